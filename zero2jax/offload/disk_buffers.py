"""Buffers that files are read into: blocks of one host arena, which XLA takes as they are. NumPy arrays.

Memory that is new has to be mapped and cleared page by page, which takes as long as reading does where the file is in
the page cache. A block is lent as an array, and free again when nobody has that any more, nor a view of it: XLA has one
for as long as a program reads it, and writes its results elsewhere. A block that is lent is never moved.
"""

import collections
import contextlib
import ctypes
import gc
import weakref

import numpy as np

from zero2jax.memory.host_arena import ArenaFullError, ArenaStatistics, Block, HostArena

ALIGNMENT = 64
"""Of memory that XLA takes as it is."""


class Buffers:
    """An arena of so many bytes. Taken from by one thread; others may let go.

    Attributes:
      num_own: how many buffers were made apart, for want of room.
    """

    def __init__(self, num_bytes: int):
        self._arena = HostArena(max(num_bytes, 1), alignment=ALIGNMENT)
        self._let_go: collections.deque[contextlib.ExitStack] = collections.deque()
        self.num_own = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """A buffer whose contents are whatever was there: of the arena, or one of its own if that has no room."""
        block = self._block(num_bytes)
        if block is None:
            gc.collect(0)  # JAX lets go of what XLA is done with when it is called next, or when this is
            block = self._block(num_bytes)
        if block is None:
            self.num_own += 1
            return aligned(num_bytes)
        lent = contextlib.ExitStack()
        lent.callback(block.release)
        memory = lent.enter_context(block.held())
        # no array, which NumPy's views would pass over to hold what it is a view of
        owner = (ctypes.c_ubyte * num_bytes).from_buffer(memory.data)
        weakref.finalize(owner, self._let_go.append, lent).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _block(self, num_bytes: int) -> Block | None:
        while self._let_go:  # not in the finalizer, which may run while the arena allocates
            self._let_go.popleft().close()
        try:
            return self._arena.allocate((num_bytes,), np.uint8)
        except ArenaFullError:
            return None

    @property
    def statistics(self) -> ArenaStatistics:
        """Of the arena."""
        return self._arena.statistics


def aligned(num_bytes: int) -> np.ndarray:
    """New memory that XLA takes as it is."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
