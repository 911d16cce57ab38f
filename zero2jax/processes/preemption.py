"""Ending on request: a signal is noted, the training loop finishes its step, saves and exits.

Outside any jitted step. Clusters announce the end of a job by SIGTERM, some seconds or minutes before they kill it;
many restart a job by its exit code.
"""

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from zero2jax.processes.agreement import all_agree

PREEMPTED_EXIT_CODE = 75
"""What a program exits with that saved on request and wants to be resumed: EX_TEMPFAIL of sysexits.h, "try again".

Not 143, which a shell also reports of a program that SIGTERM ended before it could save.
"""


class Preemption:
    """Notes signals between `with` and its end, in the main thread; `should_stop` says whether one came.

    Args:
      signals: what to note.
      check_every: in several processes, ask the others at steps that are a multiple of it. Asking waits for the step.

    Example:
      >>> with Preemption() as preemption:
      ...     for step in range(1, 4):
      ...         if step == 2:  # as `kill PID` or the cluster would
      ...             signal.raise_signal(signal.SIGTERM)
      ...         if preemption.should_stop(step):
      ...             break  # after checkpointer.save(step, state, force=True)
      >>> step
      2
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,), *, check_every: int = 1):
        self.signals = tuple(signals)
        self.check_every = check_every
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def should_stop(self, step: int) -> bool:
        """Whether to save and exit after this step; the same answer in every process that asks at the same step."""
        if jax.process_count() > 1 and step % self.check_every:
            return False
        return not all_agree(self.received is None)

    def __enter__(self) -> Self:
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
