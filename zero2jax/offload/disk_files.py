"""Files of one process on a local disk: written once, checksummed, by a few threads. NumPy arrays; knows of no state.

A file is written under a new name, synchronised, and never changed; it lasts as long as its `DiskFile` does, or, where
the process ends first, until another one clears the folder. So nothing that is being written can harm what was, and
who has mapped a file may go on reading it when it is gone from the folder.

    DIR/process-0-of-2/lock            held by the process that uses the folder
    DIR/process-0-of-2/12-params.w-0   the 12th file, of a leaf's first shard
"""

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import mmap
import os
import shutil
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import numpy as np

from zero2jax.base.tables import readable_bytes
from zero2jax.offload.disk_buffers import aligned

_BLOCK_BYTES = 16 * 2**20  # of a file that are read or written and summed at a time
NUM_THREADS = 4


class OffloadFileError(RuntimeError):
    """A file of an offloaded state could not be written or read, or is not what was written."""


class DiskFile:
    """A file that is complete.

    Attributes:
      path: where it is.
      num_bytes: its size.
      crc32: checksum of its bytes.
    """

    def __init__(self, path: Path, num_bytes: int, crc32: int):
        self.path, self.num_bytes, self.crc32 = path, num_bytes, crc32
        self._owned = False

    def own(self) -> None:
        """From now on, delete it when nobody has this object any more, unless the process ends before."""
        if not self._owned:
            self._owned = True
            weakref.finalize(self, _delete_own, self.path, os.getpid()).atexit = False

    def check_size(self) -> None:
        """Raise an OffloadFileError if it is gone or has another size."""
        try:
            found = self.path.stat().st_size
        except OSError as error:
            raise OffloadFileError(f"reading {self.path}: {error.strerror}. {_DAMAGED}") from error
        if found != self.num_bytes:
            raise OffloadFileError(
                f"reading {self.path}: it has {found} bytes, and {self.num_bytes} were written. {_DAMAGED}"
            )

    def check_sum(self, found: int) -> None:
        """Raise an OffloadFileError if another checksum was found."""
        if found != self.crc32:
            raise OffloadFileError(
                f"reading {self.path}: its checksum (CRC-32) is {found:08x}, and that of what was written is "
                f"{self.crc32:08x}. {_DAMAGED}"
            )

    def mapped(self) -> np.ndarray:
        """Its bytes, read once for their checksum, then mapped: they stay readable when the file is deleted.

        Raises:
          OffloadFileError: they are not those that were written.
        """
        self.check_size()
        with open(self.path, "rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self.check_sum(_sum(data))
        return data


_DAMAGED = "The state in these files cannot be used: restore a checkpoint."


class Meter:
    """Bytes, and the seconds in which at least one thread was moving some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active, self._since = 0, 0.0
        self._bytes, self._busy_s = 0, 0.0

    @contextlib.contextmanager
    def moving(self, num_bytes: int) -> Iterator[None]:
        """Around the moving of so many bytes."""
        with self._lock:
            if self._num_active == 0:
                self._since = time.perf_counter()
            self._num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_active -= 1
                self._bytes += num_bytes
                if self._num_active == 0:
                    self._busy_s += time.perf_counter() - self._since

    def taken(self) -> float:
        """Bytes per second since it was asked last; NaN if nothing moved."""
        with self._lock:
            rate = self._bytes / self._busy_s if self._busy_s else float("nan")
            self._bytes, self._busy_s = 0, 0.0
        return rate


class Folder:
    """The folder of one process below `nvme_path`, locked for as long as it is used.

    Args:
      root: `nvme_path`; made if it is not there.
      process_index: of this process, which names the folder.
      num_processes: how many there are, likewise.

    Attributes:
      path: the folder.
      files: those that somebody has, by name.
      reads, writes: what the threads moved.

    Raises:
      OffloadFileError: another run that is alive uses the folder, or it cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str], process_index: int, num_processes: int):
        self.path = Path(root).absolute() / f"process-{process_index}-of-{num_processes}"
        self.files: weakref.WeakValueDictionary[str, DiskFile] = weakref.WeakValueDictionary()
        self.reads, self.writes = Meter(), Meter()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise OffloadFileError(
                f"making {self.path} for an offloaded state: {error.strerror}. Give a folder of a local disk that "
                f"this process may write: nvme_path."
            ) from error
        weakref.finalize(self, os.close, self._lock)
        if not _locked(self._lock):
            owner = os.pread(self._lock, 200, 0).decode(errors="replace")
            raise OffloadFileError(
                f"opening {self.path} for an offloaded state: {owner or 'another run'} uses it and is alive. Give "
                f"each run, and each engine of a program, an nvme_path of its own; or end that one."
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        # apart, for what writes waits for the update to be made
        self._readers, self._writers = (
            concurrent.futures.ThreadPoolExecutor(NUM_THREADS, f"zero2jax-{name}")
            for name in ("reads", "writes")
        )
        self._numbers = itertools.count(1 + max(map(_number, self.path.iterdir()), default=0))

    def clear(self, keep: Container[str] = ()) -> None:
        """Delete what an earlier run left: what nobody has, and is not named."""
        for path in self.path.iterdir():
            if path.name != "lock" and path.name not in keep and path.name not in self.files:
                path.unlink(missing_ok=True)

    def file(self, name: str, num_bytes: int, crc32: int) -> DiskFile:
        """A file that is there, as it was written."""
        found = self.files.get(name)
        if found is None:
            found = self.files[name] = DiskFile(self.path / name, num_bytes, crc32)
        return found

    def write(self, name: str, data: Callable[[], np.ndarray]) -> "concurrent.futures.Future[DiskFile]":
        """Begin to write an array's bytes to a new file.

        Args:
          name: part of the file's name.
          data: gives the array, in a thread, which waits for it.

        Returns:
          the file, once it is on the disk; or an OffloadFileError.
        """
        path = self.path / f"{next(self._numbers)}-{name}"
        return self._writers.submit(self._write, path, data)

    def read(self, file: DiskFile, into: np.ndarray | None = None) -> "concurrent.futures.Future[np.ndarray]":
        """Begin to read a file: its bytes, or an OffloadFileError where they are not those that were written.

        Args:
          file: the file.
          into: where to; None makes new memory.
        """
        return self._readers.submit(self._read, file, into)

    def check(self, files: Iterable[DiskFile]) -> None:
        """Read files for their checksums; raise an OffloadFileError for one that is not what was written."""
        for _ in self._readers.map(DiskFile.mapped, files):
            pass

    def _write(self, path: Path, data: Callable[[], np.ndarray]) -> DiskFile:
        array = np.ascontiguousarray(data())
        view = array.reshape(-1).view(np.uint8)
        with self.writes.moving(view.nbytes):
            try:
                write_file(path, view)
            except OSError as error:
                _delete(path)
                raise OffloadFileError(_cannot_write(path, view.nbytes, error)) from error
        file = self.file(path.name, view.nbytes, _sum(view))
        file.own()
        return file

    def _read(self, file: DiskFile, into: np.ndarray | None) -> np.ndarray:
        file.check_size()
        buffer = aligned(file.num_bytes) if into is None else into
        with self.reads.moving(file.num_bytes):
            try:
                with open(file.path, "rb", buffering=0) as source:
                    for start in range(0, file.num_bytes, _BLOCK_BYTES):
                        _read_exactly(source, buffer.data[start : start + _BLOCK_BYTES])
            except OSError as error:
                raise OffloadFileError(f"reading {file.path}: {error}. {_DAMAGED}") from error
        file.check_sum(_sum(buffer))
        return buffer


def _locked(lock: int) -> bool:
    """Take a lock, if need be from an engine of this process that nobody has any more."""
    import fcntl  # not on Windows, which can do all else

    for attempt in range(2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if attempt == 0:
                gc.collect()
        else:
            return True
    return False


def write_file(path: Path, data: np.ndarray) -> None:
    """Write bytes to a new file, and wait until the disk has them."""
    with open(path, "xb", buffering=0) as file:
        view = data.data
        while view:
            view = view[file.write(view[:_BLOCK_BYTES]) :]
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a small file in the place of what was there: all of it, or nothing."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        write_file(new, np.frombuffer(text.encode(), np.uint8))
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        _delete(new)
        raise OffloadFileError(_cannot_write(path, len(text), error)) from error


def _cannot_write(path: Path, num_bytes: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"writing {path}: {error.strerror or error}."
    free = readable_bytes(shutil.disk_usage(path.parent).free)
    return (
        f"writing {path}: the disk is full: {readable_bytes(num_bytes)} are wanted, {free} are free. Free space, or "
        f"give another nvme_path."
    )


def _read_exactly(source: object, view: memoryview) -> None:
    while view:
        count = source.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"it ends {len(view)} bytes too early")
        view = view[count:]


def _sum(data: np.ndarray) -> int:
    total = 0
    for start in range(0, data.nbytes, _BLOCK_BYTES):
        total = zlib.crc32(data.data[start : start + _BLOCK_BYTES], total)
    return total


def _delete_own(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        _delete(path)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _number(path: Path) -> int:
    head = path.name.partition("-")[0]
    return int(head) if head.isdecimal() else 0
