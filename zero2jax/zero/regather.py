"""An operation with a body of its own that reads full parameters, without holding them for backward. Per-device code.

`jax.checkpoint` would run the body again in backward: right for one product, whose result is not needed then, and as
costly as a forward pass for a loop. Here the operation runs once. What its backward pass reads is a pytree of arrays
(`jax.vjp`); the full parameters among them are left out of it, gathered again by backward, and put back in.

Limit: what the body computes from a parameter alone and saves (its transpose, a cast) is held; a warning names it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from zero2jax.base.pytrees import PyTree

Full = list[jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Again:
    """Stands in a pytree of arrays for the full parameter of that index."""

    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Moving:
    """Which of the other operands are differentiated."""

    flags: tuple[bool, ...]


def regathered(
    fun: Callable[[Full, list[PyTree]], Sequence[jax.Array]],
    gather: Callable[[list[jax.Array], list[Any]], Full],
    sources: list[jax.Array],
    ports: list[Any],
    others: list[PyTree],
    *,
    names: Sequence[str],
    prevent_cse: bool,
) -> list[jax.Array]:
    """`fun(gather(sources, ports), others)`; backward gathers again.

    Args:
      fun: the operation: full parameters and its other operands -> its results.
      gather: linear in `ports`, which it is differentiated by.
      sources: shards of the parameters.
      ports: where their gradients leave; None for a frozen parameter.
      others: pytrees of arrays.
      names: of the parameters, for the warning.
      prevent_cse: keep the compiler from taking both gathers for one, which it cannot where a loop stands between.
    """

    def run(sources: list[jax.Array], ports: list[Any], others: list[PyTree]) -> list[jax.Array]:
        return list(fun(gather(sources, ports), others))

    def forward(*primals: Any) -> tuple[list[jax.Array], Any]:
        is_primal = lambda x: isinstance(x, CustomVJPPrimal)
        sources, ports, others = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
        flags = _Moving(tuple(x.perturbed for x in jax.tree.leaves(primals[2], is_leaf=is_primal)))
        leaves = jax.tree.leaves(others)

        def moved(full: Full, moving: list[jax.Array]) -> list[jax.Array]:
            return list(fun(full, jax.tree.unflatten(treedef, _merged(moving, leaves, flags))))

        full = gather(sources, ports)
        out, pull = jax.vjp(moved, full, [x for x, moves in zip(leaves, flags.flags, strict=True) if moves])
        _warn_of_held(jax.tree.leaves(pull), full, names)
        index = {id(x): i for i, x in enumerate(full)}
        pull = jax.tree.map(lambda x: _Again(index[id(x)]) if id(x) in index else x, pull)
        return out, (pull, sources, ports, flags)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, Any, Any]:
        pull, sources, ports, flags = saved
        cotangents = [_full_zero(x) if isinstance(x, SymbolicZero) else x for x in cotangents]
        if prevent_cse:
            first = next(i for i, x in enumerate(cotangents) if x.dtype != jax.dtypes.float0)
            sources, cotangents[first] = jax.lax.optimization_barrier((sources, cotangents[first]))
        full, reduce = jax.vjp(lambda ports: gather(sources, ports), ports)
        is_again = lambda x: isinstance(x, _Again)
        pull = jax.tree.map(lambda x: full[x.index] if is_again(x) else x, pull, is_leaf=is_again)
        of_full, of_moving = pull(cotangents)
        of_others = _merged(of_moving, [None] * len(flags.flags), flags)
        return [None] * len(sources), reduce(of_full)[0], jax.tree.unflatten(treedef, of_others)

    treedef = jax.tree.structure(others)
    operation = jax.custom_vjp(run)
    operation.defvjp(forward, backward, symbolic_zeros=True)
    return operation(sources, ports, others)  # type: ignore[no-any-return]


def _merged(moving: Sequence[Any], still: Sequence[Any], flags: _Moving) -> list[Any]:
    rest = iter(moving)
    return [next(rest) if moves else x for x, moves in zip(still, flags.flags, strict=True)]


def _full_zero(x: SymbolicZero) -> Any:
    float0 = x.dtype == jax.dtypes.float0
    return np.zeros(x.shape, jax.dtypes.float0) if float0 else jnp.zeros(x.shape, x.dtype)


def _warn_of_held(saved: Sequence[jax.Array], full: Full, names: Sequence[str]) -> None:
    """Say which parameters backward reads in another form, by the shapes of what it saves."""
    ids = {id(x) for x in saved}
    for x, name in zip(full, names, strict=True):
        if id(x) not in ids and x.ndim > 1 and any(sorted(y.shape) == sorted(x.shape) for y in saved):
            warnings.warn(
                f"stage 3 holds parameter {name!r} until backward, as stage 2 does: a loop or another operation with a "
                f"body of its own saves something made of it there (a transpose, a cast). Put a jax.checkpoint around "
                f"that operation, whose backward pass then repeats it.",
                stacklevel=2,
            )
