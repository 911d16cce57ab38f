"""Times of programs that take turns, and what their compiled code says: shared by `bench.py` and `growth.py`.

A machine's speed drifts, so each round times every program once and what counts is the ratio to the same round's plain
step. Steps keep all cores busy and are timed by the wall; tracing and compiling by the processor time of this process.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import programs

import zero2jax

Row = dict[str, Any]


def in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round; a round before them warms up and is not kept, unless it is the only one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            gc.collect()  # or one program pays for the garbage of another
            times[name].append(run())
    return {name: seconds[1:] or seconds for name, seconds in times.items()}


def ratio(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """[median, lower quartile, upper quartile] of the ratios of rounds."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    if len(ratios) == 1:
        return ratios * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [middle, low, high]


def reading(compiled: jax.stages.Compiled) -> Row:
    """Bytes per device and step of a compiled program: its peak, and what a device sends by ring algorithms."""
    audit = zero2jax.audit(compiled)
    return {
        "peak_bytes": audit.memory.total_bytes,
        "rest_bytes": audit.memory.argument_bytes,
        "sent_bytes": sum(c.wire_bytes * c.trips for c in audit.collectives),
    }


class Measured:
    """Programs of one case, made, traced, compiled and run in turn; `rows` has what was measured, by name."""

    def __init__(self, case: programs.Case, names: Sequence[str], lower_rounds: int, compiles: bool = True):
        self.rows: dict[str, Row] = {name: {} for name in names}
        self._programs: dict[str, programs.Program] = {}
        lowered: dict[str, jax.stages.Lowered] = {}

        def lower(name: str) -> float:
            self._programs[name] = program = programs.make(name, case)
            start = time.process_time()
            lowered[name] = program.lower()
            return time.process_time() - start

        self._add("lower", in_turn({name: lambda name=name: lower(name) for name in names}, lower_rounds))
        if compiles:
            seconds = {}
            for name in names:
                start = time.process_time()
                compiled = lowered.pop(name).compile()  # which the step then runs
                seconds[name] = [time.process_time() - start]
                self.rows[name] |= reading(compiled)
            self._add("compile", seconds)
        self._states: dict[str, Any] = {}

    def train(self, params: Any, batches: np.ndarray) -> None:
        """The losses of a step on each batch, from these full parameters."""
        self._batch = batches[0]
        for name, program in self._programs.items():
            state, losses = program.init(params), []
            for batch in batches:
                state, loss = program.step(state, batch)
                losses.append(float(loss))
            self._states[name] = state
            self.rows[name]["losses"] = losses

    def time(self, rounds: int, others: dict[str, Callable[[], float]] | None = None) -> None:
        """Time a step of each, and of `others`, in turn."""

        def step(name: str) -> float:
            start = time.perf_counter()
            self._states[name], loss = self._programs[name].step(self._states[name], self._batch)
            jax.block_until_ready((self._states[name], loss))
            return time.perf_counter() - start

        runs = {name: lambda name=name: step(name) for name in self._programs}
        self._add("step", in_turn(runs | (others or {}), rounds))

    def _add(self, what: str, times: dict[str, list[float]]) -> None:
        base = times[programs.PLAIN]
        for name, seconds in times.items():
            row = self.rows.setdefault(name, {})
            row[f"{what}_s"] = statistics.median(seconds)
            row[f"{what}_ratio"] = ratio(seconds, base)


class LossesDiffer(Exception):
    """Programs that should train alike do not; names them."""


TOLERANCE = 1e-5  # of the loss after a few fp32 steps; sums in another order differ by 1e-7 to 1e-6


def check_losses(rows: dict[str, Row]) -> None:
    """Compare every row's losses with the first row's.

    Raises:
      LossesDiffer: by more than `TOLERANCE`, relatively.
    """
    known = {name: row["losses"] for name, row in rows.items() if "losses" in row}
    first = known[programs.PLAIN]
    for name, losses in known.items():
        if not np.allclose(losses, first, rtol=TOLERANCE, atol=0):
            raise LossesDiffer(
                f"comparing programs that train one model on the same data: the losses of {name!r} are {losses}, those "
                f"of {programs.PLAIN!r} {first}, and they may differ by {TOLERANCE:g} of their value. No table is "
                f"printed: mend the program first."
            )
