"""What `zero2jax.plan` reports: memory by class, collectives, overlap, and what the compiler does not know."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.planning.offload_plan import OffloadPlan
from zero2jax.planning.picture import Bar, Picture
from zero2jax.planning.targets import Target
from zero2jax.programs.audit import Audit, CollectiveRow
from zero2jax.programs.formulas import CLASSES, MASTER, OPTIMIZER, PARAMETERS, Formula
from zero2jax.programs.liveness import Lifetimes
from zero2jax.programs.overlap import Overlap, Timeline
from zero2jax.programs.products import Product


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """Bytes per device of one class.

    Attributes:
      name: `master`, `optimizer state`, `parameters`, `gradients` or `activations and temporaries`.
      rest_bytes: between steps, padding included.
      peak_bytes: where the live bytes of the schedule are highest.
      formula_bytes: by the formula, without padding; None where there is none.
      formula: the formula in words.
    """

    name: str
    rest_bytes: int
    peak_bytes: int
    formula_bytes: int | None
    formula: str

    def with_more(self, num_bytes: int) -> "ClassRow":
        """The row with so many bytes more, at rest and at the peak."""
        rest, peak = self.rest_bytes + num_bytes, self.peak_bytes + num_bytes
        return dataclasses.replace(self, rest_bytes=rest, peak_bytes=peak)


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A step compiled for a target, read: per device, in bytes, FLOPs and seconds.

    Attributes:
      target: what it was compiled for.
      axes: mesh axes.
      jax_version: version of jax, and so of the compiler.
      stage: ZeRO stage.
      num_microbatches: slices of the batch per step and device.
      batch_size: examples per step, over all devices.
      num_params: number of parameters.
      compute_dtype: what parameters are cast to, `bfloat16` for instance.
      memory_fraction: part of the target's memory that the program may use.
      usable_bytes: memory that the program may use; None where the target's memory is not known.
      by_class: memory by class, measured beside the formula; on the devices.
      offload: what the host holds and exchanges with them; None if nothing is offloaded.
      audit: memory as the compiler allocates it, and the collectives.
      lifetimes: live bytes at each instruction of the schedule.
      timeline: the schedule at the target's rates, products alone taking time: what it hides is a lower bound.
      timeline_with_memory: the same, memory-bound work taking time too; None where the memory's rate is not known.
      rates_known: whether the target has rates; without, nothing is said about time.
      compile_s: seconds the compiler took.
      compiler_options: XLA's options of the step, as far as they are not its own defaults.
      notes: what to know about these figures, and what was converted or ignored.
    """

    target: Target
    axes: Mapping[str, int]
    jax_version: str
    stage: int
    num_microbatches: int
    batch_size: int
    num_params: int
    compute_dtype: str
    memory_fraction: float
    usable_bytes: int | None
    by_class: tuple[ClassRow, ...]
    offload: OffloadPlan | None
    audit: Audit
    lifetimes: Lifetimes = dataclasses.field(repr=False)
    timeline: Timeline = dataclasses.field(repr=False)
    timeline_with_memory: Timeline | None = dataclasses.field(repr=False)
    rates_known: bool
    compile_s: float
    compiler_options: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def rest_bytes(self) -> int:
        """What the step takes: state, and its batch."""
        return self.audit.memory.argument_bytes + self._unseen_bytes

    @property
    def total_bytes(self) -> int:
        """Peak of the step, as the compiler allocates it, and what stays on the device beside it."""
        return self.audit.memory.total_bytes + self._unseen_bytes

    @property
    def _unseen_bytes(self) -> int:
        return 0 if self.offload is None else self.offload.unseen_bytes

    @property
    def alias_bytes(self) -> int:
        """Outputs that are written in the place of donated arguments."""
        return self.audit.memory.alias_bytes

    @property
    def host_bytes(self) -> int:
        """What is stored in host memory, counted apart."""
        own = max(self.audit.memory.host_bytes, self.lifetimes.host_bytes)
        if self.offload is None:
            return own
        return max(own - self.offload.pinned_bytes, 0) + self.offload.host_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Usable memory that is left over; negative if the step does not fit."""
        return None if self.usable_bytes is None else self.usable_bytes - self.total_bytes

    @property
    def device_bytes(self) -> int | None:
        """What a device may store of parameters, masters and optimizer state between steps, for a `ratio` of "auto":
        usable memory without all else that the peak holds.
        """
        stored = sum(row.rest_bytes for row in self.by_class if row.name in (MASTER, OPTIMIZER, PARAMETERS))
        return None if self.headroom_bytes is None else self.headroom_bytes + stored

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None where the target's memory is not known."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0

    @property
    def communication_bytes(self) -> int:
        """Bytes of all collectives per step."""
        return sum(c.total_bytes for c in self.audit.collectives)

    @property
    def exposed_bytes(self) -> int | None:
        """Those of `communication_bytes` that the schedule waits for at the target's rates; None without rates."""
        return round(sum(o.exposed_bytes for o in self.timeline.overlaps)) if self.rates_known else None

    @property
    def compute_s(self) -> float | None:
        """Seconds of matrix products per step, each at the target's rate for its dtype."""
        return self.timeline.compute_s if self.rates_known else None

    @property
    def widened_flops(self) -> float:
        """Operations per step of matrix products in more than 16 bits, where the step computes in 16."""
        is_narrow = jnp.dtype(self.compute_dtype).itemsize == 2
        return sum(p.total_flops for p in self.timeline.products if is_narrow and p.is_wide)

    @property
    def first_widened(self) -> Product | None:
        """Where that begins: the first of them that converts an operand to the other's dtype, else the first."""
        wide = [p for p in self.timeline.products if p.is_wide] if self.widened_flops else []
        return next((p for p in wide if p.promotes), wide[0] if wide else None)

    @property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """The collectives by kind and axis."""
        return self.audit.rows()

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        exposed = {row: self._exposed_bytes(row) for row in self.collectives}
        return {
            "target": self.target.name,
            "axes": dict(self.axes),
            "jax_version": self.jax_version,
            "stage": self.stage,
            "num_microbatches": self.num_microbatches,
            "batch_size": self.batch_size,
            "num_params": self.num_params,
            "compute_dtype": self.compute_dtype,
            "total_bytes": self.total_bytes,
            "rest_bytes": self.rest_bytes,
            "host_bytes": self.host_bytes,
            "offload": None if self.offload is None else self.offload.as_dict(),
            "alias_bytes": self.alias_bytes,
            "memory_bytes": self.target.memory_bytes,
            "memory_fraction": self.memory_fraction,
            "usable_bytes": self.usable_bytes,
            "headroom_bytes": self.headroom_bytes,
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "by_class": {row.name: dataclasses.asdict(row) for row in self.by_class},
            "live_peak_bytes": self.lifetimes.peak.total_bytes,
            "live_peak_at": self.lifetimes.peak.name,
            "largest_at_peak": [dataclasses.asdict(tensor) for tensor in self.lifetimes.largest_at_peak],
            "compiler_memory": dataclasses.asdict(self.audit.memory),
            "collectives": [
                dataclasses.asdict(row) | {"exposed_bytes": exposed[row]} for row in self.collectives
            ],
            "communication_bytes": self.communication_bytes,
            "exposed_bytes": self.exposed_bytes,
            "overlap": [self._overlap(o) for o in self.timeline.overlaps],
            "flops": self.timeline.flops,
            "flops_by_dtype": self.timeline.flops_by_dtype,
            "widened_flops": self.widened_flops,
            "first_widened": dataclasses.asdict(self.first_widened) if self.first_widened else None,
            "compute_s": self.compute_s,
            "communication_s": self.timeline.communication_s if self.rates_known else None,
            "exposed_s": self.timeline.exposed_s if self.rates_known else None,
            "hidden_share": self.timeline.hidden_share if self.rates_known else None,
            "with_memory": self._with_memory(),
            "compile_s": self.compile_s,
            "compiler_options": dict(self.compiler_options),
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The report as text."""
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        title = (
            f"stage {self.stage}, {_count(self.num_params)} parameters, batch {self.batch_size} in "
            f"{self.num_microbatches} microbatch(es), {axes} on {self.target.name}, jax {self.jax_version}, "
            f"compiled in {self.compile_s:.0f} s"
        )
        parts = [title, self._verdict(), "", *self._memory_lines(), "", *self._largest_lines()]
        parts += [*self._collective_lines(), ""]
        options = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        with_options = [f"compiled with {options}"] if options else []
        return "\n".join([*parts, *(f"- {note}" for note in (*with_options, *self.notes))])

    __str__ = table

    def save_picture(self, path: str | Path) -> None:
        """Draw memory over the schedule, and a bar per class, as a PNG; needs matplotlib."""
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        picture = Picture(
            title=f"One training step on {self.target.name}, {axes}: {_count(self.num_params)} parameters, "
            f"ZeRO stage {self.stage} (jax {self.jax_version})",
            points=self.lifetimes.points,
            loop_trips=self.audit.module.loop_trips(),
            allocated_bytes=self.total_bytes,
            usable_bytes=self.usable_bytes,
            device=self.target.name,
            bars=[Bar(row.name, row.peak_bytes, row.formula_bytes) for row in self.by_class],
        )
        picture.save(path)

    def _verdict(self) -> str:
        peak = f"{readable_bytes(self.total_bytes)} per device at peak, {readable_bytes(self.rest_bytes)} at rest"
        if self.usable_bytes is None or self.headroom_bytes is None:
            return f"{peak}; the memory of target {self.target.name!r} is not known"
        room = readable_bytes(abs(self.headroom_bytes))
        usable = f"{readable_bytes(self.usable_bytes)} usable ({self.memory_fraction:g} of the card)"
        return f"{peak}, {usable}: " + (
            f"fits, {room} to spare" if self.fits else f"DOES NOT FIT, {room} too much"
        )

    def _memory_lines(self) -> list[str]:
        rows = [("bytes per device", "at rest", "at peak", "formula", "formula for")]
        for row in self.by_class:
            at_rest, at_peak = readable_bytes(row.rest_bytes), readable_bytes(row.peak_bytes)
            rows.append((row.name, at_rest, at_peak, readable_bytes(row.formula_bytes), row.formula))
        packing = self.total_bytes - sum(row.peak_bytes for row in self.by_class)
        rows.append(("packing by the compiler", "-", readable_bytes(packing), "-", "total less live bytes"))
        total = (readable_bytes(self.rest_bytes), readable_bytes(self.total_bytes))
        rows.append(("total", *total, "-", "the compiler's allocation"))
        lines = [*aligned(rows, right=(1, 2, 3)), *(self.offload.lines() if self.offload else ())]
        if self.offload and self.device_bytes is not None:
            room = f"{readable_bytes(self.device_bytes)} ({self.device_bytes} bytes)"
            lines.append(f"a device may store {room} between steps: device_bytes chooses a ratio by that")
        return lines

    def _largest_lines(self) -> list[str]:
        rows = [("largest at peak", "tensor", "class", "computed by", "in")]
        for t in self.lifetimes.largest_at_peak:
            kind = f"{t.dtype}[{','.join(map(str, t.shape))}]"
            kind = f"{t.count} x {kind}" if t.count > 1 else kind
            operation = t.op_name.removeprefix("jit(step)/").removeprefix("shard_map/")
            operation = operation if len(operation) <= 60 else f"...{operation[-57:]}"
            source = shortened(t.source)
            rows.append((readable_bytes(t.num_bytes), kind, t.class_name, operation or "-", source or "-"))
        return [*aligned(rows, right=(0,)), ""] if len(rows) > 1 else []

    def _collective_lines(self) -> list[str]:
        rows = [("collective", "axis", "where", "runs", "bytes per step", "exposed")]
        for row in self.collectives:
            where = "across hosts" if row.across else "in node"
            sizes = (readable_bytes(row.bytes_per_step), readable_bytes(self._exposed_bytes(row)))
            rows.append((row.kind, row.axis or "?", where, f"{row.num_runs:,}", *sizes))
        lines = aligned(rows, right=(3, 4, 5))
        if self.timeline.flops:
            by_dtype = self.timeline.flops_by_dtype.items()
            shares = ", ".join(f"{flops / self.timeline.flops:.0%} in {dtype}" for dtype, flops in by_dtype)
            lines.append(f"matrix products: {self.timeline.flops / 1e12:.3g} TFLOP, {shares}")
        if self.rates_known and self.communication_bytes:
            hidden = 1 - (self.exposed_bytes or 0) / self.communication_bytes
            lines.append(
                f"{hidden:.0%} of the bytes hidden; matrix products {self.compute_s or 0:.3g} s, collectives "
                f"{self.timeline.communication_s:.3g} s, of which {self.timeline.exposed_s:.3g} s are waited for"
            )
            more = self.timeline_with_memory
            if more is not None and more.hidden_share is not None:
                lines.append(
                    f"with memory-bound work {more.hidden_share:.0%} of the time of collectives is hidden: "
                    f"{more.exposed_s:.3g} s are waited for in a step of {more.step_s:.3g} s"
                )
        lines.append(f"{readable_bytes(self.alias_bytes)} of the outputs are written into donated arguments")
        return lines

    def _with_memory(self) -> dict[str, Any] | None:
        more = self.timeline_with_memory
        if more is None or not self.rates_known:
            return None
        return {"exposed_s": more.exposed_s, "hidden_share": more.hidden_share, "step_s": more.step_s}

    def _exposed_bytes(self, row: CollectiveRow) -> int | None:
        if not self.rates_known:
            return None
        return round(sum(o.exposed_bytes for o in self.timeline.overlaps if self._is_in(o, row)))

    def _is_in(self, overlap: Overlap, row: CollectiveRow) -> bool:
        c = overlap.collective
        return (c.kind, self.audit.axis(c), self.audit.across(c)) == (row.kind, row.axis, row.across)

    def _overlap(self, overlap: Overlap) -> dict[str, Any]:
        c = overlap.collective
        values = {
            "kind": c.kind,
            "name": c.name,
            "op_name": c.op_name,
            "axis": self.audit.axis(c),
            "across": self.audit.across(c),
            "is_async": c.is_async,
            "num_bytes": c.num_bytes,
            "num_runs": c.trips,
            "flops_inside": overlap.flops_inside,
        }
        if self.rates_known:
            share = 1 - overlap.exposed_s / overlap.seconds if overlap.seconds else 1.0
            values |= {"seconds": overlap.seconds, "exposed_s": overlap.exposed_s, "hidden_share": share}
        return values


def shortened(source: str) -> str:
    """A source line without the current directory, if it is below that."""
    return source.removeprefix(f"{Path.cwd()}/")


def _count(num_params: int) -> str:
    return f"{num_params / 1e9:.2f}e9" if num_params >= 1e8 else f"{num_params:,}"


def class_rows(lifetimes: Lifetimes, formulas: Mapping[str, Formula]) -> tuple[ClassRow, ...]:
    """A row per class, from the walk and the formulas of the classes that have one."""
    return tuple(
        ClassRow(
            name=name,
            rest_bytes=lifetimes.rest_by_class[name],
            peak_bytes=lifetimes.peak.by_class[name],
            formula_bytes=formulas[name].num_bytes if name in formulas else None,
            formula=formulas[name].words if name in formulas else "",
        )
        for name in CLASSES
    )
