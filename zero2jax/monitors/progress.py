"""Lines of progress: metrics and throughput every so many steps, and where the time of a step goes.

A JAX step is one program: forward, backward and update have no times of their own (a profiler's trace shows them). What
the host can tell is when it called, when the call returned, and when the result was there.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from zero2jax.base.pytrees import PyTree
from zero2jax.monitors.observers import StepRecord, Upcoming

WARM_UP_STEPS = 2  # as in DeepSpeed: the first compile
BREAKDOWN_EVERY = 10  # steps between two lines, where it is not said


class Utilization:
    """Model FLOPs of a step against the peak of all devices.

    Three times the matrix products of the forward pass, one for it and two for backward: recomputing counts for
    nothing, and frozen parameters as if they were trained.

    Args:
      forward_flops: of the global batch of a step.
      peak_flops: of all devices together, per second.
    """

    def __init__(self, forward_flops: Callable[[Upcoming], float], peak_flops: float):
        self._forward_flops, self._peak = forward_flops, peak_flops
        self._flops: dict[Any, float] = {}
        self._latest = 0.0

    def note(self, upcoming: Upcoming) -> None:
        """Count the operations of a step to come; those of a batch of the same shapes are known."""
        key = _shapes(upcoming.batch)
        if key not in self._flops:
            self._flops[key] = 3 * self._forward_flops(upcoming)
        self._latest = self._flops[key]

    def of(self, steps_per_s: float) -> float:
        """The share of the peak at this rate."""
        return self._latest * steps_per_s / self._peak


class Progress:
    """Prints a line every `every` steps, in the first process, as an observer of steps that are done.

    Args:
      every: steps between two lines.
      metrics: whether to print loss, learning rate, gradient norm, skipped steps and throughput.
      throughput: whether throughput is among them.
      breakdown: whether to print where the time goes.
      utilization: for model FLOPs, where the peak is known.
    """

    def __init__(
        self,
        every: int,
        *,
        metrics: bool = True,
        throughput: bool = True,
        breakdown: bool = False,
        utilization: Utilization | None = None,
    ):
        self._every, self._utilization = every, utilization
        self._metrics, self._throughput, self._breakdown = metrics, throughput, breakdown
        self._num_seen = self._num_skipped = 0
        self._timed: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        """Take a step in, and print."""
        self._num_seen += 1
        self._num_skipped += record.metrics.get("applied", 1.0) == 0.0
        if self._num_seen > WARM_UP_STEPS:
            self._timed.append(record)
        if record.step % self._every == 0:
            for line in self.lines(record):
                print(line, flush=True)
            self._timed = []

    def lines(self, record: StepRecord) -> list[str]:
        """What to print after a step."""
        lines = []
        if self._metrics:
            parts = [self._values(record), self._rates() if self._throughput else ""]
            lines.append(f"step {record.step}: " + "; ".join(part for part in parts if part))
        if self._breakdown and self._timed:
            lines.append(f"step {record.step}: {self._times()}{self._offload()}")
        return lines

    def _values(self, record: StepRecord) -> str:
        names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad norm", "loss_scale": "loss scale"}
        values = [
            f"{word} {record.metrics[name]:.6g}" for name, word in names.items() if name in record.metrics
        ]
        num_skipped = int(record.metrics.get("num_skipped", self._num_skipped))
        return ", ".join([*values, f"{num_skipped} skipped"])

    def _rates(self) -> str:
        total_s = sum(r.total_s for r in self._timed)
        if not total_s:
            return ""
        rates = [f"{sum(r.num_examples for r in self._timed) / total_s:,.1f} samples/s"]
        if num_tokens := sum(r.num_tokens for r in self._timed):
            rates.append(f"{num_tokens / total_s:,.0f} tokens/s")
        if self._utilization is not None:
            rates.append(f"{self._utilization.of(len(self._timed) / total_s):.1%} of peak (model FLOPs)")
        return ", ".join(rates)

    def _times(self) -> str:
        mean_ms = lambda name: f"{1e3 * _mean([getattr(r, name) for r in self._timed]):.2f} ms"
        is_known = any(not math.isnan(r.transfer_s) for r in self._timed)
        transfer = f"; the batch was there after {mean_ms('transfer_s')}" if is_known else ""
        return (
            f"a step took {mean_ms('total_s')} (mean of {len(self._timed)}): devices {mean_ms('device_s')}, waiting "
            f"for the loop {mean_ms('idle_s')}; the loop: between steps {mean_ms('between_s')}, dispatch "
            f"{mean_ms('dispatch_s')}{transfer}"
        )

    def _offload(self) -> str:
        """Of an engine that offloads and measures it: the part of the steps that it adds, and bytes per second."""
        mean = lambda name: _mean([r.metrics.get(f"offload_{name}", math.nan) for r in self._timed])
        if math.isnan(share := mean("share")):
            return ""
        rates = {way: mean(f"{way}_bytes_per_s") for way in ("down", "up", "read", "write")}
        known = [f"{way} {rate / 1e9:.3g} GB/s" for way, rate in rates.items() if not math.isnan(rate)]
        return ", ".join([f"; offload adds {share:.1%} of a step", *known])


def _mean(values: list[float]) -> float:
    """The mean of those that are known; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _shapes(batch: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, *[(x.shape, x.dtype) for x in leaves]
