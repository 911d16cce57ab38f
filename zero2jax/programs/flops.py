"""Matrix products of a loss function, counted in its trace: no device and no compiler is needed."""

import warnings
from collections.abc import Callable
from typing import Any

from zero2jax.base import jaxprs
from zero2jax.base.losses import Loss, LossTerms, SliceContext
from zero2jax.base.pytrees import PyTree


def loss_flops(loss: Loss, trace: Callable[[Loss], Any]) -> float:
    """Floating-point operations of a loss's matrix products, for one device's microbatch, forward.

    Args:
      loss: from `losses.normalized`.
      trace: traces the computation that the loss belongs to, with the function it is given in the place of the loss.
    """
    flops = 0.0

    def counted(params: PyTree, batch: PyTree, rng: SliceContext) -> LossTerms:
        nonlocal flops
        jaxpr, _ = jaxprs.trace(loss, params, batch, rng)
        flops = sum(product.flops for product in jaxprs.products(jaxpr))
        return loss(params, batch, rng)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step's own trace says the same
        trace(counted)
    return flops
