"""Two real processes save and restore together, each only its own shards; and what that takes of the host's memory.

The programs that they run are files of `tests/programs_run/`.
"""

import jax
import numpy as np
from helpers import make_batches, make_engine, make_params, train
from spawn import run_program

from zero2jax import Checkpointer
from zero2jax.checkpoints.format import Checkpoint


def test_two_processes_save_and_restore_together(tmp_path):
    engine = make_engine(3, stage=3)
    state, _ = train(engine, engine.init(make_params()), make_batches(2))
    with Checkpointer(tmp_path / "one", engine) as checkpointer:
        checkpointer.save(2, state, {"from": "one"})

    found = run_program("save_and_restore.py", tmp_path)
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
    """Bytes over what the process holds: restoring takes its own shards and a few blocks, never a full copy; an
    asynchronous save takes one copy of its shards, a synchronous one none. Slack, 8 MiB and more, is for the allocator.
    """
    full = 2 * 24 * 4 * 2**20  # parameters and momenta: 24 leaves of 4 MiB each
    slack = 8 * 2**20
    for asynchronous, synchronous in run_program("save_large.py", tmp_path):
        assert asynchronous < full / 2 + slack
        assert synchronous < slack
    for peak, read in run_program("restore_large.py", tmp_path):
        assert peak < 0.6 * full
        assert read <= full / 2 + 100  # its own half, and the scalars


def test_a_process_that_cannot_write_fails_the_save_of_all_and_nothing_is_lost(tmp_path):
    found = run_program("full_disk.py", tmp_path)
    for index, messages in enumerate(found):
        for failing, message in enumerate(messages):
            reason = "the disk is full" if index == failing else "another process could not write"
            assert f"saving step 2 to {tmp_path}/{failing}: {reason}" in message
            assert "latest complete checkpoint is step 1" in message
    assert [len(messages) for messages in found] == [2, 2]


def test_what_one_process_cannot_save_is_refused_in_all_at_once(tmp_path):
    found = run_program("refusals.py", tmp_path)
    assert [len(messages) for messages in found] == [3, 3]
    assert "found a builtins.object" in found[0][0]
    assert "another process cannot begin this save" in found[1][0]
    assert all("below 2**31" in messages[1] for messages in found)
    assert "another process could not write" in found[0][2]
    assert "IndexError" in found[1][2]


def test_a_process_may_read_the_directory_at_any_moment_while_another_deletes_from_it(tmp_path):
    (tmp_path / "marks").mkdir()
    num_saves = 13
    _, held = run_program("deletion.py", tmp_path / "run", tmp_path / "marks", num_saves)
    assert held == list(range(2, held[-1] + 1))  # the deletion came before every access of the process
    assert 5 < held[-1] < num_saves
