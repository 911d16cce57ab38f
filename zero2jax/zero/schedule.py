"""When a step communicates: options of XLA's compiler that hide more of it. They change no number.

Without them each iteration of a loop over layers issues its gathers and waits for them at once, with nothing to run
beside them. Pipelined, a layer's gathers start one iteration early; the compiler peels the first layer off the loop.
With two layers in an iteration the one gathers into memory that the other has done with, and nothing is copied.

Near its limit of memory the compiler orders a program to save memory, and computes and communicates again. By its count
a write of a layer into a stack makes a new stack: where full layers are held for backward it has them once more for
each layer of an iteration, and comes near the limit at half of what fits. The limit is raised by that.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zero2jax.base.compiler import GPU_PLATFORMS, refusal
from zero2jax.base.peaks import memory_bytes

Options = dict[str, bool | str]

_HIDES_LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
_LIMIT = "xla_gpu_memory_limit_slop_factor"
_OF_LIMIT = 95  # its default, percent
_OF_CARD = 0.8  # what the compiler takes for a program's, where nobody tells it
# Each by the names that jax's compilers have had for it, the newest first; one refuses what it does not know.
_EARLY_GATHERS: tuple[Options, ...] = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},
    {"xla_gpu_enable_pipelined_all_gather": True},
)
_TWO_LAYERS: tuple[Options, ...] = ({"xla_gpu_enable_while_loop_double_buffering": True},)
_TWICE = {name for options in _TWO_LAYERS for name in options}


def with_pipelined_gathers(
    options: Mapping[str, Any], at_use: bool, mesh: Mesh, in_twos: bool = True
) -> dict[str, Any]:
    """Compiler options of a step, with those that start its gathers early where parameters are gathered at their use.

    Args:
      options: the user's. Whoever switches off latency hiding (`overlap_comm: false`) gets no pipelining either.
      at_use: whether the step gathers parameters where they are used.
      mesh: of the step; only GPUs have these options.
      in_twos: whether an iteration has two layers. Not with several microbatches, whose loop the compiler would write
        twice, too, nor beside an axis `model`, where most that is sent is activations: 0.5 GiB for nothing in 170B.
    """
    device = mesh.devices.flat[0]
    if device.platform not in GPU_PLATFORMS or not at_use or options.get(_HIDES_LATENCY) is False:
        return dict(options)
    local = mesh.local_devices or [device]  # none of a target that is not here
    early, two_layers = _spelled(local[0])
    return {**early, **(two_layers if in_twos else {}), **options}


def with_room_for_layers(
    options: Mapping[str, Any], held_bytes: int, stored_bytes: int, mesh: Mesh
) -> dict[str, Any]:
    """Compiler options of a step, with its limit of memory where it holds full layers of a stack until backward.

    Args:
      options: those of `with_pipelined_gathers`.
      held_bytes: of the layers that each device holds in full, in stacks that are scanned over.
      stored_bytes: of what a step takes and gives back, which the limit leaves out.
      mesh: of the step; only GPUs whose memory is known have a limit.
    """
    device, twice = mesh.devices.flat[0], any(options.get(name) for name in _TWICE)
    memory = memory_bytes(device.device_kind) if device.platform in GPU_PLATFORMS else None
    limit = _OF_CARD * (memory or 0) - stored_bytes
    if not held_bytes or limit < held_bytes:  # it does not fit, with or without
        return dict(options)
    return {_LIMIT: round(_OF_LIMIT * (1 + (1 + twice) * held_bytes / limit)), **options}


@functools.cache
def _spelled(device: jax.Device) -> tuple[Options, Options]:
    """`_EARLY_GATHERS` and `_TWO_LAYERS` as the compiler for a device knows them."""
    return _known(_EARLY_GATHERS, device), _known(_TWO_LAYERS, device)


def _known(names: tuple[Options, ...], device: jax.Device) -> Options:
    for options in names:
        if refusal(options, device) is None:
            return options
    warnings.warn(
        f"the compiler of jax {jax.__version__} knows none of the options {[*map(list, names)]}: less communication is "
        f"hidden. The step is as exact without.",
        stacklevel=2,
    )
    return {}
