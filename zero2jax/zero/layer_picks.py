"""Operations that only pick layers out of a stack, or put layers together to one: they act on shards.

An operation that leaves the sharded dim alone does to a shard what it does to the full parameter, so a parameter need
not be gathered for it. `PICKS` knows them by primitive: how dims of the result come from dims of the operand, and the
functions that make the results.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.zero.layer_dims import reshaped_leading
from zero2jax.zero.shard_plan import Placement


@dataclasses.dataclass(frozen=True)
class Picked:
    """What an operation that picks layers does: `kept[i]` is the dim that result dim i was (None: a new one), and
    `ops` make the results, from full parameters and from shards alike.
    """

    kept: Sequence[int | None]
    ops: Sequence[Callable[[jax.Array], jax.Array]]


def _squeeze(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    dropped, ndim = eqn.params["dimensions"], len(eqn.invars[0].aval.shape)
    if dim in dropped:
        return None
    return Picked([i for i in range(ndim) if i not in dropped], [lambda a: jax.lax.squeeze(a, dropped)])


def _unstack(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    """What iterating over an array is since jax 0.12."""
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    if dim == axis:
        return None
    pick = lambda i, a: jax.lax.index_in_dim(a, i, axis, keepdims=False)
    ops = [functools.partial(pick, i) for i in range(shape[axis])]
    return Picked([i for i in range(len(shape)) if i != axis], ops)


def _slice(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    strided = strides is not None and strides[dim] != 1
    if strided or not _takes_all(eqn, dim) or _cuts_placed(eqn, placement):
        return None
    op = lambda a: jax.lax.slice(a, start, _put(limit, dim, a.shape[dim]), strides)
    return Picked(range(len(start)), [op])


def _dynamic_slice(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    sizes = eqn.params["slice_sizes"]
    # A traced index may come from a device's batch or key: then each device would pick other layers.
    same_everywhere = not any(isinstance(i, jax.core.Tracer) for i in indices)
    if not _takes_all(eqn, dim) or _cuts_placed(eqn, placement) or not same_everywhere:
        return None
    start = _put(indices, dim, jnp.zeros_like(indices[dim]))
    op = lambda a: jax.lax.dynamic_slice(a, start, _put(sizes, dim, a.shape[dim]))
    return Picked(range(len(sizes)), [op])


def _reshape(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    shape = eqn.invars[0].aval.shape
    placed = [i for i, entry in enumerate(placement[:dim]) if entry is not None]
    first = min([dim, *placed])  # this dim and all later ones are sharded, or stand between such
    leading = reshaped_leading(shape, eqn.params["new_sizes"], first)
    if leading is None:
        return None
    kept = [*[None] * len(leading), *range(first, len(shape))]
    return Picked(kept, [lambda a: a.reshape(*leading, *a.shape[first:])])


def _expand(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> Picked | None:
    """New dims of size 1, as `jnp.stack` makes them."""
    shape, new = eqn.invars[0].aval.shape, eqn.params["shape"]
    at = eqn.params["broadcast_dimensions"]
    if math.prod(shape) != math.prod(new) or any(new[i] != n for i, n in zip(at, shape, strict=True)):
        return None
    kept = [list(at).index(i) if i in at else None for i in range(len(new))]
    added = [i for i, old in enumerate(kept) if old is None]
    return Picked(kept, [lambda a: jax.lax.expand_dims(a, added)])


PICKS: dict[str, Callable[[Any, int, Placement, Sequence[Any]], Picked | None]] = {
    "squeeze": _squeeze,
    "unstack": _unstack,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "reshape": _reshape,
    "broadcast_in_dim": _expand,
}


def _takes_all(eqn: Any, dim: int) -> bool:
    """Whether a slice takes a dim in full."""
    return eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]


def _cuts_placed(eqn: Any, placement: Placement) -> bool:
    """Whether a slice shortens a dim that another mesh axis holds, which would not divide any more."""
    return any(entry is not None and not _takes_all(eqn, i) for i, entry in enumerate(placement))


def _put(values: Sequence[Any], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


# --- layers put together to a stack: what the sharded dim and the placement become, and the function ---------------

Joined = tuple[int, Placement, Callable[[Sequence[jax.Array]], jax.Array]]


def _concatenate(eqn: Any, dim: int | None, placement: Placement) -> Joined | None:
    axis = eqn.params["dimension"]
    if dim is None or dim == axis or (placement and placement[axis] is not None):
        return None
    return dim, placement, lambda arrays: jax.lax.concatenate(arrays, axis)


def _stack(eqn: Any, dim: int | None, placement: Placement) -> Joined | None:
    """What `jnp.stack` is since jax 0.12."""
    axis = eqn.params["axis"]
    if dim is None:
        return None
    placement = (*placement[:axis], None, *placement[axis:]) if placement else ()
    return dim + (axis <= dim), placement, lambda arrays: jnp.stack(arrays, axis)


JOINS: dict[str, Callable[[Any, int | None, Placement], Joined | None]] = {
    "concatenate": _concatenate,
    "stack": _stack,
}
