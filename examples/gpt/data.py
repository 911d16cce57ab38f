"""Byte-level text: every byte is one token, so the vocabulary is 256 and nothing needs downloading.

`load_text` reads the sources of Python's standard library, which every machine with Python has, or any file or
folder of yours, and holds 5 % of it out. `make_batches` cuts random windows from it. Both are deterministic.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 20  # one part in 20 is never trained on
# Not always installed, or large tables that no one would call text.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}
SKIPPED_FOLDERS |= {"encodings", "idlelib", "lib2to3"}


def standard_library_files() -> list[Path]:
    """The Python sources of the running interpreter's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [f for f in files if not SKIPPED_FOLDERS.intersection(f.relative_to(root).parts)]


def load_text(path: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(training bytes, held-out bytes), uint8, of a file, a folder's files, or the standard library's sources.

    Of several files every 20th is held out, of a single one its last 20th.
    """
    if path is None:
        files = standard_library_files()
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file())
    else:
        files = [path]
    parts = [f.read_bytes() for f in files]
    if len(parts) < HELD_OUT:  # too few to hold files out
        text = b"\n".join(parts)
        num_train = len(text) - len(text) // HELD_OUT
        train, held_out = text[:num_train], text[num_train:]
    else:
        train = b"\n".join(part for i, part in enumerate(parts) if i % HELD_OUT)
        held_out = b"\n".join(parts[::HELD_OUT])
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)


def make_batches(text: np.ndarray, batch_size: int, context: int, *, seed: int) -> Batches:
    """Endless global batches of random windows, (batch_size, context + 1) uint8; the same for the same seed.

    Inputs are `batch[:, :-1]`, targets `batch[:, 1:]`. To resume, set `position` to what it was.

    Raises:
      ValueError: the text is shorter than one window.
    """
    num_starts = len(text) - context
    if num_starts < 1:
        raise ValueError(
            f"cannot cut windows of {context + 1} bytes from a text of {len(text)} bytes: "
            "each needs context + 1. Give more text with --text, or choose a model with a shorter context."
        )
    windows = np.lib.stride_tricks.sliding_window_view(text, context + 1)  # a view: (num_starts, context + 1)
    return Batches(windows, batch_size, np.random.default_rng(seed))


class Batches:
    """An endless iterator over batches that can tell where it is."""

    def __init__(self, windows: np.ndarray, batch_size: int, rng: np.random.Generator):
        self._windows, self._batch_size, self._rng = windows, batch_size, rng

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        return self._windows[self._rng.integers(len(self._windows), size=self._batch_size)]

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch comes from: dicts, strings and numbers."""
        return self._rng.bit_generator.state

    @position.setter
    def position(self, position: dict[str, Any]) -> None:
        self._rng.bit_generator.state = position
