"""How Orbax saves the state: a `CheckpointHandler` that writes one safetensors file per process and a manifest.

Orbax's `CheckpointManager` around it keeps the directory: temporary folder and atomic rename, retention, barriers
between processes, the background thread. Its own array handlers are not used: they save arrays as they are laid out,
with padding, in a structure of Python containers. This module is the only one that imports Orbax; import it late.
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

from zero2jax.checkpoint_format import (
    FORMAT,
    ITEM,
    CheckpointError,
    SavedLeaf,
    as_json,
    write_manifest,
    write_text,
)
from zero2jax.checkpoint_state import HostBlock
from zero2jax.safetensors_file import Tensor, write

LeafBlocks = tuple[SavedLeaf, list[HostBlock]]


class StateHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes the blocks of this process in a thread; the primary process writes the manifest when all have."""

    def __init__(self) -> None:
        self._info: dict[str, Any] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")

    async def async_save(self, directory: Any, args: "SaveState") -> list[Any]:
        """Take the blocks to the host, then write them: in a thread, or at once if `args.asynchronous` is false."""
        self._info = args.info
        written = self._pool.submit(write_process_file, Path(directory), args.leaves())
        if not args.asynchronous:
            written.result()
        return [written]

    def save(self, directory: Any, args: "SaveState") -> None:
        """Write the blocks before returning."""
        write_process_file(Path(directory), args.leaves())

    def restore(self, directory: Any, args: "RestoreState | None" = None) -> Any:
        """Not used: `Checkpointer.restore` reads the files itself."""
        raise NotImplementedError("read checkpoints with zero2jax.Checkpointer.restore")

    def finalize(self, directory: Any) -> None:
        """On the primary process, once every process has written: gather their lists of blocks in the manifest."""
        merge_parts(Path(directory), self._info, jax.process_count())

    def close(self) -> None:
        """End the writing thread."""
        self._pool.shutdown()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: a function that brings the blocks to the host, the manifest's remarks, and when to write.

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
    """Write this process's blocks and a list of them, `00000-of-00002.safetensors` and `.json`."""
    stem = f"{jax.process_index():05}-of-{jax.process_count():05}"
    file = f"{stem}.safetensors"
    blocks = [block for _, leaf_blocks in leaves for block in leaf_blocks]
    tensors = [Tensor(_block_name(b), b.leaf.dtype, b.value.shape) for b in blocks]
    written = write(
        folder / file, tensors, lambda i: blocks[i].value, metadata={"format": f"{FORMAT}, blocks"}
    )
    entries: dict[str, Any] = {leaf.name: as_json(leaf) for leaf, _ in leaves}
    for block, tensor, crc in zip(blocks, written.tensors, written.crcs, strict=True):
        start, shape = [a for a, _ in block.box], list(block.value.shape)
        entries[block.leaf.name]["blocks"].append([file, tensor.offset, start, shape, crc])
    files = {file: [written.num_bytes, written.header_bytes, written.header_crc]}
    write_text(folder / f"{stem}.json", json.dumps({"leaves": entries, "files": files}))


def merge_parts(folder: Path, info: dict[str, Any], num_processes: int) -> None:
    """Write the manifest from the processes' lists of blocks, and remove those."""
    leaves: dict[str, Any] = {}
    files: dict[str, Any] = {}
    parts = [folder / f"{i:05}-of-{num_processes:05}.json" for i in range(num_processes)]
    for part in parts:
        try:
            content = json.loads(part.read_text())
        except OSError as error:
            raise CheckpointError(
                f"finishing checkpoint {folder}: {part.name} is not there. That process could not write; its own error "
                f"says why. If processes run on several hosts, the directory must be one that all of them share."
            ) from error
        files |= content["files"]
        for name, entry in content["leaves"].items():
            leaves.setdefault(name, {**entry, "blocks": []})["blocks"] += entry["blocks"]
    for name, entry in leaves.items():
        found = sum(math.prod(block[3]) for block in entry["blocks"])
        expected = math.prod(entry["shape"])
        assert found == expected, (name, found, expected)
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


def composite(item: SaveState) -> Any:
    """The arguments of `CheckpointManager.save`."""
    return ocp.args.Composite(**{ITEM: item})


def make_manager(directory: Path, max_to_keep: int | None, timeout_s: int) -> ocp.CheckpointManager:
    """Orbax's manager of the directory, with what an interrupted save left behind cleared away."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = StateHandler()
    registry.add(ITEM, SaveState, handler)
    registry.add(ITEM, RestoreState, handler)
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
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
