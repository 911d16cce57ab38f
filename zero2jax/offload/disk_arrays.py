"""A leaf of a state whose shards are files: what stands for it in a `TrainState`. Global arrays, outside any program.

It has the shape, dtype and sharding of the array, and its shards, so a checkpoint is saved from it as from an array.
A shard that several devices of this process hold alike is one file.
"""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zero2jax.offload.disk_buffers import Buffers
from zero2jax.offload.disk_files import DiskFile, Folder

Box = tuple[tuple[int, int], ...]
"""(start, stop) of a shard in each dim."""


@dataclasses.dataclass(frozen=True)
class DiskShard:
    """A shard on one device of this process, like `jax.Shard`.

    Attributes:
      device: in whose memory it is when it is used.
      index: its place in the array.
      replica_id: 0 for one of the devices that hold the same.
      dtype: of the array.
      file: its bytes.
      shape: its shape.
    """

    device: jax.Device
    index: tuple[slice, ...]
    replica_id: int
    dtype: Any
    file: DiskFile
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.file.num_bytes

    @functools.cached_property
    def data(self) -> np.ndarray:
        """Its elements, read-only, mapped from the file; they outlast the array.

        Raises:
          OffloadFileError: the file is not what was written.
        """
        return self.file.mapped().view(self.dtype).reshape(self.shape)


class DiskArray:
    """A leaf in files.

    Args:
      folder: reads them.
      shape: global shape.
      dtype: of its elements.
      sharding: where its shards are when they are read.
      files: by box, the shards of this process.
    """

    def __init__(
        self,
        folder: Folder,
        shape: tuple[int, ...],
        dtype: Any,
        sharding: NamedSharding,
        files: Mapping[Box, DiskFile],
    ):
        self.shape, self.dtype, self.sharding = shape, np.dtype(dtype), sharding
        self._folder, self._files = folder, dict(files)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * self.dtype.itemsize

    @property
    def files(self) -> dict[Box, DiskFile]:
        """Its files by box; none after `delete`."""
        return self._files

    @property
    def num_file_bytes(self) -> int:
        """Bytes of this process's files."""
        return sum(file.num_bytes for file in self._files.values())

    def is_deleted(self) -> bool:
        """Whether a step has taken it."""
        return not self._files

    def delete(self) -> None:
        """Let the files go."""
        self._files = {}

    @property
    def addressable_shards(self) -> list[DiskShard]:
        """The shards on the devices of this process."""
        replicas: dict[Box, int] = {}
        shards = []
        here = self.sharding.addressable_devices
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            box = box_of(index, self.shape)
            replica = replicas[box] = replicas.get(box, -1) + 1
            if box in self._files and device in here:
                shape = tuple(stop - start for start, stop in box)
                shards.append(DiskShard(device, index, replica, self.dtype, self._files[box], shape))
        return shards

    def reading(self, buffers: Buffers | None = None) -> Callable[[], jax.Array]:
        """Begin to read it; the function that is returned waits, and gives the array, or an OffloadFileError.

        Args:
          buffers: to read into; None makes new memory.
        """
        self._check_there()
        reads = {
            box: self._folder.read(file, None if buffers is None else buffers.take(file.num_bytes))
            for box, file in self._files.items()
        }
        shape, dtype, sharding, folder = self.shape, self.dtype, self.sharding, self._folder

        def array() -> jax.Array:
            shards = {
                box: read.result().view(dtype).reshape([stop - start for start, stop in box])
                for box, read in reads.items()
            }
            places = sharding.addressable_devices_indices_map(shape)
            boxes = [box_of(index or (), shape) for index in places.values()]
            targets = [SingleDeviceSharding(device) for device in places]
            parts = jax.device_put([shards[box] for box in boxes], targets)
            reads.clear()  # XLA has the memory now, and lets it go when it is used
            assert folder is not None  # its threads read until here
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return array

    def load(self) -> jax.Array:
        """The array, read."""
        return self.reading()()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._check_there()
        full = np.empty(self.shape, self.dtype)
        for shard in self.addressable_shards:
            full[shard.index] = shard.data
        return full if dtype is None else full.astype(dtype)

    def _check_there(self) -> None:
        if self.is_deleted():
            raise RuntimeError(
                "reading a leaf of an offloaded state: a step has taken this state, and it is gone."
            )

    def __repr__(self) -> str:
        return f"DiskArray({self.dtype}{list(self.shape)} in {self._folder.path})"


def writing(folder: Folder, name: str, x: jax.Array) -> Callable[[], DiskArray]:
    """Begin to write an array; the function that is returned waits, and gives the leaf, or an OffloadFileError.

    Args:
      folder: of this process.
      name: for the files.
      x: not to be donated or deleted before then.
    """
    shards: dict[Box, Any] = {}
    for shard in x.addressable_shards:
        shards.setdefault(box_of(shard.index, x.shape), shard.data)
    written: dict[Box, concurrent.futures.Future[DiskFile]] = {
        box: folder.write(f"{name}-{k}", functools.partial(np.asarray, data))
        for k, (box, data) in enumerate(shards.items())
    }
    shape, dtype, sharding = x.shape, x.dtype, x.sharding

    def leaf() -> DiskArray:
        files = {box: file.result() for box, file in written.items()}
        return DiskArray(folder, shape, dtype, sharding, files)  # type: ignore[arg-type]

    return leaf


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """An index of slices as plain numbers."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
