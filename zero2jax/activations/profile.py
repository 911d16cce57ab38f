"""Time and bytes of a checkpointed segment: forward, recomputation, backward. Measured on one device, outside the step.

The step is one compiled program, in which a segment's phases cannot be timed apart. So each phase of a segment is
compiled as a program of its own and run on values of its shapes, on the first local device of the mesh:

  forward      the segment, nothing saved
  backward     from everything that backward needs (policy `everything`)
  recompute    backward from what the policy saves, less the line above

Parameters of the segment are replicated there, so no phase gathers; tensor parallelism is left out. What memory the
phases take is read from the compiled programs.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zero2jax.activations.layers import ActivationSettings, Segment, remat_layers
from zero2jax.activations.policies import Policy
from zero2jax.base import jaxprs
from zero2jax.base.tables import aligned, readable_bytes

_NUM_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a segment: seconds of its fastest run, and bytes that its program takes beside its inputs."""

    seconds: float
    temp_bytes: int


@dataclasses.dataclass(frozen=True)
class SegmentProfile:
    """One kind of segment, measured.

    Attributes:
      num_layers: layers in it.
      num_runs: how often it runs per microbatch.
      forward: nothing saved.
      backward: from everything that it needs.
      recompute_s: what backward takes longer from what the policy saves.
      saved_bytes: what the policy saves of one segment.
      everything_bytes: what would be saved without recomputation.
    """

    num_layers: int
    num_runs: int
    forward: Phase
    backward: Phase
    recompute_s: float
    saved_bytes: int
    everything_bytes: int


@dataclasses.dataclass(frozen=True)
class ActivationProfile:
    """Every kind of segment of a loss function, in the order of the program."""

    segments: tuple[SegmentProfile, ...]

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain JSON values."""
        return {"segments": [dataclasses.asdict(s) for s in self.segments]}

    def table(self) -> str:
        """The profile as text."""
        cells: list[tuple[str, ...]] = [
            ("segment of", "runs", "forward", "recompute", "backward", "saved", "instead of")
        ]
        for s in self.segments:
            layers = "1 layer" if s.num_layers == 1 else f"{s.num_layers} layers"
            seconds = (s.forward.seconds, s.recompute_s, s.backward.seconds)
            sizes = (s.saved_bytes, s.everything_bytes)
            times = [f"{1e3 * t:.3f} ms" for t in seconds]
            cells.append((layers, str(s.num_runs), *times, *map(readable_bytes, sizes)))
        lines = aligned(cells, right=range(1, 7))
        lines.append(
            "per segment and device, each phase a program of its own; full parameters, no collectives"
        )
        return "\n".join(lines)

    __str__ = table


class ProfileOnce:
    """The profile of a step, measured once for each program, and printed by the first process."""

    def __init__(self) -> None:
        self._latest: tuple[Any, ActivationProfile] | None = None

    def of(self, program: Any, measure: Callable[[], ActivationProfile]) -> ActivationProfile:
        """The profile of a program, which is known by the object that it is."""
        if self._latest is None or self._latest[0] is not program:
            self._latest = program, measure()
            if jax.process_index() == 0:
                print(self._latest[1])
        return self._latest[1]


def profile_loss(
    loss: Callable[..., Any],
    settings: ActivationSettings | None,
    trace: Callable[[Callable[..., Any]], Any],
    device: jax.Device,
) -> ActivationProfile:
    """The profile of a loss function's segments, as `settings` cuts them.

    Args:
      loss: the loss function.
      settings: what is saved; partitioning and offload, which one device cannot show, are left out.
      trace: traces the computation that the loss belongs to, with the function it is given in the place of the loss.
      device: where to run.

    Raises:
      ValueError: there are no settings.
    """
    if settings is None:
        raise ValueError(
            "profiling saved activations: this engine leaves them to the loss function. Pass "
            "Engine(activations=ActivationSettings(...)), or switch on a key of activation_checkpointing."
        )
    segments: list[Segment] = []
    local = dataclasses.replace(settings, partition_axis=None, offload=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step's own trace says the same
        trace(remat_layers(loss, local, on_segment=segments.append))
    return profile_segments(segments, device)


def profile_segments(segments: Sequence[Segment], device: jax.Device) -> ActivationProfile:
    """Compile and time the phases of each kind of segment; equal segments are measured once.

    Args:
      segments: from `remat_layers(..., on_segment=...)`.
      device: where to run.
    """
    kinds: dict[Any, Segment] = {}
    for s in segments:
        key = (s.inputs, s.num_layers, str(jaxprs.trace(s.function, *s.inputs)[0]))
        num_runs = s.num_runs + (kinds[key].num_runs if key in kinds else 0)
        kinds[key] = dataclasses.replace(s, num_runs=num_runs)
    return ActivationProfile(tuple(_profile(s, device) for s in kinds.values()))


def _profile(segment: Segment, device: jax.Device) -> SegmentProfile:
    inputs = jax.jit(
        lambda: [_example(x) for x in segment.inputs], out_shardings=SingleDeviceSharding(device)
    )()
    forward = _timed(lambda inputs: segment.function(*inputs), inputs)
    backward, everything = _backward(segment, jax.checkpoint_policies.everything_saveable, inputs)
    recomputing, saved = _backward(segment, segment.policy, inputs)
    return SegmentProfile(
        num_layers=segment.num_layers,
        num_runs=segment.num_runs,
        forward=forward,
        backward=backward,
        recompute_s=max(recomputing.seconds - backward.seconds, 0.0),
        saved_bytes=saved,
        everything_bytes=everything,
    )


def _backward(segment: Segment, policy: Policy, inputs: list[jax.Array]) -> tuple[Phase, int]:
    """The backward pass of a segment that saves by a policy, and the bytes saved, parameters left out."""
    floating = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    checkpointed = jax.checkpoint(segment.function, policy=policy)
    trees = []

    def forward(inputs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def run(*values: jax.Array) -> list[jax.Array]:
            arrays = list(inputs)
            for i, x in zip(floating, values, strict=True):
                arrays[i] = x
            return [y for y in checkpointed(*arrays) if jnp.issubdtype(y.dtype, jnp.inexact)]

        out, pullback = jax.vjp(run, *[inputs[i] for i in floating])
        leaves, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return out, leaves

    jaxpr, shapes = jaxprs.trace(forward, inputs)
    # Parameters and the like, which are stored elsewhere.
    passed_on = [x for x, mark in zip(jaxprs.inputs(jaxpr), segment.is_boundary, strict=True) if not mark]
    residuals = jaxprs.outputs(jaxpr)[len(shapes[0]) :]
    saved = [v.aval for v in residuals if not any(v is x for x in passed_on)]
    out, leaves = jax.jit(forward)(inputs)
    phase = _timed(lambda leaves, out: jax.tree.unflatten(trees[-1], leaves)(out), leaves, out)
    return phase, sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in saved)


def _timed(fun: Callable[..., Any], *args: Any) -> Phase:
    compiled = jax.jit(fun).lower(*args).compile()
    analysis = compiled.memory_analysis()
    seconds = []
    for _ in range(_NUM_RUNS + 1):  # the first one warms up
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return Phase(min(seconds[1:]), analysis.temp_size_in_bytes if analysis is not None else 0)


def _example(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.full(shape.shape, 0.01, shape.dtype)
    return jnp.zeros(shape.shape, shape.dtype)  # keys, too
