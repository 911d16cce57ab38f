"""Which dim of each leaf is sharded, how it is padded, or why it is replicated. Pure arithmetic over shapes.

In: trees of shapes, `jax.ShapeDtypeStruct`s, and any number of shards N. Out: a `LeafPlan` per leaf. Outside
`shard_map`, before anything is allocated. A leaf of shape (d0, ..., dk) that is sharded on dim i is stored as
(d0, ..., ceil(d_i / N) * N, ..., dk), each device holding 1/N of it; the padding is taken off again inside the step, so
nobody computes with it.

The rule: the dim that pads least, the first one on a tie (a gather along the leading dim of what a layer uses is
contiguous), never a layer dim (a stack of layers is not to be gathered at once), and never a dim that tensor
parallelism holds. A leaf with fewer elements than shards is replicated, and the plan says so.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054, section 5.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.mesh import DATA_AXIS, AxisName, padded_size
from zero2jax.base.pytrees import PyTree, check_same_structure, path_names
from zero2jax.base.tables import aligned

Placement = tuple[Any, ...]  # one PartitionSpec entry per dim: None, an axis name or a tuple of axis names


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf is stored: a leaf of the pytrees in a `ShardPlan`, hashable.

    Attributes:
      names: the names along the leaf's key path, `("blocks", "attn", "kernel")`: what it is known by.
      shape: true shape, without padding.
      dtype: dtype at rest.
      num_shards: N, the size of the axis that state is sharded over.
      dim: sharded dim, or None for a leaf that is replicated.
      reason: why it is replicated; empty for a sharded leaf.
      layer_dims: number of leading dims that a scan over layers takes off before the leaf is used.
      model_spec: PartitionSpec entries of the other mesh axes, one per dim (tensor parallelism).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    num_shards: int
    dim: int | None = None
    reason: str = ""
    layer_dims: int = 0
    model_spec: Placement = ()

    @property
    def path(self) -> str:
        """The names as people read and write them: `"blocks/attn/kernel"`."""
        return "/".join(self.names)

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """Global shape at rest, with padding."""
        if self.dim is None:
            return self.shape
        return tuple(
            padded_size(size, self.num_shards) if i == self.dim else size for i, size in enumerate(self.shape)
        )

    @property
    def rest_bytes(self) -> int:
        """Bytes at rest per device along the data axis (all model shards together), padding included."""
        full_bytes = math.prod(self.rest_shape) * int(self.dtype.itemsize)
        return full_bytes if self.dim is None else full_bytes // self.num_shards

    def num_model_shards(self, mesh: Mesh) -> int:
        """The number of parts that the leaf is sharded into over the mesh axes of `model_spec`."""
        return math.prod(mesh.shape[n] for entry in self.model_spec for n in _axis_names(entry))

    def device_bytes(self, mesh: Mesh) -> int:
        """Bytes at rest on each device, padding included."""
        return self.rest_bytes // self.num_model_shards(mesh)

    def spec(self, axis_name: AxisName = DATA_AXIS) -> P:
        """PartitionSpec over every axis of the mesh, of the true shape and the one at rest alike."""
        entries = list(self.model_spec) or [None] * len(self.shape)
        if self.dim is not None:
            entries[self.dim] = axis_name
        return _trimmed(entries)

    def manual_spec(self, axis_name: AxisName = DATA_AXIS) -> P:
        """PartitionSpec over the data axis alone: what `shard_map`, manual over that axis, is told."""
        return P() if self.dim is None else P(*[None] * self.dim, axis_name)


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """The plan of a pytree: its leaves' plans in the order of `jax.tree.leaves`, and its structure.

    `num_shards` is N, `axis_name` the mesh axis or axes of that size, `why_replicated` why all leaves are (or empty).
    """

    leaves: tuple[LeafPlan, ...]
    treedef: Any
    num_shards: int
    axis_name: AxisName = DATA_AXIS
    why_replicated: str = ""

    @property
    def tree(self) -> PyTree:
        """The pytree with a `LeafPlan` in the place of each leaf."""
        return self.treedef.unflatten(self.leaves)

    def map(self, fun: Callable[..., Any], *trees: PyTree) -> PyTree:
        """`fun(leaf_plan, *leaves)` over trees of the plan's structure."""
        columns = [self.treedef.flatten_up_to(tree) for tree in trees]
        return self.treedef.unflatten([fun(*row) for row in zip(self.leaves, *columns, strict=True)])

    def sharding(self, leaf: LeafPlan, mesh: Mesh) -> NamedSharding:
        """The sharding of one of its leaves at rest."""
        return NamedSharding(mesh, leaf.spec(self.axis_name))

    def shardings(self, mesh: Mesh) -> PyTree:
        """The sharding of each leaf at rest."""
        return self.map(lambda leaf: self.sharding(leaf, mesh))

    def rest_shapes(self, mesh: Mesh) -> PyTree:
        """`jax.ShapeDtypeStruct` of each leaf at rest: padded global shape, dtype and sharding."""
        shape = lambda leaf: jax.ShapeDtypeStruct(
            leaf.rest_shape, leaf.dtype, sharding=self.sharding(leaf, mesh)
        )
        return self.map(shape)

    def manual_specs(self) -> PyTree:
        """Per leaf, the PartitionSpec for a `shard_map` that is manual over the data axis."""
        return self.map(lambda leaf: leaf.manual_spec(self.axis_name))

    @property
    def rest_bytes(self) -> int:
        """Bytes at rest per device along the data axis, padding included."""
        return sum(leaf.rest_bytes for leaf in self.leaves)

    def table(self) -> str:
        """The plan as text: a line per leaf with shape, sharded dim, padding and bytes, or the reason."""
        rows = [("leaf", "shape", "dtype", "sharded dim", "padded to", "bytes/device", "why replicated")]
        for leaf in self.leaves:
            dim = leaf.dim
            rows.append(
                (
                    leaf.path or "(root)",
                    str(leaf.shape),
                    str(leaf.dtype),
                    "-" if dim is None else str(dim),
                    "-" if dim is None or leaf.rest_shape == leaf.shape else str(leaf.rest_shape[dim]),
                    f"{leaf.rest_bytes:,}",
                    leaf.reason,
                )
            )
        total = (
            f"{len(self.leaves)} leaves over {self.num_shards} shards: {self.rest_bytes:,} bytes per device"
        )
        others = {name for leaf in self.leaves for entry in leaf.model_spec for name in _axis_names(entry)}
        if others:
            total += f", before the leaves that also lie on {', '.join(sorted(others))} are sharded over it"
        return "\n".join([*aligned(rows), total])

    __str__ = table


def make_shard_plan(
    shapes: PyTree,
    num_shards: int,
    *,
    layer_dims: PyTree | None = None,
    param_specs: PyTree | None = None,
    why_replicated: str = "",
    axis_name: AxisName = DATA_AXIS,
) -> ShardPlan:
    """Decide for every leaf which dim is sharded, or why none is.

    Args:
      shapes: tree of anything with `shape` and `dtype`.
      num_shards: N, any positive number.
      layer_dims: number of leading layer dims per leaf, an int for all or a tree of ints; None means 0.
      param_specs: a PartitionSpec (or None) per leaf for the other mesh axes, as for `jax.jit`.
      why_replicated: if not empty, every leaf is replicated, and this is the reason given.
      axis_name: mesh axis of size N, or several axes of that size together.

    Example:
      >>> plan = make_shard_plan({"w": jax.ShapeDtypeStruct((1305, 64), jnp.float32)}, 8)
      >>> plan.leaves[0].dim, plan.leaves[0].rest_shape
      (1, (1305, 64))
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    depth: Sequence[int] = [0] * len(flat)
    if layer_dims is not None:
        depth = [layer_dims] * len(flat) if isinstance(layer_dims, int) else jax.tree.leaves(layer_dims)
    specs: Sequence[Any] = [None] * len(flat)
    if param_specs is not None:
        is_spec = lambda x: x is None or isinstance(x, P)
        named = jax.tree.map(lambda x: 0 if is_spec(x) else x, param_specs, is_leaf=is_spec)
        check_same_structure(shapes, named, "the parameters", "`param_specs`")
        specs = jax.tree.leaves(param_specs, is_leaf=is_spec)
    plan = ShardPlan((), treedef, num_shards=num_shards, axis_name=axis_name, why_replicated=why_replicated)
    leaves = tuple(
        _plan_leaf(plan, path_names(path), x, int(d), spec)
        for (path, x), d, spec in zip(flat, depth, specs, strict=True)
    )
    return dataclasses.replace(plan, leaves=leaves)


def _plan_leaf(
    plan: ShardPlan, names: tuple[str, ...], array: Any, layer_dims: int, spec: P | None
) -> LeafPlan:
    """The plan of one leaf by the rule above; of `plan`, only what holds for all leaves is read."""
    shape, dtype, num_shards = tuple(array.shape), array.dtype, plan.num_shards
    model_spec = _full_spec("/".join(names), shape, spec, plan.axis_name)
    layer_dims = min(layer_dims, len(shape))
    free = [i for i in range(layer_dims, len(shape)) if model_spec[i] is None and shape[i] > 1]
    size = math.prod(shape)
    if num_shards == 1:
        reason = "one shard"
    elif size == 0:
        reason = "no elements"
    elif plan.why_replicated:
        reason = plan.why_replicated
    elif not shape:
        reason = "scalar"
    elif jnp.issubdtype(dtype, jax.dtypes.extended):
        reason = "random keys"  # cannot be padded, and are few
    elif size < num_shards:
        reason = f"{size} elements, fewer than {num_shards} shards"
    elif not free and layer_dims == len(shape):
        reason = "one number per layer"
    elif not free:
        reason = "every dim is held by another mesh axis"
    else:
        reason = ""
    dim = None if reason else min(free, key=lambda i: padded_size(shape[i], num_shards) / shape[i])
    return LeafPlan(
        names=names,
        shape=shape,
        dtype=_dtype(dtype),
        num_shards=num_shards,
        dim=dim,
        reason=reason,
        layer_dims=layer_dims,
        model_spec=model_spec,
    )


def _full_spec(path: str, shape: tuple[int, ...], spec: P | None, axis_name: AxisName) -> Placement:
    entries = tuple(spec) if spec is not None else ()
    if len(entries) > len(shape):
        raise ValueError(
            f"reading param_specs for {path!r} of shape {shape}: {spec} has {len(entries)} entries and the leaf has "
            f"{len(shape)} dims. Give at most one entry per dim."
        )
    taken = [name for entry in entries for name in _axis_names(entry) if name in _axis_names(axis_name)]
    if taken:
        raise ValueError(
            f"reading param_specs for {path!r}: {spec} names the axis {taken[0]!r}, which the shard plan decides "
            f"about. Name only the other mesh axes (tensor parallelism)."
        )
    return (*entries, *[None] * (len(shape) - len(entries)))


def check_model_axes(plan: ShardPlan, mesh: Mesh, taken: Sequence[str] = ()) -> None:
    """Raise a ValueError for model specs that name an unknown or a `taken` axis, or a dim that does not divide."""
    for leaf in plan.leaves:
        placing = f"placing {leaf.path!r} of shape {leaf.shape} by P{leaf.model_spec}"
        all_names = [name for entry in leaf.model_spec for name in _axis_names(entry)]
        if twice := [name for name in all_names if all_names.count(name) > 1]:
            raise ValueError(
                f"{placing}: the axis {twice[0]!r} stands in it twice. A mesh axis shards one dim of an array: name it "
                f"once."
            )
        for size, entry in zip(leaf.shape, leaf.model_spec, strict=True):
            names = _axis_names(entry)
            if not set(taken).isdisjoint(names):
                raise ValueError(
                    f"{placing}: the axes {list(taken)} hold different examples. Name only the other mesh axes "
                    f"(tensor parallelism) in param_specs."
                )
            unknown = [n for n in names if n not in mesh.shape]
            if unknown:
                raise ValueError(
                    f"{placing}: the mesh has no axis {unknown[0]!r}, only {dict(mesh.shape)}. Add it in make_mesh, or "
                    f"leave it out of param_specs."
                )
            parts = math.prod(mesh.shape[n] for n in names)
            if size % parts:
                raise ValueError(
                    f"{placing}: a dim of {size} does not divide into {parts} parts. Choose another dim, or leave this "
                    f"leaf out of param_specs."
                )


def plan_like(shapes: PyTree, params: ShardPlan) -> ShardPlan:
    """The plan of a tree that holds copies of the parameters among other things, such as an optimizer state.

    Derived from each leaf's own shape: a leaf whose path ends in a parameter's path and has its shape is stored
    as that parameter is, so that elementwise work needs no communication; with another shape (a factored moment)
    it gets a plan of its own, keeping the parameter's layer dims. Works for any optax state.
    """
    known = {leaf.names: leaf for leaf in params.leaves}

    def plan_one(names: tuple[str, ...], x: Any) -> LeafPlan:
        param = owner(names, known)
        if param is not None and param.shape == tuple(x.shape):
            return dataclasses.replace(param, names=names, dtype=_dtype(x.dtype))
        layer_dims = param.layer_dims if param is not None and len(x.shape) > param.layer_dims else 0
        return _plan_leaf(params, names, x, layer_dims, None)

    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = tuple(plan_one(path_names(path), x) for path, x in flat)
    return dataclasses.replace(params, leaves=leaves, treedef=treedef)


def owner(names: tuple[str, ...], params: Mapping[tuple[str, ...], LeafPlan]) -> LeafPlan | None:
    """The parameter, of those by their names, with which the path of a leaf of an optimizer's state ends."""
    suffixes = [names[start:] for start in range(len(names) + 1)]
    return next((params[suffix] for suffix in suffixes if suffix in params), None)


def _dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def _axis_names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _trimmed(entries: Sequence[Any]) -> P:
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)
