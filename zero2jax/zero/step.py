"""One training step as a pure function of global arrays, and the loss without an update. Not jitted here.

In: the state at rest and a batch, global arrays sharded over the data axes. Out: the new state at rest, and metrics.

`gradients` runs inside a `shard_map` that is manual over the data axes. Its gradient shards leave as global arrays
sharded over the data axis, and what follows is plain optax, outside of it, on global arrays of true shape. So every
optax transformation is right; for elementwise ones the compiler finds nothing to communicate but the scalar of a global
norm, and for others it inserts what they need.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero2jax.base.losses import Loss, LossTerms, SliceContext, WeightedSum
from zero2jax.base.pytrees import PyTree
from zero2jax.base.transformation import learning_rate
from zero2jax.base.wide_sums import needs_wide_sums, with_wide_sums
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.gradients import full_params, local_gradients, local_loss
from zero2jax.zero.loss_scale import LossScaleState
from zero2jax.zero.microbatches import Gradient
from zero2jax.zero.precision import wide_dtype
from zero2jax.zero.prepare import chosen, prepared, updated
from zero2jax.zero.rounding import rounding_key
from zero2jax.zero.state import Layout, TrainState, merge, pad, store_frozen, unpad

Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Everything fixed about a step; its methods are pure functions of global arrays, to be jitted by the caller.

    Attributes:
      loss: from `losses.normalized`.
      tx: the optax transformation.
      mesh: device mesh.
      layout: how the state is stored.
      settings: how gradients come about.
    """

    loss: Loss
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    layout: Layout
    settings: GradientSettings

    def step(
        self,
        state: TrainState,
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, Metrics]:
        """The state after one optimizer update, and the metrics; see `Engine.step`."""
        layout, mesh = self.layout, self.mesh
        sums, totals = self.gradients(state, batch, loss_args)
        params = unpad(state.params, layout.params, mesh)
        old_opt_state = unpad(state.opt_state, layout.opt_state, mesh)
        trained = layout.trained(params)
        mean_grads = self.mean_gradient(sums, self.factor(state, totals), trained)
        grads, applied, metrics = prepared(mean_grads, totals, self.settings)
        value_fn = self._loss_of(state, params, batch, loss_args)
        offered = {
            "value": metrics["loss"],
            "grad": mean_grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda trained, *_: jax.grad(value_fn)(trained),
        }
        stored, key = (trained, old_opt_state), self.rounding(state)
        new_trained, opt_state = updated(self.tx, layout, grads, stored, applied, key, extra_args, offered)
        frozen = chosen(applied, store_frozen(params, totals.frozen, layout), params)
        new_params = merge(new_trained, frozen, layout.trainable)
        loss_scale, scale_metrics = self.next_scale(state, metrics["applied"])
        new_state = TrainState(
            step=state.step + 1,
            params=pad(new_params, layout.params, mesh),
            opt_state=pad(opt_state, layout.opt_state, mesh),
            rng=state.rng,
            loss_scale=loss_scale,
        )
        # None where the state shows none
        return new_state, metrics | scale_metrics | {"learning_rate": learning_rate(opt_state)}

    def rounding(self, state: TrainState) -> jax.Array | None:
        """Data of the key by which a step rounds stochastically, if it does."""
        if not self.settings.precision.rounds_at_random:
            return None
        return rounding_key(state.rng, state.step)

    def next_scale(self, state: TrainState, applied: jax.Array) -> tuple[LossScaleState | None, Metrics]:
        """The loss scale after a step, and its metrics, where there is one."""
        scaler = self.settings.step.loss_scale
        if scaler is None or state.loss_scale is None:
            return None, {}
        return scaler.after(state.loss_scale, applied)

    def gradients(self, state: TrainState, batch: PyTree, loss_args: Mapping[str, PyTree]) -> Gradient:
        """As `local_gradients`: a padded, sharded gradient per trainable leaf, and the sums of the loss terms."""
        plan = self.layout.params
        specs = [leaf.manual_spec(plan.axis_name) for leaf, t in self._leaves() if t]
        local = functools.partial(local_gradients, self.loss, self.settings)
        key = self._step_key(state, loss_args, self._scale(state))
        return self._on_batch(local, (specs, P()))(state.params, batch, key)

    def _loss_of(
        self, state: TrainState, params: PyTree, batch: PyTree, loss_args: Mapping[str, PyTree]
    ) -> Callable[[PyTree], jax.Array]:
        """The mean loss of the batch as a function of trainable parameters, for optimizers that look at others.

        Global arrays of true shape. Its gradient is made as the stage makes it; random keys are those of the step.
        """

        def with_gradient(trained: PyTree) -> tuple[jax.Array, PyTree]:
            other = merge(trained, params, self.layout.trainable)
            at = state._replace(params=pad(other, self.layout.params, self.mesh))
            sums, totals = self.gradients(at, batch, loss_args)
            return totals.mean().loss, self.mean_gradient(sums, self.factor(at, totals), trained)

        def judged_by_nobody(trained: PyTree) -> tuple[jax.Array, PyTree]:
            if (scaler := self.settings.step.loss_scale) is None:
                return with_gradient(trained)
            raise scaler.unjudged()

        @jax.custom_vjp
        def value_fn(trained: PyTree) -> jax.Array:
            return with_gradient(trained)[0]  # the compiler drops what makes the gradient

        scaled = lambda grads, dy: (jax.tree.map(lambda g: g * dy.astype(g.dtype), grads),)
        value_fn.defvjp(judged_by_nobody, scaled)
        return value_fn

    def evaluate(self, state: TrainState, batch: PyTree, loss_args: Mapping[str, PyTree]) -> LossTerms:
        """The mean loss terms of a batch; parameters are gathered where they are used, no full copy is made."""
        local = functools.partial(local_loss, self.loss, self.settings)
        key = self._step_key(state, loss_args)
        totals: WeightedSum = self._on_batch(local, P())(state.params, batch, key)
        return totals.mean()

    def full_params(self, params: PyTree) -> PyTree:
        """Full parameters in the dtypes that they are stored in, replicated, gathered a layer at a time."""
        local = functools.partial(full_params, self.settings)
        return self._per_device(local, (self.layout.params.manual_specs(),), P())(params)

    def _on_batch(self, local: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """`local(params, batch, key)` per device."""
        in_specs = (self.layout.params.manual_specs(), P(self.settings.axes.batch), P())
        mapped = self._per_device(local, in_specs, out_specs)
        return with_wide_sums(mapped) if needs_wide_sums(self.mesh, self.settings.axes.names) else mapped

    def _per_device(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`local` under a `shard_map` that is manual over the data axes alone."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.settings.axes.names),
            # typed replication would sum the gradient of a replicated value by an all-reduce of its own
            check_vma=False,
        )

    def _leaves(self) -> Any:
        return zip(self.layout.params.leaves, self.layout.trainable, strict=True)

    def _step_key(
        self, state: TrainState, loss_args: Mapping[str, PyTree], scale: Any = None
    ) -> SliceContext:
        return SliceContext(state.rng, state.step, jnp.int32(0), dict(loss_args), scale)

    def _scale(self, state: TrainState) -> jax.Array | None:
        scaler = self.settings.step.loss_scale
        return None if scaler is None or state.loss_scale is None else scaler.current(state.loss_scale)

    def factor(self, state: TrainState, totals: WeightedSum) -> jax.Array:
        """What `gradients` makes is multiplied by it to be the mean gradient, a scalar."""
        scale, divided = self._scale(state), self.settings.predivide
        if scale is None:
            return totals.inverse_weight if divided == 1 else totals.inverse_weight * divided
        left = divided / self.settings.num_batch_shards
        return 1 / scale if left == 1 else left / scale

    def mean_gradient(self, grads: list[jax.Array], factor: jax.Array, like: PyTree) -> PyTree:
        """Gradient shards times `factor`, at true shapes and in fp32 or wider, as the optimizer sees the gradient."""
        plan = self.layout.trained_params
        grads = unpad(plan.treedef.unflatten(grads), plan, self.mesh)
        # A constant would be multiplied with the optimizer's own: other bits than where the host is handed the factor.
        factor = jax.lax.optimization_barrier(factor)
        dtypes = jax.tree.map(lambda p: wide_dtype(p.dtype), like)
        return jax.tree.map(lambda g, dtype: g.astype(dtype) * factor.astype(dtype), grads, dtypes)
