"""One save at a time, alike in all processes: begun by all or by none, complete in all or cleared away.

`Saver` owns Orbax's manager of a directory: made for the first save, replaced after a failed one. Which checkpoints
stay is decided here, after a save has succeeded in every process. Collectives: `save` and `wait`, which all processes
call at the same point of the program. Importing this module imports Orbax.

Only the first process deletes. The others may read the directory meanwhile, so a folder that vanishes while it is read
counts as deleted. Nobody begins the next save before the first process has finished deleting.
"""

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
import orbax.checkpoint as ocp

from zero2jax.checkpoints import directory as checkpoint_directory
from zero2jax.checkpoints.format import CheckpointError, list_steps
from zero2jax.checkpoints.orbax_handler import SaveState, StateHandler, composite, make_manager
from zero2jax.processes.agreement import all_agree

_WAIT_AFTER_ERROR_S = 60  # for the threads of all processes to commit a save in progress
_MAX_READS = 10  # of a directory from which somebody deletes at this moment
_OTHER_PROCESS = "another process could not write and says why, or does not see this directory"


class Saver:
    """Saves to one directory; see `Checkpointer` for what is said of saves there, errors included.

    Args:
      directory: exists and is writable.
      max_to_keep: how many checkpoints stay; None keeps all.
      timeout_s: how long a process waits for the others to finish a save.

    Attributes:
      closed: no more is saved.
    """

    def __init__(self, directory: Path, *, max_to_keep: int | None, timeout_s: int):
        self.closed = False
        self._directory = directory
        self._max_to_keep = max_to_keep
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._saving: int | None = None
        self._orbax: tuple[ocp.CheckpointManager, StateHandler] | None = None  # made by the first save

    def save(self, step: int, prepare: Callable[[], SaveState]) -> None:
        """Begin to save a step once the save before is over; wait for this one, too, if it is synchronous.

        Args:
          step: names the checkpoint.
          prepare: gives what to save; it refuses, before anything is written, what cannot be saved.

        Raises:
          Exception: what `prepare` raised here.
          CheckpointError: another process cannot begin; the file system refused; or the save before had failed, and
            this one is begun all the same.
        """
        with self._lock:
            earlier: CheckpointError | None = None
            try:
                self.wait()
            except CheckpointError as error:
                earlier = error
            try:
                item = prepare()
            except Exception as error:
                if earlier is not None:
                    error.add_note(f"The save before failed too: {earlier}")
                all_agree(False)  # the other processes wait for the answer of this one
                raise
            if not all_agree(True):
                raise CheckpointError(
                    f"saving step {step} to {self._directory}: another process cannot begin this save and says why. "
                    f"Nothing of it was written."
                )
            self._begin(step, item)
            if not item.asynchronous:
                self.wait()
            if earlier is not None:
                earlier.add_note(f"Step {step} was saved or is being saved all the same.")
                raise earlier

    def wait(self) -> None:
        """Wait until the save in progress is complete, then delete the oldest checkpoints."""
        with self._lock:
            step = self._saving
            if step is None:
                return
            assert self._orbax is not None
            manager, handler = self._orbax
            error: Exception | None = None
            try:
                manager.wait_until_finished()
            except Exception as from_orbax:
                error = from_orbax
            self._saving = None
            error = handler.take_error() or error
            committed = jax.process_index() != 0 or step in list_steps(self._directory)
            if not all_agree(error is None and committed):
                self._fail(step, error)
            if jax.process_index() == 0 and self._max_to_keep is not None:
                for old in list_steps(self._directory)[: -self._max_to_keep]:
                    checkpoint_directory.delete(self._directory, str(old))

    def close(self) -> None:
        """Wait for the save in progress and end the threads."""
        with self._lock:
            try:
                self.wait()
            finally:
                self.closed = True
                orbax, self._orbax = self._orbax, None
                if orbax is not None:
                    orbax[0].close()

    def close_after_error(self) -> None:
        """`close` where the other processes may be anywhere: no collective there, and no long wait for them."""
        if jax.process_count() == 1:
            self.close()
        elif self._saving is not None and self._orbax is not None:
            commits = threading.Thread(target=_wait_quietly, args=(self._orbax[0],), daemon=True)
            commits.start()
            commits.join(_WAIT_AFTER_ERROR_S)

    def _begin(self, step: int, item: SaveState) -> None:
        try:
            if self._orbax is None:
                if jax.process_index() == 0:
                    checkpoint_directory.clear_failed(self._directory)
                self._orbax = make_manager(self._directory, self._timeout_s)
            manager, _ = self._orbax
            if (
                step in manager.all_steps()
            ):  # it is not in the directory: it was deleted, by hand or by `_fail`
                _read_again(manager)
            manager.save(step, args=composite(item), force=True)
        except OSError as error:
            self._fail(step, error)
        except BaseException:
            self._delete_unfinished(step)
            raise
        self._saving = step

    def _fail(self, step: int, error: Exception | None) -> NoReturn:
        """Clear away what there is of a step and say why it could not be saved."""
        self._delete_unfinished(step)
        # Orbax's manager may raise the same error again, so the next save begins with a new one.
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            with contextlib.suppress(Exception):
                orbax[0].close()
            orbax[1].close()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = str(error or _OTHER_PROCESS)
        if full:
            reason = "the disk is full"
        elif error is not None and not isinstance(error, OSError):
            reason = repr(error)
        steps = list_steps(self._directory)
        way_out = "Free space or lower max_to_keep" if full else "Resolve that"
        raise CheckpointError(
            f"saving step {step} to {self._directory}: {reason}. The state in memory is untouched and nothing of this "
            f"step is kept; the latest complete checkpoint is {f'step {steps[-1]}' if steps else 'none'}. {way_out}, "
            f"then save again."
        ) from error

    def _delete_unfinished(self, step: int) -> None:
        if jax.process_index() == 0:
            for name in checkpoint_directory.unfinished(self._directory, step):
                checkpoint_directory.delete(self._directory, name)


def _read_again(manager: ocp.CheckpointManager) -> None:
    """Let Orbax list the directory anew; it fails if a folder vanishes between listing and reading: then again."""
    for _ in range(_MAX_READS - 1):
        with contextlib.suppress(FileNotFoundError):
            return manager.reload()
    return manager.reload()


def _wait_quietly(manager: ocp.CheckpointManager) -> None:
    with contextlib.suppress(Exception):
        manager.wait_until_finished()
