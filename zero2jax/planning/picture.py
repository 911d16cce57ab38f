"""Memory over the schedule of a planned step, and a bar per class, as a PNG. The one module that needs matplotlib."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero2jax.base.tables import GIB
from zero2jax.programs.formulas import CLASSES
from zero2jax.programs.liveness import Point

_COLORS = dict(zip(CLASSES, ("#1b4f72", "#5499c7", "#e67e22", "#c0392b", "#95a5a6")))
_LIMIT = "#c0392b"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Bar:
    """Bytes of one class at peak, and by its formula, if it has one."""

    name: str
    peak_bytes: int
    formula_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn.

    Attributes:
      title: above both drawings.
      points: live bytes over the schedule.
      loop_trips: how often each loop of `points` runs, by name; None where it is not known.
      allocated_bytes: what the compiler allocates.
      usable_bytes: what the program may use; None where that is not known.
      device: of what the usable bytes are.
      bars: a bar per class.
    """

    title: str
    points: Sequence[Point]
    loop_trips: Mapping[str, int | None]
    allocated_bytes: int
    usable_bytes: int | None
    device: str
    bars: Sequence[Bar]

    @property
    def unit(self) -> tuple[str, int]:
        """The unit of all axes, and its bytes."""
        return ("MiB", _MIB) if self.allocated_bytes < GIB else ("GiB", GIB)

    def save(self, path: str | Path) -> None:
        """Write the PNG."""
        # The object interface: no global state, no window system.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(2.3, 1))
        figure.suptitle(self.title)
        _draw_schedule(left, self)
        _draw_classes(right, self)
        figure.savefig(path, dpi=130)


def _draw_schedule(axes: Any, picture: Picture) -> None:
    points, (unit, scale) = picture.points, picture.unit
    layers = [[p.by_class[name] / scale for p in points] for name in CLASSES]
    colors = [_COLORS[name] for name in CLASSES]
    axes.stackplot(range(len(points)), *layers, labels=CLASSES, colors=colors, step="mid")
    top = _draw_limits(axes, picture)
    for start, end, body in _loop_spans(points):
        axes.axvspan(start - 0.5, end + 0.5, color="black", alpha=0.07, linewidth=0)
        if end - start >= 0.1 * len(points):  # there is room for words
            times = f"loop, {picture.loop_trips.get(body) or '?'} times"
            axes.text((start + end) / 2, top * 1.02, times, ha="center", va="bottom", fontsize=8)
    axes.set(
        xlim=(0, max(len(points) - 1, 1)),
        ylim=(0, top * 1.08),
        xlabel="instruction of the schedule (one iteration of each loop)",
        ylabel=f"live {unit} per device",
        title="Memory over the schedule",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=8, frameon=False)


def _draw_limits(axes: Any, picture: Picture) -> float:
    """Draw what is allocated and what is usable as lines; the upper edge of everything drawn."""
    unit, scale = picture.unit
    peak = max((p.total_bytes for p in picture.points), default=0)
    top = max(picture.allocated_bytes, peak) / scale
    limits = [(picture.allocated_bytes, "allocated by the compiler", "black", ":")]
    if picture.usable_bytes is not None:
        limits.append((picture.usable_bytes, f"usable on {picture.device}", _LIMIT, "--"))
    for num_bytes, words, color, style in limits:
        value = num_bytes / scale
        label = f"{words}: {value:,.1f} {unit}"
        if value > 2.5 * top:  # far above: drawn along the upper edge
            value, label = 1.15 * top, f"{label} (far above)"
        axes.axhline(value, color=color, linestyle=style, linewidth=1.5, label=label)
        top = max(top, value)
    return top


def _draw_classes(axes: Any, picture: Picture) -> None:
    (unit, scale), bars = picture.unit, picture.bars[::-1]
    for n, bar in enumerate(bars):
        axes.barh(n, bar.peak_bytes / scale, height=0.55, color=_COLORS[bar.name])
        words = f" {bar.peak_bytes / scale:,.2f}"
        if bar.formula_bytes is not None:
            at = bar.formula_bytes / scale
            axes.plot([at, at], [n - 0.4, n + 0.4], color="black", linewidth=2)
            words += f" (formula {at:,.2f})"
        axes.text(max(bar.peak_bytes, bar.formula_bytes or 0) / scale, n, words, va="center", fontsize=8)
    largest = max(max(bar.peak_bytes, bar.formula_bytes or 0) for bar in bars) / scale
    axes.set(
        xlim=(0, largest * 1.7 or 1),
        xlabel=f"{unit} per device at peak; black: the formula",
        title="By class",
    )
    axes.set_yticks(range(len(bars)), [bar.name.replace(" and ", "\nand ") for bar in bars])


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
