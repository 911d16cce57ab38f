"""Between the state in its shards and the named leaves of a checkpoint. Global arrays; outside any jitted step.

Saving takes each shard from one of the devices that hold it (replica 0), drops the padding and divides the shard into
blocks. Restoring asks, for each device, for the box of the true leaf that lies in its padded shard. Neither direction
builds a full leaf that is not replicated.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero2jax.base import jaxprs
from zero2jax.base.mesh import moved, replicated
from zero2jax.base.pytrees import path_string
from zero2jax.base.transformation import kept_numbers
from zero2jax.base.versions import installed_version
from zero2jax.checkpoints.format import Box, Checkpoint, CheckpointError, SavedLeaf, cut_into_blocks, part_of
from zero2jax.zero.rounding import widened
from zero2jax.zero.state import Layout, TrainState, unpad

_HOST_BYTES = 256 * 2**20  # of the shards of one leaf that wait on the host at a time


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf of the state as an engine stores it between steps.

    Attributes:
      name: `params/blocks/w`, `opt_state/0/mu/blocks/w`, `step`, `rng`, `loss_scale/scale`.
      shape: true shape.
      rest: shape with padding, dtype and sharding.
      trainable: for a parameter, whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    rest: jax.ShapeDtypeStruct
    trainable: bool | None = None

    @property
    def is_key(self) -> bool:
        """Whether it holds typed random keys."""
        return bool(jnp.issubdtype(self.rest.dtype, jax.dtypes.prng_key))

    def __str__(self) -> str:
        return f"{self.name!r} {self.rest.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class HostBlock:
    """A box of a leaf in host memory, to be written."""

    leaf: SavedLeaf
    box: Box
    value: np.ndarray


def state_leaves(layout: Layout, mesh: jax.sharding.Mesh) -> list[StateLeaf]:
    """The leaves of an engine's state in the order of `jax.tree.leaves`.

    Raises:
      CheckpointError: two leaves have the same name, as with keys that hold a slash.
    """
    state = layout.abstract_state(mesh)
    abstract = jax.tree_util.tree_leaves_with_path(state)
    scalars = [() for _ in jax.tree.leaves(state.loss_scale)]
    shapes = [
        (),
        *[x.shape for x in (*layout.params.leaves, *layout.opt_state.leaves)],
        state.rng.shape,
        *scalars,
    ]
    trainable = [None, *layout.trainable, *[None] * (len(shapes) - 1 - len(layout.trainable))]
    names = [path_string(path) for path, _ in abstract]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(
            f"naming the leaves of the state: {twice[:3]} would each be the name of two leaves. A checkpoint knows "
            f"leaves by name; rename keys of the parameters that hold a '/' or differ only in their type."
        )
    return [
        StateLeaf(name, tuple(shape), x, flag)
        for name, shape, (_, x), flag in zip(names, shapes, abstract, trainable, strict=True)
    ]


def host_blocks(leaf: StateLeaf, x: jax.Array, *, copy: bool) -> tuple[SavedLeaf, list[HostBlock]]:
    """What this process writes of a leaf: the leaf as saved, and its blocks in host memory.

    Args:
      leaf: how the leaf is stored.
      x: global array of shape `leaf.rest.shape`; or files that stand for one, whose shards outlast them.
      copy: whether the blocks must outlive `x`, which the next step donates.
    """
    impl = None
    if leaf.is_key:
        impl, x = str(jax.random.key_impl(x)), jax.random.key_data(x)
    shape = (*leaf.shape, *x.shape[len(leaf.shape) :])
    saved = SavedLeaf(leaf.name, np.dtype(x.dtype), shape, (), leaf.trainable, impl)
    blocks = []
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    in_files = not isinstance(x, jax.Array)
    for shard in [] if in_files else shards:
        shard.data.copy_to_host_async()  # from all devices at once
    for shard in shards:
        box = _true_box(shard.index, x.shape, shape)
        extent = [b - a for a, b in box]
        if 0 in extent:
            continue
        # Padding is at the end, so the true part of a shard begins where the shard does.
        host = part_of(np.asarray(shard.data), [slice(0, n) for n in extent])
        shared = shard.device.platform == "cpu" or x.sharding.memory_kind != "device"
        if copy and shared and not in_files:
            host = np.array(host)  # NumPy may look at the very memory that the next step donates
        for block in cut_into_blocks([a for a, _ in box], extent, saved.dtype.itemsize):
            inside = [slice(a - o, b - o) for (a, b), (o, _) in zip(block, box, strict=True)]
            blocks.append(HostBlock(saved, block, part_of(host, inside)))
    return saved, blocks


def updated_beside_views(layout: Layout) -> bool:
    """Whether steps leave alone what NumPy sees of a state: it is updated by XLA's CPU backend.

    That does not write over what NumPy looks at, and updates a copy of it instead. So what is written to disk by then,
    and let go, need not be copied.
    """
    return layout.host is not None and not layout.pinned_state and _views_outlast_donation()


@functools.cache
def _views_outlast_donation() -> bool:
    """Whether the CPU backend does that; asked of it once."""
    x = jax.device_put(np.zeros(1024, np.float32), jax.local_devices(backend="cpu")[0], may_alias=False)
    view = np.asarray(x)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    return not view.any()


def read_leaf(checkpoint: Checkpoint, saved: SavedLeaf, leaf: StateLeaf) -> jax.Array:
    """A leaf of a checkpoint in the shards of `leaf`, converted to its dtype; shapes must agree."""
    if not leaf.is_key:
        return _read_sharded(checkpoint, saved, leaf.rest)
    data = jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=leaf.rest.sharding)  # replicated
    keys = _read_sharded(checkpoint, saved, data)
    wrap = lambda data: jax.random.wrap_key_data(data, impl=saved.key_impl)
    return jax.jit(wrap, out_shardings=leaf.rest.sharding)(keys)


def restored_state(like: TrainState, leaves: Sequence[jax.Array]) -> TrainState:
    """The state with these leaves, in the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _read_sharded(checkpoint: Checkpoint, saved: SavedLeaf, rest: Any) -> jax.Array:
    where = rest.sharding.addressable_devices_indices_map(rest.shape)
    shard_bytes = math.prod(rest.sharding.shard_shape(rest.shape)) * rest.dtype.itemsize
    devices = list(where)
    per_group = max(1, _HOST_BYTES // max(1, shard_bytes))
    arrays = []
    for i in range(0, len(devices), per_group):
        buffers = _read_boxes(checkpoint, saved, rest, [where[d] or () for d in devices[i : i + per_group]])
        for device, buffer in zip(devices[i : i + per_group], buffers, strict=True):
            placement = jax.sharding.SingleDeviceSharding(device, memory_kind=rest.sharding.memory_kind)
            arrays.append(jax.device_put(buffer(), placement))
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(rest.shape, rest.sharding, arrays)


def _read_boxes(
    checkpoint: Checkpoint, saved: SavedLeaf, rest: Any, indices: Sequence[tuple[slice, ...]]
) -> list[Callable[[], np.ndarray]]:
    """Per index a function that gives its padded shard, an array of its own; equal shards are read once."""
    shards: dict[Box, np.ndarray] = {}
    targets, keys = [], []
    for index in indices:
        padded = _true_box(index, rest.shape, rest.shape)
        box = _true_box(index, rest.shape, saved.shape)
        keys.append(padded)
        if padded not in shards:
            shards[padded] = np.zeros([b - a for a, b in padded], rest.dtype)
            part = part_of(shards[padded], [slice(0, b - a) for a, b in box])
            if part.size:
                targets.append((box, part))
    checkpoint.fill(saved, targets)
    # A device of a CPU may keep the array it is given, and the state is donated: never give one to two devices.
    first = {key: i for i, key in reversed(list(enumerate(keys)))}

    def shard(i: int) -> np.ndarray:
        values = shards[keys[i]]
        return values if first[keys[i]] == i else values.copy()

    return [functools.partial(shard, i) for i in range(len(keys))]


def manifest_info(
    settings: Mapping[str, Any], config: Mapping[str, Any] | None, layout: Layout, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """What a manifest says of the engine and of the versions, in JSON's own types; `format` lists the keys.

    Args:
      settings: plain values by name, those of the step.
      config: the configuration file that the engine was built from, if any.
      layout: the layout of the state.
      mesh: device mesh.
    """
    packages = ("zero2jax", "jax", "numpy", "optax", "orbax-checkpoint")
    versions = {package: installed_version(package) or "unknown" for package in packages}
    info = {
        "versions": versions,
        "config": config,
        "engine": {**settings, "mesh": {name: int(size) for name, size in mesh.shape.items()}},
        "rng_impl": default_key_impl(),
        "containers": optimizer_containers(layout),
    }
    plain = lambda x: x.tolist() if isinstance(x, np.ndarray | np.generic | jax.Array) else str(x)
    return cast(dict[str, Any], json.loads(json.dumps(info, default=plain)))


def optimizer_containers(layout: Layout) -> dict[str, str]:
    """Class names of the named tuples in the optimizer's state, `{"opt_state/0": "ScaleByAdamState"}`.

    Only tuples that hold leaves. Leaves of two optimizers may agree in names and shapes and differ in meaning.
    """
    containers: dict[str, str] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
        if isinstance(node, tuple) and hasattr(node, "_fields") and jax.tree.leaves(node):
            containers["/".join(filter(None, ("opt_state", path_string(path))))] = type(node).__name__
        for key, child in below:
            if key:
                walk(child, (*path, *key))

    walk(layout.opt_state.tree, ())
    return containers


def default_key_impl() -> str:
    """The implementation of random keys that this program uses where it names none."""
    return str(jax.random.key_impl(jax.random.key(0)))


def _true_box(index: tuple[slice, ...], rest_shape: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The part of a shard's index that lies within the true shape."""
    box = []
    for i, (rest, true) in enumerate(zip(rest_shape, shape, strict=True)):
        start, stop, _ = (index[i] if i < len(index) else slice(None)).indices(rest)
        box.append((min(start, true), min(stop, true)))
    return tuple(box)


def first_numbers(
    tx: optax.GradientTransformation, state: TrainState, layout: Layout, mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
    """The numbers that the optimizer keeps as state (`optax.inject_hyperparams`) as its first state has them.

    By the name of the leaf, replicated. Under `jax.jit` no other part of the first state is computed.
    """
    if not kept_numbers(state.opt_state):
        return {}
    home = layout.host or mesh
    init = lambda trained: kept_numbers(tx.init(widened(unpad(trained, layout.trained_params, home))))
    jaxpr, shapes = jaxprs.trace(init, layout.trained_params.rest_shapes(home))
    function, used = jaxprs.part_of(jaxprs.inlined(jaxpr), range(len(jax.tree.leaves(shapes))))
    trained = jax.tree.leaves(layout.trained(state.params))
    homes = jax.tree.leaves(layout.trained_params.shardings(home))
    given = [trained[i] if isinstance(trained[i], jax.Array) else trained[i].load() for i in used]
    numbers = jax.jit(function, out_shardings=replicated(home))(*moved(given, [homes[i] for i in used]))
    return {
        f"opt_state/{name}": x for name, x in jax.tree.unflatten(jax.tree.structure(shapes), numbers).items()
    }
