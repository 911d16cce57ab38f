"""Gradients of the microbatches of a step, one after the other and added. Per-device code, inside a `shard_map`.

In: the gradient of a slice of this device's batch as a function, and the batch. Out: the sum over its K slices. The
loop is one `jax.lax.scan`, so that a gradient is added where it was made and no two exist; with sums in a fixed order,
one for each level of a tree.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from zero2jax.base.losses import SliceContext, WeightedSum
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.gradient_settings import GradientSettings

Gradient = tuple[list[jax.Array], WeightedSum]
"""Weight x gradient of each trainable leaf, and the loss terms."""


def over_microbatches(
    gradient: Callable[[PyTree, SliceContext], Gradient],
    settings: GradientSettings,
    shapes: Sequence[tuple[int, ...]],
    batch: PyTree,
    rng: SliceContext,
) -> Gradient:
    """The sum of `gradient(microbatch, its key)`, arrays of `shapes`; if K > 1, a loop in the accumulation dtype."""
    num = settings.step.num_microbatches
    first = jax.lax.axis_index(settings.axes.names) * num
    if num == 1:
        if not settings.precision.fp32_sum:
            return gradient(batch, rng._replace(slice_index=first))
        # between barriers, as in a loop, whose body the compiler does not fuse with what is around it
        part = jax.lax.optimization_barrier((batch, rng._replace(slice_index=first)))
        return jax.lax.optimization_barrier(gradient(*part))
    slices = jax.tree.map(lambda x: x.reshape(num, x.shape[0] // num, *x.shape[1:]), batch)  # (K, B/K, ...)
    dtypes = [settings.gradient_dtype(i) for i in settings.trained]
    zeros = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def of_microbatch(i: jax.Array) -> Gradient:
        part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), slices)
        grads, terms = gradient(part, rng._replace(slice_index=first + i))
        grads = [g.astype(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
        if rng.loss_scale is not None:  # each is a mean
            grads = [g * settings.mean_weight(terms).astype(g.dtype) for g in grads]
        return grads, terms

    total: Callable[[jax.Array], Gradient] = of_microbatch
    for length, stride in _loops(num, in_order=settings.precision.fp32_sum):
        total = _looped(total, length, stride, zeros)
    grads, terms = total(jnp.int32(0))
    if rng.loss_scale is not None:
        grads = [g / settings.mean_weight(terms).astype(g.dtype) for g in grads]
    return grads, terms


def _loops(num: int, *, in_order: bool) -> list[tuple[int, int]]:
    """(length, stride) of the loops over microbatches, from the innermost: one, or the tree of `collectives._tree_sum`.

    Each level of the tree is a loop of two with a sum of its own. Microbatches of one device are added as those of
    twice as many devices would be, so that the number of devices changes no bit.
    """
    loops = []
    while in_order and num % 2 == 0:
        num //= 2
        loops.append((2, num))
    return [*loops, (num, 1)] if num > 1 else loops


def _looped(
    gradient: Callable[[jax.Array], Gradient], length: int, stride: int, zeros: list[jax.Array]
) -> Callable[[jax.Array], Gradient]:
    """The sum of `gradient(base + i * stride)` over i < length, as a function of `base`."""

    def total(base: jax.Array) -> Gradient:
        def step(total: list[jax.Array], i: jax.Array) -> Gradient:
            grads, terms = gradient(base + i * stride)
            return [t + g for t, g in zip(total, grads, strict=True)], terms

        grads, stacked = jax.lax.scan(step, zeros, jnp.arange(length, dtype=jnp.int32))
        return grads, stacked.over_microbatches()

    return total
