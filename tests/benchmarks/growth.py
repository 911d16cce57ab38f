"""How the cost of a step grows: devices, layers, microbatches, leaves. A part of `bench.py`, alone by

    python tests/benchmarks/bench.py --parts growth [--axes devices leaves]

At each point the plain step and zero2jax run the same tiny model in turn. A picture per axis has the values, and below
them their ratio to the plain step, which should not rise. With one microbatch stage 1 is stage 2's program.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import measure
import numpy as np
import programs

STAGES = ("zero2jax stage 2", "zero2jax stage 3")
METRICS = {
    "step": "step, ms",
    "peak": "peak, MiB per device",
    "sent": "sent, MiB per device",
    "lower": "trace and lower, CPU s",
    "compile": "compile, CPU s",
}
SCALE = {"step": 1e3, "peak": 2**-20, "sent": 2**-20}
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
      points: its values.
      case: value -> (case, its full parameters).
      names: programs.
      compiled: the last value that is compiled and run; beyond it is traced and lowered alone.
    """

    points: tuple[int, ...]
    case: Callable[[int], tuple[programs.Case, Any]]
    names: tuple[str, ...] = (programs.PLAIN, *STAGES)
    compiled: int = 2**31


def gpt_case(
    num_layers: int = 4, num_devices: int = 8, num_microbatches: int = 1, scanned: bool = True
) -> tuple[programs.Case, Any]:
    """The model of `gpt.py`, 64 wide, one sequence of 32 tokens per device and microbatch."""
    model = gpt.Config(num_layers, hidden=64, num_heads=2, context=32, vocab=256, scanned=scanned)
    case = programs.Case(
        loss=functools.partial(gpt.loss_fn, model),
        shapes=gpt.shapes(model),
        devices=tuple(jax.devices()[:num_devices]),
        batch_shape=(num_devices * num_microbatches, model.context + 1),
        num_microbatches=num_microbatches,
        layer_dims=gpt.layer_dims(model),
    )
    return case, gpt.first_params(model)


def leaves_case(num_leaves: int) -> tuple[programs.Case, Any]:
    """Leaves of 8 numbers on two devices, each with a gradient of its own, and next to nothing to compute."""
    params = {f"p{i}": np.full(8, 1 + i / num_leaves, np.float32) for i in range(num_leaves)}
    case = programs.Case(
        loss=lambda params, batch: sum(jnp.cos(x * (batch / 256)).mean() for x in params.values()),
        shapes=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params),
        devices=tuple(jax.devices()[:2]),
        batch_shape=(2, 8),
    )
    return case, params


AXES = {
    "devices": Axis((1, 2, 4, 8), lambda n: gpt_case(num_devices=n)),
    "layers, scanned": Axis((2, 8, 24, 96), lambda n: gpt_case(n)),
    "layers, unrolled": Axis((2, 8, 24, 48, 96), lambda n: gpt_case(n, scanned=False), compiled=24),
    "microbatches": Axis(
        (1, 4, 16), lambda n: gpt_case(num_microbatches=n), (programs.PLAIN, "zero2jax stage 1", *STAGES)
    ),
    "leaves": Axis((10, 100, 1000, 5000), leaves_case, compiled=1000),
}
QUICK = {"leaves": Axis((2, 4), leaves_case, (programs.PLAIN, STAGES[0]), compiled=2)}


def points(axis: Axis, rounds: int = ROUNDS) -> Iterator[tuple[int, dict[str, measure.Row]]]:
    """Each value of an axis and the rows of its programs.

    Raises:
      measure.LossesDiffer: programs of one point do not train alike.
    """
    for value in axis.points:
        case, params = axis.case(value)
        compiles = value <= axis.compiled
        few = min(rounds, 1 if len(jax.tree.leaves(params)) > 500 else 3)
        measured = measure.Measured(case, axis.names, lower_rounds=few, compiles=compiles)
        if compiles:
            batches = np.random.default_rng(1).integers(0, 256, (2, *case.batch_shape)).astype(np.int32)
            measured.train(params, batches)
            measure.check_losses(measured.rows)
            measured.time(rounds)
        yield value, measured.rows
        jax.clear_caches()


def value_of(row: measure.Row, metric: str) -> float | None:
    """A metric in the unit of its title; None where it was not measured."""
    raw = row.get(f"{metric}_bytes" if metric in ("peak", "sent") else f"{metric}_s")
    return None if raw is None else raw * SCALE.get(metric, 1)


def ratio_of(rows: dict[str, measure.Row], name: str, metric: str) -> float | None:
    """A metric over the plain step's; of times the median of the rounds' ratios."""
    if f"{metric}_ratio" in rows[name]:
        return rows[name][f"{metric}_ratio"][0]
    mine, plain = value_of(rows[name], metric), value_of(rows[programs.PLAIN], metric)
    return mine / plain if mine is not None and plain else None


def picture(axis: str, rows: dict[str, dict[str, measure.Row]], path: Path) -> None:
    """Values on logarithmic axes, ratios to the plain step below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    shown = [metric for metric in METRICS if metric != "sent"]
    figure, panels = plt.subplots(2, len(shown), figsize=(3.1 * len(shown), 5), sharex=True, squeeze=False)
    names = list(next(iter(rows.values())))
    for metric, (above, below) in zip(shown, panels.T, strict=True):
        for i, name in enumerate(names):
            for panel, read in (
                (above, lambda at: value_of(at[name], metric)),  # noqa: B023 (called at once)
                (below, lambda at: ratio_of(at, name, metric)),  # noqa: B023
            ):
                line = [(int(x), y) for x, at in rows.items() if (y := read(at)) is not None]
                panel.plot(*zip(*line), marker=".", color=f"C{i}", label=name)
        above.set_title(METRICS[metric], fontsize=10)
        above.set(xscale="log", yscale="log")
        below.set_xlabel(axis)
        below.set_ylim(bottom=0)
    ticks = [int(x) for x in rows]
    for panel in panels.flat:
        panel.set_xticks(ticks, [str(x) for x in ticks])
        panel.xaxis.minorticks_off()
        panel.grid(alpha=0.3)
    panels[1][0].set_ylabel("ratio to the plain step")
    panels[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=72)
    plt.close(figure)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes


def file_name(axis: str) -> str:
    """Of an axis's picture."""
    return f"growth_{axis.replace(', ', '_')}.png"


def table(results: dict[str, dict[str, dict[str, measure.Row]]]) -> str:
    """Markdown: ratios to the plain step at the first and at the last point of each axis."""
    lines = [f"| what grows | program | {' | '.join(METRICS)} |", f"|---|---|{'---|' * len(METRICS)}"]
    for axis, rows in results.items():
        for name in next(iter(rows.values())):
            cells = []
            for metric in METRICS:
                known = [(x, y) for x, at in rows.items() if (y := ratio_of(at, name, metric)) is not None]
                if not known:
                    cells.append("")
                    continue
                (_, low), (last, high) = known[0], known[-1]  # one device sends nothing
                reach = "" if last == list(rows)[-1] else f" (at {last})"
                cells.append(f"{low:.2f} → {high:.2f}{reach}")
            if name != programs.PLAIN:
                span = f"{axis}, {next(iter(rows))} to {[*rows][-1]}"
                lines.append(f"| {span} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
