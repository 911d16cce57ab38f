"""The directory of a `Checkpointer`: what may lie in it, and how folders in it are deleted. No JAX, no Orbax."""

import errno
import os
import shutil
from pathlib import Path

from zero2jax.checkpoints.format import CHECKSUM, FAILED, ITEM, MANIFEST, CheckpointError

TEMPORARY = ".orbax-checkpoint-tmp"


def check_directory(directory: Path) -> None:
    """Raise a CheckpointError for a path that is not a directory or holds something else than checkpoints."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"opening {directory} for checkpoints: it is a file. Give a directory.")
    # Whoever saves here may delete a folder between its listing and a look into it.
    others = sorted(p.name for p in directory.iterdir() if not _is_ours(p) and os.path.lexists(p))
    if others:
        raise CheckpointError(
            f"opening {directory} for checkpoints: it holds something else, {others[:5]}. Retention deletes folders "
            f"here, so give a directory of its own."
        )


def make_writable(directory: Path) -> None:
    """Make the directory if it is not there; raise a CheckpointError if this user may not write to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as error:
        raise CheckpointError(
            f"opening {directory} for checkpoints: cannot write there ({error.strerror}). Give a directory that this "
            f"user may write to; to read only, build the Checkpointer without an engine."
        ) from error


def clear_failed(directory: Path) -> None:
    """Delete what failed saves left that could not be cleared away, as their program was killed."""
    for path in directory.iterdir():
        if (path / ITEM / FAILED).exists():
            shutil.rmtree(path, ignore_errors=True)


def unfinished(directory: Path, step: int) -> list[str]:
    """Names of what a failed save of a step left; not a complete checkpoint of it, which is another program's."""
    failed = [str(step)] if (directory / str(step) / ITEM / FAILED).exists() else []
    return [*failed, *(p.name for p in directory.glob(f"{step}{TEMPORARY}*"))]


def delete(directory: Path, name: str) -> None:
    """Delete a folder of the directory, if it is there."""
    # Renamed first: a program that is killed while deleting leaves no folder that looks complete.
    doomed = directory / f"{name}{TEMPORARY}-old"
    try:
        (directory / name).rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint of this format, perhaps a damaged one, or what an interrupted save left."""
    if TEMPORARY in path.name or path.name.startswith("."):
        return True
    ours = (path / ITEM / name for name in (MANIFEST, CHECKSUM, FAILED))
    return path.name.isdecimal() and any(file.exists() for file in ours)
