"""What a run reports: metrics by step, bytes per device beside the ZeRO formula, and a PNG of losses and memory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import zero2jax

REST, STEP, OFFLOAD = "at rest", "during the step", "offload"
LOGGED = ("loss", "grad_norm", "grad_norm_clipped", "learning_rate", "applied", "held_out_loss")


class Trace:
    """A trace of some steps in a folder, for TensorBoard's profile plugin, xprof or Perfetto; none without a folder.

    `with Trace(...) as trace`: a run that ends before the last of those steps leaves the trace of those it had.
    """

    def __init__(self, folder: Path | None, first_step: int, num_steps: int = 3):
        self._folder, self._first, self._last = folder, first_step, first_step + num_steps - 1
        self._is_running = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_running:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        if self._folder is not None and step == self._first:
            jax.profiler.start_trace(self._folder)
            self._is_running = True

    def after(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._is_running and step == self._last:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
            self._is_running = False


def read_history(path: Path, before_step: int) -> list[dict[str, Any]]:
    """The rows of an interrupted run, up to the step that it resumes from."""
    if before_step == 1 or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row for row in rows if row["step"] < before_step]


class Log:
    """Metrics by step: a line of JSON each in a file, and a progress bar. `with Log(...) as log`."""

    def __init__(self, path: Path, history: list[dict[str, Any]], steps: int, console: Console):
        self.history = history
        self._path, self._console = path, console
        self._start_s = time.perf_counter()
        self._clock = zero2jax.StepClock()  # zero2jax: for the slowest of several processes
        self.waiting = self._clock.waiting  # with log.waiting(): time that belongs to the devices
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("compiling", total=steps)

    def __enter__(self) -> Log:
        self._file = self._path.open("w")
        self._file.writelines(json.dumps(row) + "\n" for row in self.history)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._file.close()

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step; waits until the devices have done it."""
        with self.waiting():
            logged = {name: np.asarray(metrics[name]).item() for name in LOGGED if name in metrics}
        self._clock.step_done()
        if "held_out_loss" in logged:
            times = self._clock.gather()  # zero2jax: by process; all of them call it
            if len(times.own_s) > 1:
                logged |= {"own_s": times.own_s, "slowest_process": times.slowest}
                self._console.print(times)
        row = {"step": step, **logged, "elapsed_s": round(time.perf_counter() - self._start_s, 3)}
        self.history.append(row)
        print(json.dumps(row), file=self._file, flush=True)
        self._progress.update(self._bar, completed=step, description=f"loss {row['loss']:.3f}")
        if "held_out_loss" in row:
            self._console.print(f"step {step}: loss {row['loss']:.3f}, held out {row['held_out_loss']:.3f}")


def memory_table(memory: zero2jax.MemoryReport, by_stage: Mapping[str, Mapping[str, int]]) -> Table:
    """Bytes per device by class, measured and by formula; and what the step takes with offload."""
    table = Table(title=f"bytes per device, ZeRO stage {memory.stage} over {memory.num_shards} devices")
    for name in ("class", "measured", "formula"):
        table.add_column(name, justify="left" if name == "class" else "right")
    table.add_column("formula for")
    number = lambda n: "-" if n is None else f"{n:,}"
    for row in memory.rows:
        table.add_row(row.name, number(row.measured_bytes), number(row.formula_bytes), row.formula)
    table.add_section()
    table.add_row("total", number(memory.total_bytes), "", " + ".join(memory.held))
    held = sum(by_stage[OFFLOAD].values())
    table.add_row(f"total with {OFFLOAD}", number(held), "", "masters and optimizer state in host memory")
    return table


def bytes_by_stage(
    engine: zero2jax.Engine,
    tx: optax.GradientTransformation | None,
    config: zero2jax.Config,
    param_specs: Any,
    params: Any,
    batch: Any,
    trainable: Any = None,
) -> dict[str, dict[str, int]]:
    """Bytes per device of the step compiled at each ZeRO stage, as `engine` was built but for the stage; with offload.

    `params` and `batch` may be shapes: nothing is allocated or run.
    """
    found = {}
    own, host = str(engine.stage), zero2jax.OffloadSettings()
    for name, stage in {"0": 0, "1": 1, "2": 2, "3": 3, OFFLOAD: engine.stage}.items():
        if name == own:
            other = engine
        else:
            zero = dataclasses.replace(config.zero_optimization, stage=stage)
            changed = dataclasses.replace(config, zero_optimization=zero)
            other = zero2jax.initialize(
                engine.loss_fn,
                tx,
                changed,
                engine.mesh,
                param_specs=param_specs,
                trainable=trainable,
                offload=host if name == OFFLOAD else None,
            )
            other.abstract_state(params)
        memory = other.lower(batch).compile().memory_analysis()
        found[name] = {REST: memory.argument_size_in_bytes, STEP: memory.temp_size_in_bytes}
        if name == OFFLOAD:  # gradients leave the step that runs on the devices
            found[name][STEP] += memory.output_size_in_bytes
    return found


def save_figure(
    path: Path,
    history: Sequence[Mapping[str, float]],
    by_stage: Mapping[str, Mapping[str, int]],
    stage: int,
    unit: str,
) -> None:
    """A PNG: training and held-out loss by step; bytes per device by stage, the stage of this run in bold."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, memory = figure.subplots(1, 2)

    held_out = [row for row in history if "held_out_loss" in row]
    training = [row for row in history if "loss" in row]
    loss.plot([r["step"] for r in training], [r["loss"] for r in training], alpha=0.5)
    loss.plot([r["step"] for r in held_out], [r["held_out_loss"] for r in held_out], "o-")
    loss.legend(["training", "held out"])
    loss.set(xlabel="step", ylabel=unit, title="loss")
    loss.grid(alpha=0.3)

    stages = list(by_stage)
    mib = {kind: [by_stage[s][kind] / 2**20 for s in stages] for kind in (REST, STEP)}
    memory.bar(stages, mib[REST], label=REST)
    bars = memory.bar(stages, mib[STEP], bottom=mib[REST], label=STEP, alpha=0.5)
    memory.bar_label(bars, [f"{rest + step:.1f}" for rest, step in zip(mib[REST], mib[STEP], strict=True)])
    memory.set_xticks(stages, [f"{stage}, {s}" if s == OFFLOAD else f"stage {s}" for s in stages])
    for label, s in zip(memory.get_xticklabels(), stages, strict=True):
        label.set_fontweight("bold" if s == str(stage) else "normal")
    memory.legend()
    memory.set(ylabel="MiB per device", title="memory of the compiled step")
    figure.savefig(path, dpi=120)
