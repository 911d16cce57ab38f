"""The smallest part of the state that the host must take so that what is stored on a device fits. On shapes."""

import itertools

from zero2jax.base.tables import readable_bytes
from zero2jax.offload.parts import Split
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def ratio_that_fits(program: StepProgram, split: Split, device_bytes: int, num_copies: int = 1) -> float:
    """The smallest ratio at which a device stores no more than a budget between steps.

    Args:
      program: its layout has a host.
      split: the parts of its update.
      device_bytes: for frozen parameters, copies of trainable ones, and the masters and optimizer state that stay.
      num_copies: how many copies of a parameter the devices store.

    Raises:
      ValueError: with all of the state on the host it stores more.
    """
    stored = stored_bytes(program, split, num_copies)
    fitting = [number for number, size in enumerate(stored, 1) if size <= device_bytes]
    if not fitting:
        raise ValueError(
            f"choosing how much of the state the host takes: with all masters and optimizer state there a device still "
            f"stores {readable_bytes(stored[-1])} of parameters between steps, and device_bytes is "
            f"{readable_bytes(device_bytes)}. Give more, use more devices, or stage 3, which shards parameters."
        )
    sizes = _part_bytes(program.layout, split, program)
    return sum(sizes[: fitting[0]]) / sum(sizes)


def stored_bytes(program: StepProgram, split: Split, num_copies: int = 1) -> list[int]:
    """What a device stores between steps, if the host has the first part of the update, the first two, and so on."""
    layout, settings = program.layout, program.settings
    leaves = layout.trained_params.leaves
    masters = [leaf.device_bytes(program.mesh) for leaf in leaves]
    frozen = sum(
        leaf.device_bytes(program.mesh)
        for leaf, trained in zip(layout.params.leaves, layout.trainable, strict=True)
        if not trained
    )
    copies = [
        num_copies * size * int(settings.compute_dtype(i).itemsize) // int(leaf.dtype.itemsize)
        for i, leaf, size in zip(settings.trained, leaves, masters, strict=True)
    ]
    sizes = _part_bytes(layout, split, program)
    saved = [
        size - sum(copies[i] for i in part.params) for size, part in zip(sizes, split.parts, strict=True)
    ]
    return [frozen + sum(sizes) - off for off in itertools.accumulate(saved)]


def _part_bytes(layout: Layout, split: Split, program: StepProgram) -> list[int]:
    """Masters and optimizer state of each part, per device."""
    size = lambda leaf: leaf.device_bytes(program.mesh)
    params, state = layout.trained_params.leaves, layout.opt_state.leaves
    return [
        sum(size(params[i]) for i in p.params) + sum(size(state[j]) for j in p.state) for p in split.parts
    ]
