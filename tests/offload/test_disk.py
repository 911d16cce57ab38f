"""Masters and optimizer state in files: the same numbers, and nothing that can go wrong with files harms a state."""

import collections
import contextlib
import errno
import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from helpers import (
    FP32,
    assert_trees_close,
    assert_trees_equal,
    make_batch,
    make_batches,
    make_engine,
    make_params,
    train,
)

import zero2jax
from zero2jax.offload import disk_files
from zero2jax.offload.disk_arrays import DiskArray
from zero2jax.offload.disk_files import Folder
from zero2jax.offload.disk_space import num_chunks

NUM = 2
HOST = tuple(jax.devices()[4 : 4 + NUM])
OTHERS = {"stage": 2, "clip_norm": 0.5, "precision": FP32, "trainable": lambda path, leaf: path != "norm"}


def engine_of(path=None, tx=None, **settings):
    offload = zero2jax.OffloadSettings(host_devices=HOST, nvme_path=path, chunk_bytes=1, **settings)
    return make_engine(NUM, tx=tx or optax.adam(1e-2), offload=offload, **OTHERS)


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


def folder_of(path):
    return path / "process-0-of-1"


def files_of(state):
    return [f.path for x in jax.tree.leaves(state) if isinstance(x, DiskArray) for f in x.files.values()]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """An engine whose state is in files, and the folder."""
    path = tmp_path_factory.mktemp("disk")
    return engine_of(path), path


@pytest.fixture(scope="module")
def in_memory():
    return engine_of()


def test_no_bit_differs_from_the_state_in_host_memory(on_disk, in_memory):
    found = []
    for engine in (on_disk[0], in_memory):
        state, metrics = train(engine, engine.init(make_params()), make_batches(3))
        loss = engine.evaluate(state, make_batch(seed=9))
        found.append(as_numpy((state, metrics, engine.params(state), loss)))
    assert_trees_equal(*found)


def test_a_part_in_files_and_the_other_on_the_devices(tmp_path, in_memory):
    engine = engine_of(tmp_path, ratio=0.5)
    state, _ = train(engine, engine.init(make_params()), make_batches(2))
    assert {type(x) for x in jax.tree.leaves(state.opt_state) if x.ndim} == {DiskArray, type(state.step)}
    expected, _ = train(in_memory, in_memory.init(make_params()), make_batches(2))
    # an ulp of a moment, and what it makes of an update
    assert_trees_close(as_numpy(state), as_numpy(expected), rtol=1e-5, atol=1e-7)
    with pytest.raises(zero2jax.CheckpointError, match=r"params/embed, .*Restore a checkpoint"):
        zero2jax.reopen_state(engine, make_params())


def test_what_is_large_is_in_files_and_what_was_is_deleted(on_disk):
    engine, path = on_disk
    state, _ = train(engine, engine.init(make_params()), make_batches(2))
    kinds = {type(x) for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert kinds == {DiskArray}
    assert isinstance(state.params["norm"], jax.Array)  # frozen: on the devices
    assert isinstance(state.params["scale"], jax.Array)  # a scalar
    records = {p.name for p in folder_of(path).glob("state-*")}
    assert records == {"state-1.json", "state-2.json"}  # the last, and the one before until a step writes
    old = state
    state, _ = engine.step(state, make_batch())
    with pytest.raises(ValueError, match=r"gone\. This state was given to engine.step"):
        engine.step(old, make_batch())
    state, _ = engine.step(state, make_batch())
    now = {p.name for p in folder_of(path).iterdir()} - {"lock", "state-3.json", "state-4.json"}
    kept = {f["name"] for n in (3, 4) for x in record(path, n)["leaves"] for f in x.get("files", ())}
    assert now == kept
    assert {p.name for p in files_of(state)} <= kept
    report = engine.memory(state, make_batch())
    assert (
        report["optimizer state, on the disk"].measured_bytes > report["master, on the disk"].measured_bytes
    )
    assert report["optimizer state"].measured_bytes == 0
    away = engine.offload_state(state)
    assert away.params["embed"] is state.params["embed"]


def record(path, step):
    return json.loads((folder_of(path) / f"state-{step}.json").read_text().splitlines()[0])


def test_checkpoints_go_between_files_memory_and_devices(on_disk, in_memory, tmp_path):
    engine = on_disk[0]
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    before = as_numpy(state)
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, state)  # the step goes on while it is written
        after, _ = train(engine, state, make_batches(3))
    after = as_numpy(after)
    plain = make_engine(NUM, tx=optax.adam(1e-2), **OTHERS)
    for other in (in_memory, plain, engine):
        other.abstract_state(make_params())
        restored, _ = zero2jax.Checkpointer(tmp_path).restore(other)
        assert_trees_equal(as_numpy(restored), before)
    assert files_of(restored)
    again, _ = train(engine, restored, make_batches(3))
    assert_trees_equal(as_numpy(again), after)
    restored, _ = zero2jax.Checkpointer(tmp_path).restore(in_memory)
    moved, _ = train(engine, restored, make_batches(3))  # arrays of the host go to files
    assert_trees_equal(as_numpy(moved), after)
    with pytest.raises(ValueError, match=r"in the files of an engine with nvme_path.* by a checkpoint"):
        plain.step(moved, make_batch())


@pytest.mark.parametrize(("num", "buffers"), [(1, 3), (2, 8), (3, 15)])
def test_buffers_bound_the_chunks_that_are_in_memory(num, buffers, on_disk, monkeypatch):
    """Three leaves are in files, each a chunk: of a master and two moments two shards are read, and then written."""
    settings = zero2jax.OffloadSettings(buffer_count=buffers)
    assert num_chunks(settings, 100, 200) == num  # of Adam
    engine, _ = on_disk
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    for update, _ in engine.functions.step._updates.values():
        monkeypatch.setattr(update, "_num_chunks", num)
        monkeypatch.setattr(update, "_buffers", None)
    begun, ended, most = collections.Counter(), collections.Counter(), []
    own_read, own_write = Folder.read, Folder._write

    def read(self, file, into):
        begun[parameter(file.path)] += 1
        most.append(sum(ended[name] < 6 for name in begun))
        return own_read(self, file, into)

    def write(self, path, data):
        file = own_write(self, path, data)
        ended[parameter(path)] += 1
        return file

    monkeypatch.setattr(Folder, "read", read)
    monkeypatch.setattr(Folder, "_write", write)
    engine.step(state, make_batch())
    assert update._buffers.num_own == 0
    assert set(begun.values()) == set(ended.values()) == {6}
    assert max(most) <= num
    assert most[-1] == 1 or num > 1


def parameter(path):
    return path.name.removesuffix("-0").removesuffix("-1").split(".")[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: os.truncate(path, 8),
            r"embed.*: it has 8 bytes, and 80 were written.*restore a checkpoint",
        ),
        (lambda path: path.unlink(), r"embed.*No such file.*restore a checkpoint"),
        (
            lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
            r"embed.*checksum \(CRC-32\) is [0-9a-f]{8}, and that of what was written is [0-9a-f]{8}",
        ),
    ],
)
def test_a_damaged_file_is_named(change, message, on_disk):
    engine, _ = on_disk
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    change(next(p for p in files_of(state) if "params.embed" in p.name))
    with pytest.raises(zero2jax.OffloadFileError, match=message):
        engine.step(state, make_batch())
    with pytest.raises(zero2jax.OffloadFileError, match=message):
        zero2jax.reopen_state(engine, make_params())


@contextlib.contextmanager
def small_disk(path):
    """A disk of 512 KiB, where one may be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    try:
        mounted = (
            os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_leaves_the_last_step_as_it_was(tmp_path, monkeypatch, in_memory):
    path = tmp_path / "small"
    with small_disk(path) as mounted:
        engine = engine_of(path)
        monkeypatch.setattr("zero2jax.offload.disk_offloaded.check_disks", lambda *args: None)
        state, _ = train(engine, engine.init(make_params()), make_batches(1))
        before = as_numpy(state)
        own, written = disk_files.write_file, []

        def write_file(path, data):
            written.append(path)
            if len(written) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            own(path, data)

        if mounted:
            free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
            (path / "others").write_bytes(bytes(free - 8192))
        else:
            monkeypatch.setattr(disk_files, "write_file", write_file)
        message = r"the disk is full: .* are wanted, .* free.*state of step 1 is intact in .*reopen_state"
        with pytest.raises(zero2jax.OffloadFileError, match=message):
            engine.step(state, make_batch())
        if mounted:
            (path / "others").unlink()
        monkeypatch.setattr(disk_files, "write_file", own)
        again = zero2jax.reopen_state(engine, make_params())
        assert_trees_equal(as_numpy(again), before)
        found, _ = train(engine, again, make_batches(2))
        restarted, _ = train(in_memory, in_memory.init(make_params()), [*make_batches(1), *make_batches(2)])
        assert_trees_equal(as_numpy(found), as_numpy(restarted))


def test_a_disk_without_room_is_refused_before_anything_is_placed(on_disk, monkeypatch):
    engine, path = on_disk
    with monkeypatch.context() as patch:
        patch.setattr(
            "shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("U", (), {"free": 0})()
        )
        with pytest.raises(
            ValueError, match=rf"disk of host here: .* take 1.00 MiB there, .* 0 B are free at {path}"
        ):
            engine.init(make_params())


CRASHES = """
import os, sys, signal
sys.path[:0] = [{tests!r}, {tests!r} + "/.."]
import jax
jax.config.update("jax_num_cpu_devices", 8)
import test_disk as t
from pathlib import Path
engine = t.engine_of(Path({path!r}))
state, _ = t.train(engine, engine.init(t.make_params()), t.make_batches(2))
own = t.disk_files.write_file
def write_file(path, data):
    own(path, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
t.disk_files.write_file = write_file
engine.step(state, t.make_batch())
"""


def test_a_run_that_was_killed_is_reopened_at_its_last_step(in_memory, tmp_path):
    code = CRASHES.format(tests=os.path.dirname(__file__), path=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == -9, done.stderr[-2000:]
    engine = engine_of(tmp_path)
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_params()) | {
        "norm": make_params()["norm"]
    }
    path = next(folder_of(tmp_path).glob("*params.embed-0"))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(zero2jax.OffloadFileError, match=r"embed-0: it has 79 bytes"):
        zero2jax.reopen_state(engine, frozen)
    path.write_bytes(data)  # what was refused is still there
    state = zero2jax.reopen_state(engine, frozen)
    expected, _ = train(in_memory, in_memory.init(make_params()), make_batches(2))
    assert_trees_equal(as_numpy(state), as_numpy(expected))
    state, _ = engine.step(state, make_batch())
    expected, _ = in_memory.step(expected, make_batch())
    assert_trees_equal(as_numpy(state), as_numpy(expected))
    # another engine, and no files of a step
    with pytest.raises(
        zero2jax.OffloadFileError, match=r"process \d+ of .* uses it and is alive.* nvme_path of its own"
    ):
        engine_of(tmp_path).init(make_params())
    del engine, state
    other = engine_of(tmp_path, tx=optax.sgd(1e-2))
    with pytest.raises(
        zero2jax.OffloadFileError, match=r"of another engine: .* leaves.* Build the engine as it was"
    ):
        zero2jax.reopen_state(other, make_params())
    (folder_of(tmp_path) / "state-3.json").write_text("{}\n00000000\n")
    with pytest.raises(zero2jax.OffloadFileError, match=r"state-3.json: its checksum"):
        zero2jax.reopen_state(other, make_params())
    other.init(make_params())  # deletes what was left
    assert not list(folder_of(tmp_path).glob("state-*"))
    with pytest.raises(zero2jax.OffloadFileError, match="has no complete step"):
        zero2jax.reopen_state(other, make_params())


def test_processes_go_back_to_the_step_that_all_have(on_disk):
    """One process may have recorded a step when another ends."""
    engine, _ = on_disk
    train(engine, engine.init(make_params()), make_batches(2))
    behind = lambda row: (np.stack([row, [row[1], row[1] - 1]]), ("a", "b"))
    values = engine.functions.reopened(behind)
    assert int(values[0]) == 1
    train(engine, zero2jax.reopen_state(engine, make_params()), make_batches(1))
    far = lambda row: (np.stack([row, [7, 6]]), ("a", "b"))
    with pytest.raises(zero2jax.OffloadFileError, match=r"process 1 \(host b\) has no complete step 2"):
        engine.functions.reopened(far)


def test_settings_that_are_none_are_refused(in_memory):
    for name, value in (("buffer_count", 0), ("nvme_path", "")):
        with pytest.raises(ValueError, match=f"reading the offload settings: {name} is"):
            zero2jax.OffloadSettings(**{name: value})
    for other in ({"nvme_path": "/x"}, {"delay_after": 1}, {"measure": True}):
        with pytest.raises(ValueError, match="those are of an update on the host"):
            zero2jax.OffloadSettings(update_on="device", **other)
    with pytest.raises(ValueError, match="this engine keeps no files"):
        zero2jax.reopen_state(in_memory, make_params())
