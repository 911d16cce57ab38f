"""Gradients of the microbatches of a step, one after the other and added. Per-device code, inside a `shard_map`.

In: the gradient of a slice of this device's batch as a function, and the batch. Out: the sum over its K slices. The
loop is one `jax.lax.scan`, so that a gradient is added where it was made and no two exist; with sums in a fixed order,
one for each level of a tree. With a loss scale it is a running mean over the weight, since a sum of weights, times the
scale, would leave the range of an accumulator in float16.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    """The sum of `gradient(microbatch, its key)`, arrays of `shapes`; if K > 1, a loop in the accumulation dtype.

    With a loss scale each is a mean over its weight, and so is what comes out.
    """
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
        return [g.astype(dtype) for g, dtype in zip(grads, dtypes, strict=True)], terms

    looped = _summed if rng.loss_scale is None else functools.partial(_averaged, settings)
    total: Callable[[jax.Array], Gradient] = of_microbatch
    for length, stride in _loops(num, in_order=settings.precision.fp32_sum):
        total = looped(total, length, stride, zeros)
    return total(jnp.int32(0))


def _loops(num: int, *, in_order: bool) -> list[tuple[int, int]]:
    """(length, stride) of the loops over microbatches, from the innermost: one, or the tree of `collectives.tree_sum`.

    Each level of the tree is a loop of two with a sum of its own. Microbatches of one device are added as those of
    twice as many devices would be, so that the number of devices changes no bit.
    """
    loops = []
    while in_order and num % 2 == 0:
        num //= 2
        loops.append((2, num))
    return [*loops, (num, 1)] if num > 1 else loops


def _summed(
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


def _averaged(
    settings: GradientSettings,
    gradient: Callable[[jax.Array], Gradient],
    length: int,
    stride: int,
    zeros: list[jax.Array],
) -> Callable[[jax.Array], Gradient]:
    """As `_summed`, the mean by weight of what are means themselves: each enters by its part of the weight so far."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)  # a weight is of 32 bits at least

    def total(base: jax.Array) -> Gradient:
        def step(before: tuple[list[jax.Array], jax.Array], i: jax.Array) -> tuple[Any, WeightedSum]:
            (mean, weight), (grads, terms) = before, gradient(base + i * stride)
            own = settings.mean_weight(terms).astype(wide)
            both = weight + own
            parts = [w / jnp.where(both == 0, 1, both) for w in (weight, own)]

            def joined(*pair: jax.Array) -> jax.Array:
                dtype = jnp.promote_types(pair[0].dtype, jnp.float32)
                addends = [x.astype(dtype) * part.astype(dtype) for x, part in zip(pair, parts, strict=True)]
                return (addends[0] + addends[1]).astype(pair[0].dtype)

            return ([joined(*pair) for pair in zip(mean, grads, strict=True)], both), terms

        (grads, _), stacked = jax.lax.scan(
            step, (zeros, jnp.zeros((), wide)), jnp.arange(length, dtype=jnp.int32)
        )
        return grads, stacked.over_microbatches()

    return total
