"""The state of one engine in the files of this process, and the record of its last complete step. Outside any program.

    state-41.json   which files are the state after step 41, with their sizes and checksums, and its scalars
    state-42.json   likewise; written when all files of step 42 are on the disk

What step 41 stored is deleted when step 43 begins to write: until a step is complete its predecessor is untouched, and
of several processes, the one that ended first has no step less than the others but the last.
"""

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero2jax.offload.disk_arrays import Box, DiskArray, box_of, writing
from zero2jax.offload.disk_files import DiskFile, Folder, OffloadFileError, write_text
from zero2jax.zero.compiled import Gather
from zero2jax.zero.state import Layout, TrainState

_FORMAT = 1
_INLINE_BYTES = 4096  # of a value that is in the record itself
_RECORD = re.compile(r"state-(\d+)\.json")

Pending = Callable[[], DiskArray]


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of the state.

    Attributes:
      name: as in a checkpoint, `params/blocks/w`.
      rest: shape, dtype and sharding at rest.
      home: its index among trainable parameters and leaves of the optimizer state if it is in files; else None.
    """

    name: str
    rest: jax.ShapeDtypeStruct
    home: int | None


class StateFiles:
    """Keeps leaves in files; the folder is opened when it is needed first.

    Args:
      root: `nvme_path`.
      layout: of the state.
      mesh: of the devices.

    Attributes:
      leaves: of the state, in the order of `jax.tree.leaves`.
    """

    def __init__(self, root: str | os.PathLike[str], layout: Layout, mesh: Mesh):
        self._root = root
        self._mesh = mesh
        self.leaves = list(_stored_leaves(layout, mesh))
        self._of_home = {leaf.home: leaf for leaf in self.leaves if leaf.home is not None}
        self._opened: Folder | None = None
        self._used = False
        self._complete: dict[int, dict[str, DiskFile]] = {}  # by step, files by name

    @property
    def folder(self) -> Folder:
        """The folder of this process, locked."""
        if self._opened is None:
            self._opened = Folder(self._root, jax.process_index(), jax.process_count())
        return self._opened

    @property
    def num_bytes(self) -> int:
        """Bytes of one state in the files of this process."""
        total = 0
        for leaf in self._of_home.values():
            places = leaf.rest.sharding.addressable_devices_indices_map(leaf.rest.shape)  # type: ignore[union-attr]
            boxes = {box_of(index or (), leaf.rest.shape) for index in places.values()}
            total += sum(_num_elements(box) for box in boxes) * leaf.rest.dtype.itemsize
        return total

    def start(self) -> Folder:
        """The folder, empty but for the states of this engine that are alive."""
        folder = self.folder
        if not self._used:
            self._used = True
            folder.clear()
        return folder

    def holds(self, home: int) -> bool:
        """Whether a leaf, by its index among trainable parameters and leaves of the optimizer state, is in files."""
        return home in self._of_home

    def writing(self, home: int, x: jax.Array) -> Pending:
        """Begin to write a leaf; see `disk_arrays.writing`."""
        name = re.sub(r"[^\w.]+", ".", self._of_home[home].name)[-100:]
        return writing(self.folder, name, x)

    def keep(self, position: int, x: jax.Array) -> Any:
        """What stands in a new state for its leaf at a position of `leaves`: the array, or files of it."""
        home = self.leaves[position].home
        return x if home is None else self.writing(home, x)()

    def begin(self, step: int) -> None:
        """Before a step writes: delete the complete ones but that which it goes on from, the state after `step`."""
        goes_on = step in self._complete and step == list(self._complete)[-1]
        for other in [s for s in self._complete if not (goes_on and s == step)]:
            (self.folder.path / f"state-{other}.json").unlink(missing_ok=True)
            del self._complete[other]

    def commit(self, state: TrainState) -> None:
        """Record a state whose files are all on the disk.

        Raises:
          OffloadFileError: the record cannot be written.
        """
        step = int(np.asarray(state.step))
        values = jax.tree.leaves(state)
        entries = [_entry(leaf, x) for leaf, x in zip(self.leaves, values, strict=True)]
        body = json.dumps({"format": _FORMAT, "mesh": self._plain_mesh, "leaves": entries})
        write_text(self.folder.path / f"state-{step}.json", f"{body}\n{zlib.crc32(body.encode()):08x}\n")
        files = [f for x in values if isinstance(x, DiskArray) for f in x.files.values()]
        self._complete[step] = {file.path.name: file for file in files}

    def way_back(self) -> str:
        """Where the last complete step is, for the error of one that was not completed."""
        if not self._complete:
            return "No step was complete before: begin again."
        return (
            f"The state of step {list(self._complete)[-1]} is intact in {self.folder.path}: "
            f"zero2jax.reopen_state(engine, params) reads it."
        )

    def reopened(self, gather: Gather) -> list[Any]:
        """The last complete state: its leaves, None where the record has no value. All processes must call it.

        Args:
          gather: asks all processes.

        Raises:
          OffloadFileError: there is none; it is of another engine; a file is damaged.
        """
        folder = self.folder
        steps = sorted(
            (int(m[1]) for m in map(_RECORD.fullmatch, os.listdir(folder.path)) if m), reverse=True
        )
        rows, hosts = gather(np.array([*steps[:2], -1, -1][:2], np.int32))
        step = int(min(rows[:, 0]))
        lacking = [f"{i} (host {hosts[i]})" for i, row in enumerate(rows) if step < 0 or step not in row]
        if lacking:
            raise OffloadFileError(
                f"reopening the state in {folder.path}: process {', '.join(lacking)} has no complete step "
                f"{'' if step < 0 else step}, which a step leaves behind. Restore a checkpoint."
            )
        entries = self._record(folder.path / f"state-{step}.json")
        values, files = [], dict[str, DiskFile]()
        for leaf, entry in zip(self.leaves, entries, strict=True):
            value, its_files = self._value(leaf, entry)
            values.append(value)
            files |= its_files
        folder.check(files.values())
        for file in files.values():
            file.own()
        folder.clear(keep=[f"state-{step}.json"])
        self._used, self._complete = True, {step: files}
        return values

    @property
    def _plain_mesh(self) -> dict[str, int]:
        return {str(name): int(size) for name, size in self._mesh.shape.items()}

    def _record(self, path: Path) -> list[dict[str, Any]]:
        body, _, rest = path.read_text().partition("\n")
        found = f"{zlib.crc32(body.encode()):08x}"
        if rest.strip() != found:
            raise OffloadFileError(
                f"reading {path}: its checksum (CRC-32) is {found}, and it says {rest.strip()[:20]!r}. Restore a "
                f"checkpoint."
            )
        record = json.loads(body)
        here = [[leaf.name, [*leaf.rest.shape], str(leaf.rest.dtype)] for leaf in self.leaves]
        there = [[entry["name"], entry["shape"], entry["dtype"]] for entry in record["leaves"]]
        differ = [pair for pair in zip(there, here, strict=False) if pair[0] != pair[1]]
        if (
            record["format"] != _FORMAT
            or record["mesh"] != self._plain_mesh
            or len(here) != len(there)
            or differ
        ):
            first = f", its leaf {differ[0][0]} and this engine's {differ[0][1]}" if differ else ""
            raise OffloadFileError(
                f"reopening {path}: it is of another engine: format {record['format']}, mesh {record['mesh']}, "
                f"{len(there)} leaves{first}; this one has format {_FORMAT}, mesh {self._plain_mesh}, {len(here)} "
                f"leaves. Build the engine as it was, or restore a checkpoint."
            )
        return record["leaves"]  # type: ignore[no-any-return]

    def _value(self, leaf: StoredLeaf, entry: dict[str, Any]) -> tuple[Any, dict[str, DiskFile]]:
        """What a record says of a leaf, and the files of it."""
        if "value" in entry:
            data = np.frombuffer(bytes.fromhex(entry["value"]), leaf.rest.dtype).reshape(leaf.rest.shape)
            return jax.device_put(data, leaf.rest.sharding), {}
        if not entry.get("files"):
            return None, {}
        boxes: dict[Box, DiskFile] = {}
        for file in entry["files"]:
            box = tuple((start, stop) for start, stop in file["box"])
            boxes[box] = self.folder.file(file["name"], file["bytes"], file["crc32"])
        array = DiskArray(self.folder, leaf.rest.shape, leaf.rest.dtype, leaf.rest.sharding, boxes)  # type: ignore[arg-type]
        return array, {file.path.name: file for file in boxes.values()}


def _stored_leaves(layout: Layout, mesh: Mesh) -> Iterator[StoredLeaf]:
    state = layout.abstract_state(mesh)
    num_trained = sum(layout.trainable)
    homes: list[int | None] = [None]  # of `step`
    trained = iter(range(num_trained))
    homes += [next(trained) if t else None for t in layout.trainable]
    homes = [None if home in layout.resident_params else home for home in homes]
    of_state = range(len(layout.opt_state.leaves))
    homes += [None if j in layout.resident_state else num_trained + j for j in of_state]
    leaves = jax.tree_util.tree_leaves_with_path(state)
    homes += [None] * (len(leaves) - len(homes))
    for (path, rest), home in zip(leaves, homes, strict=True):
        plain = isinstance(rest.dtype, np.dtype) and rest.ndim > 0 and rest.size > 0
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield StoredLeaf(name, rest, home if plain else None)


def _entry(leaf: StoredLeaf, x: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": leaf.name, "shape": [*leaf.rest.shape], "dtype": str(leaf.rest.dtype)}
    if isinstance(x, DiskArray):
        files = x.files.items()
        entry["files"] = [
            {"name": f.path.name, "box": box, "bytes": f.num_bytes, "crc32": f.crc32} for box, f in files
        ]
    elif isinstance(x.dtype, np.dtype) and x.nbytes <= _INLINE_BYTES and x.is_fully_replicated:
        entry["value"] = np.asarray(x).tobytes().hex()
    return entry


def _num_elements(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box], dtype=np.int64))
