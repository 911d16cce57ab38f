"""One buffer of host memory, divided among arrays that come and go: for staging buffers of offload. Host side, NumPy.

The contiguous allocator that DeepSpeed has on its devices, where XLA needs none, at the place where blocks do come and
go: the host. An allocation takes the smallest free block that fits (best fit, the lowest of equals); a release merges
the block with its free neighbours; and when all free blocks together suffice and none alone does, live blocks are moved
together (defragmentation). An array is reached through its `Block`, which knows where it is now; a view that must not
move is asked for by `held`.

Not for several threads at a time. DeepSpeed's `runtime/zero/contiguous_memory_allocator.py` is the model of the
behaviour; ZeRO, arXiv:1910.02054, section 6.3, of the idea.
"""

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zero2jax.base.checks import is_whole
from zero2jax.base.tables import readable_bytes


class ArenaFullError(MemoryError):
    """The arena has no room for a block, also after moving what may be moved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaStatistics:
    """Bytes of an arena, padding of blocks to the alignment counted as theirs.

    Attributes:
      total_bytes: of the buffer.
      free_bytes: in no block.
      largest_free_bytes: of the largest free block.
      peak_bytes: the most that blocks have had.
      num_blocks: live ones.
      num_moves: blocks that defragmentation has moved, since the beginning.
      moved_bytes: their bytes.
    """

    total_bytes: int
    free_bytes: int
    largest_free_bytes: int
    peak_bytes: int
    num_blocks: int
    num_moves: int
    moved_bytes: int

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that no single block has."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


class Block:
    """An array in an arena, wherever that puts it. Made by `HostArena.allocate`."""

    def __init__(self, arena: "HostArena", offset: int, size: int, shape: tuple[int, ...], dtype: Any):
        self._arena: HostArena | None = arena
        self._holders = 0
        self.offset = offset
        self.size = size
        self.shape = shape
        self.dtype = dtype

    @property
    def array(self) -> np.ndarray:
        """The array where it is now; the next allocation may move it. Keep the block, and not this.

        Raises:
          ValueError: the block has been released.
        """
        if self._arena is None:
            raise ValueError(
                f"reading a block of {self.dtype}{list(self.shape)}: it has been released, and its bytes may be those "
                f"of another by now. Allocate a new one."
            )
        return self._arena.view(self)

    @contextlib.contextmanager
    def held(self) -> Iterator[np.ndarray]:
        """The array, which stays where it is inside of the `with`: for a transfer that runs meanwhile, say."""
        array = self.array
        self._holders += 1
        try:
            yield array
        finally:
            self._holders -= 1

    @property
    def is_held(self) -> bool:
        """Whether it must not be moved now."""
        return self._holders > 0

    def release(self) -> None:
        """Give the bytes back; a second time does nothing.

        Raises:
          ValueError: the block is held.
        """
        if self._arena is None:
            return
        if self.is_held:
            raise ValueError(
                f"releasing a block of {self.dtype}{list(self.shape)}: it is held. Leave the `with block.held()` "
                f"first."
            )
        self._arena._forget(self)
        self._arena = None


class HostArena:
    """A buffer of `num_bytes` on the host, whose blocks begin at multiples of `alignment` bytes.

    Example:
      >>> arena = HostArena(1024)
      >>> block = arena.allocate((4, 8), np.float32)
      >>> block.array[:] = 1
      >>> arena.statistics.free_bytes
      896
      >>> block.release()
    """

    def __init__(self, num_bytes: int, *, alignment: int = 64):
        if not is_whole(num_bytes) or not is_whole(alignment) or num_bytes < 1 or alignment < 1:
            raise ValueError(
                f"making a host arena of {num_bytes!r} bytes at an alignment of {alignment!r}: both are whole numbers "
                f"from 1 on."
            )
        self._alignment = alignment
        self._total = num_bytes // alignment * alignment
        raw = np.empty(self._total + alignment, np.uint8)
        first = -raw.ctypes.data % alignment
        self._bytes = raw[first : first + self._total]
        self._blocks: list[Block] = []  # live, by offset
        self._used = self._peak = self._num_moves = self._moved = 0

    def allocate(self, shape: Sequence[int], dtype: Any) -> Block:
        """A block for an array, whose contents are whatever was there.

        Raises:
          ValueError: the shape has a negative dim; the elements are objects.
          ArenaFullError: there is no room, with the sizes that are free and held.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject or not all(is_whole(n) and n >= 0 for n in shape):
            raise ValueError(
                f"allocating {dtype}{list(shape)} in a host arena: a shape is whole numbers from 0 on, and elements "
                f"are numbers. Correct the shape, or store objects elsewhere."
            )
        wanted = math.prod(shape) * dtype.itemsize
        size = max(-(-wanted // self._alignment), 1) * self._alignment
        offset = self._best_fit(size)
        if offset is None and self._total - self._used >= size:
            self.defragment()
            offset = self._best_fit(size)
        if offset is None:
            raise ArenaFullError(self._refusal(wanted, tuple(shape), dtype))
        block = Block(self, offset, size, tuple(shape), dtype)
        bisect.insort(self._blocks, block, key=lambda b: b.offset)
        self._used += size
        self._peak = max(self._peak, self._used)
        return block

    def _forget(self, block: Block) -> None:
        self._blocks.remove(block)
        self._used -= block.size

    def defragment(self) -> None:
        """Move live blocks to the front, each as far as those before it allow; what is held stays."""
        front = 0
        for block in self._blocks:
            if not block.is_held and block.offset > front:
                # NumPy copies as if through a buffer where the two overlap
                self._bytes[front : front + block.size] = self._bytes[
                    block.offset : block.offset + block.size
                ]
                block.offset = front
                self._num_moves += 1
                self._moved += block.size
            front = block.offset + block.size

    def view(self, block: Block) -> np.ndarray:
        """The array of a live block."""
        num_bytes = math.prod(block.shape) * block.dtype.itemsize
        flat = self._bytes[block.offset : block.offset + num_bytes]
        return flat.view(block.dtype).reshape(block.shape)

    @property
    def free_blocks(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what is free: between neighbours that are live, so that no two of them touch."""
        ends = [0, *(b.offset + b.size for b in self._blocks)]
        starts = [*(b.offset for b in self._blocks), self._total]
        return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]

    @property
    def statistics(self) -> ArenaStatistics:
        """What is free, in use, and was moved."""
        return ArenaStatistics(
            total_bytes=self._total,
            free_bytes=self._total - self._used,
            largest_free_bytes=max((size for _, size in self.free_blocks), default=0),
            peak_bytes=self._peak,
            num_blocks=len(self._blocks),
            num_moves=self._num_moves,
            moved_bytes=self._moved,
        )

    def _best_fit(self, size: int) -> int | None:
        fitting = [(free, offset) for offset, free in self.free_blocks if free >= size]
        return min(fitting)[1] if fitting else None

    def _refusal(self, wanted: int, shape: tuple[int, ...], dtype: np.dtype) -> str:
        now = self.statistics
        held = sum(block.size for block in self._blocks if block.is_held)
        return (
            f"allocating {dtype}{list(shape)}, {readable_bytes(wanted)}, in a host arena of "
            f"{readable_bytes(now.total_bytes)}: {readable_bytes(now.free_bytes)} are free, the largest block of them "
            f"{readable_bytes(now.largest_free_bytes)}, and {readable_bytes(held)} are held where they are. Release "
            f"blocks, or make the arena larger."
        )
