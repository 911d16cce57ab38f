"""Masters and moments stored in 16 bits: made fp32 for the update, and rounded after it. Under `jax.jit`.

Global arrays of true shape, outside `shard_map`. Bf16 has 8 bits: a parameter that moves by less than a 512th of itself
is where it was once the new value is rounded to nearest, and a second moment of decay 0.999 stops for good. Rounded at
random, up with the probability of its distance from below, the value is right in the mean. Gupta et al., Deep Learning
with Limited Numerical Precision, arXiv:1502.02551; for bf16 training Zamirai et al., arXiv:2010.06192.

The random bits come from the state: the key of the run, the numbers of the step and the leaf, and the index of the
element in the full leaf. So they are the same at every stage and on any number of devices, on the host too, and a
restored run goes on with those of the run that was saved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base.pytrees import PyTree
from zero2jax.zero.precision import Precision, wide_dtype
from zero2jax.zero.shard_plan import ShardPlan, owner

_TAG = 0xF00DF00D  # apart from the keys of the loss function, which are folded with a step below 2**31


def narrowed(plan: ShardPlan, params: ShardPlan, precision: Precision) -> tuple[ShardPlan, frozenset[int]]:
    """The plan of an optimizer's state with its moments in `state_dtype`, and which leaves these are.

    A moment is a leaf of fp32, of one dim or more, that belongs to a trainable parameter by its name. What belongs to
    no parameter (learning rates, counts, losses) stays as it is.
    """
    dtype = precision.state_dtype
    if dtype == jnp.float32:
        return plan, frozenset()
    known = {leaf.names: leaf for leaf in params.leaves}

    def is_moment(names: tuple[str, ...]) -> bool:
        param = owner(names, known)
        return param is not None and not precision.is_kept(param.path, param)

    which = frozenset(
        i
        for i, leaf in enumerate(plan.leaves)
        if leaf.dtype == jnp.float32 and leaf.shape and is_moment(leaf.names)
    )
    leaves = [
        dataclasses.replace(leaf, dtype=dtype) if i in which else leaf for i, leaf in enumerate(plan.leaves)
    ]
    return dataclasses.replace(plan, leaves=tuple(leaves)), which


def rounding_key(rng: jax.Array, step: jax.Array) -> jax.Array:
    """Key data (uint32) of a step's rounding, from the raw key data of the run and the number of the step."""
    key = jax.random.wrap_key_data(rng[-2:], impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, _TAG), step))


def widened(trained: PyTree) -> PyTree:
    """Trainable parameters as they are stored -> as the optimizer sees them."""
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), trained)


def widened_state(opt_state: PyTree, narrow: frozenset[int]) -> PyTree:
    """An optimizer's state as it is stored -> as the optimizer made it; `narrow` as in `Layout.narrow_state`."""
    leaves, treedef = jax.tree.flatten(opt_state)
    return jax.tree.unflatten(
        treedef, [x.astype(jnp.float32) if i in narrow else x for i, x in enumerate(leaves)]
    )


def rounded(new: PyTree, seen: PyTree, stored: PyTree, key: jax.Array | None = None) -> PyTree:
    """What the optimizer made, in the dtypes that it is stored in.

    Args:
      new: global arrays of true shape.
      seen: what they were made of, as the optimizer saw it; anything with dtypes, in the same structure, like `stored`.
      stored: as it is stored; a leaf that is narrower there than in `seen` is rounded.
      key: data of a key by which bf16 is rounded stochastically; None rounds to nearest.
    """
    leaves, treedef = jax.tree.flatten(new)
    dtypes = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (seen, stored)]
    numbered = enumerate(zip(leaves, *dtypes, strict=True))
    done = [x if wide == dtype else _rounded(x, dtype, key, i) for i, (x, wide, dtype) in numbered]
    return jax.tree.unflatten(treedef, done)


def _rounded(x: jax.Array, dtype: Any, key: jax.Array | None, number: int) -> jax.Array:
    if dtype == jnp.float16:  # a finite number stays one
        largest = float(jnp.finfo(dtype).max)
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)
    if dtype != jnp.bfloat16 or key is None:
        return x.astype(dtype)
    own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), number)
    noise = jax.random.bits(own, x.shape, jnp.uint16).astype(jnp.uint32)
    # bf16 is the upper half of fp32: what is added to the lower half carries with the probability of its size
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    up_or_down = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), up_or_down, x).astype(dtype)
