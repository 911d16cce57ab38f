"""The two halves of an offloaded step: gradients on the devices, the update on the host. Pure functions, not jitted.

Global arrays. What the device hands over is not the gradient that the optimizer sees, in fp32, but what it is made of:
sums in the dtype of the reduction, and scalars. Norm and verdict are taken on the device, of all gradients; the host
divides, clips and updates, by the same arithmetic in the same order as a step without offloading.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero2jax.base.pytrees import PyTree
from zero2jax.base.transformation import learning_rate
from zero2jax.zero.prepare import chosen, for_optimizer, judged, updated
from zero2jax.zero.state import TrainState, pad, store_frozen, unpad
from zero2jax.zero.step import Metrics, StepProgram

_FUNCTIONS = ("value_fn", "obj_fn", "grad_fn")


class Handed(NamedTuple):
    """What the host needs to know of a step besides the sums of its gradients: replicated scalars.

    Fields:
      factor: sums times it are the mean gradient.
      grad_norm: global norm of the gradient before clipping.
      applied: whether the step counts, a bool; None if every step does.
      loss: the mean loss, for optimizers that look at it.
      rounding: key data of the step's stochastic rounding; None without.
    """

    factor: jax.Array
    grad_norm: jax.Array
    applied: jax.Array | None
    loss: jax.Array
    rounding: jax.Array | None = None


class Reduced(NamedTuple):
    """What the devices make of a batch.

    Fields:
      sums: weight x gradient of each trainable leaf as it is stored, in the dtype of the reduction.
      handed: scalars for the host.
      kept: what of the new state stays on the devices: `params` a list of the frozen leaves, `opt_state` empty.
      metrics: those that the devices know.
    """

    sums: list[jax.Array]
    handed: Handed
    kept: TrainState
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class HostStep:
    """An offloaded step in two halves.

    Attributes:
      program: the step as it is without offloading, on the mesh of the devices.
      home: the mesh on which the update runs, the host's.
    """

    program: StepProgram
    home: Mesh

    def reduced(self, state: TrainState, batch: PyTree, loss_args: Mapping[str, PyTree]) -> Reduced:
        """Gradients and metrics. On the devices.

        Args:
          state: with trainable parameters in the dtype that they are computed in, and no optimizer state.
          batch: as for `Engine.step`, like `loss_args`.
        """
        program, layout, mesh = self.program, self.program.layout, self.program.mesh
        sums, totals = program.gradients(state, batch, loss_args)
        factor = program.factor(state, totals)
        mean = program.mean_gradient(sums, factor, layout.trained(layout.params.tree))
        applied, metrics = judged(mean, totals, program.settings)
        loss_scale, scale_metrics = program.next_scale(state, metrics["applied"])
        # Of frozen leaves alone: the others may lie in host memory, where nothing is computed.
        plan, kinds = layout.frozen_params, layout.trainable
        leaves = [x for x, t in zip(jax.tree.leaves(state.params), kinds, strict=True) if not t]
        unpadded = iter(unpad(leaves, plan, mesh))
        old = layout.params.treedef.unflatten([None if t else next(unpadded) for t in kinds])
        new = jax.tree.leaves(chosen(applied, store_frozen(old, totals.frozen, layout), old))
        frozen = pad(new, plan, mesh)
        kept = state._replace(step=state.step + 1, params=frozen, loss_scale=loss_scale)
        handed = Handed(
            factor=factor,
            grad_norm=metrics["grad_norm"],
            applied=applied,
            loss=metrics["loss"],
            rounding=program.rounding(state),
        )
        return Reduced(sums, handed, kept, metrics | scale_metrics)

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

        Raises:
          ValueError: the transformation evaluates the loss.
        """
        program, layout, home = self.program, self.program.layout, self.home
        on_host = dataclasses.replace(program, mesh=home)
        old = unpad(trained, layout.trained_params, home)
        old_state = unpad(opt_state, layout.opt_state, home)
        mean = on_host.mean_gradient(sums, handed.factor, old)
        grads = for_optimizer(mean, handed.grad_norm, program.settings)
        offered = {"value": handed.loss, "grad": mean, **{name: _refused(name) for name in _FUNCTIONS}}
        stored, key = (old, old_state), handed.rounding
        new, new_state = updated(program.tx, layout, grads, stored, handed.applied, key, extra_args, offered)
        new = pad(new, layout.trained_params, home)
        return new, pad(new_state, layout.opt_state, home), self.copies(new), learning_rate(new_state)

    def copies(self, trained: PyTree, which: Sequence[int] | None = None) -> list[jax.Array]:
        """Trainable parameters, or those of some indices, in the dtype that they are computed in, as new buffers."""
        settings, leaves = self.program.settings, jax.tree.leaves(trained)
        indices = settings.trained if which is None else [settings.trained[i] for i in which]
        dtypes = [settings.compute_dtype(i) for i in indices]
        return [jnp.array(x, dtype, copy=True) for x, dtype in zip(leaves, dtypes, strict=True)]


def _refused(name: str) -> Callable[..., Any]:
    """What an optimizer gets in the place of the loss of other parameters."""

    def evaluate(*_: Any, **__: Any) -> Never:
        raise ValueError(
            f"offloading to host memory (offload=...): the optimizer evaluates {name}, the loss of other parameters or "
            f"its gradient, and the update runs apart from the loss. Take an optimizer that does not, or build the "
            f"engine without offload."
        )

    return evaluate
