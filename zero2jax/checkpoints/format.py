"""What lies on disk: a manifest and safetensors files, and a reader that checks every byte it uses. NumPy only.

    DIR/40/state/manifest.json              leaves by name: true shape, dtype, and the blocks they are divided into
    DIR/40/state/manifest.json.sha256       its checksum, as `sha256sum -c` reads it
    DIR/40/state/00000-of-00002.safetensors one file per process that saved, holding blocks

The saved tree is the logical one: a flat mapping from leaf names (`params/blocks/w`, `opt_state/0/mu/blocks/w`,
`step`, `rng`) to arrays of their true shapes. A block is a box of one leaf, at most `BLOCK_BYTES` large. The blocks
follow the shards that were saved; nothing else in a checkpoint knows of devices, stages or padding. A reader takes the
blocks that meet the box it wants, so any number of devices fits.

Every block has a CRC-32 in the manifest, every file its size and a CRC-32 of its header, and the manifest its
SHA-256: a missing, shortened or altered file is refused by name and never read as zeros.

Beside `format`, `version`, `step`, `leaves`, `files` and `extra`, a manifest records what no reader needs to find the
arrays (`Checkpoint.info`):

    versions      of zero2jax, jax, numpy, optax and orbax-checkpoint
    config        the configuration file that the engine was built from, or null
    engine        `StepSettings.plain`, and `mesh`: axis sizes by name
    rng_impl      implementation of random keys; another one is refused
    frozen_saved  whether frozen parameters were saved
    containers    class names of the named tuples in the optimizer's state, by path; others are refused
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero2jax.base.pytrees import PyTree
from zero2jax.checkpoints import extra as checkpoint_extra
from zero2jax.checkpoints import safetensors_file

FORMAT = "zero2jax checkpoint"
VERSION = 1
ITEM = "state"  # folder of a step's folder
MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.sha256"
FAILED = "failed"  # lies where the manifest would, if a process could not write
BLOCK_BYTES = 32 * 2**20
EXTRA = "extra/"  # names of the arrays in `extra`

Box = tuple[tuple[int, int], ...]
"""(start, stop) per dim."""


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or used; the message says which file, leaf or setting is in the way."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short, altered, or of a format this version does not read."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of a leaf in a file: bytes from `offset`, C order, with their CRC-32."""

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc: int

    @property
    def box(self) -> Box:
        """Where in the leaf it lies."""
        return tuple((a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as saved.

    Attributes:
      name: `params/blocks/w`.
      dtype: NumPy dtype; uint32 for typed random keys.
      shape: true shape; typed random keys have the dims of their key data last.
      blocks: disjoint boxes that cover it.
      trainable: for a parameter, whether it was trained.
      key_impl: for typed random keys, the name of their implementation.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    trainable: bool | None = None
    key_impl: str | None = None

    def __str__(self) -> str:
        kind = f"keys of {self.key_impl} " if self.key_impl else ""
        return f"{self.name!r} {kind}{self.dtype}{list(self.shape)}"


def as_json(leaf: SavedLeaf) -> dict[str, Any]:
    """A leaf as it stands in the manifest."""
    entry: dict[str, Any] = {"dtype": leaf.dtype.name, "shape": list(leaf.shape)}
    if leaf.trainable is not None:
        entry["trainable"] = leaf.trainable
    if leaf.key_impl is not None:
        entry["key_impl"] = leaf.key_impl
    entry["blocks"] = [[b.file, b.offset, list(b.start), list(b.shape), b.crc] for b in leaf.blocks]
    return entry


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest and its checksum into `folder`, flushed to the disk."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **content}, separators=(",", ":")) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / MANIFEST, text)
    write_text(folder / CHECKSUM, f"{digest}  {MANIFEST}\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file and flush it to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class Checkpoint:
    """One complete checkpoint on disk, for reading; opening it reads and checks the manifest.

    Args:
      folder: the step's folder, `DIR/40`.

    Attributes:
      step: number of steps taken when it was saved.
      leaves: `SavedLeaf` by name, without the arrays of `extra`.
      info: what the manifest records beside the arrays; the keys are listed at the top of this module.
      bytes_read: bytes of blocks read so far.

    Raises:
      CheckpointError: a file is missing, altered or of another format or version (names it).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._state = folder / ITEM
        content = self._read_manifest()
        try:
            self._files = {
                name: (size, header, crc) for name, (size, header, crc) in content["files"].items()
            }
            leaves = {name: self._leaf(name, entry) for name, entry in content["leaves"].items()}
            self.step = int(content["step"])
            self._extra = content["extra"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(
                f"{self._reading(MANIFEST)}: it lacks what version {VERSION} has ({error!r})."
            ) from error
        self.leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(EXTRA)}
        self._extra_leaves = {name: leaf for name, leaf in leaves.items() if name.startswith(EXTRA)}
        self.info = {
            key: content.get(key)
            for key in ("versions", "config", "engine", "rng_impl", "frozen_saved", "containers")
        }
        self.bytes_read = 0
        self._checked: set[str] = set()
        self._check_sizes()

    def extra(self) -> PyTree:
        """What was saved beside the state."""
        arrays = [self.array(self._extra_leaves[f"{EXTRA}{i}"]) for i in range(len(self._extra_leaves))]
        return checkpoint_extra.decode(self._extra, arrays)

    def array(self, leaf: SavedLeaf) -> np.ndarray:
        """A full leaf as a NumPy array of its true shape."""
        out = np.empty(leaf.shape, leaf.dtype)
        self.fill(leaf, [(tuple((0, n) for n in leaf.shape), out)])
        return out

    def fill(self, leaf: SavedLeaf, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Fill arrays from boxes of a leaf, converting to their dtypes. Each block that is needed is read once.

        Args:
          leaf: one of `leaves`.
          targets: (box, array of the box's shape) pairs; boxes may overlap. Host memory beyond these arrays is at
            most a block per thread.

        Raises:
          CheckpointError: a byte that was read is not the one that was written (names the file).
        """
        jobs = [(b, [(box, out) for box, out in targets if _meet(b.box, box)]) for b in leaf.blocks]
        jobs = [(block, hit) for block, hit in jobs if hit]

        def fill_from(job: tuple[Block, list[tuple[Box, np.ndarray]]]) -> None:
            block, hit = job
            values = self.read_block(leaf, block)
            for box, out in hit:
                meet = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block.box, box, strict=True)]
                from_block = [slice(a - o, b - o) for (a, b), o in zip(meet, block.start, strict=True)]
                to_out = [slice(a - o, b - o) for (a, b), (o, _) in zip(meet, box, strict=True)]
                part_of(out, to_out)[...] = part_of(values, from_block)

        if len(jobs) < 2:
            for job in jobs:
                fill_from(job)
        else:
            _run(fill_from, jobs)

    def read_block(self, leaf: SavedLeaf, block: Block) -> np.ndarray:
        """The values of one block, checked against its CRC-32; a fresh array."""
        self._check_header(block.file)
        data = self._bytes(block.file, block.offset, math.prod(block.shape) * leaf.dtype.itemsize)
        if zlib.crc32(data.data) != block.crc:
            raise DamagedError(
                f"{self._reading(block.file)}: leaf {leaf.name!r} does not have the checksum that it was saved with; "
                f"bytes {block.offset} to {block.offset + data.nbytes} of the file were altered."
            )
        self.bytes_read += data.nbytes
        return data.view(leaf.dtype).reshape(block.shape)

    def verify(self) -> None:
        """Read every byte of the checkpoint and check it.

        Raises:
          CheckpointError: at the first file that is not as it was written.
        """
        for file in self._files:
            self._check_header(file)
        for leaf in [*self.leaves.values(), *self._extra_leaves.values()]:
            _run(functools.partial(self.read_block, leaf), leaf.blocks)

    def _bytes(self, file: str, offset: int, num_bytes: int) -> np.ndarray:
        data = np.empty(num_bytes, np.uint8)
        try:
            safetensors_file.read_at(self._state / file, offset, data)
        except safetensors_file.FileError as error:
            raise DamagedError(f"{self._reading(file)}: {error}") from error
        return data

    def _reading(self, file: str) -> str:
        return f"reading checkpoint {self.folder}, file {ITEM}/{file}"

    def _read_manifest(self) -> dict[str, Any]:
        texts = []
        for file in (MANIFEST, CHECKSUM):
            try:
                texts.append((self._state / file).read_bytes())
            except OSError as error:
                raise DamagedError(
                    f"{self._reading(file)}: {error.strerror}. It belongs to every checkpoint of zero2jax; this one is "
                    f"damaged, or of another program."
                ) from error
        text, checksum = texts
        if checksum != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
            raise DamagedError(
                f"{self._reading(MANIFEST)}: its SHA-256 is not the one in {CHECKSUM}; one of the two was altered."
            )
        content: dict[str, Any] = json.loads(text)
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise DamagedError(
                f"{self._reading(MANIFEST)}: it says format {content.get('format')!r}, version "
                f"{content.get('version')!r}; this zero2jax reads {FORMAT!r}, version {VERSION}. Read it with the "
                f"version of zero2jax that wrote it: {content.get('versions')}."
            )
        return content

    def _leaf(self, name: str, entry: Mapping[str, Any]) -> SavedLeaf:
        blocks = tuple(
            Block(f, o, tuple(start), tuple(shape), crc) for f, o, start, shape, crc in entry["blocks"]
        )
        dtype = safetensors_file.dtype_from_name(entry["dtype"])
        shape = tuple(entry["shape"])
        return SavedLeaf(name, dtype, shape, blocks, entry.get("trainable"), entry.get("key_impl"))

    def _check_sizes(self) -> None:
        for file, (size, _, _) in self._files.items():
            try:
                actual = (self._state / file).stat().st_size
            except FileNotFoundError:
                raise DamagedError(
                    f"{self._reading(file)}: it is missing, and {size} bytes were written."
                ) from None
            if actual != size:
                raise DamagedError(
                    f"{self._reading(file)}: it has {actual} bytes, and {size} bytes were written."
                )

    def _check_header(self, file: str) -> None:
        if file in self._checked:
            return
        _, num_bytes, crc = self._files[file]
        data = self._bytes(file, 0, num_bytes)
        if zlib.crc32(data.data) != crc:
            raise DamagedError(f"{self._reading(file)}: its first {num_bytes} bytes were altered.")
        self._checked.add(file)


def part_of(x: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
    """A view of a part of an array, also of one without dims."""
    index: Any = (..., *slices)
    return x[index]


def cut_into_blocks(
    start: Sequence[int], shape: Sequence[int], itemsize: int, limit: int = BLOCK_BYTES
) -> list[Box]:
    """Boxes of at most `limit` bytes (or one element) that cover a box, in C order; none for an empty box.

    Divided along the first dims, so that a block is contiguous in the box.

    Example:
      >>> cut_into_blocks((4, 0), (3, 2), itemsize=4, limit=16)
      [((4, 6), (0, 2)), ((6, 7), (0, 2))]
    """
    if 0 in shape:
        return []
    boxes: list[Box] = [()]
    size = math.prod(shape) * itemsize
    for a, n in zip(start, shape, strict=True):
        size //= n  # bytes of one index of this dim
        per_block = n if size * n <= limit else max(1, limit // size)
        pieces = [(a + i, a + min(i + per_block, n)) for i in range(0, n, per_block)]
        boxes = [(*box, piece) for box in boxes for piece in pieces]
    return boxes


def list_steps(directory: Path) -> list[int]:
    """The steps whose checkpoints in `directory` are complete, in order."""
    try:
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(p.name) for p in paths if p.name.isdecimal() and (p / ITEM / MANIFEST).exists())


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The folder of a step: `path` itself if it is one, else the latest (or the given) step in it.

    Raises:
      CheckpointError: there is no complete checkpoint (says what is there).
    """
    if step is None and (path / ITEM).is_dir():
        return path
    steps = list_steps(path)
    if step in steps or (step is None and steps):
        return path / str(steps[-1] if step is None else step)
    if not path.is_dir():
        there = "the directory does not exist"
    elif steps:
        there = f"it holds the steps {steps}"
    else:
        there = f"it holds {sorted(p.name for p in path.iterdir())[:5] or 'nothing'}"
    wanted = "a checkpoint" if step is None else f"step {step}"
    raise CheckpointError(
        f"looking for {wanted} in {path}: {there}. Give the directory that a zero2jax.Checkpointer saved to, and a "
        f"step that is in it."
    )


def _meet(a: Box, b: Box) -> bool:
    return all(max(s, u) < min(t, v) for (s, t), (u, v) in zip(a, b, strict=True))


def _run(fun: Callable[[Any], Any], jobs: Sequence[Any]) -> None:
    """Run jobs in `NUM_THREADS` threads; the first error is raised and later jobs are not begun."""
    with concurrent.futures.ThreadPoolExecutor(safetensors_file.NUM_THREADS) as pool:
        futures = [pool.submit(fun, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
