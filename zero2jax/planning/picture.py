"""Memory over the schedule of a planned step, and a bar per class, as a PNG. The one module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2jax.base.tables import GIB
from zero2jax.programs.formulas import CLASSES
from zero2jax.programs.liveness import Point

if TYPE_CHECKING:
    from zero2jax.planning.report import PlanReport

_COLORS = dict(zip(CLASSES, ("#1b4f72", "#5499c7", "#e67e22", "#c0392b", "#95a5a6")))
_MIB = 2**20


def save_picture(report: PlanReport, path: str | Path) -> None:
    """Write the picture of a report."""
    # The object interface: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    small = report.total_bytes < GIB
    unit, scale = ("MiB", _MIB) if small else ("GiB", GIB)
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2.3, 1))
    axes = " x ".join(f"{name} {size}" for name, size in report.axes.items())
    figure.suptitle(
        f"One training step on {report.target.name}, {axes}: {report.num_params / 1e9:.3g}e9 parameters, "
        f"ZeRO stage {report.stage} (jax {report.jax_version})"
    )
    _draw_schedule(left, report, unit, scale)
    _draw_classes(right, report, unit, scale)
    figure.savefig(path, dpi=130)


def _draw_schedule(axes: Any, report: PlanReport, unit: str, scale: int) -> None:
    points = report.lifetimes.points
    x = range(len(points))
    layers = [[p.by_class[name] / scale for p in points] for name in CLASSES]
    axes.stackplot(x, *layers, labels=CLASSES, colors=[_COLORS[name] for name in CLASSES], step="mid")
    top = max(report.total_bytes, report.lifetimes.peak.total_bytes) / scale
    limits = [(report.total_bytes, "allocated by the compiler", "black", ":")]
    if report.usable_bytes is not None:
        limits.append((report.usable_bytes, f"usable on {report.target.name}", "#c0392b", "--"))
    for num_bytes, words, color, style in limits:
        value = num_bytes / scale
        label = f"{words}: {value:,.1f} {unit}"
        if value > 2.5 * top:  # far above: drawn along the upper edge
            value, label = 1.15 * top, f"{label} (far above)"
        axes.axhline(value, color=color, linestyle=style, linewidth=1.5, label=label)
        top = max(top, value)
    trips = {
        i.body: i.known_trips
        for instructions in report.audit.module.computations.values()
        for i in instructions
        if i.opcode == "while"
    }
    for start, end, body in _loop_spans(points):
        axes.axvspan(start - 0.5, end + 0.5, color="black", alpha=0.07, linewidth=0)
        times = f"loop, {trips.get(body) or '?'} times"
        axes.text((start + end) / 2, top * 1.02, times, ha="center", va="bottom", fontsize=8)
    axes.set(
        xlim=(0, max(len(points) - 1, 1)),
        ylim=(0, top * 1.08),
        xlabel="instruction of the schedule (one iteration of each loop)",
        ylabel=f"live {unit} per device",
        title="Memory over the schedule",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=8, frameon=False)


def _draw_classes(axes: Any, report: PlanReport, unit: str, scale: int) -> None:
    rows = report.by_class[::-1]
    for n, row in enumerate(rows):
        axes.barh(n, row.peak_bytes / scale, height=0.55, color=_COLORS[row.name])
        words = f" {row.peak_bytes / scale:,.2f}"
        if row.formula_bytes is not None:
            at = row.formula_bytes / scale
            axes.plot([at, at], [n - 0.4, n + 0.4], color="black", linewidth=2)
            words += f" (formula {at:,.2f})"
        axes.text(max(row.peak_bytes, row.formula_bytes or 0) / scale, n, words, va="center", fontsize=8)
    largest = max(max(row.peak_bytes, row.formula_bytes or 0) for row in rows) / scale
    axes.set(
        xlim=(0, largest * 1.7 or 1),
        xlabel=f"{unit} per device at peak; black: the formula",
        title="By class",
    )
    axes.set_yticks(range(len(rows)), [row.name.replace(" and ", "\nand ") for row in rows])


def _loop_spans(points: Sequence[Point]) -> list[tuple[int, int, str]]:
    """(first, last, body) of each outermost run of points inside a loop."""
    spans: list[tuple[int, int, str]] = []
    for n, point in enumerate(points):
        body = point.loops[0] if point.loops else ""
        if body and spans and spans[-1][2] == body and spans[-1][1] == n - 1:
            spans[-1] = (spans[-1][0], n, body)
        elif body:
            spans.append((n, n, body))
    return spans
