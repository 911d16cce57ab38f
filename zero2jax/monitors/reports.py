"""Texts printed once in a run, before a step: in every process alike, since they may compile; the first one prints."""

from collections.abc import Callable
from pathlib import Path

import jax

from zero2jax.monitors.observers import Upcoming


class Report:
    """Prints a text, or writes it to a file, before the first step that is to have it.

    Args:
      text: makes it, of the step to come.
      step: number of the step; None for the first one that is seen, of a run that goes on as well.
      output: path of the file; None prints.
    """

    def __init__(
        self, text: Callable[[Upcoming], str], *, step: int | None = None, output: str | None = None
    ):
        self._text, self._step, self._output = text, step, output
        self._is_done = False

    def __call__(self, upcoming: Upcoming) -> None:
        """Hear of a step to come."""
        if self._is_done or (self._step is not None and upcoming.step != self._step):
            return
        self._is_done = True
        text = self._text(upcoming)
        if jax.process_index() != 0:
            return
        if self._output is None:
            print(text, flush=True)
        else:
            Path(self._output).write_text(text + "\n")
