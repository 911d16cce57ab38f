"""Stragglers: what each process spends on its own in a step, and which spends most.

In a step every process waits for the slowest in the collectives, so the time of a step is the same everywhere and tells
nothing. What differs is the time that a process does not wait for its devices: loading data, logging, a busy host.
`StepClock` measures that one.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zero2jax.processes.agreement import gather_with_hosts


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step that each process spent on its own, by process index, and the hosts they run on."""

    own_s: tuple[float, ...]
    hosts: tuple[str, ...]

    @property
    def slowest(self) -> int:
        """Index of the process that spent most."""
        return int(np.argmax(self.own_s))

    def __str__(self) -> str:
        slowest = self.slowest
        return (
            f"slowest of {len(self.own_s)} processes: {slowest} (host {self.hosts[slowest]}), "
            f"{self.own_s[slowest]:.4f} s per step outside of the devices' work; median {np.median(self.own_s):.4f} s"
        )


class StepClock:
    """Measures a process's own time per step.

    Example:
      >>> clock = StepClock()
      >>> for step in range(3):
      ...     with clock.waiting():
      ...         pass  # float(metrics["loss"]): waits for the devices, and through them for the other processes
      ...     clock.step_done()
      >>> len(clock.gather().own_s)
      1
    """

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._start_s = time.perf_counter()
        self._waited_s = 0.0
        self._num_steps = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for the devices: reading metrics, saving a checkpoint."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    def step_done(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def gather(self) -> StepTimes:
        """The times of all processes since the last call, on each of them; all must call it.

        It waits for the other processes, for some milliseconds: once in many steps.
        """
        own_s = (time.perf_counter() - self._start_s - self._waited_s) / max(1, self._num_steps)
        own, hosts = gather_with_hosts(np.array(own_s, np.float32))
        self._restart()
        return StepTimes(own_s=tuple(float(x) for x in own), hosts=hosts)
