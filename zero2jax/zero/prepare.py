"""From the mean gradient to the new state: norm, verdict, clipping, the update. Global arrays of true shape."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero2jax.base.losses import WeightedSum
from zero2jax.base.pytrees import PyTree
from zero2jax.base.transformation import update
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.rounding import rounded, widened, widened_state
from zero2jax.zero.state import Layout

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
    applied, metrics = judged(grads, totals, settings)
    return for_optimizer(grads, metrics["grad_norm"], settings), applied, metrics


def judged(
    grads: PyTree, totals: WeightedSum, settings: GradientSettings
) -> tuple[jax.Array | None, Metrics]:
    """The verdict on a mean gradient and the metrics so far; see `prepared`."""
    step, means = settings.step, totals.mean()
    grad_norm = optax.tree.norm(_summed(grads, settings))
    skipping = step.skip_nonfinite or step.loss_scale is not None
    applied = jnp.isfinite(grad_norm) if skipping else None
    metrics = {
        "loss": means.loss,
        "grad_norm": grad_norm,
        "applied": jnp.bool_(True) if applied is None else applied,
        "weight": totals.weight,
    }
    if step.clip_norm is not None:
        metrics["grad_norm_clipped"] = jnp.minimum(grad_norm, step.clip_norm)
    if jax.tree.leaves(means.aux):
        metrics["aux"] = means.aux
    return applied, metrics


def for_optimizer(grads: PyTree, grad_norm: jax.Array, settings: GradientSettings) -> PyTree:
    """A mean gradient as the optimizer gets it, its norm being known; clipped by the arithmetic of optax."""
    grads, limit = _summed(grads, settings), settings.step.clip_norm
    if limit is None:
        return grads
    keep = jnp.squeeze(grad_norm < limit)
    clip = lambda g: jax.lax.select(keep, g, (g / grad_norm.astype(g.dtype)) * limit)
    return jax.tree.map(clip, grads)


def updated(
    tx: optax.GradientTransformationExtraArgs,
    layout: Layout,
    grads: PyTree,
    stored: tuple[PyTree, PyTree],
    applied: jax.Array | None,
    key: jax.Array | None,
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """Trainable parameters and optimizer state after the update; as they were where it is not `applied`.

    Args:
      tx: the optimizer.
      layout: how the state is stored.
      grads: as the optimizer gets them.
      stored: parameters and optimizer state as they are stored; so are the results.
      applied: whether the step counts; None for yes.
      key: data of the key of the step's stochastic rounding; None rounds to nearest.
      given: see `transformation.update`, like `offered`.
    """
    with jax.named_scope("zero_update"):
        seen = widened(stored[0]), widened_state(stored[1], layout.narrow_state)
        updates, opt_state = update(tx, grads, seen[1], seen[0], given=given, offered=offered)
        new = optax.apply_updates(seen[0], updates), opt_state
        return chosen(applied, rounded(new, seen, stored, key), stored)  # type: ignore[no-any-return]


def chosen(applied: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """`new`, or `old` where a step is not `applied`; None means that every step is."""
    if applied is None:
        return new
    return jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)


def _summed(grads: PyTree, settings: GradientSettings) -> PyTree:
    if settings.step.reduction != "sum":
        return grads
    return jax.tree.map(lambda g: g * settings.num_batch_shards, grads)
