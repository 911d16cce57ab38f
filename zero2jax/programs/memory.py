"""Measured bytes per device of a training state and its step, by class, beside what the formula says.

What is stored between steps is read from the live buffers; what exists during a step is read from the compiled
program: its temporary allocation as the compiler reports it, the parameters from what its all-gathers produce, full
gradients from what its reductions take in, gradient shards from the output of the compiled gradient computation.
The formulas are those of `programs.formulas`.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from zero2jax.base.pytrees import PyTree, check_alive
from zero2jax.base.tables import aligned
from zero2jax.programs.formulas import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, Formula, class_formulas
from zero2jax.programs.groups import axis_names
from zero2jax.programs.hlo import Collective, collectives
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.state import Layout, TrainState

IN_STEP = f"{PARAMETERS} in the step"
# Of an engine that offloads: what its devices hold instead, and what its host does.
BETWEEN_STEPS = f"{PARAMETERS} between steps"
ON_HOST = ", on the host"
ON_DISK = ", on the disk"
# No class of its own: what the compiler allocates for gradients, parameters and activations together.
TEMPORARY = "temporary"


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
    """Bytes per device by class: `report["master"]`, and so on.

    Attributes:
      stage: ZeRO stage.
      num_shards: N, the devices that the state is sharded over from stage 1 on.
      rows: `master`, `optimizer state`, `gradients`, `parameters in the step`, `temporary`; of an engine that offloads
        also `parameters between steps`, `master, on the host`, `optimizer state, on the host`, and, if they lie there,
        `parameters, on the host`; of what is in files `master, on the disk`, `optimizer state, on the disk` instead.
      gradients_leave: whether the step hands gradients to another program, so that they are no part of `temporary`.
    """

    stage: int
    num_shards: int
    rows: tuple[MemoryRow, ...]
    gradients_leave: bool = False

    def __getitem__(self, name: str) -> MemoryRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def total_bytes(self) -> int:
        """Peak of the step: what is stored, and the compiler's temporary allocation, which holds the other classes."""
        return sum(self[name].measured_bytes or 0 for name in self.held)

    @property
    def held(self) -> tuple[str, ...]:
        """The classes that `total_bytes` adds up."""
        between = (BETWEEN_STEPS,) if any(row.name == BETWEEN_STEPS for row in self.rows) else ()
        gradients = (GRADIENTS,) if self.gradients_leave else ()
        return MASTER, OPTIMIZER, *between, *gradients, TEMPORARY

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
        rows = [("bytes per device", "measured", "formula", "formula for", "measured in")]
        for row in self.rows:
            sizes = (number(row.measured_bytes), number(row.formula_bytes))
            rows.append((row.name, *sizes, row.formula, row.source))
        held = " + ".join(self.held)
        rows.append(("total", number(self.total_bytes), "-", held, ""))
        return "\n".join(aligned(rows, right=(1, 2)))

    __str__ = table


def live_bytes(tree: PyTree) -> int:
    """Bytes that a tree of arrays, or of files that stand for some, takes for the device that holds most of it here."""
    check_alive(
        tree, "the tree whose bytes are counted", "It was donated: pass the one that the step returned."
    )
    held: dict[jax.Device, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            size = shard.data.nbytes if isinstance(x, jax.Array) else shard.nbytes
            held[shard.device] = held.get(shard.device, 0) + size
    return max(held.values(), default=0)


def measure_memory(
    state: TrainState,
    seen: TrainState,
    step: Compiled,
    gradients: Compiled,
    layout: Layout,
    settings: GradientSettings,
    mesh: Mesh,
) -> MemoryReport:
    """The report of a state, its compiled step, and the compiled gradient computation of that step.

    `seen` is what the loss sees of the state: the state itself, unless it is offloaded.

    Raises:
      ValueError: the backend does not report the memory of compiled programs.
    """
    formulas = class_formulas(layout, settings, mesh)
    moved = collectives(step.as_text() or "")
    rows = (
        *_stored_rows(state, seen, layout, settings, mesh),
        _gradients_row(moved, gradients, settings, mesh, formulas[GRADIENTS]),
        _parameters_row(moved, settings, mesh, formulas[PARAMETERS]),
        MemoryRow(
            name=TEMPORARY,
            measured_bytes=_analysis(step).temp_size_in_bytes,
            formula_bytes=None,
            formula="activations and the two above",
            source="allocation of the compiled step",
        ),
    )
    leave = layout.host is not None and not layout.pinned_state
    return MemoryReport(settings.step.stage, settings.plan.num_shards, rows, leave)


def _stored_rows(
    state: TrainState, seen: TrainState, layout: Layout, settings: GradientSettings, mesh: Mesh
) -> list[MemoryRow]:
    """What is stored between steps."""
    formulas = class_formulas(layout, settings, mesh)
    if layout.host is None:
        return [
            _row(MASTER, live_bytes(state.params), "live buffers", formulas[MASTER]),
            _row(OPTIMIZER, live_bytes(state.opt_state), "live buffers", formulas[OPTIMIZER]),
        ]
    at = lambda leaves, which, inside: [x for i, x in enumerate(leaves) if (i in which) == inside]
    frozen = [x for x, t in zip(jax.tree.leaves(state.params), layout.trainable, strict=True) if not t]
    trained, opt_state = jax.tree.leaves(layout.trained(state.params)), jax.tree.leaves(state.opt_state)
    here = [*frozen, *at(trained, layout.resident_params, True)]
    opt_here = at(opt_state, layout.resident_state, True)
    there, opt_there = at(trained, layout.resident_params, False), at(opt_state, layout.resident_state, False)
    copies = at(jax.tree.leaves(layout.trained(seen.params)), layout.resident_params, False)
    words, live = "masters of the host, in the compute dtype", "live buffers"
    place, source = (ON_DISK, "files") if layout.on_disk else (ON_HOST, live)
    rows = [
        (MASTER, live_bytes(here), "frozen leaves, and what stays here", live),
        (OPTIMIZER, live_bytes(opt_here), "what stays here", live),
        (BETWEEN_STEPS, 0 if layout.pinned_params else live_bytes(copies), words, live),
        (MASTER + place, live_bytes(there), "the others", source),
        (OPTIMIZER + place, live_bytes(opt_there), "the others", source),
    ]
    rows += [(PARAMETERS + ON_HOST, live_bytes(copies), words, live)] if layout.pinned_params else []
    return [_row(name, size, source, Formula(size, words)) for name, size, words, source in rows]


def _row(name: str, measured_bytes: int | None, source: str, formula: Formula) -> MemoryRow:
    return MemoryRow(
        name=name,
        measured_bytes=measured_bytes,
        formula_bytes=formula.num_bytes,
        formula=formula.words,
        source=source,
    )


def _gradients_row(
    moved: list[Collective], gradients: Compiled, settings: GradientSettings, mesh: Mesh, formula: Formula
) -> MemoryRow:
    if settings.step.at_use:
        return _row(GRADIENTS, _analysis(gradients).output_size_in_bytes, "compiled gradients", formula)
    measured = _reduced_bytes(_along(moved, settings.axis_name, mesh), settings)
    return _row(GRADIENTS, measured, "reductions of the compiled step", formula)


def _parameters_row(
    moved: list[Collective], settings: GradientSettings, mesh: Mesh, formula: Formula
) -> MemoryRow:
    if settings.step.stage == 0:
        return _row(IN_STEP, None, "no buffer of their own", formula)
    measured = _gathered_bytes(_along(moved, settings.axis_name, mesh), settings)
    if settings.axes.rest_over_replicas:  # what a group gathers of its own shards from the others, and keeps
        alone = (settings.axes.replica,)
        copies = [c for c in moved if c.kind == "all-gather" and axis_names(c.groups, mesh.shape) == alone]
        measured += sum(c.total_bytes for c in copies)
    return _row(IN_STEP, measured, "all-gathers of the compiled step", formula)


def _along(moved: list[Collective], axis_name: str, mesh: Mesh) -> list[Collective]:
    """Those along one mesh axis, alone or with others; what moves along other axes are activations."""
    return [c for c in moved if axis_name in axis_names(c.groups, mesh.shape)]


def _analysis(compiled: Compiled) -> Any:
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("measuring memory: this backend does not report the memory of compiled programs.")
    return analysis


def _reduced_bytes(moved: list[Collective], settings: GradientSettings) -> int:
    """Full gradients, from what the reductions take in; accumulated ones at the accumulator's width."""
    reduced = sum(c.total_bytes for c in moved if c.kind in ("all-reduce", "reduce-scatter"))
    trained = [(i, leaf) for i, leaf in enumerate(settings.plan.leaves) if settings.trainable[i]]
    kept = sum(settings.gradient_dtype(i).itemsize for i, _ in trained)
    sent = sum(settings.precision.reduce(leaf).itemsize for _, leaf in trained)
    return reduced * kept // max(sent, 1)


def _gathered_bytes(moved: list[Collective], settings: GradientSettings) -> int:
    """Parameters that exist at one time, from what the all-gathers over the data axis produce."""
    gathers = [c for c in moved if c.kind == "all-gather"]
    if settings.step.stage == 3:
        return max((_bytes_at_once(loops, gathers) for loops in {c.loops for c in gathers}), default=0)
    at_each_use = settings.step.stage == 2 and not settings.step.gather_once
    repeats = settings.step.num_microbatches if at_each_use else 1
    return sum(c.total_bytes for c in gathers) // repeats


def _bytes_at_once(loops: tuple[str, ...], gathers: list[Collective]) -> int:
    """One pass through an innermost loop gathers one layer; elsewhere parameters come one after the other."""
    here = [c.num_bytes for c in gathers if c.loops == loops]
    innermost = loops and not any(c.loops[: len(loops)] == loops != c.loops for c in gathers)
    return sum(here) if innermost else max(here)
