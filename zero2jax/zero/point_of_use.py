"""Evaluate an unmodified loss function so that each parameter is gathered where it is used. Per-device code.

In: the loss as a jaxpr, and a stand-in for each parameter. Out: the values that the loss returns. Inside a `shard_map`
that is manual over the data axes.

A stand-in is this device's shard (`source`) and a `port` of the shard's shape, through which the gradient leaves. The
walk over the equations passes it on through `jit`, `jax.checkpoint`, as a scanned-over input of `scan`, and through
operations that only pick layers out of a stack. Any other operation on it gathers the parameter right there:

    forward    all_gather of the shard, cast to the compute dtype, padding cut off
    backward   psum_scatter of the cotangent into the port

So in a scanned model each layer's gradient leaves the backward loop as a shard, and the full stacked gradient never
exists. Two ways:

  held (stage 2)      a parameter is gathered once per scope and before a `jax.checkpoint`, whose saved input it becomes
                      (a stack that is scanned over inside is gathered before, layer by layer, and reduced inside)
  regather (stage 3)  it is gathered inside the `jax.checkpoint`, whose backward pass gathers it again; outside of one,
                      each operation whose backward pass reads it is wrapped in a `jax.checkpoint` of its own,
                      unless the parameter is small

The port is never read: it gives the cotangent a place, a shape and a dtype. Differentiate with respect to the
ports. A source may also be full already (gathered once per step); then only the backward half is left.

Limits. A parameter that `cond`, `while`, a custom derivative or a kernel uses, or that a scan closes over, is gathered
just before, and with regather stays until its backward pass. A value computed from parameters alone
(`w1 @ w2`) is an activation like any other.

ZeRO, arXiv:1910.02054, sections 5.2 and 5.3.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base import jaxprs
from zero2jax.zero.exchange import Use, by_layer, gather, gather_and_reduce
from zero2jax.zero.layer_dims import input_depths, reshaped_leading
from zero2jax.zero.shard_plan import Placement

# Operations on a parameter alone that are cheap to repeat after each gather.
_DEFERRABLE = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "slice"}
)

# Operations whose backward pass does not read the parameter, so there is nothing to gather again.
_LINEAR = _DEFERRABLE | {"add", "add_any", "concatenate", "copy", "dynamic_slice", "gather", "neg", "pad"}
_LINEAR |= {"reduce_sum", "rev", "select_n", "sub"}

# Operands of these that backward does read: a predicate, indices.
_READ_BY_BACKWARD = {"select_n": slice(0, 1), "gather": slice(1, None), "dynamic_slice": slice(1, None)}

# Outside of loops a parameter with at most this many elements is kept for the backward pass: gathering it again
# costs more than it holds (DeepSpeed's default of `stage3_param_persistence_threshold`).
_SMALL = 100_000

Arrays = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Standin:
    """A parameter that has not been gathered yet.

    Attributes:
      use: how it is gathered and its gradient reduced.
      source: this device's shard as it is stored, or the full parameter if `use.gathered`.
      port: what the loss is differentiated by, of the shard's shape and `use.grad_dtype`; None for a frozen parameter.
      pending: equations that were put off, to be applied to the parameter once it is gathered.
    """

    use: Use
    source: jax.Array
    port: jax.Array | None
    pending: tuple[Any, ...] = ()

    @property
    def arrays(self) -> Arrays:
        """What of it crosses a transformation; `over` builds it again on the other side."""
        return self.source, self.port

    def over(self, arrays: Arrays, **changes: Any) -> "Standin":
        """The same over other arrays."""
        return dataclasses.replace(self, source=arrays[0], port=arrays[1], **changes)

    @property
    def size(self) -> int:
        """Number of elements of the full parameter."""
        if self.use.gathered or self.use.dim is None:
            return self.source.size
        return self.source.size // self.source.shape[self.use.dim] * self.use.size

    @property
    def keeps_layers(self) -> bool:
        """Whether what is pending commutes with taking layers out of a stack."""
        return all(eqn.primitive.name == "convert_element_type" for eqn in self.pending)


@dataclasses.dataclass(frozen=True)
class Scope:
    """What is evaluated in one go: a loss, or the body of a `scan` or a `jax.checkpoint`, calls inlined.

    Attributes:
      regather: stage 3; else a parameter that has been gathered is held.
      recomputed: inside a `jax.checkpoint` that saves nothing, so holding a parameter costs nothing.
      in_loop: inside a scan, whose forward and backward loops the compiler cannot merge.
      held: what has been gathered here, and the stand-in it was gathered for, by `_key`.
    """

    regather: bool
    recomputed: bool = False
    in_loop: bool = False
    held: dict[Any, tuple[Standin, jax.Array]] = dataclasses.field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether a parameter that is gathered stays for the rest of this scope."""
        return self.recomputed or not self.regather

    def inner(self, **changes: Any) -> "Scope":
        """The scope of a body in this one, in which nothing has been gathered."""
        return dataclasses.replace(self, held={}, **changes)

    def has(self, x: Standin) -> bool:
        """Whether the parameter of a stand-in is held here."""
        return _key(dataclasses.replace(x, pending=())) in self.held

    def value(self, x: Any) -> Any:
        """An operand as an array. A stand-in is gathered here, unless the scope holds it."""
        if not isinstance(x, Standin):
            return x
        key = _key(x)
        if key in self.held:
            return self.held[key][1]
        if x.pending:
            before = dataclasses.replace(x, pending=x.pending[:-1])
            (array,) = jaxprs.bind(x.pending[-1], [self.value(before)])
        else:
            array = gather(x.use, x.source) if x.port is None else gather_and_reduce(x.use, x.source, x.port)
        if self.holds:
            self.held[key] = x, array
        return array


def _key(x: Standin) -> tuple[Any, ...]:
    """What makes two stand-ins the same array. By identity: arrays and equations cannot be hashed."""
    return (id(x.source), x.use, *map(id, x.pending))


def evaluate(jaxpr: Any, args: Sequence[Any], *, regather: bool) -> list[jax.Array]:
    """Evaluate a jaxpr whose `args` may be `Standin`s; returns its outputs, all of them arrays."""
    return _evaluate(jaxpr, args, Scope(regather))


def _evaluate(jaxpr: Any, args: Sequence[Any], scope: Scope) -> list[jax.Array]:
    return [scope.value(x) for x in _walk(jaxpr, args, scope)]


def _walk(jaxpr: Any, args: Sequence[Any], scope: Scope) -> list[Any]:
    return jaxprs.evaluate(jaxpr, args, lambda eqn, operands: _apply(eqn, operands, scope))


def _apply(eqn: Any, operands: list[Any], scope: Scope) -> Sequence[Any]:
    """The outputs of one equation, arrays or stand-ins, from operands that may be stand-ins."""
    standins = [x for x in operands if isinstance(x, Standin)]
    if not standins:  # no parameter in it
        return jaxprs.bind(eqn, operands)
    if jaxprs.is_call(eqn):  # passed on into the body
        return _walk(jaxprs.body(eqn), operands, scope)
    if jaxprs.is_scan(eqn):  # passed on, a layer at a time
        return _scan(eqn, operands, scope)
    if jaxprs.is_checkpoint(eqn):  # gathered again inside, or held as its saved input
        return _checkpoint(eqn, operands, scope)
    first = operands[0]
    if isinstance(first, Standin) and len(standins) == 1:
        picked = _pick_layers(eqn, first, operands[1:], scope)
        if picked is not None:  # passed on: other stand-ins, of the layers that were picked
            return picked
        cast = eqn.primitive.name == "convert_element_type"
        if len(operands) == 1 and (cast or (not scope.holds and eqn.primitive.name in _DEFERRABLE)):
            return [dataclasses.replace(first, pending=(*first.pending, eqn))]  # put off until it is gathered
    compute = lambda *xs: jaxprs.bind(eqn, [scope.value(x) for x in xs])
    small = not scope.in_loop and all(x.size <= _SMALL for x in standins)
    # gathered here, and held until backward has read it, if it does
    if scope.holds or small or _never_saved(eqn, operands) or jaxprs.has_body(eqn):
        return compute(*operands)
    # gathered here, and gathered again in backward
    return _recomputing(compute, operands, prevent_cse=not scope.in_loop)


def _never_saved(eqn: Any, operands: Sequence[Any]) -> bool:
    name = eqn.primitive.name
    read = operands[_READ_BY_BACKWARD.get(name, slice(0))]
    return name in _LINEAR and not any(isinstance(x, Standin) for x in read)


def _arrays_of(operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.arrays if isinstance(x, Standin) else x for x in operands)


def _recomputing(
    fun: Callable[..., Sequence[jax.Array]], operands: Sequence[Any], **options: Any
) -> Sequence[jax.Array]:
    """`fun(*operands)` under `jax.checkpoint`, with stand-ins passed in rather than what they stand for."""

    def inner(*arrays: Any) -> Sequence[jax.Array]:
        pairs = zip(operands, arrays, strict=True)
        return fun(*[x.over(a) if isinstance(x, Standin) else a for x, a in pairs])

    return jax.checkpoint(inner, **options)(*_arrays_of(operands))


def _checkpoint(eqn: Any, operands: list[Any], scope: Scope) -> Sequence[jax.Array]:
    options = jaxprs.checkpoint_options(eqn)
    if not scope.regather:
        depths = input_depths(jaxprs.body(eqn))
        operands = [_saved_input(x, depth, scope) for x, depth in zip(operands, depths, strict=True)]
        if not any(isinstance(x, Standin) for x in operands):
            return jaxprs.bind(eqn, operands)
    elif options["policy"] is jax.checkpoint_policies.everything_saveable:
        warnings.warn(
            "a jax.checkpoint with the policy everything_saveable saves the parameters that stage 3 gathers inside of "
            "it, too, so that they are held until backward, as at stage 2. Leave that jax.checkpoint out, or use "
            "another policy.",
            stacklevel=2,
        )
    saves_nothing = options["policy"] in (None, jax.checkpoint_policies.nothing_saveable)
    body = scope.inner(recomputed=scope.recomputed or saves_nothing)
    return _recomputing(lambda *xs: _evaluate(jaxprs.body(eqn), xs, body.inner()), operands, **options)


def _saved_input(x: Any, depth: int, scope: Scope) -> Any:
    """An operand of a `jax.checkpoint` that saves it: gathered now, or, if it is full already, passed in.

    A stack that is scanned over inside, `depth` dims deep, is gathered now, a layer at a time, and passed in as a
    stand-in: so its gradient is still reduced layer by layer.
    """
    if not isinstance(x, Standin) or x.use.gathered:
        return x
    if depth == 0 or x.use.dim is None or x.use.dim < depth or scope.has(x) or not x.keeps_layers:
        return scope.value(x)
    (full,) = by_layer(gather, [(dataclasses.replace(x.use, layer_dims=depth), x.source)])
    return x.over((full, x.port), use=dataclasses.replace(x.use, gathered=True))


def _scan(eqn: Any, operands: list[Any], scope: Scope) -> Sequence[jax.Array]:
    body, num_consts, num_carry, options = jaxprs.scan_parts(eqn)
    split = num_consts + num_carry
    fixed = [scope.value(x) for x in operands[:split]]
    xs = [_scanned(x, scope) for x in operands[split:]]

    def step(*arrays: Any) -> list[jax.Array]:
        pairs = zip(xs, arrays[split:], strict=True)
        layers = [x.over(a, use=x.use.layer) if isinstance(x, Standin) else a for x, a in pairs]
        # not `recomputed`: what the body held, the loop would stack
        return _evaluate(body, [*arrays[:split], *layers], scope.inner(in_loop=True, recomputed=False))

    return jaxprs.rebuild_scan(step, num_consts, num_carry, [*fixed, *_arrays_of(xs)], options)


def _scanned(x: Any, scope: Scope) -> Any:
    """A scanned-over operand: the stand-in itself if its shard has all the layers."""
    if not isinstance(x, Standin):
        return x
    if not x.keeps_layers or x.use.dim == 0:
        warnings.warn(
            f"parameter {x.use.path!r} is scanned over, and its shards do not hold whole layers (it is sharded on "
            f"the scanned dim, or reshaped before the scan), so the whole stack is gathered before the loop. Pass "
            f"`batch` to engine.init, so that the layers are read from the loss function, or set `layer_dims`.",
            stacklevel=2,
        )
        return scope.value(x)
    return x


# --- layers picked out of a stack: the operation acts on the shard ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Picked:
    """What an operation that picks layers does: `kept[i]` is the dim that result dim i was (None: a new one), and
    `ops` make the results, from full parameters and from shards alike.
    """

    kept: Sequence[int | None]
    ops: Sequence[Callable[[jax.Array], jax.Array]]


def _pick_layers(eqn: Any, x: Standin, indices: Sequence[Any], scope: Scope) -> list[Standin] | None:
    """The stand-ins of `eqn` applied to `x`, if that leaves the sharded dim alone and can act on the shard."""
    use, pick = x.use, _PICKS.get(eqn.primitive.name)
    if pick is None or use.dim is None or not x.keeps_layers or scope.has(x):
        return None
    picked = pick(eqn, use.dim, use.placement, indices)
    if picked is None:
        return None
    placement = tuple(None if i is None else use.placement[i] for i in picked.kept) if use.placement else ()
    use = dataclasses.replace(use, dim=list(picked.kept).index(use.dim), placement=placement)
    results = [(op(x.source), None if x.port is None else op(x.port)) for op in picked.ops]
    return [x.over(arrays, use=use) for arrays in results]


def _squeeze(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> _Picked | None:
    dropped, ndim = eqn.params["dimensions"], len(eqn.invars[0].aval.shape)
    if dim in dropped:
        return None
    return _Picked([i for i in range(ndim) if i not in dropped], [lambda a: jax.lax.squeeze(a, dropped)])


def _unstack(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> _Picked | None:
    """What iterating over an array is since jax 0.12."""
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    if dim == axis:
        return None
    pick = lambda i, a: jax.lax.index_in_dim(a, i, axis, keepdims=False)
    ops = [functools.partial(pick, i) for i in range(shape[axis])]
    return _Picked([i for i in range(len(shape)) if i != axis], ops)


def _slice(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> _Picked | None:
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    strided = strides is not None and strides[dim] != 1
    if strided or not _takes_all(eqn, dim) or _cuts_placed(eqn, placement):
        return None
    op = lambda a: jax.lax.slice(a, start, _put(limit, dim, a.shape[dim]), strides)
    return _Picked(range(len(start)), [op])


def _dynamic_slice(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> _Picked | None:
    sizes = eqn.params["slice_sizes"]
    # A traced index may come from a device's batch or key: then each device would pick other layers.
    same_everywhere = not any(isinstance(i, jax.core.Tracer) for i in indices)
    if not _takes_all(eqn, dim) or _cuts_placed(eqn, placement) or not same_everywhere:
        return None
    start = _put(indices, dim, jnp.zeros_like(indices[dim]))
    op = lambda a: jax.lax.dynamic_slice(a, start, _put(sizes, dim, a.shape[dim]))
    return _Picked(range(len(sizes)), [op])


def _reshape(eqn: Any, dim: int, placement: Placement, indices: Sequence[Any]) -> _Picked | None:
    shape = eqn.invars[0].aval.shape
    placed = [i for i, entry in enumerate(placement[:dim]) if entry is not None]
    first = min([dim, *placed])  # this dim and all later ones are sharded, or stand between such
    leading = reshaped_leading(shape, eqn.params["new_sizes"], first)
    if leading is None:
        return None
    kept = [*[None] * len(leading), *range(first, len(shape))]
    return _Picked(kept, [lambda a: a.reshape(*leading, *a.shape[first:])])


_PICKS: dict[str, Callable[[Any, int, Placement, Sequence[Any]], _Picked | None]] = {
    "squeeze": _squeeze,
    "unstack": _unstack,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "reshape": _reshape,
}


def _takes_all(eqn: Any, dim: int) -> bool:
    """Whether a slice takes a dim in full."""
    return eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]


def _cuts_placed(eqn: Any, placement: Placement) -> bool:
    """Whether a slice shortens a dim that another mesh axis holds, which would not divide any more."""
    return any(entry is not None and not _takes_all(eqn, i) for i, entry in enumerate(placement))


def _put(values: Sequence[Any], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])
