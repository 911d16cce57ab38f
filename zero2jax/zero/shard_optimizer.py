"""Wrap an optax optimizer so that its state lives in shards, for people who keep their own jitted step.

Global arrays, inside or outside `jax.jit`, outside `shard_map`. The user's step computes gradients of full parameters
over a batch sharded over the data axis; the wrapper asks for those gradients in shards, so that the compiler turns
their all-reduce into a reduce-scatter, updates in shards, and returns full updates (stages 1 and 2) or their shards
(stage 3, for parameters that are stored in shards). 12/N bytes per parameter with Adam, less the master if the
parameters stay replicated. ZeRO, arXiv:1910.02054, section 5.1.

Limits. Put the parameters on the mesh first, or give the step output shardings: parameters that are nowhere yet are
stored where the compiler puts them. The full gradient exists for a moment: only `zero2jax.initialize` reduces it where
backward makes it. XLA's CPU backend leaves the all-reduce and slices it; its GPU backend makes the reduce-scatter, but
for a leaf that does not divide by N.
"""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.mesh import DATA_AXIS, check_mesh, replicated
from zero2jax.base.pytrees import PyTree, is_function, path_string, shapes_of
from zero2jax.base.transformation import checked_transformation, refuse_multi_steps
from zero2jax.zero.layer_dims import guess_layer_dims
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan, check_model_axes, make_shard_plan, plan_like
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
      stage: 0 changes nothing; 2 returns full updates; 3 returns updates in shards. 1 is another name for 2, since
        where gradients are reduced is the compiler's choice here.
      param_specs: a PartitionSpec per parameter for the other mesh axes.
      layer_dims: number of leading layer dims per parameter; by default guessed from the tree.
      axis_name: axis to shard over.

    Raises:
      ValueError: a stage outside 0-3, a mesh without the axis; when initialised, a state of `optax.MultiSteps`, or
        parameters that were put on other devices than the mesh's.

    Example:
      >>> import jax.numpy as jnp, zero2jax
      >>> tx = shard_optimizer(optax.adam(1e-3), zero2jax.make_mesh(data=1))
      >>> state = tx.init({"w": jnp.ones((4, 2))})
      >>> updates, state = jax.jit(tx.update)({"w": jnp.ones((4, 2))}, state)
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"wrapping an optimizer: stage is {stage!r}; ZeRO has the stages 0, 1, 2 and 3.")
    check_mesh(mesh, axis_name)
    sharded = _Sharded(checked_transformation(tx), mesh, stage, param_specs, layer_dims, axis_name)
    # Made once, so that outside of `jit` a second update compiles nothing. Inlined, so that inside of the user's `jit`
    # the sharding constraints stand in the program that the compiler places.
    jitted = jax.jit(sharded.update, static_argnums=4, inline=True)

    def update(
        grads: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        static = {name: x for name, x in extra_args.items() if is_function(x) or isinstance(x, bool | str)}
        traced = {name: x for name, x in extra_args.items() if name not in static}
        return jitted(grads, state, params, traced, tuple(static.items()))

    return optax.GradientTransformationExtraArgs(sharded.init, update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Sharded:
    """A transformation whose state is sharded, as pure functions of global arrays."""

    inner: optax.GradientTransformationExtraArgs
    mesh: Mesh
    stage: int
    param_specs: PyTree | None
    layer_dims: PyTree | None
    axis_name: str

    def init(self, params: PyTree) -> PyTree:
        """The state of new parameters, padded and in shards."""
        self._check_devices(params)
        _, state_plan = self._plans(params)
        build = lambda params: pad(self.inner.init(params), state_plan, self.mesh)
        return jax.jit(build, out_shardings=state_plan.shardings(self.mesh))(params)

    def _check_devices(self, params: PyTree) -> None:
        """Refuse parameters that were put on some of the devices only, by which JAX would refuse the user's step."""
        devices = replicated(self.mesh).device_set
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            put = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
            if put and x.sharding.device_set != devices:
                raise ValueError(
                    f"initialising a sharded optimizer: {path_string(path)!r} lies on {len(x.sharding.device_set)} "
                    f"device(s), and the mesh has {len(devices)}. Put the parameters on the "
                    f"mesh first: jax.device_put(params, jax.NamedSharding(mesh, jax.P()))."
                )

    def update(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree | None,
        traced: dict[str, Any],
        static: tuple[tuple[str, Any], ...],
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state; extra arguments are traced (arrays, numbers) or static (functions, choices)."""
        plan, state_plan = self._plans(grads if params is None else params)
        # Parameters that are nowhere yet (fresh from an init function) would be stored where the compiler likes.
        shards = None if params is None else plan.map(self._sharded, plan.map(self._stored, params))
        updates, state = self.inner.update(
            plan.map(self._sharded, plan.map(self._full_if_padded, grads)),
            unpad(state, state_plan, self.mesh),
            shards,
            **traced,
            **dict(static),
        )
        return plan.map(self._stored, updates), pad(state, state_plan, self.mesh)

    def _plans(self, params: PyTree) -> tuple[ShardPlan, ShardPlan]:
        shapes = shapes_of(params)
        plan = make_shard_plan(
            shapes,
            check_mesh(self.mesh, self.axis_name),
            layer_dims=guess_layer_dims(shapes) if self.layer_dims is None else self.layer_dims,
            param_specs=self.param_specs,
            why_replicated="stage 0 replicates the state" if self.stage == 0 else "",
            axis_name=self.axis_name,
        )
        check_model_axes(plan, self.mesh)
        opt_shapes = jax.eval_shape(self.inner.init, shapes)
        refuse_multi_steps(opt_shapes)
        return plan, plan_like(opt_shapes, plan)

    def _sharded(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return self._place(x, leaf.spec(self.axis_name))

    def _stored(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        """`x` as a parameter is stored between steps, and so its update."""
        in_shards = self.stage == 3 and leaf.rest_shape == leaf.shape
        return self._place(x, leaf.spec(self.axis_name) if in_shards else P(*leaf.model_spec))

    def _full_if_padded(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        # A fresh array may be stored as constrained, but not in uneven shards.
        return x if leaf.rest_shape == leaf.shape else self._place(x, P(*leaf.model_spec))

    def _place(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
