"""What a user's loss function returns, brought to one form, and its mean over microbatches and devices.

`loss_fn(params, batch)` or `loss_fn(params, batch, rng)` returns a scalar, or `(scalar, aux)`. The scalar is the
mean over the examples it was given. Two names in a dict `aux` have a meaning:

  "weight"  a scalar: the loss is a mean over that weight (the number of tokens that count, say). The step's loss and
            gradient are then the exact weighted mean over all devices and microbatches. Where a slice may have no
            weight at all, divide by `jnp.maximum(weight, 1)`: a loss of 0/0 has no gradient on any device.
  "frozen"  new values for frozen leaves of the parameters (batch statistics): a tree whose leaf paths are paths of
            frozen leaves. The step stores their mean over devices and microbatches; integers, their maximum.

Everything else in `aux` is reported: floating leaves as (weighted) means, integers and booleans as sums of at least 32
bits.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero2jax.base.mesh import AxisName
from zero2jax.base.pytrees import PyTree

LossFn = Callable[..., Any]
Loss = Callable[[PyTree, PyTree, "SliceKey"], "LossTerms"]
"""A loss function in its one form: (params, batch, slice key) -> LossTerms."""


class SliceKey(NamedTuple):
    """What a loss function's random key is made of; made only for a loss function that takes one.

    Fields:
      data: raw data of the base key (uint32).
      step: int32 scalar, number of the step.
      slice_index: int32 scalar, number of the slice of the batch: device x K + microbatch.
    """

    data: jax.Array
    step: jax.Array
    slice_index: jax.Array

    def key(self) -> jax.Array:
        """The key: differs by step, device and microbatch, and not by stage."""
        key = jax.random.fold_in(jax.random.wrap_key_data(self.data), self.step)
        return jax.random.fold_in(key, self.slice_index)


class LossTerms(NamedTuple):
    """One call of a loss function.

    Fields:
      loss: float32 scalar.
      weight: float32 scalar; 1 where the loss function gives none.
      aux: everything else that it returned, `None` if nothing.
      frozen: new values for frozen leaves, `None` if none.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    frozen: PyTree


def takes_rng(loss_fn: LossFn) -> bool:
    """Whether a loss function wants a random key as its third argument.

    True if it has a third positional parameter without a default, or one called `rng` or `key`.

    Raises:
      ValueError: a parameter called `rng` or `key` stands elsewhere.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unset = (None, inspect.Parameter.empty)  # what functools.partial has set is meant
    named = [p for p in parameters if p.name in ("rng", "key") and any(p.default is u for u in unset)]
    misplaced = [p.name for p in named if p not in positional[2:3]]
    if misplaced:
        raise ValueError(
            f"reading the loss function's parameters: {misplaced[0]!r} is not the third positional one, where a "
            f"random key is passed in. Write loss_fn(params, batch, rng)."
        )
    if len(positional) < 3:
        return False
    return positional[2].default is inspect.Parameter.empty or positional[2].name in ("rng", "key")


def returns_aux(output: Any) -> bool:
    """Whether a loss function's output is `(loss, aux)`."""
    return isinstance(output, tuple) and len(output) == 2


def normalized(loss_fn: LossFn) -> Loss:
    """`loss_fn` as a function of (params, batch, slice key) that returns `LossTerms`.

    Raises (when traced):
      ValueError: the loss or the weight is not a floating scalar, or the output has another form.
    """
    with_rng = takes_rng(loss_fn)

    def call(params: PyTree, batch: PyTree, rng: SliceKey) -> LossTerms:
        output = loss_fn(params, batch, rng.key()) if with_rng else loss_fn(params, batch)
        loss, aux = output if returns_aux(output) else (output, None)
        loss = _scalar(loss, "the loss")
        weight, frozen = jnp.float32(1), None
        if isinstance(aux, Mapping):
            aux = dict(aux)
            if "weight" in aux:
                weight = jax.lax.stop_gradient(_scalar(aux.pop("weight"), "aux['weight']", integers=True))
            frozen = aux.pop("frozen", None)
        aux, frozen = jax.lax.stop_gradient(jax.tree.map(jnp.asarray, (aux, frozen)))  # Python numbers too
        return LossTerms(loss, weight, aux, frozen)

    return call


def _scalar(x: Any, name: str, *, integers: bool = False) -> jax.Array:
    single = jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
    kinds = (jnp.floating, jnp.integer, jnp.bool_) if integers else (jnp.floating,)
    good = single and jnp.shape(x) == () and any(jnp.issubdtype(jnp.result_type(x), k) for k in kinds)
    if not good:
        given = jax.tree.map(lambda a: f"{jnp.result_type(a).name}{list(jnp.shape(a))}", x)
        raise ValueError(
            f"tracing the loss function: {name} is {given}, and it must be one floating scalar. Return the mean over "
            f"the examples of the batch, as a scalar or as (scalar, aux)."
        )
    return jnp.asarray(x).astype(jnp.float32)


class WeightedSum(NamedTuple):
    """Sums over slices of a batch, each counted by its weight: sum(w x), and sum(w) to divide it by.

    The one place that knows how means over microbatches and devices come about: `of` each slice, `over_microbatches`
    and `psum` add, `mean` and `inverse_weight` divide.

    Fields:
      loss: sum(w loss), float32 scalar.
      weight: sum(w), float32 scalar.
      aux: sum(w x) of floating leaves in at least float32; plain sums of integers, in at least 32 bits.
      frozen: new values for frozen leaves: means over the slices, not weighted; of integers the maximum.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    frozen: PyTree

    @classmethod
    def of(cls, terms: LossTerms) -> "WeightedSum":
        """The addends of one slice. A slice of weight 0 adds 0, whatever its loss is."""

        def scaled(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
                return jnp.where(terms.weight == 0, jnp.zeros_like(wide), wide * terms.weight)
            return x.astype(jnp.promote_types(x.dtype, jnp.int32)) if x.dtype.itemsize < 4 else x

        return cls(scaled(terms.loss), terms.weight, jax.tree.map(scaled, terms.aux), terms.frozen)

    def over_microbatches(self) -> "WeightedSum":
        """The sum of sums that are stacked along a leading dim (K, ...)."""
        added = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), self._replace(frozen=None))
        joined = lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x.max(0)
        return added._replace(frozen=jax.tree.map(joined, self.frozen))

    def psum(self, axis_name: AxisName) -> "WeightedSum":
        """The sum over mesh axes. Per-device code."""
        added = jax.lax.psum(self._replace(frozen=None), axis_name)
        mean_or_max = lambda x: jax.lax.pmean if jnp.issubdtype(x.dtype, jnp.floating) else jax.lax.pmax
        return added._replace(frozen=jax.tree.map(lambda x: mean_or_max(x)(x, axis_name), self.frozen))

    def mean(self) -> LossTerms:
        """Sums divided by the weight; integers stay sums, and without any weight every mean is 0."""
        divided = lambda x: x / self._divisor if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return LossTerms(divided(self.loss), self.weight, jax.tree.map(divided, self.aux), self.frozen)

    @property
    def inverse_weight(self) -> jax.Array:
        """What sums of w x, gradients say, are multiplied by to make them means, float32 scalar."""
        return 1 / self._divisor

    @property
    def _divisor(self) -> jax.Array:
        return jnp.where(self.weight == 0, 1, self.weight)  # every addend of weight 0 is 0
