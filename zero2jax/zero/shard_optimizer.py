"""Wrap an optax optimizer so that its state lives in shards, for people who keep their own jitted step.

Global arrays, inside or outside `jax.jit`, outside `shard_map`. The user's step computes gradients of whole
parameters over a batch cut over the data axis; the wrapper asks for those gradients in shards, so that the compiler
turns their all-reduce into a reduce-scatter, updates in shards, and returns the updates whole (stages 1 and 2) or in
shards (stage 3, for parameters that rest in shards). 12/N bytes per parameter with Adam, less the master if the
parameters stay whole. ZeRO, arXiv:1910.02054, section 5.1.

Limits. Put the parameters on the mesh first, or give the step output shardings: parameters that are nowhere yet rest
where the compiler puts them. The whole gradient exists for a moment: only `zero2jax.initialize` reduces it where
backward makes it. XLA's CPU backend leaves the all-reduce and slices it; its GPU backend makes the reduce-scatter, but
for a leaf that does not divide by N.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.mesh import DATA_AXIS, check_mesh
from zero2jax.base.pytrees import PyTree, shapes_of
from zero2jax.base.transformation import checked_transformation, refuse_multi_steps
from zero2jax.zero.layer_dims import guess_layer_dims
from zero2jax.zero.shard_plan import (
    LeafPlan,
    ShardPlan,
    check_model_axes,
    make_shard_plan,
    plan_like,
)
from zero2jax.zero.state import pad, unpad


def shard_optimizer(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    stage: int = 2,
    *,
    param_specs: PyTree | None = None,
    layer_dims: PyTree | None = None,
    axis_name: str = DATA_AXIS,
) -> optax.GradientTransformationExtraArgs:
    """`tx` with its state sharded over a mesh axis; same updates, same state structure (leaves may be padded).

    Args:
      tx: any optax transformation.
      mesh: mesh with an axis `axis_name` of size N; all axes of type Auto.
      stage: 0 changes nothing; 1 and 2 return whole updates (the compiler makes them the same program); 3 returns
        updates in shards.
      param_specs: a PartitionSpec per parameter for the other mesh axes.
      layer_dims: number of leading layer dims per parameter; by default guessed from the tree.
      axis_name: axis to shard over.

    Raises:
      ValueError: a stage outside 0-3, a mesh without the axis; when initialised, a state of `optax.MultiSteps`.

    Example:
      >>> import jax.numpy as jnp, zero2jax
      >>> tx = shard_optimizer(optax.adam(1e-3), zero2jax.make_mesh(data=1))
      >>> state = tx.init({"w": jnp.ones((4, 2))})
      >>> updates, state = jax.jit(tx.update)({"w": jnp.ones((4, 2))}, state)
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"wrapping an optimizer: stage is {stage!r}; ZeRO has the stages 0, 1, 2 and 3.")
    num_shards = check_mesh(mesh, axis_name)
    inner = checked_transformation(tx)

    def plans(params: PyTree) -> tuple[ShardPlan, ShardPlan]:
        shapes = shapes_of(params)
        plan = make_shard_plan(
            shapes,
            num_shards,
            layer_dims=guess_layer_dims(shapes) if layer_dims is None else layer_dims,
            param_specs=param_specs,
            whole="stage 0 keeps the state whole" if stage == 0 else "",
            axis_name=axis_name,
        )
        check_model_axes(plan, mesh)
        opt_shapes = jax.eval_shape(inner.init, shapes)
        refuse_multi_steps(opt_shapes)
        return plan, plan_like(opt_shapes, plan)

    def init(params: PyTree) -> PyTree:
        _, state_plan = plans(params)
        build = jax.jit(
            lambda params: pad(inner.init(params), state_plan, mesh),
            out_shardings=state_plan.shardings(mesh),
        )
        return build(params)

    def apply(grads: PyTree, state: PyTree, params: PyTree | None, extra_args: dict[str, Any]) -> Any:
        plan, state_plan = plans(grads if params is None else params)
        shard = lambda tree: plan.map(lambda leaf, x: _place(x, mesh, leaf.spec(axis_name)), tree)
        at_rest = lambda tree: plan.map(
            lambda leaf, x: _place(x, mesh, _rest_spec(leaf, stage, axis_name)), tree
        )
        # Whole first where a leaf does not divide: a fresh array may come to rest as constrained, but not uneven.
        whole = lambda leaf, x: x if leaf.rest_shape == leaf.shape else _place(x, mesh, P(*leaf.model_spec))
        # Parameters that are nowhere yet (fresh from an init function) would otherwise rest where the compiler likes.
        shards = None if params is None else shard(at_rest(params))
        updates, state = inner.update(
            shard(plan.map(whole, grads)), unpad(state, state_plan, mesh), shards, **extra_args
        )
        return at_rest(updates), pad(state, state_plan, mesh)

    def update(
        grads: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((grads, state, params))):
            return apply(grads, state, params, extra_args)
        return jax.jit(lambda grads, state, params: apply(grads, state, params, extra_args))(
            grads, state, params
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _rest_spec(leaf: LeafPlan, stage: int, axis_name: str) -> P:
    """Where a parameter rests between steps, and so its update."""
    return leaf.spec(axis_name) if stage == 3 and leaf.rest_shape == leaf.shape else P(*leaf.model_spec)


def _place(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
