"""What a run reports: bytes per device beside the ZeRO formula, and a PNG of losses and of memory by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from matplotlib.figure import Figure
from rich.table import Table

import zero2jax

REST, STEP = "at rest", "during the step"


def memory_table(memory: zero2jax.MemoryReport) -> Table:
    """Bytes per device by class, measured and by formula."""
    table = Table(title=f"bytes per device, ZeRO stage {memory.stage} over {memory.num_shards} devices")
    for name in ("class", "measured", "formula"):
        table.add_column(name, justify="left" if name == "class" else "right")
    table.add_column("formula for")
    number = lambda n: "-" if n is None else f"{n:,}"
    for row in memory.rows:
        table.add_row(row.name, number(row.measured_bytes), number(row.formula_bytes), row.formula)
    table.add_section()
    table.add_row("total", number(memory.total_bytes), "", "master + optimizer + temporary")
    return table


def bytes_by_stage(
    engine: zero2jax.Engine,
    tx: optax.GradientTransformation | None,
    config: zero2jax.Config,
    param_specs: Any,
    params: Any,
    batch: Any,
) -> dict[int, dict[str, int]]:
    """Bytes per device of the step compiled at each ZeRO stage, as `engine` was built but for the stage.

    `params` and `batch` may be shapes: nothing is allocated or run.
    """
    found = {}
    for stage in (0, 1, 2, 3):
        if stage == engine.stage:
            other = engine
        else:
            zero = dataclasses.replace(config.zero_optimization, stage=stage)
            changed = dataclasses.replace(config, zero_optimization=zero)
            other = zero2jax.initialize(engine.loss_fn, tx, changed, engine.mesh, param_specs=param_specs)
            other.abstract_state(params)
        memory = other.lower(batch).compile().memory_analysis()
        found[stage] = {REST: memory.argument_size_in_bytes, STEP: memory.temp_size_in_bytes}
    return found


def save_figure(
    path: Path, history: Sequence[Mapping[str, float]], by_stage: Mapping[int, Mapping[str, int]], stage: int
) -> None:
    """A PNG: training and held-out loss by step; bytes per device by stage, the stage of this run in bold."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, memory = figure.subplots(1, 2)

    held_out = [row for row in history if "held_out_loss" in row]
    training = [row for row in history if "loss" in row]
    loss.plot([r["step"] for r in training], [r["loss"] for r in training], alpha=0.5)
    loss.plot([r["step"] for r in held_out], [r["held_out_loss"] for r in held_out], "o-")
    loss.legend(["training", "held out"])
    loss.set(xlabel="step", ylabel="nats per byte", title="loss")
    loss.grid(alpha=0.3)

    stages = list(by_stage)
    mib = {kind: [by_stage[s][kind] / 2**20 for s in stages] for kind in (REST, STEP)}
    memory.bar(stages, mib[REST], label=REST)
    bars = memory.bar(stages, mib[STEP], bottom=mib[REST], label=STEP, alpha=0.5)
    memory.bar_label(bars, [f"{rest + step:.1f}" for rest, step in zip(mib[REST], mib[STEP], strict=True)])
    memory.set_xticks(stages, [f"stage {s}" for s in stages])
    for label, s in zip(memory.get_xticklabels(), stages, strict=True):
        label.set_fontweight("bold" if s == stage else "normal")
    memory.legend()
    memory.set(ylabel="MiB per device", title="memory of the compiled step")
    figure.savefig(path, dpi=120)
