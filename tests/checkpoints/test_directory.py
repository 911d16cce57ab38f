"""A directory from which another program deletes while it is read: what vanished counts as deleted."""

import os
import shutil
from pathlib import Path

import pytest
from helpers import make_engine, make_params

from zero2jax import Checkpointer, CheckpointError
from zero2jax.checkpoints import directory
from zero2jax.checkpoints.format import find_checkpoint, list_steps


def delete_after_each_listing(monkeypatch, folder, choose):
    """From now on one of the steps that a listing of the folder names is deleted before the lister looks into it."""
    listdir = os.listdir

    def listed(path="."):
        names = listdir(path)
        steps = [int(name) for name in names if name.isdecimal()]
        if Path(path) == folder and steps:
            directory.delete(folder, str(choose(steps)))
        return names

    monkeypatch.setattr(os, "listdir", listed)


@pytest.fixture(scope="module")
def engine():
    return make_engine(1)


@pytest.fixture
def state(engine):
    return engine.init(make_params())


def test_a_folder_that_vanishes_while_the_directory_is_read_counts_as_deleted(
    tmp_path, monkeypatch, engine, state
):
    with Checkpointer(tmp_path, engine, max_to_keep=None) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state)
        checkpointer.wait()
        shutil.rmtree(tmp_path / "4")
        delete_after_each_listing(monkeypatch, tmp_path, min)
        Checkpointer(tmp_path)
        assert list_steps(tmp_path) == [2, 3]
        # Orbax still knows step 4, reads the directory again, and finds 3 gone, too.
        assert checkpointer.save(4, state)
        monkeypatch.undo()
    assert list_steps(tmp_path) == [4]


def test_a_checkpoint_that_is_deleted_while_it_is_restored_is_not_called_damaged(
    tmp_path, monkeypatch, engine, state
):
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)

    def found_then_deleted(*args):
        folder = find_checkpoint(*args)
        directory.delete(tmp_path, folder.name)
        return folder

    monkeypatch.setattr("zero2jax.checkpoints.checkpointer.find_checkpoint", found_then_deleted)
    reader = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="it was deleted while it was read; max_to_keep"):
        reader.restore(engine)
    with pytest.raises(CheckpointError, match=r"looking for a checkpoint in .*it holds nothing"):
        reader.restore(engine)


def test_steps_of_a_path_that_is_no_directory():
    assert list_steps(Path("/nonexistent")) == []
    assert list_steps(Path("/dev/null")) == []
