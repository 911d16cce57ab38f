"""The programs that zero2jax is measured against: the same model and optimizer, without the library."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any


def plain_step(loss_fn: Callable, tx: optax.GradientTransformation, dtype: Any) -> Callable:
    """Plain data parallelism: (params, opt_state), batch -> new state and loss; state whole on every device."""

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, opt_state = state
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        loss, grads = jax.value_and_grad(loss_fn)(low, batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def constrained_step(
    loss_fn: Callable, tx: optax.GradientTransformation, dtype: Any, mesh: Mesh, specs: PyTree
) -> Callable:
    """ZeRO by sharding constraints alone: state in shards, parameters whole, gradients in shards.

    The compiler decides where to gather and how to reduce. `specs` places each parameter.
    """
    place = lambda tree, specs: jax.tree.map(
        lambda x, s: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)), tree, specs
    )
    whole = jax.tree.map(lambda _: P(), specs)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, opt_state = state
        low = place(jax.tree.map(lambda x: x.astype(dtype), params), whole)
        loss, grads = jax.value_and_grad(loss_fn)(low, batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), place(grads, specs), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (place(optax.apply_updates(params, updates), specs), opt_state), loss

    return step


def state_shapes(shapes: PyTree, tx: optax.GradientTransformation, mesh: Mesh, specs: PyTree) -> PyTree:
    """Shapes of (fp32 params, opt_state) with each parameter, and each leaf of its shape, placed by `specs`."""
    masters = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=NamedSharding(mesh, s)),
        shapes,
        specs,
    )
    by_shape = {x.shape: x.sharding for x in jax.tree.leaves(masters)}
    place = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=by_shape.get(x.shape, NamedSharding(mesh, P()))
    )
    return masters, jax.tree.map(place, jax.eval_shape(tx.init, masters))
