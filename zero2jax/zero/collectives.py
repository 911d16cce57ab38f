"""Sums and concatenations over one mesh axis, of arrays that may be sharded over others. Per-device code.

Inside a `shard_map` that is manual over the data axes. `placement` names the other mesh axes that each dim of the array
is sharded over, `()` for none.

A collective over `data` inside a `shard_map` that is manual over `data` only sees operands that are replicated
over the automatic axes: a gradient sharded over `model` would first be all-gathered over `model` and then reduced
in full, M times the bytes. So on a mesh with other axes the collective runs in an inner `shard_map` that is manual over
those too. (Sharding constraints around the collective do not help; and without it, XLA's CPU compiler ends the process
at a sum in 16 bits: "Invalid binary instruction opcode copy".)

A stack whose leading dims other axes hold (the stages of a pipeline) is exchanged a layer at a time in there, `layers`
dims deep: in one piece, the compiler would copy the stack into another layout, and a loop outside would take each layer
from the device that has it.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zero2jax.base.mesh import padded_size
from zero2jax.zero.shard_plan import Placement


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` with zeros behind it in each dim that is longer in `shape`. Global arrays or per-device ones."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, padded - true) for padded, true in zip(shape, x.shape, strict=True)])


def all_gather(
    x: jax.Array, axis_name: str, dim: int, placement: Placement = (), layers: int = 0
) -> jax.Array:
    """Concatenate the devices' shards along `dim`: (..., d/N, ...) -> (..., d, ...)."""
    gather = lambda y: jax.lax.all_gather(y, axis_name, axis=dim - layers, tiled=True)
    return on_local_shard(_of_each_layer(gather, layers), placement)(x)


def psum_scatter(
    x: jax.Array, axis_name: str, dim: int, placement: Placement = (), layers: int = 0
) -> jax.Array:
    """Sum over the devices, keeping this device's shard along `dim`: (..., d, ...) -> (..., d/N, ...)."""
    scatter = lambda y: jax.lax.psum_scatter(y, axis_name, scatter_dimension=dim - layers, tiled=True)
    return on_local_shard(_of_each_layer(scatter, layers), placement)(x)


def psum(x: jax.Array, axis_name: str, placement: Placement = ()) -> jax.Array:
    """Sum over the devices, replicated on all of them."""
    return on_local_shard(lambda y: jax.lax.psum(y, axis_name), placement)(x)


def scatter_in_order(
    x: jax.Array, axis_name: str, dim: int, placement: Placement = (), layers: int = 0
) -> jax.Array:
    """`psum_scatter`, the addends travelling in the dtype of `x` and added in fp32, or wider, in a fixed tree."""
    dim -= layers

    def scatter(x: jax.Array) -> jax.Array:
        num = jax.lax.axis_size(axis_name)
        parts = jax.lax.all_to_all(x, axis_name, dim, dim, tiled=True)  # those of device 0, of device 1, ...
        parts = parts.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
        return tree_sum(jnp.moveaxis(parts, dim, 0))

    return on_local_shard(_of_each_layer(scatter, layers), placement)(x)


def sum_in_order(x: jax.Array, axis_name: str, placement: Placement = ()) -> jax.Array:
    """`psum` like `scatter_in_order`; the shards of the sum are gathered in its dtype."""

    def summed(x: jax.Array) -> jax.Array:
        if x.size == 0:  # which XLA does not gather
            return x.astype(jnp.promote_types(x.dtype, jnp.float32))
        flat = pad_to(x.reshape(-1), (padded_size(x.size, jax.lax.axis_size(axis_name)),))
        shard = scatter_in_order(flat, axis_name, 0)
        return jax.lax.all_gather(shard, axis_name, tiled=True)[: x.size].reshape(x.shape)

    return on_local_shard(summed, placement)(x)


def tree_sum(parts: jax.Array) -> jax.Array:
    """(N, ...) -> (...) of at least fp32: halves are added first, so that part i meets part i + N/2."""
    parts = parts.astype(jnp.promote_types(parts.dtype, jnp.float32))
    while len(parts) > 1:
        half = 1 << (len(parts) - 1).bit_length() - 1
        upper = len(parts) - half
        parts = jnp.concatenate([parts[:upper] + parts[half:], parts[upper:half]])
    return parts[0]


def _of_each_layer(
    collective: Callable[[jax.Array], jax.Array], layers: int
) -> Callable[[jax.Array], jax.Array]:
    """`collective` of each layer of a stack, in loops over its leading dims."""
    for _ in range(layers):
        collective = functools.partial(jax.lax.map, collective)
    return collective


def on_local_shard(
    collective: Callable[[jax.Array], jax.Array], placement: Placement
) -> Callable[[jax.Array], jax.Array]:
    """`collective` on what this device holds, manual over the automatic axes too."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, axis_type in types if axis_type != AxisType.Manual}
    if not names:
        return collective
    return jax.shard_map(
        collective,
        mesh=mesh,
        in_specs=P(*placement),
        out_specs=P(*placement),
        axis_names=names,
        check_vma=False,
    )
