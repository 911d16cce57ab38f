"""Remat by hand: `remat(fn, policy=...)` for a function or block, `layer(fn)` to mark blocks of an unrolled model.

`remat` is `jax.checkpoint` with the policies of `policies`. It takes plain functions, functions of NNX modules,
and classes of Linen modules (through `flax.linen.remat`). `layer` changes nothing by itself: it leaves a mark in the
traced program, by which `remat_layers`, and so the options of `Engine`, find the blocks of a model that has no loop.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero2jax.activations.policies import PolicyLike, check_tensors, remat_policy, tensors_of
from zero2jax.base import jaxprs

LAYER_MARK = "zero2jax_layer"
"""The name of the `jit` equation that a marked block becomes."""


def remat(
    fn: Callable[..., Any],
    *,
    policy: PolicyLike = "nothing",
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`fn`, whose intermediate values are recomputed in backward, but for those that the policy saves.

    Args:
      fn: a function of arrays (or NNX modules), or a Linen module class.
      policy: see `remat_policy`.
      prevent_cse: keep the compiler from merging the recomputation with forward; False inside of `scan`.
      static_argnums: positions of arguments that are no arrays.

    Raises:
      ValueError: unknown policy; when called, a tensor name that `fn` does not have (a Linen class is not asked).

    Example:
      >>> import jax.numpy as jnp
      >>> block = remat(lambda x, w: jnp.tanh(x @ w), policy="dots")
      >>> block(jnp.ones((2, 3)), jnp.zeros((3, 3))).shape
      (2, 3)
    """
    chosen = remat_policy(policy)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    options: dict[str, Any] = {"policy": chosen, "prevent_cse": prevent_cse}
    if inspect.isclass(fn) and _is_linen(fn):
        return sys.modules["flax.linen"].remat(fn, static_argnums=static, **options)  # type: ignore[no-any-return]
    checkpointed = jax.checkpoint(fn, static_argnums=static, **options)

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _has_nnx(args, kwargs):  # whose state the function may change
            return sys.modules["flax.nnx"].remat(fn, static_argnums=static, **options)(*args, **kwargs)
        if tensors_of(chosen):
            jaxpr = jax.make_jaxpr(fn, static_argnums=static)(*args, **kwargs)
            check_tensors(chosen, jaxprs.tensor_names(jaxpr), getattr(fn, "__name__", "the function"))
        return checkpointed(*args, **kwargs)

    return checked


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, marked as one block of an unrolled model; it computes the same.

    Arguments are arrays, trees of them, or NNX modules: close over everything else. The activation that enters the
    block is one of the arguments.

    Raises:
      TypeError: `fn` is a class.

    Example:
      >>> import jax.numpy as jnp
      >>> block = layer(lambda params, x: jnp.tanh(x @ params))
      >>> block(jnp.zeros((3, 3)), jnp.ones((2, 3))).shape
      (2, 3)
    """

    if inspect.isclass(fn):
        raise TypeError(
            f"marking {fn.__name__} as a layer: it is a class, and a function of arrays is needed. Mark the call, "
            f"layer(lambda params, x: module.apply(params, x)), or wrap the class with zero2jax.remat."
        )

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        def call(args: Any, kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        call.__name__ = call.__qualname__ = LAYER_MARK
        jit = sys.modules["flax.nnx"].jit if _has_nnx(args, kwargs) else jax.jit
        return jit(call)(args, kwargs)  # made anew: what `fn` closes over may be of this trace

    return marked


def _is_linen(cls: type) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and issubclass(cls, linen.Module)


def _has_nnx(args: Any, kwargs: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_module = lambda x: isinstance(x, nnx.Module)
    return any(map(is_module, jax.tree.leaves((args, kwargs), is_leaf=is_module)))
