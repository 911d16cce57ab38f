"""Measured bytes per device of a training state and its step, by class, beside what the formula says.

What rests between steps is read from the live buffers; what exists during a step is read from the compiled program:
its temporary allocation as the compiler reports it, the parameters from what its all-gathers produce, whole
gradients from what its reductions take in, gradient shards from the output of the compiled gradient computation.

The formulas, with P parameters, N shards, c bytes of the compute and g bytes of the gradient dtype (ZeRO,
arXiv:1910.02054, section 5):

    stage   master     parameters in the step   gradients
    0       4 P        c P                      g P
    1       4 P / N    c P                      g P
    2       4 P / N    c P                      g P / N
    3       4 P / N    those of one layer       g P / N

A leaf that other mesh axes cut into M parts counts as P / M.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from zero2jax.base.pytrees import PyTree
from zero2jax.programs.hlo import Collective, axis_names, collectives
from zero2jax.zero.gradients import GradientSettings
from zero2jax.zero.shard_plan import LeafPlan
from zero2jax.zero.state import Layout, TrainState


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One class of bytes per device.

    Attributes:
      name: the class.
      measured_bytes: bytes on the device that has most; None where the class is no buffer of its own.
      formula_bytes: what the formula gives, without padding; None where there is none.
      formula: the formula in words.
      source: what was measured.
    """

    name: str
    measured_bytes: int | None
    formula_bytes: int | None
    formula: str
    source: str


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes per device by class: master, optimizer state, gradients, parameters in the step, temporary."""

    stage: int
    num_shards: int
    rows: tuple[MemoryRow, ...]

    def __getitem__(self, name: str) -> MemoryRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def total_bytes(self) -> int:
        """Peak of the step: what rests, and the compiler's temporary allocation, which holds the other classes."""
        return sum(self[name].measured_bytes or 0 for name in ("master", "optimizer state", "temporary"))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "stage": self.stage,
            "num_shards": self.num_shards,
            "total_bytes": self.total_bytes,
            "by_class": {row.name: dataclasses.asdict(row) for row in self.rows},
        }

    def table(self) -> str:
        """The report as text."""
        number = lambda n: "-" if n is None else f"{n:,}"
        cells = [("bytes per device", "measured", "formula", "formula for", "measured in")]
        for row in self.rows:
            cells.append(
                (row.name, number(row.measured_bytes), number(row.formula_bytes), row.formula, row.source)
            )
        cells.append(("total", number(self.total_bytes), "-", "master + optimizer state + temporary", ""))
        widths = [max(len(line[i]) for line in cells) for i in range(5)]
        aligned = lambda i, cell: cell.rjust(widths[i]) if i in (1, 2) else cell.ljust(widths[i])
        return "\n".join(
            "  ".join(aligned(i, cell) for i, cell in enumerate(line)).rstrip() for line in cells
        )

    __str__ = table


def live_bytes(tree: PyTree) -> int:
    """Bytes that a tree of arrays takes on the device of this process that holds most of it."""
    held: dict[jax.Device, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def measure_memory(
    state: TrainState,
    step: Compiled,
    gradients: Compiled,
    layout: Layout,
    settings: GradientSettings,
    mesh: Mesh,
) -> MemoryReport:
    """The report of a state, its compiled step, and the compiled gradient computation of that step."""
    found = [
        c
        for c in collectives(step.as_text() or "")
        if settings.axis_name in axis_names(c.groups, mesh.shape)  # the other axes move activations
    ]
    size = lambda leaf: math.prod(leaf.shape) // leaf.num_model_shards(mesh)
    rest_bytes = lambda plan: sum(size(leaf) * int(leaf.dtype.itemsize) for leaf in plan.leaves)
    shards = layout.params.num_shards if settings.step.stage else 1
    of = lambda sharded: f" / {shards}" if sharded and shards > 1 else ""
    scattered = settings.step.stage >= 2
    whole_grads = sum(settings.gradient_dtype(i).itemsize * size(leaf) for i, leaf in _trained(layout))
    whole_params = sum(
        settings.compute_dtype(i).itemsize * size(leaf) for i, leaf in enumerate(layout.params.leaves)
    )
    rows = (
        MemoryRow(
            "master",
            live_bytes(state.params),
            rest_bytes(layout.params) // shards,
            "parameters at rest" + of(True),
            "live buffers",
        ),
        MemoryRow(
            "optimizer state",
            live_bytes(state.opt_state),
            rest_bytes(layout.opt_state) // shards,
            "state of the optimizer" + of(True),
            "live buffers",
        ),
        MemoryRow(
            "gradients",
            _analysis(gradients).output_size_in_bytes if scattered else _reduced_bytes(found, settings),
            whole_grads // shards if scattered else whole_grads,
            "gradients" + of(scattered),
            "compiled gradients" if scattered else "reductions of the compiled step",
        ),
        MemoryRow(
            "parameters in the step",
            _gathered_bytes(found, settings),
            None if settings.step.stage == 3 else whole_params,
            "those of one layer" if settings.step.stage == 3 else "parameters in the compute dtype",
            "all-gathers of the compiled step" if settings.step.stage else "no buffer of their own",
        ),
        MemoryRow(
            "temporary",
            _analysis(step).temp_size_in_bytes,
            None,
            "activations and the two above",
            "allocation of the compiled step",
        ),
    )
    return MemoryReport(settings.step.stage, layout.params.num_shards, rows)


def _analysis(compiled: Compiled) -> Any:
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("measuring memory: this backend does not report the memory of compiled programs.")
    return analysis


def _trained(layout: Layout) -> list[tuple[int, LeafPlan]]:
    return [(i, leaf) for i, leaf in enumerate(layout.params.leaves) if layout.trainable[i]]


def _reduced_bytes(found: list[Collective], settings: GradientSettings) -> int:
    """Whole gradients, from what the reductions take in; accumulated ones at the accumulator's width."""
    reduced = sum(c.total_bytes for c in found if c.kind in ("all-reduce", "reduce-scatter"))
    if settings.step.num_microbatches == 1:
        return reduced
    widths = [
        (settings.gradient_dtype(i).itemsize, settings.precision.reduce(leaf).itemsize)
        for i, leaf in enumerate(settings.plan.leaves)
        if settings.trainable[i]
    ]
    return reduced * sum(a for a, _ in widths) // max(sum(b for _, b in widths), 1)


def _gathered_bytes(found: list[Collective], settings: GradientSettings) -> int | None:
    """Parameters that exist at one time, from what the all-gathers produce."""
    gathers = [c for c in found if c.kind == "all-gather"]
    if settings.step.stage == 0:
        return None
    if settings.step.stage == 3:
        return max((_bytes_at_once(loops, gathers) for loops in {c.loops for c in gathers}), default=0)
    repeats = (
        settings.step.num_microbatches if settings.step.stage == 2 and not settings.step.gather_once else 1
    )
    return sum(c.total_bytes for c in gathers) // repeats


def _bytes_at_once(loops: tuple[str, ...], gathers: list[Collective]) -> int:
    """One pass through an innermost loop gathers one layer; elsewhere parameters come one after the other."""
    found = [c.num_bytes for c in gathers if c.loops == loops]
    innermost = loops and not any(c.loops[: len(loops)] == loops != c.loops for c in gathers)
    return sum(found) if innermost else max(found)
