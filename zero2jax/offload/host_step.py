"""The two halves of an offloaded step: gradients on the devices, the update on the host. Pure functions, not jitted.

Global arrays. What the device hands over is not the gradient that the optimizer sees, in fp32, but what it is made of:
sums in the dtype of the reduction, and scalars. Norm and verdict are taken on the device, of all gradients; the host
divides, clips and updates, by the same arithmetic in the same order as a step without offloading.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero2jax.base.mesh import axis_size
from zero2jax.base.pytrees import PyTree
from zero2jax.base.transformation import learning_rate, update
from zero2jax.zero.state import TrainState, pad, store_frozen, unpad
from zero2jax.zero.step import Metrics, StepProgram


class Handed(NamedTuple):
    """What the host needs to know of a step besides the sums of its gradients: replicated scalars.

    Fields:
      factor: sums times it are the mean gradient.
      grad_norm: global norm of the gradient before clipping.
      loss: the mean loss, for optimizers that look at it.
    """

    factor: jax.Array
    grad_norm: jax.Array
    loss: jax.Array


class Reduced(NamedTuple):
    """What the devices make of a batch.

    Fields:
      sums: weight x gradient of each trainable leaf as it is stored, in the dtype of the reduction.
      handed: scalars for the host.
      step: of the new state.
      frozen: the frozen leaves of the new state.
      rng: of the new state.
      metrics: those that the devices know.
    """

    sums: list[jax.Array]
    handed: Handed
    step: jax.Array
    frozen: list[jax.Array]
    rng: jax.Array
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class HostStep:
    """An offloaded step in two halves.

    Attributes:
      program: the step as it is without offloading, on the mesh of the devices.
    """

    program: StepProgram

    def reduced(self, state: TrainState, batch: PyTree, loss_args: Mapping[str, PyTree]) -> Reduced:
        """Gradients and metrics. On the devices.

        Args:
          state: with trainable parameters in the dtype that they are computed in, and no optimizer state.
          batch: as for `Engine.step`, like `loss_args`.
        """
        program, layout, mesh = self.program, self.program.layout, self.program.mesh
        settings = program.settings.step
        sums, totals = program.gradients(state, batch, loss_args)
        means, factor = totals.mean(), totals.inverse_weight
        grads = self._summed(program.mean_gradient(sums, factor, layout.trained(layout.params.tree)))
        grad_norm = optax.tree.norm(grads)
        applied = jnp.isfinite(grad_norm) if settings.skip_nonfinite else jnp.bool_(True)
        metrics = {"loss": means.loss, "grad_norm": grad_norm, "applied": applied, "weight": totals.weight}
        if settings.clip_norm is not None:
            metrics["grad_norm_clipped"] = jnp.minimum(grad_norm, settings.clip_norm)
        if jax.tree.leaves(means.aux):
            metrics["aux"] = means.aux
        old = unpad(state.params, layout.params, mesh)
        new = store_frozen(old, totals.frozen, layout)
        if settings.skip_nonfinite:
            new = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)
        new = pad(new, layout.params, mesh)
        frozen = [x for x, t in zip(jax.tree.leaves(new), layout.trainable, strict=True) if not t]
        handed = Handed(factor, grad_norm, means.loss)
        return Reduced(sums, handed, state.step + 1, frozen, state.rng, metrics)

    def update(
        self,
        trained: PyTree,
        opt_state: PyTree,
        sums: list[jax.Array],
        handed: Handed,
        extra_args: Mapping[str, Any],
    ) -> tuple[PyTree, PyTree, list[jax.Array], jax.Array | None]:
        """Masters and optimizer state after the update, the copies for the devices, and the learning rate. On the host.

        Args:
          trained: trainable parameters at rest, like `opt_state` and `sums`.
          opt_state: state of the transformation.
          sums: see `Reduced`, like `handed`.
          handed: scalars.
          extra_args: for the transformation.
        """
        program, layout, home = self.program, self.program.layout, self.program.layout.host
        settings = program.settings.step
        assert home is not None
        on_host = dataclasses.replace(program, mesh=home)
        old_params = unpad(trained, layout.trained_params, home)
        old_state = unpad(opt_state, layout.opt_state, home)
        mean = on_host.mean_gradient(sums, handed.factor, old_params)
        grads = self._summed(mean)
        if settings.clip_norm is not None:
            grads = clipped(grads, handed.grad_norm, settings.clip_norm)
        offered = {"value": handed.loss, "grad": mean}
        updates, new_state = update(
            program.tx, grads, old_state, old_params, given=extra_args, offered=offered
        )
        new_params = optax.apply_updates(old_params, updates)
        if settings.skip_nonfinite:
            applied = jnp.isfinite(handed.grad_norm)
            choose = lambda new, old: jnp.where(applied, new, old)
            new_params = jax.tree.map(choose, new_params, old_params)
            new_state = jax.tree.map(choose, new_state, old_state)
        new_params = pad(new_params, layout.trained_params, home)
        copies = self.copies(new_params)
        return new_params, pad(new_state, layout.opt_state, home), copies, learning_rate(new_state)

    def copies(self, trained: PyTree) -> list[jax.Array]:
        """Trainable parameters in the dtype that they are computed in, in buffers of their own. On the host."""
        settings = self.program.settings
        dtypes = [settings.compute_dtype(i) for i in settings.trained]
        return [
            jnp.array(x, dtype, copy=True) for x, dtype in zip(jax.tree.leaves(trained), dtypes, strict=True)
        ]

    def _summed(self, grads: PyTree) -> PyTree:
        settings = self.program.settings
        if settings.step.reduction != "sum":
            return grads
        num = axis_size(self.program.mesh, settings.axes.batch)
        return jax.tree.map(lambda g: g * num, grads)


def clipped(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """Gradients scaled so that their global norm, which is `norm`, is at most `max_norm`: as optax does it."""
    keep = jnp.squeeze(norm < max_norm)
    return jax.tree.map(lambda g: jax.lax.select(keep, g, (g / norm.astype(g.dtype)) * max_norm), grads)
