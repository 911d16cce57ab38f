"""Gradients of one step. Per-device code, inside a `shard_map` that is manual over the data axes.

In: this device's shards of the parameters, its part of the batch. Out: this device's shards of the gradients, summed
over all devices and microbatches with the slices' weights, and the sums of the loss terms.

  stage 0, 1   parameters are gathered once; full gradients accumulate on each device and are all-reduced (0) or
               reduce-scattered (1) once, after the last microbatch; stage 1 of one microbatch is stage 2
  stage 2, 3   parameters are gathered at their point of use (`point_of_use`), where backward reduce-scatters their
               gradient; microbatches add into a sharded accumulator

With `gather_once`, stage 2 gathers full parameters before the microbatches, P bytes instead of K x P for K
microbatches, and only the gradients are handled at the point of use.

Over a mesh with groups of devices (`mesh.DataAxes`) all of this happens inside a group; then the shards of the
gradients are summed over the groups, once per step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base.losses import Loss, SliceContext, WeightedSum
from zero2jax.base.pytrees import PyTree
from zero2jax.zero import collectives, quantized
from zero2jax.zero.exchange import Use, by_layer, gather, reduce_grad
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.microbatches import Gradient, over_microbatches
from zero2jax.zero.point_of_use import Standin, evaluate
from zero2jax.zero.tracing import (
    tell_of_unused_leaves,
    trace_loss,
    warn_of_nothing_quantised,
    warn_of_wide_products,
)


def local_gradients(
    loss: Loss, settings: GradientSettings, params: PyTree, batch: PyTree, rng: SliceContext
) -> Gradient:
    """Sums over all devices and microbatches of weight x gradient, and of the weighted loss terms.

    With a loss scale that of the gradients is a mean, times the scale: sums of weights might leave float16's range.

    Args:
      loss: from `losses.normalized`.
      settings: see `GradientSettings`.
      params: this device's shards at rest.
      batch: this device's part of the batch; every leaf (B, ...), with B a multiple of K.
      rng: key of this step, the same on all devices; each device and microbatch gets its own index.

    Returns:
      One gradient shard per trainable leaf, in the shape of its shard at rest and the leaf's reduce dtype, or the
      accumulation dtype if K > 1 and stage >= 2; and the totals, the same on every device.
    """
    shards = _group_shards(settings, settings.uses, params)
    gradients = _gradients_at_use if settings.step.at_use else _full_gradients
    grads, terms = gradients(loss, settings, shards, batch, rng)
    return _over_groups(settings, grads), terms.psum(settings.axes.names)


def _full_gradients(
    loss: Loss, settings: GradientSettings, shards: list[jax.Array], batch: PyTree, rng: SliceContext
) -> Gradient:
    """Stage 0, and stage 1 with several microbatches: full parameters, full gradients, reduced once."""
    trained, uses = settings.trained, settings.uses
    params = by_layer(gather, list(zip(uses, shards, strict=True)))

    def objective(values: list[jax.Array], batch: PyTree, rng: SliceContext) -> tuple[jax.Array, WeightedSum]:
        full = list(params)
        for i, x in zip(trained, values, strict=True):
            full[i] = x
        return _scaled(_evaluated(_weighted(loss), settings, full, batch, rng, regather=False), settings, rng)

    def gradient(batch: PyTree, rng: SliceContext) -> Gradient:
        values = [params[i] for i in trained]
        (_, terms), grads = jax.value_and_grad(objective, has_aux=True)(values, batch, rng)
        return grads, terms

    grads, terms = over_microbatches(gradient, settings, [params[i].shape for i in trained], batch, rng)
    return by_layer(reduce_grad, [(uses[i], g) for i, g in zip(trained, grads, strict=True)]), terms


def _gradients_at_use(
    loss: Loss, settings: GradientSettings, shards: list[jax.Array], batch: PyTree, rng: SliceContext
) -> Gradient:
    """Else: each parameter is gathered, and its gradient reduced, where it is used."""
    trained, uses, sources = settings.trained, settings.uses, shards
    if settings.step.gather_once:
        sources = by_layer(gather, list(zip(uses, shards, strict=True)))
        uses = [dataclasses.replace(use, gathered=True) for use in uses]

    def objective(ports: list[jax.Array], batch: PyTree, rng: SliceContext) -> tuple[jax.Array, WeightedSum]:
        port_of = dict(zip(trained, ports, strict=True))
        pairs = enumerate(zip(uses, sources, strict=True))
        standins = [Standin(use, x, port_of.get(i)) for i, (use, x) in pairs]
        regather = settings.step.stage == 3
        return _scaled(
            _evaluated(_weighted(loss), settings, standins, batch, rng, regather=regather), settings, rng
        )

    def gradient(batch: PyTree, rng: SliceContext) -> Gradient:
        ports = [jnp.zeros(shards[i].shape, uses[i].sum_dtype) for i in trained]
        (_, terms), grads = jax.value_and_grad(objective, has_aux=True)(ports, batch, rng)
        return grads, terms

    return over_microbatches(gradient, settings, [shards[i].shape for i in trained], batch, rng)


def _weighted(loss: Loss) -> Callable[..., tuple[jax.Array, WeightedSum]]:
    def weighted(params: PyTree, batch: PyTree, rng: SliceContext) -> tuple[jax.Array, WeightedSum]:
        terms = WeightedSum.of(loss(params, batch, rng))
        return terms.loss, terms

    return weighted


def _scaled(
    result: tuple[jax.Array, WeightedSum], settings: GradientSettings, rng: SliceContext
) -> tuple[jax.Array, WeightedSum]:
    """What is differentiated: the weighted loss, or, with a loss scale, the scale times it over the mean weight."""
    value, terms = result
    if rng.loss_scale is None:
        return result
    weight = settings.mean_weight(terms)
    return value * (rng.loss_scale / jnp.where(weight == 0, 1, weight)).astype(value.dtype), terms


def local_loss(
    loss: Loss, settings: GradientSettings, params: PyTree, batch: PyTree, rng: SliceContext
) -> WeightedSum:
    """Sums of the loss terms over all devices, without gradients; parameters are gathered where they are used."""
    shards = _group_shards(settings, settings.uses, params)
    standins = [Standin(use, x, None) for use, x in zip(settings.uses, shards, strict=True)]
    rng = rng._replace(slice_index=jax.lax.axis_index(settings.axes.names))
    terms = _evaluated(loss, settings, standins, batch, rng, regather=False, trains=False)
    return WeightedSum.of(terms).psum(settings.axes.names)


def _evaluated(
    fun: Callable[..., Any],
    settings: GradientSettings,
    params: Sequence[Standin | jax.Array],
    batch: PyTree,
    rng: SliceContext,
    *,
    regather: bool,
    trains: bool = True,
) -> Any:
    """`fun(params, batch, rng)`, the leaves of `params` full or stand-ins."""
    jaxpr, out = trace_loss(fun, settings.compute_shapes, batch, rng)
    if trains:  # what is to be said is said once, by the step
        warn_of_wide_products(jaxpr, settings.precision.compute_dtype)
        paths = {i: settings.plan.leaves[i].path for i in settings.trained}
        tell_of_unused_leaves(jaxpr, paths, refuse=settings.step.unused == "error")
        if settings.plan.num_shards > 1 and not any(
            use.gather_wire or use.reduce_wire for use in settings.uses
        ):
            warn_of_nothing_quantised(settings.precision.quantize)
    with jax.named_scope("zero_loss"):
        flat = evaluate(jaxpr, [*params, *jax.tree.leaves((batch, rng))], regather=regather)
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def full_params(settings: GradientSettings, params: PyTree) -> PyTree:
    """Shards at rest -> full parameters, without padding, in the dtypes that they are stored in."""
    dtypes = [leaf.dtype for leaf in settings.plan.leaves]
    uses = [
        dataclasses.replace(use, dtype=dtype, pinned=False, gather_wire=None)
        for use, dtype in zip(settings.uses, dtypes, strict=True)
    ]
    shards = _group_shards(settings, uses, params)
    return settings.plan.treedef.unflatten(by_layer(gather, list(zip(uses, shards, strict=True))))


def _group_shards(settings: GradientSettings, uses: list[Use], params: PyTree) -> list[jax.Array]:
    """This device's shard of each leaf in its group: gathered over the groups, if the state is sharded over them."""
    shards: list[jax.Array] = settings.plan.treedef.flatten_up_to(params)
    replica = settings.axes.replica
    if replica is None or not settings.axes.rest_over_replicas:
        return shards

    def over_groups(use: Use, x: jax.Array) -> jax.Array:
        if use.dim is None:
            return x
        if use.gather_wire is not None:
            return quantized.all_gather(x, replica, use.dim, use.gather_wire, use.dtype, use.placement)
        return collectives.all_gather(x.astype(use.dtype), replica, use.dim, use.placement, use.held_layers)

    return by_layer(over_groups, list(zip(uses, shards, strict=True)))


def _over_groups(settings: GradientSettings, grads: list[jax.Array]) -> list[jax.Array]:
    """Gradients summed inside each group -> this device's shards at rest of their sum over the groups."""
    replica = settings.axes.replica
    if replica is None:
        return grads

    def over_groups(use: Use, x: jax.Array) -> jax.Array:
        dim = use.dim if settings.axes.rest_over_replicas else None
        if use.reduce_wire is not None:
            if dim is None:
                return quantized.psum(x, replica, use.reduce_wire, use.placement)
            return quantized.scatter(x, replica, dim, use.reduce_wire, use.placement)
        x = x.astype(use.grad_dtype) if use.in_order else x
        if dim is None:
            return (collectives.sum_in_order if use.in_order else collectives.psum)(x, replica, use.placement)
        scatter = collectives.scatter_in_order if use.in_order else collectives.psum_scatter
        return scatter(x, replica, dim, use.placement, use.held_layers)

    uses = settings.uses
    return by_layer(over_groups, [(uses[i], g) for i, g in zip(settings.trained, grads, strict=True)])
