"""One writer until it fails. A monitor is never worth a run: its failure is told once, and training goes on."""

from collections.abc import Callable, Iterable
from typing import Any

from zero2jax.base import notices
from zero2jax.base.checks import type_name


class Outlet:
    """Calls a function, in any thread, until it raises for the first time.

    Args:
      name: what to call it in the warning.
      function: what is called.
      close: called at the end, or after a failure.
    """

    def __init__(self, name: str, function: Callable[..., None], close: Callable[[], None] = lambda: None):
        self.name = name
        self._function, self._close = function, close
        self._is_open = True
        self._failure = ""

    def __call__(self, *args: Any) -> None:
        """Call the function, unless it has failed before."""
        if self._is_open:
            self._try(self._function, *args)

    def close(self) -> None:
        """Close what it writes to; calls after that do nothing."""
        if self._is_open:
            self._is_open = False
            self._try(self._close)

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        # Whatever a service, a library or a function of the user's comes up with: none of it is to end the run.
        try:
            function(*args)
        except Exception as error:
            self._failure = self._failure or f"{type_name(error)}: {error}"
            self.close()

    def take_failure(self) -> str:
        """Why it failed, the first time that one asks after a failure; else nothing."""
        failure, self._failure = self._failure, ""
        return failure


def warn_of_failures(outlets: Iterable[Outlet]) -> None:
    """Warn of each outlet that has failed and has not been warned of."""
    for outlet in outlets:
        if failure := outlet.take_failure():
            notices.warn(
                f"{outlet.name} failed and is switched off: {failure}. Training goes on without it; to have it back, "
                f"mend the cause and start again."
            )
