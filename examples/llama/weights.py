"""A model folder as hubs hold it, and this example's parameters: read and written, a layer at a time or at once.

    folder/config.json, model.safetensors            or  model.safetensors.index.json and the files that it names

`load_folder` reads all of it: for small models and tests. `open_folder` reads nothing: it gives leaves with a shape, a
dtype and slices, of which `engine.init` reads each device's part. A folder's tensors are a layer's each, and matrices
are (outputs, inputs); here the layers are stacked and matrices are (inputs, outputs). `NAMES` is the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero2jax
from examples.llama.config import LlamaConfig, config_json, read_config
from examples.llama.model import param_shapes

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
LAYER = "model.layers.{}."
# Parameter here -> tensor on disk. One that ends in "kernel" is stored transposed.
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
    "layers/attn_norm/scale": LAYER + "input_layernorm.weight",
    "layers/mlp_norm/scale": LAYER + "post_attention_layernorm.weight",
    "layers/q_norm/scale": LAYER + "self_attn.q_norm.weight",
    "layers/k_norm/scale": LAYER + "self_attn.k_norm.weight",
}
for _ours, _theirs in {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}.items():
    NAMES[f"layers/{_ours}/kernel"] = f"{LAYER}{_theirs}.weight"
    NAMES[f"layers/{_ours}/bias"] = f"{LAYER}{_theirs}.bias"
# Buffers that old files hold and that follow from the configuration.
IGNORED = ".rotary_emb.inv_freq"
ADAPTERS = ("lora_a", "lora_b")
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class WeightsError(ValueError):
    """A folder's tensors and its `config.json` do not belong together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A parameter whose values are read when it is sliced: `shape`, `dtype`, `leaf[slices] -> np.ndarray`."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[tuple[slice, ...]], np.ndarray]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.read(index)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def path_name(path: Any) -> str:
    """`layers/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def base_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Shapes of the parameters without adapters."""
    return param_shapes(dataclasses.replace(config, lora_rank=0))


def open_folder(path: str | Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """(configuration, tree of `Lazy` leaves) of a folder; maps its files and reads no tensor.

    Raises:
      ConfigError: as `read_config`.
      zero2jax.CheckpointError: a file is missing, cut short, or no safetensors file (named).
      WeightsError: tensors are missing, unknown, or of another shape than the configuration says (named).
    """
    path = Path(path)
    config = read_config(path)
    source = path / INDEX if (path / INDEX).exists() else path / FILE
    tensors = zero2jax.load_exported(source)
    tensors = {name: x for name, x in tensors.items() if not name.endswith(IGNORED)}
    _check_tensors(source, config, tensors)

    def leaf(key_path: Any, shape: jax.ShapeDtypeStruct) -> Lazy:
        name = path_name(key_path)
        of_layers = [tensors[tensor] for tensor in tensor_names(config, name)]
        if name.endswith("kernel"):
            of_layers = [x.T for x in of_layers]
        dtypes = {x.dtype for x in of_layers}
        if len(dtypes) > 1:
            raise WeightsError(
                f"reading {source}: the layers of {NAMES[name]} have different dtypes, {dtypes}."
            )
        read = functools.partial(_stacked if "layers/" in name else _single, of_layers)
        return Lazy(shape.shape, of_layers[0].dtype, read)

    return config, jax.tree_util.tree_map_with_path(leaf, base_shapes(config))


def load_folder(path: str | Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """(configuration, parameters as NumPy arrays in the folder's dtypes) of a folder, read in full.

    Raises:
      as `open_folder`.
    """
    config, params = open_folder(path)
    full = lambda leaf: np.array(leaf[tuple(slice(0, n) for n in leaf.shape)])
    return config, jax.tree.map(full, params)


def tensor_names(config: LlamaConfig, name: str) -> list[str]:
    """The tensors on disk of a parameter: one, or one per layer."""
    template = NAMES[name]
    return [template.format(i) for i in range(config.num_layers)] if LAYER in template else [template]


def _single(arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    return arrays[0][index]


def _stacked(arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    return np.stack([x[index[1:]] for x in arrays[index[0]]])


def _disk_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name on disk, as the configuration says."""
    shapes = {}
    for name, leaf in named_leaves(base_shapes(config)):
        shape = leaf.shape[1:] if LAYER in NAMES[name] else leaf.shape
        shapes |= dict.fromkeys(tensor_names(config, name), shape[::-1] if name.endswith("kernel") else shape)
    return shapes


def _check_tensors(source: Path, config: LlamaConfig, tensors: dict[str, np.ndarray]) -> None:
    expected = _disk_shapes(config)
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    if head is not None and not np.array_equal(head, tensors.get(NAMES["embed"])):
        raise WeightsError(
            f"reading {source}: config.json says tie_word_embeddings, and lm_head.weight differs from "
            f"{NAMES['embed']}. Write false there, or remove the tensor."
        )
    wrong = [
        f"{name}: missing, expected {list(shape)}" for name, shape in expected.items() if name not in tensors
    ]
    wrong += [f"{name}: not of this model" for name in tensors if name not in expected]
    for name, shape in expected.items():
        x = tensors.get(name)
        if x is not None and x.shape != shape:
            wrong.append(f"{name}: has shape {list(x.shape)}, expected {list(shape)}")
        elif x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            wrong.append(f"{name}: has dtype {x.dtype}, expected a floating one")
    if wrong:
        more = [f"and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise WeightsError(
            "\n  ".join([f"reading {source}: {len(wrong)} tensors do not fit config.json", *wrong[:8], *more])
            + "\nThe folder is incomplete, or its config.json is that of another model."
        )


def add_adapters(
    config: LlamaConfig, params: dict[str, Any], seed: int = 0, base_dtype: Any = jnp.bfloat16
) -> Any:
    """Parameters with new adapters beside each matrix of the layers; the base in `base_dtype`, read when sliced.

    An adapter's product is zero at first: `lora_b` is. `lora_a` is normal, of variance 1 / inputs.
    """
    shapes = param_shapes(config)
    rng = np.random.default_rng(seed)
    base = dict(named_leaves(params))

    def leaf(key_path: Any, shape: jax.ShapeDtypeStruct) -> Any:
        name = path_name(key_path)
        if name.endswith("lora_a"):
            return (rng.standard_normal(shape.shape, np.float32) / math.sqrt(shape.shape[1])).astype(
                np.float32
            )
        if name.endswith("lora_b"):
            return np.zeros(shape.shape, np.float32)
        stored = base[name]
        return Lazy(
            shape.shape, jnp.dtype(base_dtype), lambda index: np.asarray(stored[index]).astype(base_dtype)
        )

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def is_adapter(path: str, leaf: Any) -> bool:
    """The predicate of what LoRA trains."""
    return path.endswith(ADAPTERS)


def stored_params(config: LlamaConfig, state: zero2jax.TrainState) -> Any:
    """The parameters of a training state as `Lazy` leaves: a slice is gathered to the host when it is read.

    Every process must read the same slices in the same order.
    """

    def leaf(shape: jax.ShapeDtypeStruct, stored: jax.Array) -> Lazy:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            bounds: list[Any] = [s.indices(n)[:2] for s, n in zip(index, shape.shape)]  # without padding
            first = bounds[0][0]
            if bounds[0][1] - first == 1:
                bounds[0] = None
            everywhere = jax.sharding.NamedSharding(
                stored.sharding.mesh, jax.sharding.PartitionSpec(), memory_kind=stored.sharding.memory_kind
            )
            part = _gathered(stored, np.int32(first), tuple(bounds), everywhere)
            return np.asarray(part.addressable_data(0))

        return Lazy(shape.shape, stored.dtype, read)

    return jax.tree.map(leaf, param_shapes(config), state.params)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gathered(
    x: jax.Array, first: jax.Array, bounds: tuple[Any, ...], sharding: jax.sharding.Sharding
) -> Any:
    """A part of a stored array, replicated; `bounds` per dim, None for row `first` alone: one program for all layers.

    A dim that is sharded is cut at fixed bounds: at others the compiler would gather all of it first.
    """
    if bounds[0] is None:
        x = jax.lax.dynamic_slice_in_dim(x, first, 1)
    part = x[tuple(slice(None) if b is None else slice(*b) for b in bounds)]
    return jax.lax.with_sharding_constraint(part, sharding)


def save_folder(
    path: str | Path,
    config: LlamaConfig,
    params: Any,
    dtype: Any = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `config.json` and the tensors, as hubs hold them, a tensor at a time; adapters are merged.

    Args:
      path: folder; made if it is not there. It must not hold weights.
      config: of the model.
      params: tree of arrays or `Lazy` leaves.
      dtype: of the tensors in the files; by default each leaf's own.
      max_file_bytes: a model above it is written as several files and an index; a tensor is never divided.

    Raises:
      WeightsError: the folder holds weights; a leaf is missing or has another shape.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    existing = sorted(p.name for p in path.glob("model*.safetensors*"))
    if existing:
        raise WeightsError(
            f"writing {path}: it holds {existing[0]} already. Remove it, or give another folder."
        )
    leaves = dict(named_leaves(params))
    wrong = [
        f"{name}: {leaves[name].shape if name in leaves else 'missing'}, expected {shape.shape}"
        for name, shape in named_leaves(param_shapes(config))
        if name not in leaves or tuple(leaves[name].shape) != shape.shape
    ]
    if wrong:
        raise WeightsError(
            f"writing {path}: parameters do not fit the configuration: {', '.join(wrong[:8])}."
        )

    tensors = []
    for name in [name for name in NAMES if name in leaves]:
        shape = leaves[name].shape[1:] if LAYER in NAMES[name] else leaves[name].shape
        stored = Tensor(
            "", np.dtype(dtype or leaves[name].dtype), shape[::-1] if name.endswith("kernel") else shape
        )
        for layer, tensor in enumerate(tensor_names(config, name)):
            value = functools.partial(_value, config, leaves, name, layer)
            tensors.append(dataclasses.replace(stored, name=tensor, value=value))
    _write_files(path, tensors, max_file_bytes)
    if jax.process_index() == 0:
        (path / "config.json").write_text(config_json(config, str(np.dtype(dtype or leaves["embed"].dtype))))


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy what else a folder holds: the tokenizer and the settings of generation."""
    for pattern in ("*token*", "*.model", "vocab.json", "merges.txt", "generation_config.json", "*.jinja"):
        for file in source.glob(pattern):
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, out / file.name)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a file is to hold; `value()` gives its values, in any floating dtype, when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray] = lambda: np.zeros(0)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _value(config: LlamaConfig, leaves: dict[str, Any], name: str, layer: int) -> np.ndarray:
    """One tensor as it is on disk; a matrix with an adapter is merged in fp32, and rounded to its own dtype."""
    of_layer = [slice(layer, layer + 1)] if LAYER in NAMES[name] else []

    def read(leaf: Any) -> np.ndarray:
        index = (*of_layer, *(slice(0, n) for n in leaf.shape[len(of_layer) :]))
        return np.asarray(leaf[index]).reshape(leaf.shape[len(of_layer) :])

    x = read(leaves[name])
    module = name.removesuffix("kernel")
    if name.endswith("kernel") and f"{module}lora_a" in leaves:
        a, b = (read(leaves[module + part]).astype(np.float32) for part in ADAPTERS)
        x = (x.astype(np.float32) + (config.lora_alpha / config.lora_rank) * (a @ b)).astype(x.dtype)
    return x.T if name.endswith("kernel") else x


def _write_files(path: Path, tensors: Sequence[Tensor], max_file_bytes: int) -> None:
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(t.num_bytes for t in [*files[-1], tensor]) > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    names = [FILE]
    if len(files) > 1:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for name, group in zip(names, files):
        _write_file(path / name, group)
    if len(files) > 1 and jax.process_index() == 0:
        index = {
            "metadata": {"total_size": sum(t.num_bytes for t in tensors)},
            "weight_map": {t.name: name for name, group in zip(names, files) for t in group},
        }
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: Sequence[Tensor]) -> None:
    """Length of the header, header, tensors without gaps: the safetensors format. The first process writes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        start, end = end, end + t.num_bytes
        header[t.name] = {"dtype": DTYPES[t.dtype.name], "shape": t.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    writes = jax.process_index() == 0
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") if writes else contextlib.nullcontext() as file:
        if writes:
            file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            values = np.ascontiguousarray(t.value().astype(t.dtype, copy=False))
            if writes:
                file.write(values.reshape(-1).view(np.uint8).data)
    if writes:
        partial.rename(path)
