"""Checkpoints that were damaged, killed while being saved, or cannot be saved: refused by name, nothing lost."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_trees_equal, make_batches, make_engine, make_params, train
from spawn import PROGRAMS, environment

from zero2jax import Checkpointer, CheckpointError
from zero2jax.checkpoints import safetensors_file
from zero2jax.checkpoints.format import Checkpoint, DamagedError, list_steps


@pytest.fixture(scope="module")
def engine():
    return make_engine(2, tx=optax.sgd(0.1, momentum=0.9))


@pytest.fixture(scope="module")
def batch():
    return make_batches(1)


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """A directory with the steps 1 and 2, and the state of step 2 on the host."""
    directory = tmp_path_factory.mktemp("saved")
    state = engine.init(make_params())
    with Checkpointer(directory, engine) as checkpointer:
        for step in (1, 2):
            state, _ = train(engine, state, make_batches(1))
            checkpointer.save(step, state, {"position": np.arange(step)})
    return directory, jax.device_get(state)


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def files(directory, step=2):
    return sorted(p for p in (directory / str(step)).rglob("*") if p.is_file())


def refused(directory, engine, path):
    with pytest.raises(DamagedError) as error:
        Checkpointer(directory).restore(engine)
    assert path.name in str(error.value), error.value
    assert "The checkpoint before it is step 1: checkpointer.restore(engine, step=1)." in str(error.value)
    state, extra = Checkpointer(directory).restore(engine, step=1)
    assert int(state.step) == 1
    assert extra["position"].tolist() == [0]


def test_every_altered_byte_is_refused_by_name(saved, copy, engine):
    """A sample of every file's bytes: altering one of ours refuses the file, one of Orbax's changes nothing."""
    for path in files(copy):
        good = path.read_bytes()
        ours = path.parent.name == "state" and path.name != "commit_success.txt"
        step = 1 if len(good) < 200 else len(good) // 40
        for i in range(0, len(good), step):
            path.write_bytes(good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :])
            if ours:
                with pytest.raises(DamagedError, match=path.name.split(".")[0]):
                    Checkpoint(copy / "2").verify()
            else:  # Orbax's own remarks: not read
                assert_trees_equal(jax.device_get(Checkpointer(copy).restore(engine)[0]), saved[1])
        path.write_bytes(good)
    Checkpoint(copy / "2").verify()


def test_a_restore_notices_any_altered_byte_that_it_reads(copy, engine):
    (path,) = (copy / "2" / "state").glob("*.safetensors")
    good = path.read_bytes()
    for i in [0, 9, 200, *random.Random(0).sample(range(len(good)), 12), len(good) - 1]:
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        refused(copy, engine, path)
    path.write_bytes(good)
    assert Checkpointer(copy).restore(engine)[1]["position"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sha256", "00000-of-00001.safetensors"])
def test_missing_and_shortened_files_are_refused_by_name(copy, engine, name):
    path = copy / "2" / "state" / name
    good = path.read_bytes()
    for length in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        refused(copy, engine, path)
    path.write_bytes(good + b"x")
    refused(copy, engine, path)
    path.unlink()
    if name == "manifest.json":  # then it was never complete
        assert Checkpointer(copy).latest_step() == 1
        with pytest.raises(CheckpointError, match=r"looking for step 2 in .*holds the steps \[1\]"):
            Checkpointer(copy).restore(engine, step=2)
    else:
        refused(copy, engine, path)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "another"}])
def test_another_version_is_refused_by_name(copy, engine, change):
    import hashlib
    import json

    path = copy / "2" / "state" / "manifest.json"
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.with_name("manifest.json.sha256").write_text(f"{digest}  manifest.json\n")
    (value,) = change.values()
    with pytest.raises(
        CheckpointError, match=f"says .*{value!r}.*reads 'zero2jax checkpoint', version 1.*jax"
    ):
        Checkpointer(copy).restore(engine)


def test_the_checksum_file_is_one_for_sha256sum(copy):
    subprocess.run(
        ["sha256sum", "-c", "manifest.json.sha256"], cwd=copy / "2" / "state", check=True, capture_output=True
    )


# ---- saving fails


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_is_said_and_leaves_state_and_earlier_checkpoints_alone(
    copy, engine, monkeypatch, asynchronous
):
    def full(descriptor, data, offset):
        if offset > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    state, _ = Checkpointer(copy).restore(engine)
    expected = jax.device_get(state)
    with Checkpointer(copy, engine, asynchronous=asynchronous, max_to_keep=2) as checkpointer:

        def save():
            checkpointer.save(3, state)
            checkpointer.wait()

        with monkeypatch.context() as patch:
            patch.setattr(safetensors_file.os, "pwrite", full)
            with pytest.raises(
                CheckpointError, match=r"saving step 3 .*disk is full.*untouched.*is step 2. Free space"
            ):
                save()
        assert checkpointer.all_steps() == [1, 2]
        assert sorted(p.name for p in copy.iterdir()) == ["1", "2"]
        assert_trees_equal(jax.device_get(state), expected)
        assert checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [2, 3]
    assert_trees_equal(jax.device_get(Checkpointer(copy).restore(engine)[0]), expected)


def test_an_error_while_writing_is_raised_by_the_next_save(copy, engine, monkeypatch):
    state, _ = Checkpointer(copy).restore(engine)
    checkpointer = Checkpointer(copy, engine)
    failed = threading.Event()

    def fsync(descriptor):
        failed.set()
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.os, "fsync", fsync)
        assert checkpointer.save(3, state)
        assert failed.wait(60)
    with pytest.raises(CheckpointError, match=r"saving step 3 .*I/O error") as caught:
        checkpointer.save(4, state)
    assert caught.value.__notes__ == ["Step 4 was saved or is being saved all the same."]
    checkpointer.close()
    assert list_steps(copy) == [1, 2, 4]


@pytest.mark.parametrize("name", ["write_process_file", "merge_parts"])
def test_an_error_of_another_kind_is_handled_like_one_of_the_file_system(copy, engine, monkeypatch, name):
    def fail(*args):
        raise MemoryError("out of memory")

    state, _ = Checkpointer(copy).restore(engine)
    with Checkpointer(copy, engine, asynchronous=False) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(f"zero2jax.checkpoints.orbax_handler.{name}", fail)
            with pytest.raises(CheckpointError, match=r"saving step 3 .*MemoryError\('out of memory'\)"):
                checkpointer.save(3, state)
        assert sorted(p.name for p in copy.iterdir()) == ["1", "2"]
        checkpointer.save(3, state)
    assert list_steps(copy) == [1, 2, 3]


def test_an_error_in_the_block_of_a_checkpointer_is_not_hidden_by_one_of_its_save(copy, engine, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "I/O error")

    state, _ = Checkpointer(copy).restore(engine)
    monkeypatch.setattr("zero2jax.checkpoints.orbax_handler.write_process_file", fail)
    checkpointer = Checkpointer(copy, engine)

    def run():
        with checkpointer:
            checkpointer.save(3, state)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert "I/O error" in caught.value.__notes__[0]
    with pytest.raises(CheckpointError, match="this Checkpointer was closed"):
        checkpointer.save(4, state)


def test_folders_deleted_by_hand_may_be_saved_again(tmp_path, engine):
    state = engine.init(make_params())
    with Checkpointer(tmp_path / "a", engine) as checkpointer:
        for step, delete in ((5, "5"), (5, "5"), (3, "")):
            checkpointer.save(step, state)
            checkpointer.wait()
            assert checkpointer.all_steps() == [step]
            shutil.rmtree(tmp_path / "a" / delete)
        checkpointer.save(1, state)
    assert list_steps(tmp_path / "a") == [1]


def test_a_second_checkpointer_that_saves_nothing_leaves_a_save_in_progress_alone(
    tmp_path, engine, may_write
):
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, engine.init(make_params()))
        Checkpointer(tmp_path, engine).close()
        may_write.set()
    assert list_steps(tmp_path) == [1]


def test_an_error_while_committing_is_raised_and_the_next_save_works(copy, engine, monkeypatch):
    def finalize(self, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state, _ = Checkpointer(copy).restore(engine)
    with Checkpointer(copy, engine) as checkpointer:
        for step in (3, 4):
            with monkeypatch.context() as patch:
                patch.setattr("zero2jax.checkpoints.orbax_handler.StateHandler.finalize", finalize)
                checkpointer.save(step, state)
                with pytest.raises(CheckpointError, match=rf"saving step {step} .*the disk is full"):
                    checkpointer.wait()
            assert sorted(p.name for p in copy.iterdir()) == ["1", "2"]
        checkpointer.save(4, state)
    assert list_steps(copy) == [1, 2, 4]


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)  # tests may run as root, who may write anywhere
    with pytest.raises(
        CheckpointError, match=r"cannot write there .no permission to write.*without an engine"
    ):
        Checkpointer(tmp_path, engine)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"cannot write there"):
        Checkpointer("/proc/checkpoints", engine)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file"):
        Checkpointer(tmp_path / "file", engine)
    with pytest.raises(CheckpointError, match="only paths of a file system"):
        Checkpointer("gs://bucket/run", engine)


@pytest.mark.parametrize("name", ["model.safetensors", "5/default/_METADATA", "5/state/_METADATA"])
def test_a_directory_that_holds_something_else_is_refused(tmp_path, engine, name):
    path = tmp_path / "dir" / name
    path.parent.mkdir(parents=True)
    path.write_text("")
    for given in (engine, None):
        with pytest.raises(CheckpointError, match=rf"holds something else, \['{name.split('/')[0]}'\]"):
            Checkpointer(tmp_path / "dir", given)


def test_steps_that_are_there_or_passed_are_not_overwritten(copy, engine):
    state, _ = Checkpointer(copy).restore(engine)
    with Checkpointer(copy, engine) as checkpointer:
        words = (
            r"saving step 2 .*there is a checkpoint of this step.*ask whether checkpointer.latest_step\(\)"
        )
        with pytest.raises(CheckpointError, match=words):
            checkpointer.save(2, state)
        with pytest.raises(CheckpointError, match=r"saving step 0 .*holds later steps, \[1, 2\]"):
            checkpointer.save(0, state)
        assert checkpointer.save(3, state)


def test_a_state_that_was_donated_is_refused_and_the_next_is_saved(tmp_path, engine, monkeypatch):
    state = engine.init(make_params())
    after, _ = train(engine, state, make_batches(1))
    with Checkpointer(tmp_path, engine) as checkpointer:
        with pytest.raises(ValueError, match="this state was donated to a later step and is gone"):
            checkpointer.save(1, state)
        with pytest.raises(ValueError, match="saving step -1"):
            checkpointer.save(-1, after)
        with monkeypatch.context() as patch:
            patch.setattr("zero2jax.checkpoints.checkpointer.host_blocks", lambda *args, **settings: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpointer.save(1, after)
        assert list(tmp_path.iterdir()) == []
        assert checkpointer.save(np.int64(1), after)
    assert Checkpoint(tmp_path / "1").step == 1


def test_what_an_interrupted_save_or_deletion_left_is_cleared_away_by_the_next_program(copy, engine):
    for name in ("3.orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp-old", "4/state"):
        (copy / name).mkdir(parents=True)
    (copy / "4" / "state" / "failed").touch()
    assert Checkpointer(copy).all_steps() == [1, 2]
    with Checkpointer(copy, engine) as checkpointer:
        checkpointer.save(4, Checkpointer(copy).restore(engine)[0])
    assert sorted(p.name for p in copy.iterdir()) == ["1", "2", "4"]


def test_interval_retention_and_force(tmp_path, engine):
    state = engine.init(make_params())
    with Checkpointer(tmp_path, engine, max_to_keep=2, save_interval_steps=3) as checkpointer:
        assert [checkpointer.save(step, state) for step in range(8)] == [True, False, False] * 2 + [
            True,
            False,
        ]
        assert checkpointer.save(7, state, force=True)
        checkpointer.wait()
        assert checkpointer.all_steps() == [6, 7]
        assert checkpointer.latest_step() == 7
    for settings in ({"max_to_keep": 0}, {"save_interval_steps": 0}):
        with pytest.raises(ValueError, match="must be a number of at least 1"):
            Checkpointer(tmp_path, engine, **settings)


def test_force_at_the_step_that_was_saved_or_restored_last_saves_nothing(tmp_path, engine):
    state = engine.init(make_params())
    with Checkpointer(tmp_path, engine, save_interval_steps=5) as checkpointer:
        assert checkpointer.save(5, state)
        assert not checkpointer.save(5, state, force=True)
        assert checkpointer.all_steps() == [5]
    for into, there in ((None, True), (state, False)):
        with Checkpointer(tmp_path, engine) as checkpointer:
            with pytest.raises(CheckpointError, match="there is a checkpoint of this step"):
                checkpointer.save(5, state, force=True)  # of a run that it knows nothing of
            restored, _ = checkpointer.restore(into=into, select=into and "params")
            if there:
                assert not checkpointer.save(5, restored, force=True)
            else:  # another state than the checkpoint's
                with pytest.raises(CheckpointError, match="there is a checkpoint of this step"):
                    checkpointer.save(5, restored, force=True)


def test_nothing_to_restore_and_nobody_to_restore_for(tmp_path, engine):
    with pytest.raises(CheckpointError, match=r"looking for a checkpoint in .*the directory does not exist"):
        Checkpointer(tmp_path / "none").restore(engine)
    with pytest.raises(CheckpointError, match="no engine was given"):
        Checkpointer(tmp_path).restore()
    with pytest.raises(CheckpointError, match="built without an engine, to read"):
        Checkpointer(tmp_path).save(0, engine.init(make_params()))
    assert Checkpointer(tmp_path).latest_step() is None
    with pytest.raises(ValueError, match="has not seen the parameters"):
        Checkpointer(tmp_path).restore(make_engine(1))


def test_concurrent_saves_come_one_after_the_other(tmp_path, engine):
    state = engine.init(make_params())
    errors = []
    with Checkpointer(tmp_path, engine, max_to_keep=None) as checkpointer:

        def save(steps):
            for step in steps:
                try:
                    checkpointer.save(step, state)
                except CheckpointError as error:
                    errors.append(error)

        threads = [threading.Thread(target=save, args=(range(i, 20, 4),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = list_steps(tmp_path)
    assert len(steps) + len(errors) == 20
    assert steps[-1] == 19
    assert all("later steps" in str(error) for error in errors)
    for step in steps:
        Checkpoint(tmp_path / str(step)).verify()


# ---- killed while saving


def test_killed_at_thirty_random_moments_of_saving_the_last_complete_checkpoint_loads(tmp_path):
    directory = tmp_path / "run"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(PROGRAMS / "save_until_killed.py"), str(directory)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    shapes = {f"w{i:02}": jax.ShapeDtypeStruct((64, 33), np.float32) for i in range(40)}
    reader = make_engine(1, loss_fn=lambda p, b: p["w00"].sum(), tx=optax.sgd(0.1))
    reader.abstract_state(shapes)
    moments = random.Random(0)
    unfinished, latest = 0, 0

    def line():
        text = server.stdout.readline().split()
        assert text, "the child ended by itself"
        return text

    try:
        for _ in range(30):
            print("go", file=server.stdin, flush=True)
            kind, child = line()
            assert kind == "child"
            started = int(line()[1])
            threading.Event().wait(moments.uniform(0, 0.2))
            os.kill(int(child), signal.SIGKILL)
            while (text := line())[0] != "gone":
                started = int(text[1])
            unfinished += any("tmp" in p.name for p in directory.iterdir())
            # The checkpoint before the one whose saving was begun is complete, since saves wait for each other.
            state, extra = Checkpointer(directory).restore(reader)
            assert max(latest, started - 1) <= extra["step"] <= started + 1
            latest = extra["step"]
            for x in jax.tree.leaves(state.params):
                assert (np.asarray(x) == latest).all()
    finally:
        server.kill()
        server.communicate()
    assert unfinished > 3  # most were killed in the middle of writing


def test_a_save_that_fails_leaves_the_checkpoint_of_another_program_alone(tmp_path, engine, monkeypatch):
    state = engine.init(make_params())
    save = ocp.CheckpointManager.save

    def overtaken(self, step, *args, **kwargs):
        monkeypatch.setattr(ocp.CheckpointManager, "save", save)
        with Checkpointer(tmp_path, engine) as other:
            other.save(step, state)
        raise OSError(errno.EEXIST, "File exists")

    with Checkpointer(tmp_path, engine) as checkpointer:
        monkeypatch.setattr(ocp.CheckpointManager, "save", overtaken)
        with pytest.raises(CheckpointError, match="saving step 5"):
            checkpointer.save(5, state)
    assert Checkpointer(tmp_path).all_steps() == [5]
    Checkpointer(tmp_path).restore(engine)
