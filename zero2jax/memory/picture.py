"""Measured memory as a PNG: a bar per class beside its formula, and what devices held over the steps; by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero2jax.base.tables import GIB
from zero2jax.memory.report import MemoryUse
from zero2jax.programs.memory import MemoryReport

_MIB = 2**20
_COLORS = ("#1b4f72", "#5499c7", "#e67e22", "#95a5a6", "#c0392b")


def draw_memory(
    path: str | Path, report: MemoryReport | None = None, steps: Sequence[MemoryUse] = ()
) -> None:
    """Write a picture of what was measured.

    Args:
      path: of the PNG.
      report: from `engine.memory(state, batch)`: a bar per class, and a mark where its formula is.
      steps: from `memory_report(state)` after each step: bytes by class on the fullest device, and the peak.

    Raises:
      ValueError: there is nothing to draw.
    """
    if report is None and not steps:
        raise ValueError(
            f"drawing memory to {path}: there is nothing to draw. Give report=engine.memory(state, batch), or steps=, "
            f"a list of zero2jax.memory_report(state)."
        )
    # The object interface: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    drawings = (report is not None) + bool(steps)
    axes = list(figure.subplots(1, drawings, squeeze=False)[0])
    if report is not None:
        _draw_classes(axes.pop(0), report)
    if steps:
        _draw_steps(axes.pop(0), steps)
    figure.savefig(path, dpi=130)


def _draw_classes(axes: Any, report: MemoryReport) -> None:
    rows = [row for row in report.rows if row.measured_bytes is not None][::-1]
    unit, scale = _unit(max(row.measured_bytes or 0 for row in rows))
    for n, row in enumerate(rows):
        measured = (row.measured_bytes or 0) / scale
        axes.barh(n, measured, height=0.55, color=_COLORS[0])
        words = f" {measured:,.2f}"
        if row.formula_bytes is not None:
            at = row.formula_bytes / scale
            axes.plot([at, at], [n - 0.4, n + 0.4], color="black", linewidth=2)
            words += f" (formula {at:,.2f})"
        axes.text(max(measured, (row.formula_bytes or 0) / scale), n, words, va="center", fontsize=8)
    largest = max(max(row.measured_bytes or 0, row.formula_bytes or 0) for row in rows) / scale
    axes.set(
        xlim=(0, largest * 1.6 or 1),
        xlabel=f"{unit} per device; black: the formula",
        title=f"By class, stage {report.stage}",
    )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])


def _draw_steps(axes: Any, steps: Sequence[MemoryUse]) -> None:
    fullest = [use.fullest for use in steps]
    names = list(dict.fromkeys(name for device in fullest for name in device.by_class))
    unit, scale = _unit(max(device.peak_bytes or device.in_use_bytes for device in fullest))
    layers = [[device.by_class.get(name, 0) / scale for device in fullest] for name in names]
    axes.stackplot(range(len(steps)), *layers, labels=names, colors=_COLORS[: len(names)])
    if all(device.peak_bytes is not None for device in fullest):
        peaks = [(device.peak_bytes or 0) / scale for device in fullest]
        axes.plot(range(len(steps)), peaks, color="black", linestyle=":", label="peak so far")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel=f"{unit} on the fullest device", title="Over the steps")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=8, frameon=False)


def _unit(num_bytes: int) -> tuple[str, int]:
    return ("MiB", _MIB) if num_bytes < GIB else ("GiB", GIB)
