"""When a step communicates: options of XLA's compiler that hide more of it. They change no number.

Without them each iteration of a loop over layers issues its gathers and waits for them at once, with nothing to run
beside them. Pipelined, a layer's gathers start one iteration early; the compiler peels the first layer off the loop.

Near its limit of memory the compiler orders a program to save memory, and computes and communicates again. By its count
a loop that writes layers into a stack makes a new stack: where full layers are held for backward it has them twice, and
comes near the limit at some 0.6 of what fits. The limit is raised by what it counts twice.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zero2jax.base.compiler import GPU_PLATFORMS, refusal
from zero2jax.base.peaks import memory_bytes

_HIDES_LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
_LIMIT = "xla_gpu_memory_limit_slop_factor"
_OF_LIMIT = 95  # its default, percent
_OF_CARD = 0.8  # what the compiler takes for a program's, where nobody tells it
# The names that jax's compilers have had for it, the newest first; one refuses what it does not know.
_PIPELINED_GATHERS: tuple[dict[str, bool | str], ...] = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},
    {"xla_gpu_enable_pipelined_all_gather": True},
)


def with_pipelined_gathers(options: Mapping[str, Any], at_use: bool, mesh: Mesh) -> dict[str, Any]:
    """Compiler options of a step, with those that start its gathers early where parameters are gathered at their use.

    Args:
      options: the user's. Whoever switches off latency hiding (`overlap_comm: false`) gets no pipelining either.
      at_use: whether the step gathers parameters where they are used.
      mesh: of the step; only GPUs have these options.
    """
    device = mesh.devices.flat[0]
    if device.platform not in GPU_PLATFORMS or not at_use or options.get(_HIDES_LATENCY) is False:
        return dict(options)
    local = mesh.local_devices or [device]  # none of a target that is not here
    return {**_spelled(local[0]), **options}


def with_room_for_layers(
    options: Mapping[str, Any], held_bytes: int, stored_bytes: int, mesh: Mesh
) -> dict[str, Any]:
    """Compiler options of a step, with its limit of memory where it holds full layers of a stack until backward.

    Args:
      options: the user's.
      held_bytes: of the layers that each device holds in full, in stacks that are scanned over.
      stored_bytes: of what a step takes and gives back, which the limit leaves out.
      mesh: of the step; only GPUs whose memory is known have a limit.
    """
    device = mesh.devices.flat[0]
    memory = memory_bytes(device.device_kind) if device.platform in GPU_PLATFORMS else None
    limit = _OF_CARD * (memory or 0) - stored_bytes
    if not held_bytes or limit < held_bytes:  # nothing is counted twice; or it does not fit
        return dict(options)
    return {_LIMIT: round(_OF_LIMIT * (1 + held_bytes / limit)), **options}


@functools.cache
def _spelled(device: jax.Device) -> dict[str, bool | str]:
    for options in _PIPELINED_GATHERS:
        if refusal(options, device) is None:
            return options
    warnings.warn(
        f"the compiler of jax {jax.__version__} knows none of the options {[*map(list, _PIPELINED_GATHERS)]}: "
        f"gathers are not started early. The step is as exact without.",
        stacklevel=2,
    )
    return {}
