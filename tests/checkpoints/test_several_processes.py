"""Two real processes save and restore together, each only its own shards; and what that takes of the host's memory."""

from pathlib import Path

import jax
import numpy as np
from helpers import make_batches, make_engine, make_params, train
from spawn import run_processes

from zero2jax import Checkpointer
from zero2jax.checkpoints.format import Checkpoint

TESTS = Path(__file__).parents[1]


def test_two_processes_save_and_restore_together(tmp_path):
    engine = make_engine(3, stage=3)
    state, _ = train(engine, engine.init(make_params()), make_batches(2))
    with Checkpointer(tmp_path / "one", engine) as checkpointer:
        checkpointer.save(2, state, {"from": "one"})

    found = run_processes(
        f"""
        engine = make_engine(8, stage=2)
        engine.abstract_state(make_params())
        state, extra = zero2jax.Checkpointer({str(tmp_path / "one")!r}).restore(engine)
        assert extra == {{"from": "one"}}
        before = values(state)
        with zero2jax.Checkpointer({str(tmp_path / "two")!r}, engine, max_to_keep=1) as checkpointer:
            for step in (2, 3):
                assert checkpointer.save(step, state, {{"from": index}})
        other = make_engine(8, stage=0)
        other.abstract_state(make_params())
        state, extra = zero2jax.Checkpointer({str(tmp_path / "two")!r}).restore(other)
        assert extra == {{"from": 0}}
        state, extra = zero2jax.Checkpointer({str(tmp_path / "two")!r}).restore(engine, step=3)
        for x, y in zip(values(state), before, strict=True):
            np.testing.assert_array_equal(x, y)
        print(json.dumps(len(before)))
        """,
        2,
    )
    assert found[0] == found[1] > 0
    assert Checkpointer(tmp_path / "two").all_steps() == [3]
    checkpoint = Checkpoint(tmp_path / "two" / "3")
    checkpoint.verify()
    blocks = [b.file for leaf in checkpoint.leaves.values() for b in leaf.blocks]
    assert {"00000-of-00002.safetensors", "00001-of-00002.safetensors"} == set(blocks)
    again, _ = Checkpointer(tmp_path / "two").restore(engine)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_state_larger_than_the_memory_allowed_is_saved_and_restored_in_parts(tmp_path):
    """Bytes over what the process holds: restoring takes its own shards and a few blocks, never a whole copy; an
    asynchronous save takes one copy of its shards, a synchronous one none. 8 MiB of slack is for the allocator.
    """
    whole = 2 * 24 * 4 * 2**20  # parameters and momenta: 24 leaves of 4 MiB each
    setup = f"""
        engine = make_engine(4 * count, loss_fn=lambda p, b: p["w00"].sum(), tx=optax.sgd(0.1, momentum=0.9))
        params = {{f"w{{i:02}}": jax.ShapeDtypeStruct((1024, 1024), np.float32) for i in range(24)}}
        directory = {str(tmp_path / "large")!r}
        """
    found = run_processes(
        setup
        + """
        state = engine.init(lambda: {k: jax.numpy.full(x.shape, i, x.dtype) for i, (k, x) in enumerate(params.items())})
        with zero2jax.Checkpointer(directory + "0", engine) as warm:
            warm.save(0, state)  # imports, threads, buffers
            warm.wait()
        with zero2jax.Checkpointer(directory, engine, asynchronous=True) as checkpointer:
            both = lambda: (checkpointer.save(0, state), checkpointer.wait())
            asynchronous, _ = peak_above_now(both)
        with zero2jax.Checkpointer(directory + "1", engine, asynchronous=False) as checkpointer:
            synchronous, _ = peak_above_now(lambda: checkpointer.save(0, state))
        print(json.dumps([asynchronous, synchronous]))
        """,
        2,
    )
    slack = 8 * 2**20
    for asynchronous, synchronous in found:
        assert asynchronous < whole / 2 + slack
        assert synchronous < slack

    restored = run_processes(
        setup
        + """
        engine.abstract_state(params)
        checkpointer = zero2jax.Checkpointer(directory)
        small = make_engine(4 * count)
        warm = small.init(make_params())
        from zero2jax.checkpoints.format import Checkpoint
        read, read_block = [], Checkpoint.read_block
        Checkpoint.read_block = lambda self, leaf, block: (read.append(block), read_block(self, leaf, block))[1]
        peak, (state, _) = peak_above_now(lambda: checkpointer.restore(engine))
        for i, x in enumerate(jax.tree.leaves(state.params)):
            assert all((np.asarray(s.data) == i).all() for s in x.addressable_shards)
        print(json.dumps([peak, sum(4 * int(np.prod(block.shape)) for block in read)]))
        """,
        2,
    )
    for peak, read in restored:
        assert peak < whole / 2 + 2 * slack < 0.6 * whole
        assert read <= whole / 2 + 100  # its own half, and the scalars


def test_a_process_that_cannot_write_fails_the_save_of_all_and_nothing_is_lost(tmp_path):
    found = run_processes(
        f"""
        import errno, time
        from zero2jax.checkpoints import safetensors_file
        engine = make_engine(8, stage=2)
        state = engine.init(make_params())
        messages, pwrite = [], os.pwrite
        for failing in (0, 1):
            directory = {str(tmp_path)!r} + f"/{{failing}}"
            with zero2jax.Checkpointer(directory, engine, max_to_keep=1) as checkpointer:
                checkpointer.save(1, state)
                checkpointer.wait()
                if index == failing:
                    def full(*args):
                        raise OSError(errno.ENOSPC, "no space")
                    safetensors_file.os.pwrite = full
                checkpointer.save(2, state)
                try:
                    checkpointer.wait()
                except zero2jax.CheckpointError as error:
                    messages.append(str(error))
                safetensors_file.os.pwrite = pwrite
                assert checkpointer.all_steps() == [1], checkpointer.all_steps()
                checkpointer.save(2, state)
                checkpointer.wait()
                if index == 0:
                    assert checkpointer.all_steps() == [2], checkpointer.all_steps()
        print(json.dumps(messages))
        """,
        2,
    )
    for index, messages in enumerate(found):
        for failing, message in enumerate(messages):
            reason = "the disk is full" if index == failing else "another process could not write"
            assert f"saving step 2 to {tmp_path}/{failing}: {reason}" in message
            assert "latest complete checkpoint is step 1" in message
    assert [len(messages) for messages in found] == [2, 2]


def test_what_one_process_cannot_save_is_refused_in_all_at_once(tmp_path):
    found = run_processes(
        f"""
        import time
        from zero2jax.checkpoints import checkpointer
        engine = make_engine(8, stage=2)
        state = engine.init(make_params())
        messages, start = [], time.monotonic()

        def refused(*args):
            try:
                checkpointer.save(*args)
                checkpointer.wait()
            except (TypeError, ValueError) as error:
                messages.append(str(error))

        with zero2jax.Checkpointer({str(tmp_path)!r}, engine) as checkpointer:
            refused(1, state, object())
            refused(2**31, state)
            host_blocks = checkpointer.host_blocks
            if index == 1:
                checkpointer.host_blocks = lambda *args, **settings: [][0]
            refused(1, state)
            checkpointer.host_blocks = host_blocks
            checkpointer.save(1, state, object() if index else [np.ones(2)])
            checkpointer.wait()
            assert list(checkpointer.restore()[1][0]) == [1, 1]
        try:
            with zero2jax.Checkpointer({str(tmp_path)!r}, engine) as checkpointer:
                checkpointer.save(2, state)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert checkpointer.latest_step() == 2
        assert time.monotonic() - start < 60
        print(json.dumps(messages))
        """,
        2,
    )
    assert [len(messages) for messages in found] == [3, 3]
    assert "found a builtins.object" in found[0][0]
    assert "another process cannot begin this save" in found[1][0]
    assert all("below 2**31" in messages[1] for messages in found)
    assert "another process could not write" in found[0][2]
    assert "IndexError" in found[1][2]
