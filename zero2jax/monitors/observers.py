"""What an engine tells of each step, to whom: `engine.observers`, which `initialize` sets where a configuration asks.

Around the step, on the host. `before` hears of a step before it is dispatched, in every process; `after` when it is
done, in the background, in the first process only.
"""

import concurrent.futures
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zero2jax.base.pytrees import PyTree, is_traced
from zero2jax.monitors.background import Background
from zero2jax.monitors.monitors import Monitors, numbers
from zero2jax.monitors.outlets import Outlet, warn_of_failures


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of a step that is done.

    Attributes:
      step: its number, the first one being 1.
      samples: examples trained on so far, this step's included.
      num_examples: examples of the batch.
      num_tokens: elements of the batch's largest array of integers with two dims or more; 0 without one.
      metrics: its scalars, by path.
      between_s: seconds from the return of the step before to the call of this one; 0 for the first.
      dispatch_s: seconds inside of the call.
      transfer_s: seconds from the call until the batch was on the devices; NaN where times are not asked for.
      idle_s: seconds that the devices had nothing to do before it, waiting for the loop.
      device_s: seconds from then, or from when the devices were done with the step before, until it was done.
    """

    step: int
    samples: int
    num_examples: int
    num_tokens: int
    metrics: Mapping[str, float]
    between_s: float = 0.0
    dispatch_s: float = 0.0
    transfer_s: float = math.nan
    idle_s: float = 0.0
    device_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the end of the step before to its own, on the devices."""
        return self.idle_s + self.device_s

    @property
    def times_ms(self) -> dict[str, float]:
        """The times that are known in milliseconds, by the names that monitors write."""
        times = {
            "step": self.total_s,
            "input_wait": self.idle_s,
            "dispatch": self.dispatch_s,
            "transfer": self.transfer_s,
            "between_steps": self.between_s,
        }
        return {f"elapsed_time_ms_{name}": 1e3 * s for name, s in times.items() if not math.isnan(s)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upcoming:
    """A step that is about to be dispatched: its number, its batch and what the loss function takes besides."""

    step: int
    batch: PyTree
    loss_args: Mapping[str, PyTree] | None


class Observers:
    """Tells of the steps of an engine.

    Args:
      before: called with an `Upcoming`, in every process, in the loop; by the name for a failure's warning, as `after`.
      after: called with a `StepRecord`, in the first process, in the background.
      monitors: makes what each step's metrics are written with; called at the first step, in the first process, so that
        an engine that is only planned with opens nothing.
      with_times: whether they write the step's times, too.
    """

    def __init__(
        self,
        *,
        before: Mapping[str, Callable[[Upcoming], None]] | None = None,
        after: Mapping[str, Callable[[StepRecord], None]] | None = None,
        monitors: Callable[[], Monitors] | None = None,
        with_times: bool = False,
    ):
        self.monitors: Monitors | None = None
        self._make_monitors = monitors
        self._with_times = with_times
        self._before = [Outlet(name, function) for name, function in (before or {}).items()]
        self._after = [Outlet(name, function) for name, function in (after or {}).items()]
        # None before the first step, in the other processes, and without anything to tell.
        self._background: Background | None = None
        self._arrivals: concurrent.futures.Executor | None = (
            None  # waits for batches, where times are asked for
        )
        self._is_open = False
        self._last_step: Callable[[], Any] = lambda: None
        self._step = self._samples = 0
        self._is_behind = False
        self._returned_s: float | None = None
        self._done_s: float | None = None  # of the thread in the background

    def begin(
        self, state: Any, batch: PyTree, loss_args: Mapping[str, PyTree] | None
    ) -> "StepUnderWay | None":
        """Before a step, given its state and batch, and before its batch is placed; what to tell of it further.

        None inside of a program of the user's, which runs when it likes.
        """
        if is_traced((state, batch)):
            return None
        self._open()
        goes_on = self._last_step() is state.step
        step = self._step + 1 if goes_on else int(jax.device_get(state.step)) + 1
        for before in self._before:
            before(Upcoming(step=step, batch=batch, loss_args=loss_args))
        self._warn()
        num_examples, num_tokens = _sizes(batch)
        samples = (self._samples if goes_on else (step - 1) * num_examples) + num_examples
        record = StepRecord(
            step=step, samples=samples, num_examples=num_examples, num_tokens=num_tokens, metrics={}
        )
        return StepUnderWay(self, record)

    def _done(self, record: StepRecord, step: jax.Array, hear: Callable[[], None]) -> None:
        """After the call of a step, whose new number is `step`."""
        self._step, self._samples, self._last_step = record.step, record.samples, weakref.ref(step)
        if self._background is not None and not self._background.put(hear):
            self._is_behind = True
        self._returned_s = time.perf_counter()

    def _hear(self, record: StepRecord, metrics: Mapping[str, Any], begun_s: float) -> None:
        """In the background: wait for the step, then tell of it."""
        values = numbers(metrics)
        done_s = time.perf_counter()
        free_s = begun_s if self._done_s is None else self._done_s
        idle_s = max(0.0, begun_s - free_s)
        device_s = done_s - max(begun_s, free_s)
        self._done_s = done_s
        record = dataclasses.replace(record, metrics=values, idle_s=idle_s, device_s=device_s)
        for after in self._after:
            after(record)
        # what offloading moves is not known before a step is over
        values = {
            name: x for name, x in values.items() if not (name.startswith("offload_") and math.isnan(x))
        }
        values |= record.times_ms if self._with_times else {}
        if self.monitors is not None and not self.monitors.put(record.samples, values):
            self._is_behind = True

    def close(self) -> None:
        """Wait until all steps so far have been told of, and the monitors have written; 30 seconds at most."""
        if self._background is not None:
            self._background.close()
            self._background = None
        if self._arrivals is not None:
            self._arrivals.shutdown()
            self._arrivals = None
        if self.monitors is not None:
            self.monitors.close()
        self._warn()

    def _open(self) -> None:
        """Open the monitors, then the thread that hands metrics to them, in the first process."""
        if self._is_open or jax.process_index() != 0:
            return
        self._is_open = True
        if self._make_monitors is not None:
            self.monitors = self._make_monitors()
        if self._after or self.monitors is not None:
            self._background = Background("zero2jax-observers")
            if self._with_times:
                self._arrivals = concurrent.futures.ThreadPoolExecutor(1, "zero2jax-arrivals")

    def _warn(self) -> None:
        warn_of_failures([*self._before, *self._after])
        if self.monitors is not None:
            self.monitors.warn_of_failures()
            if self._is_behind:
                self.monitors.say_behind()


class StepUnderWay:
    """A step between its call and its return, told of by the engine."""

    def __init__(self, observers: Observers, record: StepRecord):
        self._observers, self._record = observers, record
        self._begun_s = time.perf_counter()
        self._arrived_s: concurrent.futures.Future[float] | None = None

    def placed(self, batch: PyTree) -> None:
        """The batch's arrays are made, and may still be on their way to the devices."""
        if self._observers._arrivals is not None:
            self._arrived_s = self._observers._arrivals.submit(_arrival, batch)

    def done(self, new_state: Any, metrics: Mapping[str, Any]) -> None:
        """The call has its new state and metrics, which may not be there yet."""
        observers, metrics, now_s = self._observers, dict(metrics), time.perf_counter()
        returned_s = self._begun_s if observers._returned_s is None else observers._returned_s
        record = dataclasses.replace(
            self._record, between_s=self._begun_s - returned_s, dispatch_s=now_s - self._begun_s
        )

        def hear() -> None:
            arrived_s = math.nan if self._arrived_s is None else self._arrived_s.result()
            observers._hear(
                dataclasses.replace(record, transfer_s=arrived_s - self._begun_s), metrics, self._begun_s
            )

        observers._done(record, new_state.step, hear)


def _arrival(batch: PyTree) -> float:
    """When the batch was on the devices; NaN where it is gone since."""
    try:
        jax.block_until_ready(batch)
    except RuntimeError:
        return math.nan
    return time.perf_counter()


def _sizes(batch: PyTree) -> tuple[int, int]:
    """(examples, tokens) of a global batch."""
    leaves = [x for x in jax.tree.leaves(batch) if np.ndim(x) > 0]
    whole = [x.size for x in leaves if x.ndim > 1 and jax.numpy.issubdtype(x.dtype, np.integer)]
    return (leaves[0].shape[0] if leaves else 0), max(whole, default=0)
