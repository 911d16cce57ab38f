"""Which leaves stay on the devices when the host takes a part of the state. On shapes, before anything is placed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base.pytrees import shapes_of
from zero2jax.base.transformation import MissingArgumentsError
from zero2jax.offload.chunks import Flat
from zero2jax.offload.host_memory import staged_bytes
from zero2jax.offload.host_step import Handed, HostStep
from zero2jax.offload.parts import Split
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def update_split(program: StepProgram) -> Split | None:
    """The parts of the update of a program whose layout has a host; None if it takes arguments that only a step has.

    Raises:
      ValueError: the optimizer evaluates the loss.
    """
    layout, settings = program.layout, program.settings
    assert layout.host is not None
    shapes = layout.abstract_state(program.mesh)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    handed: Any = (scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_), scalar)
    sums = [
        jax.ShapeDtypeStruct(settings.plan.leaves[i].rest_shape, settings.sum_dtype(i))
        for i in settings.trained
    ]
    args = (layout.trained(shapes.params), shapes.opt_state, sums, Handed(*handed), dict[str, Any]())
    try:
        return Flat.of(HostStep(program, layout.host).update, shapes_of(args)).split()
    except MissingArgumentsError:
        return None


def part_split(split: Split | None, ratio: float | str) -> Split:
    """The split by which a part of the state goes to the host.

    Raises:
      ValueError: there is no such part: the optimizer ties all leaves together, or takes arguments of a step.
    """
    what = f"offloading {ratio if isinstance(ratio, str) else format(ratio, 'g')} of the state"
    if split is None:
        raise ValueError(
            f"{what}: which leaves go is decided before the first step, and the optimizer takes arguments that only a "
            f"step has. Give them defaults in its update, or offload all of it: ratio=1."
        )
    if len(split.parts) < 2:
        raise ValueError(
            f"{what}: the optimizer updates no leaf apart from the others, for it looks at all gradients itself. Clip "
            f"by clip_norm= (gradient_clipping in a JSON) instead of in the optimizer, or offload all of it: ratio=1."
        )
    return split


def with_residents(program: StepProgram, split: Split | None, ratio: float) -> Layout:
    """The program's layout, its host storing about `ratio` of the bytes of masters and optimizer state.

    Leaves that the optimizer ties together go together; what depends on no gradient, a few scalars, is on the host.
    Where the devices update, they keep all scalars.

    Raises:
      ValueError: as `part_split`, of a ratio below 1.
    """
    layout = program.layout
    if layout.pinned_state:
        scalars = lambda plan: frozenset(i for i, leaf in enumerate(plan.leaves) if not leaf.shape)
        params, state = scalars(layout.trained_params), scalars(layout.opt_state)
        layout = dataclasses.replace(layout, resident_params=params, resident_state=state)
    if ratio == 1:
        return layout
    whole = part_split(split, ratio)
    param_bytes, state_bytes = (
        [leaf.device_bytes(program.mesh) for leaf in plan.leaves]
        for plan in (layout.trained_params, layout.opt_state)
    )
    on_host = whole.on_host(param_bytes, state_bytes, ratio).parts
    resident = whole.parts[len(on_host) :]
    return dataclasses.replace(
        layout,
        resident_params=layout.resident_params.union(i for part in resident for i in part.params),
        resident_state=layout.resident_state.union(j for part in resident for j in part.state),
    )


def in_host_memory_at_once(program: StepProgram, settings: OffloadSettings) -> int:
    """Bytes per device of the gradients and copies of a step that are in host memory at a time; see `staged_bytes`."""
    layout = program.layout
    at_once = layout.pinned_state or settings.delay_after is not None  # which waits for no chunk
    split = None if at_once else update_split(program)
    return staged_bytes(layout, program.settings, program.mesh, split, settings)
