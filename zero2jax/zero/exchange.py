"""The collectives over the data axis, each on this device's shard of the other axes. Per-device code.

Inside a `shard_map` that is manual over `data` only, a collective over `data` sees operands that are replicated
over the automatic axes: a gradient sharded over `model` would first be all-gathered over `model` and then reduced
whole, M times the bytes. So where a value has a placement on other axes, the collective runs in an inner
`shard_map` that is manual over those axes too. (Sharding constraints around the collective do not help.)
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from zero2jax.zero.shard_plan import Placement


def all_gather(x: jax.Array, axis_name: str, dim: int, placement: Placement = ()) -> jax.Array:
    """Concatenate the devices' shards along `dim`: (..., d/N, ...) -> (..., d, ...).

    `placement` names the other mesh axes that each dim is sharded over, `()` for none.
    """
    return _on_local_shard(lambda y: jax.lax.all_gather(y, axis_name, axis=dim, tiled=True), placement)(x)


def psum_scatter(x: jax.Array, axis_name: str, dim: int, placement: Placement = ()) -> jax.Array:
    """Sum over the devices, keeping this device's shard along `dim`: (..., d, ...) -> (..., d/N, ...)."""
    scatter = lambda y: jax.lax.psum_scatter(y, axis_name, scatter_dimension=dim, tiled=True)
    return _on_local_shard(scatter, placement)(x)


def psum(x: jax.Array, axis_name: str, placement: Placement = ()) -> jax.Array:
    """Sum over the devices; every device keeps the whole."""
    return _on_local_shard(lambda y: jax.lax.psum(y, axis_name), placement)(x)


def _on_local_shard(
    collective: Callable[[jax.Array], jax.Array], placement: Placement
) -> Callable[[jax.Array], jax.Array]:
    names = {
        n for entry in placement for n in (entry if isinstance(entry, tuple) else (entry,)) if n is not None
    }
    if not names:
        return collective
    return jax.shard_map(
        collective,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=P(*placement),
        out_specs=P(*placement),
        axis_names=names,
        check_vma=False,
    )
