"""Checkpoints that fit any number of devices, any stage and any mesh, and survive a crash.

`Checkpointer` saves the logical state: arrays of their true shapes, by name (`format` says what lies on disk). Outside
any jitted step. Reading needs only NumPy and the engine's shardings; Orbax, which commits a save (temporary folder and
rename, background thread, barriers between processes), is imported when a `Checkpointer` that can save is built.

In several processes, every process calls `save`, `wait` and `restore` at the same point of the program, and the
directory is one that all of them see. Limits: a machine that loses power may lose the rename of the last save; a
process that dies while saving leaves the others waiting for at most `timeout_s`.
"""

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero2jax.base.checks import type_name
from zero2jax.base.pytrees import PyTree
from zero2jax.base.transformation import ConfiguredTransformation
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
from zero2jax.checkpoints.matching import (
    Selection,
    check_containers,
    match_leaves,
    warn_of_other_numbers,
)
from zero2jax.checkpoints.state_leaves import (
    HostBlock,
    StateLeaf,
    first_numbers,
    host_blocks,
    manifest_info,
    optimizer_containers,
    read_leaf,
    restored_state,
    state_leaves,
    updated_beside_views,
)
from zero2jax.engine import Engine
from zero2jax.memory.arena import in_arena
from zero2jax.processes.agreement import gather_over
from zero2jax.zero.state import TrainState
from zero2jax.zero.state_checks import check_state

if TYPE_CHECKING:  # they import Orbax
    from zero2jax.checkpoints.orbax_handler import SaveState
    from zero2jax.checkpoints.saver import Saver


class Checkpointer:
    """Saves and restores an engine's state in a directory, one numbered folder per step.

    Args:
      directory: where the checkpoints lie, on a file system that all processes share.
      engine: the engine whose states are saved. Without one, the checkpointer only reads. The first save clears
        away unfinished ones, so only one checkpointer at a time may save to a directory.
      max_to_keep: older checkpoints are deleted once a newer one is complete; None keeps all.
      save_interval_steps: `save` does nothing at steps that are not a multiple of it.
      asynchronous: `save` returns once the shards are copied to the host, and a thread writes them; what is there
        already, of an engine that offloads, is copied only as far as a step comes before the thread.
      save_frozen: whether frozen parameters are saved too. Without them, `restore` takes them from `into`.
      timeout_s: how long a process waits for the others to finish a save.

    Attributes:
      restored_from: the `Checkpoint` that `restore` read last, which knows how many bytes it read; or None.

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
        self.restored_from: Checkpoint | None = None
        self._asynchronous = asynchronous
        self._save_frozen = save_frozen
        self._saver: Saver | None = None
        self._at_hand: int | None = None  # the step that was saved or restored last
        checkpoint_directory.check_directory(self.directory)
        if engine is not None:
            from zero2jax.checkpoints import saver  # fails here and now if Orbax is not installed

            checkpoint_directory.make_writable(self.directory)
            self._saver = saver.Saver(self.directory, max_to_keep=max_to_keep, timeout_s=timeout_s)

    def save(self, step: int, state: TrainState, extra: PyTree = None, *, force: bool = False) -> bool:
        """Save the state after `step` steps; returns False at a step that `save_interval_steps` skips, else True.

        The state is only read. Once this returns it may be donated, even while a thread still writes. An error in that
        thread is raised by `wait`, by `close`, or by the next `save` that is not skipped, after its own writing has
        begun. End a program with `close` or `wait`, or use `with`: Python allows no new work in threads once the main
        program has ended, so a save that is still being written then is lost.

        Args:
          step: number of updates taken, which names the checkpoint; later than those in the directory.
          state: a state of the engine.
          extra: what else to resume from: nested dicts, lists and tuples of numbers, strings, bytes and arrays.
            In several processes, that of the first process is saved.
          force: save at a step that `save_interval_steps` would skip; at the step that this checkpointer has saved or
            fully restored last, it waits for that save and returns False: a program can end in `force=True`.

        Raises:
          CheckpointError: there is a checkpoint of this step or a later one; the file system refused, now or in the
            save before; or another process cannot save. The state and earlier checkpoints are untouched.
          ValueError: the state was donated to a step.
          TypeError: `extra` holds something else; the step is no whole number.
        """
        step, engine, saver = self._checked_step(step)
        if not force and step % self.save_interval_steps:
            _check_not_donated(step, state, engine, self.directory)
            return False
        if force and step == self._at_hand:
            _check_not_donated(step, state, engine, self.directory)
            self.wait()
            return False
        self._at_hand = None
        saver.save(step, lambda: self._prepared(step, state, engine, extra))
        self._at_hand = step
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
          ValueError: the engine offloads to hosts without room for the state.
        """
        self.wait()
        engine = engine or self.engine
        if engine is None:
            raise CheckpointError(
                f"restoring from {self.directory}: no engine was given. Call checkpointer.restore(engine): its "
                f"mesh, stage and optimizer decide where the state goes."
            )
        layout, mesh = engine.layout, engine.mesh
        leaves = state_leaves(layout, mesh)
        given: Sequence[Any] = [None] * len(leaves)
        if into is not None:
            check_state(into := engine.unpacked(into), layout)
            given = jax.tree.leaves(into)
        folder = find_checkpoint(self.directory, self._agreed(step))
        try:
            checkpoint = self.restored_from = Checkpoint(folder)
            sources = match_leaves(
                checkpoint, leaves, select=select, rename=rename, strict=strict, has_into=into is not None
            )
            taken = [leaf.name for leaf, source in zip(leaves, sources, strict=True) if source is not None]
            if strict:
                check_containers(checkpoint, optimizer_containers(layout), taken)
            if into is None:
                engine.functions.check_room(gather_over(mesh))
            restored = [
                x if source is None else engine.functions.keep(i, read_leaf(checkpoint, source, leaf))
                for i, (leaf, source, x) in enumerate(zip(leaves, sources, given, strict=True))
            ]
            extra = checkpoint.extra()
        except DamagedError as error:
            if not folder.exists():
                raise CheckpointError(
                    f"restoring {folder}: it was deleted while it was read; max_to_keep of the program that saves here "
                    f"deletes the oldest. Restore again, a later step."
                ) from error
            raise DamagedError(f"{error} {self._way_back(int(folder.name))}") from error
        self._at_hand = int(folder.name) if into is None else None
        state = restored_state(layout.abstract_state(mesh), restored)
        engine.overflow_watch.forget()
        return _with_its_numbers(str(folder), engine, state, leaves, taken), extra

    def info(self, step: int | None = None) -> dict[str, Any]:
        """What a checkpoint records beside the arrays: `versions`, `config`, `engine` (settings, mesh), `rng_impl`."""
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
        try:
            if self._saver is not None:
                self._saver.wait()
        except CheckpointError:
            self._at_hand = None
            raise

    def close(self) -> None:
        """Wait for the save in progress and end the threads.

        Raises:
          CheckpointError: it failed.
        """
        if self._saver is not None:
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._saver is not None:
            try:
                self._saver.close_after_error()
            except Exception as of_close:
                error.add_note(f"Closing {self.directory}: {of_close}")

    def _checked_step(self, step: int) -> tuple[int, Engine, "Saver"]:
        try:
            number = operator.index(step)
        except TypeError:
            raise TypeError(
                f"saving to {self.directory}: the step is a {type_name(step)}, and it is a whole number: "
                f"checkpointer.save(step, state), with int(state.step) for the step."
            ) from None
        doing = f"saving step {step} to {self.directory}"
        if self.engine is None or self._saver is None:
            raise CheckpointError(
                f"{doing}: this Checkpointer was built without an engine, to read. Build it as "
                f"Checkpointer(directory, engine)."
            )
        if self._saver.closed:
            raise CheckpointError(f"{doing}: this Checkpointer was closed. Build another one.")
        if number < 0:
            raise ValueError(f"{doing}: a step is a number of updates, 0 or more.")
        if number >= 2**31 and jax.process_count() > 1:
            raise ValueError(
                f"{doing}: several processes agree on steps as int32. Number steps below 2**31, as state.step does."
            )
        return number, self.engine, self._saver

    def _prepared(self, step: int, state: TrainState, engine: Engine, extra: PyTree) -> "SaveState":
        """What is to be saved; whatever can be refused is refused here, before anything is written."""
        from zero2jax.checkpoints.orbax_handler import SaveState

        _check_not_donated(step, state, engine, self.directory)
        state = engine.unpacked(state)
        self._check_step(step)
        encoded, arrays = None, list[np.ndarray]()
        if jax.process_index() == 0:
            checkpoint_directory.make_writable(self.directory)
            encoded, arrays = checkpoint_extra.encode(extra)
        info = manifest_info(engine.settings.plain, engine.config, engine.layout, engine.mesh)
        info |= {"frozen_saved": self._save_frozen, "step": step, "extra": encoded}
        return SaveState(self._leaves_to_save(state, engine, arrays), info, self._asynchronous)

    def _leaves_to_save(
        self, state: TrainState, engine: Engine, arrays: Sequence[np.ndarray]
    ) -> Callable[[], list[tuple[SavedLeaf, list[HostBlock]]]]:
        leaves = state_leaves(engine.layout, engine.mesh)
        values = jax.tree.leaves(state)
        copy = self._asynchronous and not updated_beside_views(engine.layout)

        def take() -> list[tuple[SavedLeaf, list[HostBlock]]]:
            taken = []
            for stored in leaves:
                value = values.pop(0)  # nobody but the caller has it then
                if self._save_frozen or stored.trainable is not False:
                    taken.append(host_blocks(stored, value, copy=copy))
            for i, x in enumerate(arrays):
                leaf = SavedLeaf(f"{EXTRA}{i}", x.dtype, x.shape)
                box = tuple((0, n) for n in x.shape)
                taken.append((leaf, [HostBlock(leaf, box, x)] if x.size else []))
            return taken

        return take

    def _check_step(self, step: int) -> None:
        steps = self.all_steps()
        if step in steps:
            raise CheckpointError(
                f"saving step {step} to {self.directory}: there is a checkpoint of this step. Save a later step, or "
                f"delete that folder first; to save the last step once, ask whether checkpointer.latest_step() is it."
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
        latest = self.latest_step()
        chosen = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if latest is None else latest)))
        return None if chosen < 0 else chosen

    def _way_back(self, step: int) -> str:
        before = [s for s in self.all_steps() if s < step]
        if not before:
            return "There is no checkpoint before it."
        return (
            f"The checkpoint before it is step {before[-1]}: checkpointer.restore(engine, step={before[-1]})."
        )


def _check_not_donated(step: int, state: TrainState, engine: Engine, directory: Path) -> None:
    if not in_arena(state):
        check_state(state, engine.layout)
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError(
            f"saving step {step} to {directory}: this state was donated to a later step and is gone. Save the state "
            f"that engine.step returned, before it is given to the next."
        )


def _with_its_numbers(
    folder: str, engine: Engine, state: TrainState, leaves: Sequence[StateLeaf], taken: Sequence[str]
) -> TrainState:
    """A restored state with the numbers of a configuration's optimizer; a warning where those of another one differ."""
    first = first_numbers(engine.tx, state, engine.layout, engine.mesh)
    own = {name: x for name, x in first.items() if name in taken}
    restored = {leaf.name: x for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True)}
    if not isinstance(engine.tx, ConfiguredTransformation):
        warn_of_other_numbers(folder, {name: restored[name] for name in own}, own)
        return state
    placed = {
        leaf.name: jax.device_put(own[leaf.name], leaf.rest.sharding) for leaf in leaves if leaf.name in own
    }
    return restored_state(state, list((restored | placed).values()))
