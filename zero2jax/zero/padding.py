"""Between arrays as they rest (padded, evenly sharded) and as the optimizer sees them (true shapes). Global arrays.

Outside `shard_map`, under `jax.jit`. A cut array keeps its sharding: the compiler accepts uneven shards inside a
program, so elementwise work on a leaf that does not divide still communicates nothing.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zero2jax.base.pytrees import PyTree
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan


def cut(tree: PyTree, plan: ShardPlan, mesh: Mesh) -> PyTree:
    """Padded leaves at rest -> leaves of true shape, sharded the same way."""

    def one(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        if leaf.rest_shape == leaf.shape:
            return x
        return _constrain(jax.lax.slice(x, [0] * x.ndim, leaf.shape), leaf, plan, mesh)

    return plan.map(one, tree)


def pad(tree: PyTree, plan: ShardPlan, mesh: Mesh) -> PyTree:
    """Leaves of true shape -> padded leaves (zeros), placed as they rest."""

    def one(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        if leaf.rest_shape != leaf.shape:
            widths = [(0, rest - true) for rest, true in zip(leaf.rest_shape, leaf.shape, strict=True)]
            x = jnp.pad(x, widths)
        return _constrain(x, leaf, plan, mesh)

    return plan.map(one, tree)


def _constrain(x: jax.Array, leaf: LeafPlan, plan: ShardPlan, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, leaf.spec(plan.axis_name)))
