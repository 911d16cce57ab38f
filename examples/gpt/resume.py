"""Train on 8 devices, be killed, resume on 3, be asked to stop, finish on 1: is it still the same training run?

    python examples/gpt/resume.py

Runs `train.py` four times: once without interruption, and in parts that share a folder of checkpoints. The parts
also differ in their ZeRO stage. Exports the parameters, and draws the losses of both beside each other in
`out/resume/resume.png`.
Takes no GPU, downloads nothing; seen on two busy CPU cores: about four minutes.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

import zero2jax

TRAIN = Path(__file__).with_name("train.py")
BATCH_SIZE = 24  # = 8 devices * 3 = 3 devices * 8 = 1 device * 24 sequences


@dataclass(frozen=True)
class Args:
    """Kill and resume the example on other numbers of devices."""

    steps: int = 90
    """Optimizer updates of the full run."""
    save_every: int = 10
    """Steps between checkpoints."""
    out: Path = Path("out/resume")
    """Folder for everything; emptied first."""


@dataclass(frozen=True)
class Part:
    """One process: how it runs and how it ends."""

    devices: int
    stage: int
    signal: signal.Signals | None = None
    signal_after: int = 0  # steps

    @property
    def label(self) -> str:
        ending = f", {self.signal.name} after step {self.signal_after}" if self.signal else ""
        return f"{self.devices} device{'s'[: self.devices - 1]}, stage {self.stage}{ending}"


def run(part: Part, args: Args, folder: Path) -> list[dict[str, float]]:
    """Run a part in `folder` until its end; the rows of its metrics."""
    config = {
        "train_batch_size": BATCH_SIZE,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": part.stage},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, TRAIN, "--devices", part.devices, "--steps", args.steps]
    command += ["--deepspeed_config", path, "--out", folder, "--no_report", "--save_every", args.save_every]
    command += ["--checkpoints", folder / "checkpoints", "--resume", "auto"]
    print(f"--- {part.label}", flush=True)
    with subprocess.Popen([str(x) for x in command]) as process:
        while process.poll() is None:
            time.sleep(0.05)
            if part.signal and steps_done(metrics) >= part.signal_after:
                process.send_signal(part.signal)
                process.wait()
    exit_codes = {None: 0, signal.SIGTERM: zero2jax.PREEMPTED_EXIT_CODE, signal.SIGKILL: -signal.SIGKILL}
    expected = exit_codes[part.signal]
    if process.returncode != expected:
        raise SystemExit(f"{part.label}: exit code {process.returncode}, expected {expected}")
    return rows(metrics)


def rows(metrics: Path) -> list[dict[str, float]]:
    """The complete lines of a file of metrics."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_done(metrics: Path) -> int:
    return int(max((row["step"] for row in rows(metrics)), default=0))


def save_figure(
    path: Path, uninterrupted: list[dict[str, float]], parts: list[tuple[Part, list[dict[str, float]]]]
) -> float:
    """Losses of the uninterrupted run and of the parts, and their differences; the largest difference."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    loss, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    expected = {row["step"]: row["loss"] for row in uninterrupted}
    steps, losses = list(expected), list(expected.values())
    loss.plot(steps, losses, color="0.75", linewidth=5, label="8 devices, uninterrupted")
    before: list[dict[str, float]] = []
    largest = 0.0
    for part, found in parts:
        new = [row for row in found if row not in before]  # steps after the last checkpoint are taken again
        steps = [row["step"] for row in new]
        (line,) = loss.plot(steps, [row["loss"] for row in new], ".-", linewidth=1, label=part.label)
        away = [abs(row["loss"] - expected[row["step"]]) for row in new]
        difference.plot(steps, away, ".-", color=line.get_color())
        largest = max(largest, *away)
        if part.signal:
            loss.axvline(steps[-1], color=line.get_color(), linestyle=":")
        before = found
    loss.set(ylabel="training loss, nats per byte", title="one run in three parts")
    loss.legend()
    difference.set(xlabel="step", ylabel="difference")
    for axes in (loss, difference):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return largest


def main(args: Args) -> None:
    shutil.rmtree(args.out, ignore_errors=True)
    start_s = time.perf_counter()
    uninterrupted = run(Part(8, 2), args, args.out / "uninterrupted")
    killed = Part(8, 2, signal.SIGKILL, args.steps * 2 // 5)
    asked = Part(3, 3, signal.SIGTERM, args.steps * 7 // 10)
    parts = [(part, run(part, args, args.out / "parts")) for part in (killed, asked, Part(1, 1))]
    model = args.out / "model.safetensors"
    zero2jax.export_checkpoint(args.out / "parts" / "checkpoints", model)
    print(f"{model}: {sum(x.size for x in zero2jax.load_exported(model).values()):,} parameters, exported")
    largest = save_figure(args.out / "resume.png", uninterrupted, parts)
    last, last_in_parts = uninterrupted[-1]["loss"], parts[-1][1][-1]["loss"]
    print(
        f"last loss {last:.4f} uninterrupted, {last_in_parts:.4f} in parts; they differ by at most {largest:.1e} in "
        f"any of {args.steps} steps; took {time.perf_counter() - start_s:.0f} s. See {args.out}/resume.png"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
