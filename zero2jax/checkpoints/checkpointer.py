"""Checkpoints that fit any number of devices, any stage and any mesh, and survive a crash.

`Checkpointer` saves the logical state: arrays of true shape by name (see `checkpoint_format` for what lies on disk).
Outside any jitted step. Orbax commits a save (temporary folder and rename, background thread, barriers between
processes) and is imported when a `Checkpointer` that can save is built; reading needs only NumPy and the engine's
shardings. Which checkpoints stay is decided here, after a save has succeeded in every process.

In several processes, every process calls `save`, `wait` and `restore` at the same point of the program, and the
directory is one that all of them see. Limits: a machine that loses power may lose the rename of the last save; a
process that dies while saving leaves the others waiting for at most `timeout_s`.
"""

import contextlib
import errno
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np

from zero2jax.base.pytrees import PyTree
from zero2jax.checkpoints import directory as checkpoint_directory
from zero2jax.checkpoints import extra as checkpoint_extra
from zero2jax.checkpoints.format import (
    EXTRA,
    Checkpoint,
    CheckpointError,
    DamagedError,
    SavedLeaf,
    find_checkpoint,
    list_steps,
)
from zero2jax.checkpoints.matching import Selection, check_containers, match_leaves
from zero2jax.checkpoints.state_leaves import (
    HostBlock,
    host_blocks,
    manifest_info,
    optimizer_containers,
    read_leaf,
    restored_state,
    state_leaves,
)
from zero2jax.engine import Engine
from zero2jax.zero.state import TrainState, check_state

_WAIT_AFTER_ERROR_S = 60  # for the threads of all processes to commit a save in progress
_OTHER_PROCESS = "another process could not write and says why, or does not see this directory"


class Checkpointer:
    """Saves and restores an engine's state in a directory, one numbered folder per step.

    Args:
      directory: where the checkpoints lie, on a file system that all processes share.
      engine: the engine whose states are saved. Without one, the checkpointer only reads. The first save
        clears away unfinished ones: let there be one that saves per directory.
      max_to_keep: older checkpoints are deleted once a newer one is complete; None keeps all.
      save_interval_steps: `save` does nothing at steps that are not a multiple of it.
      asynchronous: `save` returns once the shards are copied to the host, and a thread writes them.
      save_frozen: whether frozen parameters are saved too. Without them, `restore` takes them from `into`.
      timeout_s: how long a process waits for the others to finish a save.

    Raises:
      CheckpointError: the directory cannot be made or written to, or holds something else.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, zero2jax
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> engine = zero2jax.Engine(loss, optax.adam(1e-2), zero2jax.make_mesh(data=1))
      >>> state = engine.init({"w": jnp.ones((4, 2))})
      >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, engine) as checkpointer:
      ...     saved = checkpointer.save(0, state, extra={"epoch": 3})
      ...     checkpointer.wait()
      ...     state, extra = checkpointer.restore()
      >>> extra
      {'epoch': 3}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        engine: Engine | None = None,
        *,
        max_to_keep: int | None = 3,
        save_interval_steps: int = 1,
        asynchronous: bool = True,
        save_frozen: bool = True,
        timeout_s: int = 1200,
    ):
        if "://" in os.fspath(directory):
            raise CheckpointError(
                f"opening {os.fspath(directory)!r} for checkpoints: only paths of a file system are supported. Mount "
                f"the bucket, or save to a disk and copy."
            )
        for name, value in {"max_to_keep": max_to_keep, "save_interval_steps": save_interval_steps}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"building a Checkpointer: {name} is {value!r}; it must be a number of at least 1."
                )
        self.directory = Path(directory).absolute()
        self.engine = engine
        self.save_interval_steps = save_interval_steps
        self._max_to_keep = max_to_keep
        self._timeout_s = timeout_s
        self._asynchronous = asynchronous
        self._save_frozen = save_frozen
        self._lock = threading.RLock()
        self._saving: int | None = None
        self._closed = False
        self._manager: Any = None  # made by the first save
        self._handler: Any = None
        checkpoint_directory.check_directory(self.directory)
        if engine is not None:
            from zero2jax.checkpoints import orbax_handler  # noqa: F401, fails here and now if Orbax is not installed

            checkpoint_directory.make_writable(self.directory)

    def save(self, step: int, state: TrainState, extra: PyTree = None, *, force: bool = False) -> bool:
        """Save the state after `step` steps; whether it was a step to save at.

        The state is only read. When this returns it may be donated, also if the writing goes on in a thread; an error
        there is raised by `wait`, by `close`, or by the next `save` at a step to save at, once that has begun its own
        writing. End a program with `close` or `wait`, or use `with`: Python allows no new work in threads once the main
        program has ended, so a save that is still being written then is lost.

        Args:
          step: names the checkpoint; later than those in the directory.
          state: a state of the engine.
          extra: what else to resume from: nested dicts, lists and tuples of numbers, strings, bytes and arrays.
            In several processes, that of the first process is saved.
          force: save at a step that `save_interval_steps` would skip.

        Raises:
          CheckpointError: there is a checkpoint of this step or a later one; the file system refused, now or in the
            save before; or another process cannot save. The state and earlier checkpoints are untouched.
          ValueError: the state was donated to a step.
          TypeError: `extra` holds something else.
        """
        with self._lock:
            step = self._checked_step(step)
            if not force and step % self.save_interval_steps:
                self._check_savable(step, state)
                return False
            earlier = self._wait_for_error()
            problem: Exception | None = None
            try:
                item = self._prepared(step, state, extra)
            except Exception as error:
                problem = error
                if earlier is not None:
                    error.add_note(f"The save before failed too: {earlier}")
            self._begin_everywhere(step, problem)
            self._save(step, item)
            if not self._asynchronous:
                self.wait()
            if earlier is not None:
                earlier.add_note(f"Step {step} was saved or is being saved all the same.")
                raise earlier
            return True

    def restore(
        self,
        engine: Engine | None = None,
        step: int | None = None,
        *,
        into: TrainState | None = None,
        select: Selection | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        strict: bool = True,
    ) -> tuple[TrainState, Any]:
        """The state of a checkpoint in the engine's shards, and what was saved as `extra`.

        Each process reads only what its devices hold. Floating leaves of another dtype are converted, with a warning.

        Args:
          engine: any engine that has seen the parameters' shapes (`engine.abstract_state(shapes)` is enough); by
            default the one given at construction.
          step: which checkpoint; the latest by default.
          into: a state of the engine that gives the leaves which the checkpoint does not; do not use it afterwards.
          select: restore only some leaves, the others come from `into`: a prefix of names such as `"params"`, a
            sequence of prefixes, or a predicate `(name, leaf) -> bool`.
          rename: where leaves have another name in the checkpoint: a mapping from the engine's names, or prefixes of
            them, to those in the checkpoint, or a function.
          strict: refuse a checkpoint that lacks selected leaves or has others besides; if False, leaves that it lacks
            come from `into`, and others are passed over. Shapes must always agree.

        Raises:
          CheckpointError: there is no such checkpoint; it does not fit the engine (lists every leaf that differs); a
            file of it is damaged (names it, and the complete checkpoint before).
        """
        self.wait()
        engine = engine or self.engine
        if engine is None:
            raise CheckpointError(
                f"restoring from {self.directory}: no engine was given. Call restore(engine), whose mesh, stage and "
                f"optimizer decide where the state goes."
            )
        layout, mesh = engine.layout, engine.mesh
        leaves = state_leaves(layout, mesh)
        given: Sequence[Any] = [None] * len(leaves)
        if into is not None:
            check_state(into, layout)
            given = jax.tree.leaves(into)
        folder = find_checkpoint(self.directory, self._agreed(step))
        try:
            checkpoint = Checkpoint(folder)
            sources = match_leaves(
                checkpoint, leaves, select=select, rename=rename, strict=strict, has_into=into is not None
            )
            if strict:
                taken = [
                    leaf.name for leaf, source in zip(leaves, sources, strict=True) if source is not None
                ]
                check_containers(checkpoint, optimizer_containers(layout), taken)
            restored = [
                x if source is None else read_leaf(checkpoint, source, leaf)
                for leaf, source, x in zip(leaves, sources, given, strict=True)
            ]
            extra = checkpoint.extra()
        except DamagedError as error:
            raise DamagedError(f"{error} {self._way_back(int(folder.name))}") from error
        return restored_state(layout.abstract_state(mesh), restored), extra

    def info(self, step: int | None = None) -> dict[str, Any]:
        """What a checkpoint says of itself: `versions`, `config`, `engine` (stage, mesh, batch) and `rng_impl`."""
        return Checkpoint(find_checkpoint(self.directory, step)).info

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return list_steps(self.directory)

    def wait(self) -> None:
        """Wait until the save in progress is complete.

        Raises:
          CheckpointError: it failed.
        """
        with self._lock:
            step = self._saving
            if step is None:
                return
            error: Exception | None = None
            try:
                self._manager.wait_until_finished()
            except Exception as from_orbax:
                error = from_orbax
            self._saving = None
            error = self._handler.take_error() or error
            if not self._complete_everywhere(step, error):
                self._fail(step, error)
            self._delete_old()

    def close(self) -> None:
        """Wait for the save in progress and end the threads."""
        with self._lock:
            try:
                self.wait()
            finally:
                self._closed = True
                manager, self._manager = self._manager, None
                if manager is not None:
                    manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        # The other processes may be anywhere in their program: no collective here, and no long wait for them.
        try:
            if jax.process_count() == 1:
                self.close()
            elif self._saving is not None:
                committed = threading.Thread(target=self._wait_quietly, args=(self._manager,), daemon=True)
                committed.start()
                committed.join(_WAIT_AFTER_ERROR_S)
        except Exception as of_close:
            error.add_note(f"Closing {self.directory}: {of_close}")
        return None

    @staticmethod
    def _wait_quietly(manager: Any) -> None:
        with contextlib.suppress(Exception):
            manager.wait_until_finished()

    def _checked_step(self, step: int) -> int:
        doing = f"saving step {step} to {self.directory}"
        if self.engine is None:
            raise CheckpointError(
                f"{doing}: this Checkpointer was built without an engine, to read. Build it as "
                f"Checkpointer(directory, engine)."
            )
        if self._closed:
            raise CheckpointError(f"{doing}: this Checkpointer was closed. Build another one.")
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"{doing}: a step is a number of updates, 0 or more.")
        if number >= 2**31 and jax.process_count() > 1:
            raise ValueError(
                f"{doing}: several processes agree on steps as int32. Number steps below 2**31, as state.step does."
            )
        return number

    def _check_savable(self, step: int, state: TrainState) -> None:
        assert self.engine is not None
        check_state(state, self.engine.layout)
        if any(x.is_deleted() for x in jax.tree.leaves(state)):
            raise ValueError(
                f"saving step {step} to {self.directory}: this state was donated to a later step and is gone. Save "
                f"the state that engine.step returned, before it is given to the next."
            )

    def _wait_for_error(self) -> CheckpointError | None:
        try:
            self.wait()
        except CheckpointError as error:
            return error
        return None

    def _prepared(self, step: int, state: TrainState, extra: PyTree) -> Any:
        """What the handler is to save; whatever can be refused is refused here, before anything is written."""
        from zero2jax.checkpoints import orbax_handler

        assert self.engine is not None
        self._check_savable(step, state)
        self._check_step(step)
        encoded, arrays = None, list[np.ndarray]()
        if jax.process_index() == 0:
            checkpoint_directory.make_writable(self.directory)
            encoded, arrays = checkpoint_extra.encode(extra)
        info = {**manifest_info(self.engine), "frozen_saved": self._save_frozen, "step": step}
        leaves = self._leaves_to_save(state, arrays)
        return orbax_handler.SaveState(leaves, {**info, "extra": encoded}, self._asynchronous)

    def _begin_everywhere(self, step: int, problem: Exception | None) -> None:
        """Raise what is in the way of a save, in every process: one alone would leave the others waiting for it."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            fine = bool(np.all(multihost_utils.process_allgather(np.bool_(problem is None))))
            if problem is None and not fine:
                raise CheckpointError(
                    f"saving step {step} to {self.directory}: another process cannot begin this save and says why. "
                    f"Nothing of it was written."
                )
        if problem is not None:
            raise problem

    def _save(self, step: int, item: Any) -> None:
        from zero2jax.checkpoints import orbax_handler

        try:
            if self._manager is None:
                if jax.process_index() == 0:
                    checkpoint_directory.clear_failed(self.directory)
                self._manager, self._handler = orbax_handler.make_manager(self.directory, self._timeout_s)
            elif list(self._manager.all_steps()) != self.all_steps():  # folders were deleted by hand
                self._manager.reload()
            self._manager.save(step, args=orbax_handler.composite(item), force=True)
        except OSError as error:
            self._fail(step, error)
        except BaseException:
            self._delete_unfinished(step)
            raise
        self._saving = step

    def _leaves_to_save(
        self, state: TrainState, arrays: Sequence[np.ndarray]
    ) -> Callable[[], list[tuple[SavedLeaf, list[HostBlock]]]]:
        assert self.engine is not None
        leaves = state_leaves(self.engine.layout, self.engine.mesh)

        def take() -> list[tuple[SavedLeaf, list[HostBlock]]]:
            found = [
                host_blocks(leaf, x, copy=self._asynchronous)
                for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True)
                if self._save_frozen or leaf.trainable is not False
            ]
            for i, x in enumerate(arrays):
                leaf = SavedLeaf(f"{EXTRA}{i}", x.dtype, x.shape)
                whole = tuple((0, n) for n in x.shape)
                found.append((leaf, [HostBlock(leaf, whole, x)] if x.size else []))
            return found

        return take

    def _check_step(self, step: int) -> None:
        steps = self.all_steps()
        if step in steps:
            raise CheckpointError(
                f"saving step {step} to {self.directory}: there is a checkpoint of this step. Save a later step, or "
                f"delete that folder first."
            )
        if steps and step < steps[-1]:
            raise CheckpointError(
                f"saving step {step} to {self.directory}: it holds later steps, {[s for s in steps if s > step]}, "
                f"from a run that went further. Delete those folders, or continue in a new directory."
            )

    def _agreed(self, step: int | None) -> int | None:
        """The step that the first process chooses: file systems may show others a newer one later."""
        if step is not None or jax.process_count() == 1:
            return step
        from jax.experimental import multihost_utils

        latest = self.latest_step()
        chosen = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if latest is None else latest)))
        return None if chosen < 0 else chosen

    def _way_back(self, step: int) -> str:
        before = [s for s in self.all_steps() if s < step]
        if not before:
            return "There is no checkpoint before it."
        return f"The checkpoint before it is step {before[-1]}: restore(engine, step={before[-1]})."

    def _complete_everywhere(self, step: int, error: Exception | None) -> bool:
        """Whether the save succeeded; the same answer in every process."""
        fine = error is None and (jax.process_index() != 0 or step in self.all_steps())
        if jax.process_count() == 1:
            return fine
        from jax.experimental import multihost_utils

        return bool(np.all(multihost_utils.process_allgather(np.bool_(fine))))

    def _fail(self, step: int, error: Exception | None) -> NoReturn:
        """Clear away what there is of a step and say why it could not be saved."""
        self._delete_unfinished(step)
        # Orbax's manager may raise the same error again, so the next save begins with a new one.
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()
            self._handler.close()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = str(error or _OTHER_PROCESS)
        if full:
            reason = "the disk is full"
        elif error is not None and not isinstance(error, OSError):
            reason = repr(error)
        latest = self.latest_step()
        way_out = "Free space or lower max_to_keep" if full else "Resolve that"
        raise CheckpointError(
            f"saving step {step} to {self.directory}: {reason}. The state in memory is untouched and nothing of this "
            f"step is kept; the latest complete checkpoint is {'none' if latest is None else f'step {latest}'}. "
            f"{way_out}, then save again."
        ) from error

    def _delete_unfinished(self, step: int) -> None:
        self._delete(checkpoint_directory.unfinished(self.directory, step))

    def _delete_old(self) -> None:
        if self._max_to_keep is not None:
            self._delete([str(step) for step in self.all_steps()[: -self._max_to_keep]])

    def _delete(self, names: Sequence[str]) -> None:
        if jax.process_index() == 0:
            for name in names:
                checkpoint_directory.delete(self.directory, name)
        if names and self._manager is not None:
            self._manager.reload()


def _checked_step(step: int) -> int:
    if (number := operator.index(step)) < 0:
        raise ValueError(f"saving step {number}: a step is a number of updates, 0 or more.")
    return number
