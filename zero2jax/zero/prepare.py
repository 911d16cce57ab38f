"""From the mean gradient to what the optimizer is given: norm, verdict, clipping. Global arrays of true shape."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero2jax.base.losses import WeightedSum
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.gradient_settings import GradientSettings

Metrics = dict[str, Any]


def prepared(
    grads: PyTree, totals: WeightedSum, settings: GradientSettings
) -> tuple[PyTree, jax.Array | None, Metrics]:
    """The gradient for the optimizer, whether the step counts, and the metrics so far.

    Args:
      grads: the mean gradient, in master dtypes.
      totals: the sums of the loss terms.
      settings: of the step.

    Returns:
      The gradient, a sum over devices if so wanted, clipped; whether all of it is finite, a bool scalar, None if no
      step is skipped; `loss`, `grad_norm`, `applied`, `weight`, and, where they exist, `grad_norm_clipped` and `aux`.
    """
    step, means = settings.step, totals.mean()
    if step.reduction == "sum":
        grads = jax.tree.map(lambda g: g * settings.num_batch_shards, grads)
    grad_norm = optax.tree.norm(grads)
    skipping = step.skip_nonfinite or step.loss_scale is not None
    applied = jnp.isfinite(grad_norm) if skipping else None
    metrics = {
        "loss": means.loss,
        "grad_norm": grad_norm,
        "applied": jnp.bool_(True) if applied is None else applied,
        "weight": totals.weight,
    }
    if step.clip_norm is not None:
        clip = optax.clip_by_global_norm(step.clip_norm)
        grads, _ = clip.update(grads, optax.EmptyState())
        metrics["grad_norm_clipped"] = jnp.minimum(grad_norm, step.clip_norm)
    if jax.tree.leaves(means.aux):
        metrics["aux"] = means.aux
    return grads, applied, metrics
