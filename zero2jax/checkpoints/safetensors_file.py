"""Safetensors files, written and read a tensor at a time. NumPy only; no JAX, no device.

A file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, byte range), and the
tensors without gaps. Both the files of a checkpoint and what `zero2jax export` writes are such files, so every tool
that reads safetensors can look into them. Format: https://github.com/huggingface/safetensors, format section.

Why not the `safetensors` package: it writes a file from a dict of full arrays, and a checkpoint of more than the
host's memory has to be written in parts and in parallel.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUM_THREADS = 4  # writing or reading one file; each holds one tensor at a time
_ALIGNMENT = 64  # of the first tensor in the file; readers may map it
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the format's own reader

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class FileError(ValueError):
    """A safetensors file cannot be used: missing, cut short, or not such a file."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `offset` and `num_bytes` are bytes from the start of the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write` put into a file: the tensors at their offsets, a CRC-32 per piece and one of the header."""

    tensors: tuple[Tensor, ...]
    crcs: tuple[int, ...]
    num_bytes: int
    header_bytes: int
    header_crc: int


def dtype_from_name(name: str) -> np.dtype:
    """NumPy's dtype of a name such as `"float32"`, `"bfloat16"` or `"float8_e4m3fn"`.

    Raises:
      FileError: no such dtype.
    """
    try:
        return np.dtype(name)  # jax has told NumPy of bfloat16 and the 8-bit floats
    except TypeError as error:
        raise FileError(
            f"reading a dtype: {name!r} is unknown to NumPy and to this version of jax. A newer jax may know it."
        ) from error


def make_header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> tuple[bytes, tuple[Tensor, ...]]:
    """The start of a file with these tensors, in this order, and the tensors with their offsets."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise FileError(f"making a header: two tensors are called {tensor.name!r}. Names must differ.")
        name = _NAMES.get(tensor.dtype.name)
        # What the format has no name for (int4, float8_e4m3b11fnuz, complex) stands there as its bytes.
        shape = tensor.shape if name else (*tensor.shape, tensor.dtype.itemsize)
        end = position + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": name or "U8",
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    placed, position = [], len(header)
    for tensor in tensors:
        placed.append(dataclasses.replace(tensor, offset=position))
        position += tensor.num_bytes
    return header, tuple(placed)


def write(
    path: Path,
    tensors: Sequence[Tensor],
    value: Callable[[int], np.ndarray],
    *,
    pieces: Sequence[tuple[int, int]] | None = None,
    metadata: Mapping[str, str] | None = None,
    num_threads: int = NUM_THREADS,
) -> Written:
    """Write a file a piece at a time. It is flushed to the disk before this returns, and removed if anything fails.

    Args:
      path: must not exist.
      tensors: names, dtypes and shapes, in the order of the file; offsets are not looked at.
      value: `value(i)` gives the values of the i-th piece when its turn comes, from one of the threads.
      pieces: per piece, the index of its tensor and the bytes of the tensor before it; by default a piece per tensor.
      metadata: strings for the header.
      num_threads: threads that write.

    Raises:
      OSError: from the file system (disk full, no permission, the file exists).
    """
    header, placed = make_header(tensors, metadata or {})
    where = [(i, 0) for i in range(len(placed))] if pieces is None else pieces
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_at(descriptor, memoryview(header), 0)

        def write_one(i: int) -> int:
            data = raw_bytes(value(i))
            tensor, start = placed[where[i][0]], where[i][1]
            assert start + data.nbytes <= tensor.num_bytes, (tensor, start, data.nbytes)
            _write_at(descriptor, data, tensor.offset + start)
            return zlib.crc32(data)

        with concurrent.futures.ThreadPoolExecutor(num_threads, "safetensors") as pool:
            jobs = [pool.submit(write_one, i) for i in range(len(where))]
            try:
                crcs = tuple(job.result() for job in jobs)
            finally:
                for job in jobs:
                    job.cancel()
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    end = placed[-1].offset + placed[-1].num_bytes if placed else len(header)
    return Written(placed, crcs, end, len(header), zlib.crc32(header))


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, metadata) of a file.

    Raises:
      FileError: missing, cut short, or not a safetensors file (names the file).
    """
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            text = file.read(length) if len(start) == _LENGTH_BYTES and length <= _MAX_HEADER_BYTES else b""
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise FileError(f"reading {path}: {error.strerror}. Give the path of a safetensors file.") from error
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        found = {name: _tensor(name, entry, _LENGTH_BYTES + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"reading {path}: it does not start with the header of a safetensors file ({error}). The file is damaged, "
            f"or of another kind."
        ) from error
    end = max((t.offset + t.num_bytes for t in found.values()), default=_LENGTH_BYTES + length)
    if size != end:
        raise FileError(
            f"reading {path}: it has {size} bytes and its header says {end}. The file is damaged."
        )
    return found, metadata


def read_at(path: Path, offset: int, out: np.ndarray) -> None:
    """Fill `out` (uint8) from the bytes of a file at `offset`.

    Raises:
      FileError: the file is missing or ends before.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            view, filled = out.data, 0
            while filled < out.nbytes:
                count = file.readinto(view[filled:])
                if not count:
                    raise FileError(
                        f"reading {path}: it ends at byte {offset + filled}. The file is cut short."
                    )
                filled += count
    except OSError as error:
        raise FileError(f"reading {path}: {error.strerror}.") from error


def raw_bytes(x: np.ndarray) -> memoryview:
    """The bytes of an array in C order; a copy only if it is not contiguous."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _tensor(name: str, entry: Mapping[str, Any], data_start: int) -> Tensor:
    start, end = entry["data_offsets"]
    tensor = Tensor(name, dtype_from_name(_DTYPES[entry["dtype"]]), tuple(entry["shape"]), data_start + start)
    if end - start != tensor.num_bytes:
        raise ValueError(f"tensor {name!r} has {end - start} bytes, expected {tensor.num_bytes}")
    return tensor


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
