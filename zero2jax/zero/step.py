"""One training step as a pure function of global arrays, and the loss without an update. Not jitted here.

Inside, `gradients` runs under a `shard_map` that is manual over the data axes. Its gradient shards leave as global
arrays sharded over that axis, and the optimizer is plain optax on global arrays of true shape. So every optax
transformation is right; for elementwise ones the compiler finds nothing to communicate but the scalar of a global
norm, and for others it inserts what they need.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero2jax.base.losses import Loss, LossTerms, SliceKey, WeightedSum
from zero2jax.base.mesh import axis_size
from zero2jax.base.pytrees import PyTree, path_names
from zero2jax.base.transformation import learning_rate
from zero2jax.zero.gradients import GradientSettings, full_params, local_gradients, local_loss
from zero2jax.zero.state import Layout, TrainState, merge, pad, unpad

Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Everything fixed about a step; its methods are pure functions of global arrays, to be jitted by the caller.

    Attributes:
      loss: from `losses.normalized`.
      tx: the optax transformation.
      mesh: device mesh.
      layout: where the state rests.
      settings: how gradients come about.
    """

    loss: Loss
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    layout: Layout
    settings: GradientSettings

    def step(
        self, state: TrainState, batch: PyTree, extra_args: dict[str, Any]
    ) -> tuple[TrainState, Metrics]:
        """The state after one optimizer update, and the metrics; see `Engine.step`."""
        grads, totals = self.gradients(state, batch)
        params = unpad(state.params, self.layout.params, self.mesh)
        trained = self.layout.trained(params)
        grads = self._averaged(grads, totals, trained)
        grad_norm = clipped_norm = optax.tree.norm(grads)
        if self.settings.step.clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(self.settings.step.clip_norm).update(
                grads, optax.EmptyState()
            )
            clipped_norm = jnp.minimum(grad_norm, self.settings.step.clip_norm)
        old_opt_state = unpad(state.opt_state, self.layout.opt_state, self.mesh)
        means = totals.mean()
        updates, opt_state = self.tx.update(
            grads, old_opt_state, trained, **{"value": means.loss, **extra_args}
        )
        new_params = merge(optax.apply_updates(trained, updates), params, self.layout.trainable)
        new_params = self._with_frozen(new_params, totals.frozen)
        applied = jnp.bool_(True)
        if self.settings.step.skip_nonfinite:
            applied = jnp.isfinite(grad_norm)
            new_params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(applied, new, old),
                (new_params, opt_state),
                (params, old_opt_state),
            )
        new_state = TrainState(
            step=state.step + 1,
            params=pad(new_params, self.layout.params, self.mesh),
            opt_state=pad(opt_state, self.layout.opt_state, self.mesh),
            rng=state.rng,
        )
        metrics = {
            "loss": means.loss,
            "grad_norm": grad_norm,
            "grad_norm_clipped": clipped_norm,
            "learning_rate": learning_rate(opt_state),  # None where the state shows none
            "applied": applied,
            "weight": totals.weight,
            "aux": means.aux,
        }
        return new_state, metrics

    def gradients(self, state: TrainState, batch: PyTree) -> tuple[list[jax.Array], WeightedSum]:
        """Sums over devices and microbatches: a padded, sharded gradient per trainable leaf, and the loss terms."""
        plan = self.layout.params
        specs = [leaf.manual_spec(plan.axis_name) for leaf, t in self._leaves() if t]

        def local(params: PyTree, batch: PyTree, rng: SliceKey) -> tuple[list[jax.Array], WeightedSum]:
            return local_gradients(self.loss, self.settings, params, batch, rng)

        return self.per_device(local, (specs, P()))(state.params, batch, self._step_key(state))

    def evaluate(self, state: TrainState, batch: PyTree) -> LossTerms:
        """The mean loss terms of a batch; parameters appear where they are used, no whole copy is made."""

        def local(params: PyTree, batch: PyTree, rng: SliceKey) -> WeightedSum:
            return local_loss(self.loss, self.settings, params, batch, rng)

        totals: WeightedSum = self.per_device(local, P())(state.params, batch, self._step_key(state))
        return totals.mean()

    def full_params(self, params: PyTree) -> PyTree:
        """Full parameters in the dtypes that they are stored in, replicated, gathered a layer at a time."""
        gathered = jax.shard_map(
            functools.partial(full_params, self.settings),
            mesh=self.mesh,
            in_specs=(self.layout.params.manual_specs(),),
            out_specs=P(),
            axis_names=set(self.settings.axes.names),
            check_vma=False,
        )
        return gathered(params)

    def per_device(self, local: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """`local(params, batch, rng)` under a `shard_map` that is manual over the data axes alone."""
        axes = self.settings.axes
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.layout.params.manual_specs(), P(axes.batch), P()),
            out_specs=out_specs,
            axis_names=set(axes.names),
            # typed replication would sum the gradient of a replicated value by an all-reduce of its own
            check_vma=False,
        )

    def _leaves(self) -> Any:
        return zip(self.layout.params.leaves, self.layout.trainable, strict=True)

    def _step_key(self, state: TrainState) -> SliceKey:
        return SliceKey(state.rng, state.step, jnp.int32(0))

    def _averaged(self, grads: list[jax.Array], totals: WeightedSum, like: PyTree) -> PyTree:
        """Summed gradient shards -> the mean gradient at master dtypes and true shapes, as the optimizer sees it."""
        plan = self.layout.params
        trained = [leaf for leaf, t in self._leaves() if t]
        sub_plan = dataclasses.replace(plan, leaves=tuple(trained), treedef=jax.tree.structure(like))
        grads = unpad(sub_plan.treedef.unflatten(grads), sub_plan, self.mesh)
        scale = totals.inverse_weight
        if self.settings.step.reduction == "sum":
            scale = scale * axis_size(self.mesh, self.settings.axes.batch)
        return jax.tree.map(lambda g, p: g.astype(p.dtype) * scale.astype(p.dtype), grads, like)

    def _with_frozen(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Store the new values of frozen leaves that the loss function returned."""
        new = {path_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(frozen)}
        known = {leaf.names: leaf for leaf, t in self._leaves() if not t}
        for names, x in new.items():
            leaf = known.get(names)
            if leaf is None or leaf.shape != x.shape:
                paths = sorted(leaf.path for leaf in known.values())
                rule = f"one of the frozen leaves {paths[:8]}" if leaf is None else f"shape {leaf.shape}"
                raise ValueError(
                    f"storing aux['frozen']: leaf {'/'.join(names)!r} of shape {x.shape} does not fit, expected "
                    f"{rule}. Return new values under the paths that the frozen leaves have in the parameters."
                )
        pick = lambda leaf, x: new[leaf.names].astype(leaf.dtype) if leaf.names in new else x
        return self.layout.params.map(pick, params)
