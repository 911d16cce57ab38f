"""How Orbax saves the state: a `CheckpointHandler` that writes one safetensors file per process and a manifest.

Orbax's `CheckpointManager` around it commits a save: temporary folder and atomic rename, barriers between processes,
the background thread. Its own array handlers are not used: they save arrays as they are laid out,
with padding, in a structure of Python containers. Only this module and `saver` import Orbax; import them late.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zero2jax.checkpoints.format import (
    FAILED,
    FORMAT,
    ITEM,
    MANIFEST,
    SavedLeaf,
    as_json,
    write_manifest,
    write_text,
)
from zero2jax.checkpoints.safetensors_file import Tensor, write
from zero2jax.checkpoints.state_leaves import HostBlock

LeafBlocks = tuple[SavedLeaf, list[HostBlock]]


class StateHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes the blocks of this process in a thread; the primary process writes the manifest when all have."""

    def __init__(self) -> None:
        self._info: dict[str, Any] = {}
        self._error: Exception | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")

    async def async_save(self, directory: Any, args: "SaveState") -> list[Any]:
        """Take the blocks to the host, then write them: in a thread, or at once if `args.asynchronous` is false."""
        self._info, self._error = args.info, None
        try:
            leaves = args.leaves()
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self._error = error  # raised later, for the reason given in _write
            return []
        written = self._pool.submit(self._write, Path(directory), leaves)
        if not args.asynchronous:
            written.result()
        return [written]

    def _write(self, folder: Path, leaves: list[LeafBlocks]) -> None:
        # Not raised here: Orbax would leave the other processes at its next barrier until their time is over.
        try:
            write_process_file(folder, leaves)
        except Exception as error:
            self._error = error

    def take_error(self) -> Exception | None:
        """What kept this process from writing, once; to be asked for when the save is over."""
        error, self._error = self._error, None
        return error

    def save(self, directory: Any, args: "SaveState") -> None:
        """Not used: an `AsyncCheckpointer` calls `async_save`."""
        raise NotImplementedError("save with zero2jax.Checkpointer.save")

    def restore(self, directory: Any, args: "RestoreState | None" = None) -> Any:
        """Not used: `Checkpointer.restore` reads the files itself."""
        raise NotImplementedError("read checkpoints with zero2jax.Checkpointer.restore")

    def finalize(self, directory: Any) -> None:
        """On the primary process, once all have ended: if all have written, gather their lists in the manifest."""
        folder = Path(directory)
        try:
            merge_parts(folder, self._info, jax.process_count())
        except Exception as error:
            if not isinstance(error, FileNotFoundError):  # that is a list of another process
                self._error = self._error or error
            (folder / MANIFEST).unlink(missing_ok=True)
            (folder / FAILED).touch()

    def close(self) -> None:
        """End the writing thread."""
        self._pool.shutdown()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: a function that brings the blocks to the host, the manifest's other entries, and when to write.

    A function, because Orbax first waits for the save before: there is one copy on the host, not two.
    """

    leaves: Callable[[], list[LeafBlocks]]
    info: dict[str, Any]
    asynchronous: bool


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax wants a counterpart of `SaveState`."""


def write_process_file(folder: Path, leaves: Sequence[LeafBlocks]) -> None:
    """Write this process's blocks and a list of them, `00000-of-00002.safetensors` and `.json`.

    The lists of blocks are emptied: each block is let go once it is written.
    """
    stem = f"{jax.process_index():05}-of-{jax.process_count():05}"
    file = f"{stem}.safetensors"
    blocks = [block for _, leaf_blocks in leaves for block in leaf_blocks]
    tensors = [
        Tensor(name, b.leaf.dtype, b.value.shape)
        for name, b in zip(_distinct([_block_name(b) for b in blocks]), blocks, strict=True)
    ]
    places = [(b.leaf.name, [a for a, _ in b.box], list(b.value.shape)) for b in blocks]
    values = dict(enumerate(b.value for b in blocks))
    blocks.clear()
    for _, leaf_blocks in leaves:
        leaf_blocks.clear()
    written = write(folder / file, tensors, values.pop, metadata={"format": f"{FORMAT}, blocks"})
    entries: dict[str, Any] = {leaf.name: as_json(leaf) for leaf, _ in leaves}
    for (name, start, shape), tensor, crc in zip(places, written.tensors, written.crcs, strict=True):
        entries[name]["blocks"].append([file, tensor.offset, start, shape, crc])
    files = {file: [written.num_bytes, written.header_bytes, written.header_crc]}
    write_text(folder / f"{stem}.json", json.dumps({"leaves": entries, "files": files}))


def merge_parts(folder: Path, info: dict[str, Any], num_processes: int) -> None:
    """Write the manifest from the processes' lists of blocks, and remove those.

    Raises:
      OSError: a list is not there, since that process could not write.
    """
    leaves: dict[str, Any] = {}
    files: dict[str, Any] = {}
    parts = [folder / f"{i:05}-of-{num_processes:05}.json" for i in range(num_processes)]
    for part in parts:
        content = json.loads(part.read_text())
        files |= content["files"]
        for name, entry in content["leaves"].items():
            leaves.setdefault(name, {**entry, "blocks": []})["blocks"] += entry["blocks"]
    for name, entry in leaves.items():
        saved = sum(math.prod(block[3]) for block in entry["blocks"])
        expected = math.prod(entry["shape"])
        assert saved == expected, (name, saved, expected)
    write_manifest(folder, {**info, "leaves": leaves, "files": files})
    for part in parts:
        part.unlink()
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _block_name(block: HostBlock) -> str:
    if block.value.shape == block.leaf.shape:
        return block.leaf.name
    return f"{block.leaf.name}[{','.join(f'{a}:{b}' for a, b in block.box)}]"


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with `~` behind one that is taken: a leaf may be called as a block of another, `w[0:1]`."""
    taken: dict[str, None] = {}
    for name in names:
        while name in taken:
            name += "~"
        taken[name] = None
    return list(taken)


def composite(item: SaveState) -> Any:
    """The arguments of `CheckpointManager.save`."""
    return ocp.args.Composite(**{ITEM: item})


def make_manager(directory: Path, timeout_s: int) -> tuple[ocp.CheckpointManager, StateHandler]:
    """Orbax's manager of the directory, which clears away what an interrupted save left behind, and the handler.

    It keeps every checkpoint: it would delete old ones also when a new one could not be finished.
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = StateHandler()
    registry.add(ITEM, SaveState, handler)
    registry.add(ITEM, RestoreState, handler)
    manager = ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            save_root_metadata=False,
            atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.ATOMIC_RENAME),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=timeout_s, create_directories_asynchronously=False
            ),
        ),
        handler_registry=registry,
    )
    return manager, handler
