"""The host arena against a model that only knows intervals: 10,000 random sequences, and what is refused."""

import numpy as np
import pytest

from zero2jax.memory.host_arena import ArenaFullError, HostArena

TOTAL, STEPS = 16, 12


def gaps_between(live):
    """(size, offset) of what live blocks leave free, which must not overlap."""
    end, gaps = 0, []
    for offset, size in sorted([(b.offset, b.size) for b in live] + [(TOTAL, 0)]):
        assert offset >= end, "two blocks overlap"
        if offset > end:
            gaps.append((offset - end, end))
        end = offset + size
    return gaps


def run(numbers):
    """One sequence, a step per number; the number of moves."""
    arena, live, gaps, moves = HostArena(TOTAL, alignment=1), {}, [(TOTAL, 0)], 0
    for step, number in enumerate(numbers, 1):
        kind, size = number % 5, number // 5 % 7 + 1
        if kind > 1 or not live:
            free = sum(size for size, _ in gaps)
            fitting = [gap for gap in gaps if gap[0] >= size]
            try:
                block = arena.allocate((size,), np.uint8)
            except ArenaFullError:
                assert free < size
                continue
            assert free >= size
            if fitting:
                assert block.offset == min(fitting)[1]  # the smallest that fits, the lowest of equals
            else:
                moves += 1
                for other, byte in live.items():
                    assert other.array.tobytes() == bytes([byte]) * other.size
            block.array[:] = step
            live[block] = step
        else:
            block = list(live)[number // 5 % len(live)]
            del live[block]
            block.release()
        gaps = gaps_between(live)
        assert [(size, offset) for offset, size in arena.free_blocks] == gaps  # merged: none touches another
    for block, byte in live.items():
        assert block.array.tobytes() == bytes([byte]) * block.size
    now = arena.statistics
    assert (now.num_blocks, now.free_bytes) == (len(live), sum(size for size, _ in gaps))
    assert now.largest_free_bytes == max(gaps, default=(0, 0))[0]
    assert (now.num_moves > 0) == (moves > 0)
    return moves


def test_random_sequences_lose_nothing_and_overlap_nowhere():
    draws = np.random.default_rng(0).integers(0, 1 << 20, (10_000, STEPS)).tolist()
    moved = sum(run(numbers) > 0 for numbers in draws)
    assert moved > 1000  # so many of them had to move blocks


def test_what_is_held_stays_and_the_others_move_around_it():
    arena = HostArena(400, alignment=4)
    blocks = [arena.allocate((25,), np.float32) for _ in range(4)]
    for i, block in enumerate(blocks):
        block.array[:] = i
    blocks[0].release()
    blocks[2].release()
    with blocks[1].held() as view:
        with pytest.raises(
            ArenaFullError, match=r"200 B are free, the largest block of them 100 B, and 100 B are held"
        ):
            arena.allocate((50,), np.float32)
        with pytest.raises(ValueError, match="it is held"):
            blocks[1].release()
        assert (view == 1).all()
        assert blocks[1].offset == 100
    large = arena.allocate((50,), np.float32)
    assert (blocks[1].offset, blocks[3].offset, large.offset) == (0, 100, 200)
    assert (blocks[1].array == 1).all()
    assert (blocks[3].array == 3).all()
    assert arena.statistics.fragmentation == 0


def test_blocks_are_aligned_counted_and_refused_after_their_release():
    arena = HostArena(1000)
    block = arena.allocate((3, 5), np.float16)
    assert block.array.ctypes.data % 64 == 0
    assert (block.array.shape, block.array.dtype) == ((3, 5), np.float16)
    empty = arena.allocate((0, 2), np.float32)
    assert empty.array.size == 0
    now = arena.statistics
    assert (now.total_bytes, now.free_bytes, now.peak_bytes, now.num_blocks) == (960, 832, 128, 2)
    block.release()
    block.release()
    assert arena.statistics.largest_free_bytes == 832
    assert arena.statistics.fragmentation == pytest.approx(1 - 832 / 896)
    with pytest.raises(ValueError, match="it has been released, and its bytes may be those of another"):
        _ = block.array
    with pytest.raises(
        ArenaFullError, match=r"allocating float32\[400\], 1.56 KiB, in a host arena of 960 B"
    ):
        arena.allocate((400,), np.float32)
    for shape, dtype in (((-1,), np.uint8), ((1,), object), ((1.5,), np.uint8)):
        with pytest.raises(ValueError, match="a shape is whole numbers from 0 on"):
            arena.allocate(shape, dtype)
    with pytest.raises(ValueError, match="both are whole numbers from 1 on"):
        HostArena(0)
