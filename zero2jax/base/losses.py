"""What a user's loss function returns, brought to one form, and its mean over microbatches and devices.

`loss_fn(params, batch)` or `loss_fn(params, batch, rng)` returns a scalar, or `(scalar, aux)`. The scalar is the
mean over the examples it was given. Two names in a dict `aux` have a meaning:

  "weight"  a scalar: the loss is a mean over that weight (the number of tokens that count, say). The step's loss and
            gradient are then the exact weighted mean over all devices and microbatches. Where a slice may have no
            weight at all, divide by `jnp.maximum(weight, 1)`: a loss of 0/0 has no gradient on any device.
  "frozen"  new values for frozen leaves of the parameters (batch statistics): a tree whose leaf paths are paths of
            frozen leaves. The step stores their mean over devices and microbatches; of integers the maximum, of random
            keys that of the first slice.

Everything else in `aux` is reported: floating leaves as (weighted) means, integers and booleans as sums of at least 32
bits. Sums are taken in float32, or in a wider dtype that the loss has.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero2jax.base.checks import type_name
from zero2jax.base.mesh import AxisName
from zero2jax.base.pytrees import PyTree, path_string

LossFn = Callable[..., Any]
Loss = Callable[[PyTree, PyTree, "SliceContext"], "LossTerms"]
"""A loss function in its one form: (params, batch, slice key) -> LossTerms."""


class SliceContext(NamedTuple):
    """What a loss function is called with besides parameters and its slice of the batch.

    Fields:
      data: raw data of the base key (uint32); the key is made only for a loss function that takes one.
      step: int32 scalar, number of the step.
      slice_index: int32 scalar, number of the slice of the batch: device x K + microbatch.
      loss_args: arrays that are not per example, by name, the same for every slice.
      loss_scale: float32 scalar that the loss is multiplied by for backward; None for 1. No loss function sees it.
    """

    data: jax.Array
    step: jax.Array
    slice_index: jax.Array
    loss_args: Mapping[str, PyTree] | None = None
    loss_scale: jax.Array | None = None

    def key(self) -> jax.Array:
        """The key: differs by step, device and microbatch, and not by stage."""
        key = jax.random.fold_in(jax.random.wrap_key_data(self.data), self.step)
        return jax.random.fold_in(key, self.slice_index)


class LossTerms(NamedTuple):
    """One call of a loss function.

    Fields:
      loss: scalar, float32 or wider.
      weight: scalar of at least the loss's dtype; 1 where the loss function gives none.
      aux: everything else that it returned, `None` if nothing.
      frozen: new values for frozen leaves, `None` if none.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    frozen: PyTree


def takes_rng(loss_fn: LossFn, loss_args: Iterable[str] = ()) -> bool:
    """Whether a loss function wants a random key as its third argument.

    True if it has a third positional parameter without a default, or one called `rng` or `key`, and none of the names
    in `loss_args`.

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
    if len(positional) < 3 or positional[2].name in loss_args:
        return False
    return positional[2].default is inspect.Parameter.empty or positional[2].name in ("rng", "key")


def returns_aux(output: Any) -> bool:
    """Whether a loss function's output is `(loss, aux)`."""
    return isinstance(output, tuple) and len(output) == 2


def normalized(loss_fn: LossFn) -> Loss:
    """`loss_fn` as a function of (params, batch, slice key) that returns `LossTerms`.

    Raises (when traced):
      ValueError: the loss or the weight is not a floating scalar, or the output has another form.
      TypeError: `loss_fn` is no function (at once), does not take the loss arguments, or asks for others; a leaf of
        `aux` has no mean.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"reading the loss function: found {type_name(loss_fn)}, expected a function loss_fn(params, batch)."
        )
    takes_rng(loss_fn)  # refused here, not when the loss is traced

    def call(params: PyTree, batch: PyTree, rng: SliceContext) -> LossTerms:
        loss_args = (rng and rng.loss_args) or {}
        args = (params, batch, rng.key()) if takes_rng(loss_fn, loss_args) else (params, batch)
        _check_arguments(loss_fn, args, loss_args)
        output = loss_fn(*args, **loss_args)
        loss, aux = output if returns_aux(output) else (output, None)
        _warn_of_aux(aux, params, batch)
        loss = _scalar(loss, "the loss")
        weight, frozen = jnp.ones((), loss.dtype), None
        if isinstance(aux, Mapping):
            aux = dict(aux)
            if "weight" in aux:
                weight = jax.lax.stop_gradient(_scalar(aux.pop("weight"), "aux['weight']", integers=True))
                weight = weight.astype(max(weight.dtype, loss.dtype, key=lambda d: d.itemsize))
            frozen = aux.pop("frozen", None)
        aux, frozen = jax.lax.stop_gradient(jax.tree.map(jnp.asarray, (aux, frozen)))  # Python numbers too
        _check_aux(aux)
        return LossTerms(loss, weight, aux, frozen)

    return call


def _check_arguments(loss_fn: LossFn, args: tuple[Any, ...], loss_args: Mapping[str, PyTree]) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        signature.bind(*args, **loss_args)
    except TypeError as error:
        raise TypeError(
            f"calling the loss function {signature} with {len(args)} positional arguments and the loss arguments "
            f"{sorted(loss_args)}: {error}. It is called as loss_fn(params, batch), with a random key if it has a "
            f"third positional parameter, and with what loss_args={{...}} names, in engine.step and engine.evaluate."
        ) from None


def _warn_of_aux(aux: PyTree, params: PyTree, batch: PyTree) -> None:
    """Say what `aux` will be where its shapes hint that something else was meant."""
    if aux is None:
        return
    tree: Any = jax.tree.structure(params)
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    same_shapes = jax.tree.structure(aux) == tree and shapes(aux) == shapes(params)
    if same_shapes and not jax.tree_util.treedef_is_leaf(tree):
        warnings.warn(
            "tracing the loss function: the aux that it returns has the structure and the shapes of the parameters. "
            "The step differentiates by itself: pass the loss, not jax.value_and_grad of it.",
            stacklevel=2,
        )
    num_rows = {shape[0] for shape in shapes(batch) if shape}
    reported = aux if not isinstance(aux, Mapping) else {k: x for k, x in aux.items() if k not in _MEANINGS}
    per_row = [
        f"{path_string(path)!r} {list(jnp.shape(x))}"
        for path, x in jax.tree_util.tree_leaves_with_path(reported)
        if jnp.ndim(x) > 1 and jnp.shape(x)[0] in num_rows - {1}
    ]
    if per_row and not same_shapes:
        warnings.warn(
            f"tracing the loss function: leaves of aux have a row for each of the {max(num_rows)} examples of a slice: "
            f"{', '.join(per_row[:3])}. metrics['aux'] holds their mean over devices and microbatches, in which rows "
            f"of different examples are mixed, at the cost of an all-reduce in each step. Return means over the "
            f"examples.",
            stacklevel=2,
        )


_MEANINGS = ("weight", "frozen")


def _check_aux(aux: PyTree) -> None:
    keys = [
        repr(path_string(path))
        for path, x in jax.tree_util.tree_leaves_with_path(aux)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended)
    ]
    if keys:
        raise TypeError(
            f"tracing the loss function: aux holds random keys, {', '.join(keys[:5])}, which have no mean over devices "
            f"and microbatches. Leave them out, or return jax.random.key_data of them as integers, which are summed."
        )


@contextlib.contextmanager
def noted_errors(axes: tuple[str, ...]) -> Iterator[None]:
    """Add to an error of JAX about mesh axes what the loss function has to do with them."""
    try:
        yield
    except (NameError, ValueError) as error:
        text = str(error)
        if "unbound axis name" in text:
            error.add_note(
                f"zero2jax: a loss function may name the mesh axes {list(axes)}, over which its batch is sharded. Use "
                f"that name in it, or make the mesh and the engine with the loss's own, Engine(axis_name=...)."
            )
        elif "shard_map" in text:
            error.add_note(
                f"zero2jax: inside of the step the loss function runs under a shard_map over {list(axes)}. One of its "
                f"own maps over other mesh axes: name those in axis_names= and in its specs, and pass "
                f"mesh=jax.sharding.get_abstract_mesh()."
            )
        elif "sharding_constraint" in text or "manual" in text.lower():
            error.add_note(
                f"zero2jax: the loss function sees one device's part of the batch, so that a sharding constraint in it "
                f"may not name the axes {list(axes)}. Leave them out of its PartitionSpec, and take the mesh from "
                f"jax.sharding.get_abstract_mesh(). Flax's boxed parameters make such constraints: see "
                f"flax.linen.meta.unbox."
            )
        raise


def _scalar(x: Any, name: str, *, integers: bool = False) -> jax.Array:
    single = x is not None and jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
    kinds = (jnp.floating, jnp.integer, jnp.bool_) if integers else (jnp.floating,)
    good = single and jnp.shape(x) == () and any(jnp.issubdtype(jnp.result_type(x), k) for k in kinds)
    if not good:
        given = jax.tree.map(lambda a: f"{jnp.result_type(a).name}{list(jnp.shape(a))}", x)
        raise ValueError(
            f"tracing the loss function: {name} is {given}, and it must be one floating scalar. Return the mean over "
            f"the examples of the batch, as a scalar or as (scalar, aux)."
        )
    x = jnp.asarray(x)
    return _widened(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _widened(x: jax.Array) -> jax.Array:
    """`x` in the dtype that it is added in, of at least 32 bits; not by promotion, which int4 and fp8 do not have."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype.itemsize >= 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


class WeightedSum(NamedTuple):
    """Sums over slices of a batch, each counted by its weight: sum(w x), and sum(w) to divide it by.

    The one place that knows how means over microbatches and devices come about: `of` each slice, `over_microbatches`
    and `psum` add, `mean` and `inverse_weight` divide.

    Fields:
      loss: sum(w loss), scalar, float32 or wider.
      weight: sum(w), scalar of the same dtype or a wider one.
      aux: sum(w x) of floating leaves; plain sums of integers; in at least 32 bits.
      frozen: new values for frozen leaves: means over the slices, not weighted; of integers the maximum, of random
        keys that of the first slice.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    frozen: PyTree

    @classmethod
    def of(cls, terms: LossTerms) -> "WeightedSum":
        """The addends of one slice. A slice of weight 0 adds 0, whatever its loss is."""

        def scaled(x: jax.Array) -> jax.Array:
            wide = _widened(x)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return wide
            return jnp.where(terms.weight == 0, jnp.zeros_like(wide), wide * terms.weight.astype(wide.dtype))

        frozen = jax.tree.map(_widened, terms.frozen)
        return cls(scaled(terms.loss), terms.weight, jax.tree.map(scaled, terms.aux), frozen)

    def over_microbatches(self) -> "WeightedSum":
        """The sum of sums that are stacked along a leading dim (K, ...)."""
        added = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), self._replace(frozen=None))
        joined = _by_kind(mean=lambda x: x.mean(0), largest=lambda x: x.max(0), first=lambda x: x[0])
        return added._replace(frozen=jax.tree.map(joined, self.frozen))

    def psum(self, axis_name: AxisName) -> "WeightedSum":
        """The sum over mesh axes. Per-device code."""
        added = jax.lax.psum(self._replace(frozen=None), axis_name)

        def first(key: jax.Array) -> jax.Array:
            data = jax.random.key_data(key)
            mine = jnp.where(jax.lax.axis_index(axis_name) == 0, data, jnp.zeros_like(data))
            return jax.random.wrap_key_data(jax.lax.psum(mine, axis_name), impl=jax.random.key_impl(key))

        joined = _by_kind(
            mean=lambda x: jax.lax.pmean(x, axis_name),
            largest=lambda x: jax.lax.pmax(x, axis_name),
            first=first,
        )
        return added._replace(frozen=jax.tree.map(joined, self.frozen))

    def mean(self) -> LossTerms:
        """Sums divided by the weight; integers stay sums, and without any weight every mean is 0."""
        divided = lambda x: x / self._divisor.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return LossTerms(divided(self.loss), self.weight, jax.tree.map(divided, self.aux), self.frozen)

    @property
    def inverse_weight(self) -> jax.Array:
        """What sums of w x, gradients say, are multiplied by to make them means, a scalar of the weight's dtype."""
        return 1 / self._divisor

    @property
    def _divisor(self) -> jax.Array:
        return jnp.where(self.weight == 0, 1, self.weight)  # every addend of weight 0 is 0


def _by_kind(
    *,
    mean: Callable[[jax.Array], jax.Array],
    largest: Callable[[jax.Array], jax.Array],
    first: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """How new values of a frozen leaf become one: by whether they are inexact, integers or random keys."""

    def join(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return first(x)
        return mean(x) if jnp.issubdtype(x.dtype, jnp.inexact) else largest(x)

    return join
