"""Parameters out of a checkpoint into safetensors files, and from such files into an engine's shards.

`export_checkpoint` needs neither the training script nor the devices of the run: it reads blocks and writes pieces of
at most `PIECE_BYTES`, so a model larger than the host's memory passes through. `load_exported` maps files instead of
reading them; `engine.init` then takes from the map only what each device holds.

A model above the size of one file is written as several with an index, named as Hugging Face names them:
`model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from zero2jax.base.pytrees import PyTree, path_string, shapes_of
from zero2jax.checkpoints.format import (
    Checkpoint,
    CheckpointError,
    SavedLeaf,
    cut_into_blocks,
    find_checkpoint,
    write_text,
)
from zero2jax.checkpoints.matching import CheckpointWarning, check_prefixes, renamed_prefixes, renamer
from zero2jax.checkpoints.safetensors_file import FileError, Tensor, read_header, write

PIECE_BYTES = 128 * 2**20
PARAMS = "params/"
BARE = "params"  # the name of parameters that are one array
_FORMAT = {"format": "pt"}  # what loaders of Hugging Face expect; it says nothing about the tensors


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the parameters of a checkpoint as `out`, or as several files beside it; returns what was written.

    Names are those of the parameters' leaves, `blocks/attn/kernel`.

    Args:
      checkpoint: directory of a `Checkpointer`, or the folder of one step in it.
      out: a path that ends in `.safetensors`.
      step: which checkpoint; the latest by default.
      dtype: floating leaves are converted to it. By default fp32 masters stay fp32 and frozen leaves as they are.
      max_file_bytes: if the tensors are larger together, several files; a tensor is never divided.
      aliases: further names of tied parameters, `{"head/kernel": "embed"}`. A tensor is written once, the file's
        metadata says which other names it has, and `load_exported` gives it under all of them. A leaf of the
        checkpoint that has an alias's name must hold the same values.

    Raises:
      CheckpointError: the checkpoint cannot be read; `out` exists or lies among checkpoints; an alias does not fit;
        `dtype` is not floating. Numbers that do not fit into it are counted in a warning.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise CheckpointError(f"exporting to {out}: give a path that ends in .safetensors.")
    if dtype is not None and not jax.numpy.issubdtype(np.dtype(dtype), jax.numpy.floating):
        raise CheckpointError(
            f"exporting {checkpoint}: dtype is {np.dtype(dtype)}; parameters are exported as floating numbers, such as "
            f"bfloat16."
        )
    source = Checkpoint(find_checkpoint(Path(checkpoint), step))
    _check_out(source, out)
    leaves = {
        name.removeprefix(PARAMS): leaf
        for name, leaf in source.leaves.items()
        if name.startswith(PARAMS) or name == BARE
    }
    aliases = dict(aliases or {})
    _check_aliases(source, leaves, aliases)
    leaves = {name: leaf for name, leaf in leaves.items() if name not in aliases}
    tensors = [Tensor(name, _export_dtype(leaf, dtype), leaf.shape) for name, leaf in leaves.items()]
    groups = _group(tensors, max_file_bytes)
    index, paths = _paths(source, out, len(groups))
    metadata = _FORMAT | ({"aliases": json.dumps(aliases)} if aliases else {})
    overflowed: dict[str, int] = {}
    written = [*paths, index] if len(groups) > 1 else paths
    complete = False
    try:
        for path, group in zip(paths, groups, strict=True):
            _write_group(source, path, group, leaves, metadata, overflowed)
        if len(groups) > 1:
            _write_index(index, paths, groups, aliases)
        complete = True
    except OSError as error:
        raise CheckpointError(
            f"exporting {source.folder} to {out}: {error.strerror}. Nothing is left of it there. Make room, or give "
            f"another path."
        ) from error
    finally:
        for path in [] if complete else written:
            path.unlink(missing_ok=True)
    if overflowed:
        warnings.warn(
            f"exporting {source.folder} to {out}: {overflowed} numbers do not fit into {np.dtype(dtype)} and are "
            f"infinite or NaN there. bfloat16 has the range of float32.",
            CheckpointWarning,
            stacklevel=2,
        )
    return paths if len(groups) == 1 else [index, *paths]


def load_exported(
    path: str | Path,
    like: PyTree | None = None,
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> Any:
    """Tensors of safetensors files, mapped into memory and not read: what is used is read when it is used.

    `engine.init(load_exported(path, shapes))` reads each device's part into its shards and builds no full copy.

    Args:
      path: a `.safetensors` file, an `.index.json`, or a folder that holds one index or one file.
      like: a tree of arrays or shapes; the tensors come back in its structure. Without it, as a dict by name.
      rename: where tensors have other names in the file: a mapping from the tree's names, or prefixes of them, to
        those in the file, or a function.

    Raises:
      CheckpointError: a file is missing or damaged; with `like`, a tensor is missing or has another shape (lists them),
        or two parameters have one name.
    """
    try:
        arrays = _mapped(Path(path))
    except FileError as error:
        raise CheckpointError(str(error)) from error
    if like is None:
        return arrays
    source = renamer(rename)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes_of(like))
    names = [path_string(key_path) or BARE for key_path, _ in leaves]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(
            f"loading {path}: {twice[:3]} would each be the name of two parameters, and a tensor goes to one. Rename "
            f"keys of `like` that hold a '/' or differ only in their type."
        )
    check_prefixes(renamed_prefixes(rename), names, f"loading {path}", "rename")
    chosen, wrong = [], []
    for key_path, shape in leaves:
        name = path_string(key_path) or BARE
        array = arrays.get(source(name))
        chosen.append(array)
        if array is None:
            wrong.append(f"{name!r} {shape.dtype}{list(shape.shape)}: no tensor {source(name)!r}")
        elif array.shape != shape.shape or _kind(array.dtype) != _kind(shape.dtype):
            wrong.append(
                f"{name!r} {shape.dtype}{list(shape.shape)}: the file has {array.dtype}{list(array.shape)}"
            )
    if wrong:
        some = sorted(set(arrays) - {source(path_string(p) or BARE) for p, _ in leaves})[:8]
        raise CheckpointError(
            "\n  ".join([f"loading {path}: {len(wrong)} parameters do not fit", *wrong[:8]])
            + f"\nTensors that no parameter took: {some}. Give their names with rename=."
        )
    return jax.tree.unflatten(treedef, chosen)


def parse_bytes(text: str) -> int:
    """`"5GB"` as bytes; kB, MB, GB and TB are powers of 1000, KiB, MiB and GiB of 1024.

    Raises:
      ValueError: it is not such a size.

    Example:
      >>> parse_bytes("1.5GB"), parse_bytes("2MiB")
      (1500000000, 2097152)
    """
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", 1):
        units |= {f"{prefix}b": 1000**power, f"{prefix}ib": 1024**power}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units or float(match[1]) == 0:
        raise ValueError(f"reading a size: {text!r} is none. Write a number and a unit, as in 5GB or 500MB.")
    return int(float(match[1]) * units[match[2]])


def _write_group(
    source: Checkpoint,
    path: Path,
    group: Sequence[Tensor],
    leaves: Mapping[str, SavedLeaf],
    metadata: Mapping[str, str],
    overflowed: dict[str, int],
) -> None:
    pieces, boxes = [], []
    for i, tensor in enumerate(group):
        start = 0
        for box in cut_into_blocks([0] * len(tensor.shape), tensor.shape, tensor.dtype.itemsize, PIECE_BYTES):
            pieces.append((i, start))
            boxes.append((tensor, box))
            start += int(np.prod([b - a for a, b in box], dtype=np.int64)) * tensor.dtype.itemsize

    def value(i: int) -> np.ndarray:
        tensor, box = boxes[i]
        leaf = leaves[tensor.name]
        saved = np.empty([b - a for a, b in box], leaf.dtype)
        source.fill(leaf, [(box, saved)])
        if leaf.dtype == tensor.dtype:
            return saved
        with np.errstate(over="ignore", invalid="ignore"):  # counted instead
            values = saved.astype(tensor.dtype)
        if count := int((np.isfinite(saved) & ~np.isfinite(values)).sum()):
            overflowed[tensor.name] = overflowed.get(tensor.name, 0) + count
        return values

    # Under another name until it is complete.
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    write(partial, group, value, pieces=pieces, metadata=metadata, num_threads=1)
    partial.rename(path)


def _write_index(
    index: Path, paths: Sequence[Path], groups: Sequence[Sequence[Tensor]], aliases: Mapping[str, str]
) -> None:
    """Say in which file each tensor is."""
    content = {
        "metadata": {"total_size": sum(t.num_bytes for group in groups for t in group), "aliases": aliases},
        "weight_map": {t.name: path.name for path, group in zip(paths, groups, strict=True) for t in group},
    }
    write_text(index, json.dumps(content, indent=2) + "\n")


def _check_out(source: Checkpoint, out: Path) -> None:
    """Make the folder of `out`; raise an error if it is one of checkpoints, which then could not be saved to again."""
    folder, steps = out.parent.resolve(), source.folder.resolve().parent
    only_steps = folder == steps and all(p.name.split(".")[0].isdecimal() for p in steps.iterdir())
    if only_steps or folder.is_relative_to(source.folder.resolve()):
        raise CheckpointError(
            f"exporting {source.folder} to {out}: that folder is for checkpoints only. Give a path outside it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"exporting {source.folder} to {out}: {error.strerror}.") from error


def _paths(source: Checkpoint, out: Path, num_files: int) -> tuple[Path, list[Path]]:
    """(path of the index of several files, paths of the files); none of them may exist."""
    index, paths = out.with_name(out.name + ".index.json"), [out]
    if num_files > 1:
        paths = [
            out.with_name(f"{out.stem}-{i + 1:05}-of-{num_files:05}.safetensors") for i in range(num_files)
        ]
    existing = [str(p) for p in (out, index, *paths) if p.exists()]
    if existing:
        raise CheckpointError(
            f"exporting {source.folder}: {existing[0]} exists. Remove it, or give another path."
        )
    return index, paths


def _group(tensors: Sequence[Tensor], limit: int | None) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and groups[-1] and size + tensor.num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    return groups


def _export_dtype(leaf: SavedLeaf, dtype: DTypeLike | None) -> np.dtype:
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    return np.dtype(dtype) if dtype is not None and floating else leaf.dtype


def _check_aliases(source: Checkpoint, leaves: Mapping[str, SavedLeaf], aliases: Mapping[str, str]) -> None:
    for alias, name in aliases.items():
        if name not in leaves or name in aliases:
            raise CheckpointError(
                f"exporting {source.folder}: alias {alias!r} stands for {name!r}, which is no parameter of it. It has "
                f"{sorted(leaves)[:8]}."
            )
        if alias not in leaves:
            continue
        a, b = leaves[alias], leaves[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not _equal(source, a, b):
            raise CheckpointError(
                f"exporting {source.folder}: {alias!r} is said to be tied to {name!r}, and their values differ. Leave "
                f"out that alias, and both are written."
            )


def _equal(source: Checkpoint, a: SavedLeaf, b: SavedLeaf) -> bool:
    for box in cut_into_blocks([0] * len(a.shape), a.shape, a.dtype.itemsize, PIECE_BYTES):
        x, y = (np.empty([stop - start for start, stop in box], a.dtype) for _ in range(2))
        source.fill(a, [(box, x)])
        source.fill(b, [(box, y)])
        if x.tobytes() != y.tobytes():
            return False
    return True


def _kind(dtype: DTypeLike) -> str:
    kinds = (jax.numpy.floating, jax.numpy.integer, jax.numpy.complexfloating)
    return next((kind.__name__ for kind in kinds if jax.numpy.issubdtype(dtype, kind)), str(dtype))


def _mapped(path: Path) -> dict[str, np.ndarray]:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FileError(
                f"reading {path}: it holds {[p.name for p in files]}. Give the path of one file or index."
            )
        path = files[0]
    elif not path.exists() and path.with_name(path.name + ".index.json").exists():
        path = path.with_name(path.name + ".index.json")
    if path.suffix != ".json":
        return _mapped_file(path)
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files = sorted({path.with_name(file) for file in weight_map.values()})
        if not files:
            raise ValueError("it names no file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"reading {path}: it is no index of safetensors files beside it ({error!r})."
        ) from error
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        arrays |= _mapped_file(file, resolve=False)
    if missing := sorted(set(weight_map) - set(arrays)):
        raise FileError(f"reading {path}: it names tensors that its files do not have, {missing[:8]}.")
    return _with_aliases(arrays, read_header(file)[1])


def _mapped_file(path: Path, *, resolve: bool = True) -> dict[str, np.ndarray]:
    tensors, metadata = read_header(path)
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    arrays = {
        name: data[t.offset : t.offset + t.num_bytes].view(t.dtype).reshape(t.shape)
        for name, t in tensors.items()
    }
    return _with_aliases(arrays, metadata) if resolve else arrays


def _with_aliases(arrays: dict[str, np.ndarray], metadata: Mapping[str, str]) -> dict[str, np.ndarray]:
    try:
        aliases = json.loads(metadata.get("aliases", "{}"))
        return arrays | {alias: arrays[name] for alias, name in aliases.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"reading the aliases in the metadata of a file: they do not fit ({error!r})."
        ) from error
