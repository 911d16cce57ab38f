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
                      each operation whose backward pass reads it is wrapped in a `jax.checkpoint` of its own, or, if
                      it has a body (`cond`, a custom derivative, a loop that closes over it), in `regather`,
                      unless the parameter is small: that one is held

The port is never read: it gives the cotangent a place, a shape and a dtype. Differentiate with respect to the
ports. A source may also be full already (gathered once per step); then only the backward half is left. Or it lies in
pinned host memory: it is fetched where it is gathered; a loop or a slice takes layers out of it there, and for any
other operation its shard is fetched first.

Limits. With regather, what such an operation makes of a parameter alone and saves stays until backward, as does what
an operation with effects (a callback) reads. A value computed from several parameters (`w1 @ w2`) is an activation
like any other, and a parameter that is used twice is gathered and its gradient reduced at each use.

ZeRO, arXiv:1910.02054, sections 5.2 and 5.3.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero2jax.base import jaxprs
from zero2jax.base.memories import to_device
from zero2jax.zero.exchange import Use, by_layer, gather, gather_and_reduce
from zero2jax.zero.layer_dims import input_depths
from zero2jax.zero.layer_picks import JOINS, PICKS
from zero2jax.zero.regather import regathered

# Operations on a parameter alone that are cheap to repeat after each gather.
_DEFERRABLE = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "slice"}
)

# Functions of a parameter alone with a derivative of their own (a rounding, an activation): put off with regather.
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})

# Operations whose backward pass does not read the parameter, so there is nothing to gather again.
_LINEAR = _DEFERRABLE | {"add", "add_any", "concatenate", "copy", "dynamic_slice", "gather", "neg", "pad"}
_LINEAR |= {"reduce_sum", "rev", "select_n", "sub"}

# Operands of these that backward does read: a predicate, indices.
_READ_BY_BACKWARD = {"select_n": slice(0, 1), "gather": slice(1, None), "dynamic_slice": slice(1, None)}

# What pinned host memory can do with an array; a loop slices, too.
_SLICES = frozenset({"slice", "dynamic_slice"})

Arrays = tuple[Any, jax.Array | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Standin:
    """A parameter that has not been gathered yet.

    Attributes:
      use: how it is gathered and its gradient reduced.
      source: this device's shard as it is stored, or the full parameter if `use.gathered`.
      port: what the loss is differentiated by, of the shard's shape and `use.sum_dtype`; None for a frozen parameter.
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
    def fetched(self) -> "Standin":
        """The stand-in of the same shard in device memory."""
        if not self.use.pinned:
            return self
        use = dataclasses.replace(self.use, pinned=False)
        return self.over((to_device(self.source), self.port), use=use)

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
      shared: of the whole loss: one function for the bodies of checkpoints that are alike, which jax then traces and
        transforms once, by what they are alike in.
    """

    regather: bool
    recomputed: bool = False
    in_loop: bool = False
    held: dict[Any, tuple[Standin, jax.Array]] = dataclasses.field(default_factory=dict)
    shared: dict[Any, Callable[..., Sequence[jax.Array]]] = dataclasses.field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every parameter that is gathered stays for the rest of this scope."""
        return self.recomputed or not self.regather

    def keeps(self, x: Standin) -> bool:
        """Whether this parameter stays, since all do or it is small."""
        return self.holds or (not self.in_loop and x.size <= x.use.max_kept)

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
        if self.keeps(x):
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
    name, first = eqn.primitive.name, operands[0]
    joined = _joined(eqn, standins, scope) if name in JOINS and len(standins) == len(operands) else None
    if joined is not None:  # passed on: one stand-in of all of them
        return [joined]
    if isinstance(first, Standin) and len(standins) == 1:
        picked = _pick_layers(eqn, first, operands[1:], scope)
        if picked is not None:  # passed on: other stand-ins, of the layers that were picked
            return picked
        alone = name in _DEFERRABLE or (name in _CUSTOM and len(eqn.outvars) == 1)
        if len(operands) == 1 and (name == "convert_element_type" or (not scope.keeps(first) and alone)):
            return [dataclasses.replace(first, pending=(*first.pending, eqn))]  # put off until it is gathered
    # gathered here, and held until backward has read it, if it does; nothing goes backward through a `while`
    if all(scope.keeps(x) for x in standins) or _never_saved(eqn, operands) or eqn.effects or name == "while":
        return jaxprs.bind(eqn, [scope.value(x) for x in operands])
    # gathered here, and gathered again in backward
    operands = [scope.value(x) if isinstance(x, Standin) and scope.keeps(x) else x for x in operands]
    if jaxprs.has_body(eqn):
        return _regathering(jaxprs.detached(eqn), jaxprs.arrays(eqn, operands), scope)
    compute = lambda *xs: jaxprs.bind(eqn, [scope.inner().value(x) for x in xs])
    return _recomputing(compute, operands, prevent_cse=not scope.in_loop)


def _never_saved(eqn: Any, operands: Sequence[Any]) -> bool:
    read = operands[_READ_BY_BACKWARD.get(eqn.primitive.name, slice(0))]
    return eqn.primitive.name in _LINEAR and not any(isinstance(x, Standin) for x in read)


def _arrays_of(operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.arrays if isinstance(x, Standin) else x for x in operands)


def _bare(x: Any) -> Any:
    """What a stand-in says of its arrays, without them: it may outlive the trace that they belong to."""
    return x.over((None, None)) if isinstance(x, Standin) else None


def _kind(x: Any) -> Any:
    """What of an operand a body is written for; two layers differ by name alone."""
    return (dataclasses.replace(x.use, path=""), *map(id, x.pending)) if isinstance(x, Standin) else None


def _recomputing(
    fun: Callable[..., Sequence[jax.Array]], operands: Sequence[Any], **options: Any
) -> Sequence[jax.Array]:
    """`fun(*operands)` under `jax.checkpoint`, with stand-ins passed in rather than what they stand for."""
    return jax.checkpoint(_over_arrays(fun, operands), **options)(*_arrays_of(operands))


def _over_arrays(fun: Callable[..., Sequence[jax.Array]], operands: Sequence[Any]) -> Callable[..., Any]:
    """`fun` of operands like these as a function of their arrays."""
    kinds = [_bare(x) for x in operands]

    def inner(*arrays: Any) -> Sequence[jax.Array]:
        pairs = zip(kinds, arrays, strict=True)
        return fun(*[x.over(a) if isinstance(x, Standin) else a for x, a in pairs])

    return inner


def _regathering(
    fun: Callable[..., Sequence[jax.Array]], operands: Sequence[Any], scope: Scope
) -> Sequence[jax.Array]:
    """`fun(*operands)`, run once, its stand-ins gathered again for backward; other operands may be pytrees."""
    at = [i for i, x in enumerate(operands) if isinstance(x, Standin)]
    standins, scope = [_bare(operands[i]) for i in at], scope.inner()

    def full(sources: list[jax.Array], ports: list[Any]) -> list[jax.Array]:
        return [scope.inner().value(x.over((s, p))) for x, s, p in zip(standins, sources, ports, strict=True)]

    def placed(params: list[jax.Array], others: list[Any]) -> Sequence[jax.Array]:
        param, other = iter(params), iter(others)
        return fun(*[next(param if i in at else other) for i in range(len(params) + len(others))])

    return regathered(
        placed,
        full,
        [operands[i].source for i in at],
        [operands[i].port for i in at],
        [x for x in operands if not isinstance(x, Standin)],
        names=[x.use.path for x in standins],
        prevent_cse=not scope.in_loop,
    )


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
    placed = any(isinstance(x, Standin) and x.use.placement for x in operands)
    if scope.regather and scope.in_loop and not scope.recomputed and not placed:
        # Forward and backward are two loops, which nothing merges. The barrier would tie a layer's gathers to the
        # cotangent that reaches it, and the compiler could not start them an iteration early. (Placed on other axes
        # they would be all-reduced once more.)
        options = {**options, "prevent_cse": False}
    body, inner = jaxprs.body(eqn), scope.inner(recomputed=scope.recomputed or saves_nothing)
    alike = (id(body), inner.recomputed, inner.in_loop, *map(_kind, operands))
    if alike not in scope.shared:
        scope.shared[alike] = _over_arrays(lambda *xs: _evaluate(body, xs, inner.inner()), operands)
    return jax.checkpoint(scope.shared[alike], **options)(*_arrays_of(operands))


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
    return x.over((full, x.port), use=dataclasses.replace(x.use, gathered=True, pinned=False))


def _scan(eqn: Any, operands: list[Any], scope: Scope) -> Sequence[jax.Array]:
    body, num_consts, num_carry, options = jaxprs.scan_parts(eqn)
    split = num_consts + num_carry
    operands = jaxprs.arrays(eqn, operands)
    dropped = [isinstance(x, Standin) and not (scope.keeps(x) or eqn.effects) for x in operands[:num_consts]]
    dropped += [False] * num_carry
    fixed = [x if d else scope.value(x) for x, d in zip(operands[:split], dropped, strict=True)]
    xs = [_scanned(x, scope) for x in operands[split:]]
    is_loop = options["length"] > max(
        int(options["unroll"]), 1
    )  # else the compiler inlines its only iteration
    kinds, inside = [_bare(x) for x in xs], scope.inner(in_loop=is_loop, recomputed=False)

    def step(*arrays: Any) -> list[jax.Array]:
        pairs = zip(kinds, arrays[split:], strict=True)
        layers = [x.over(a, use=x.use.layer) if isinstance(x, Standin) else a for x, a in pairs]
        # not `recomputed`: what the body held, the loop would stack
        return _evaluate(body, [*arrays[:split], *layers], inside.inner())

    loop = lambda *arrays: jaxprs.rebuild_scan(step, num_consts, num_carry, arrays, options)
    if any(dropped):  # what the loop closes over is gathered again for its backward loop
        return _regathering(loop, [*fixed, *_arrays_of(xs)], scope)
    return loop(*fixed, *_arrays_of(xs))


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
    return x.fetched if scope.in_loop else x


def _pick_layers(eqn: Any, x: Standin, indices: Sequence[Any], scope: Scope) -> list[Standin] | None:
    """The stand-ins of `eqn` applied to `x`, if that leaves the sharded dim alone and can act on the shard."""
    use, pick = x.use, PICKS.get(eqn.primitive.name)
    if pick is None or use.dim is None or not x.keeps_layers or scope.has(x):
        return None
    picked = pick(eqn, use.dim, use.placement, indices)
    if picked is None:
        return None
    placement = tuple(None if i is None else use.placement[i] for i in picked.kept) if use.placement else ()
    x = x if eqn.primitive.name in _SLICES else x.fetched
    dim = list(picked.kept).index(use.dim)
    use = dataclasses.replace(x.use, dim=dim, placement=placement, layer_dims=0)
    results = [(op(x.source), None if x.port is None else op(x.port)) for op in picked.ops]
    return [x.over(arrays, use=use) for arrays in results]


def _joined(eqn: Any, standins: Sequence[Standin], scope: Scope) -> Standin | None:
    """The stand-in of parameters that are put together, but not along the sharded dim: a stack of layers."""
    first = standins[0]
    alike = {dataclasses.replace(x.use, path="", layer_dims=0) for x in standins}
    gathered = any(x.pending or scope.has(x) for x in standins)
    joined = JOINS[eqn.primitive.name](eqn, first.use.dim, first.use.placement)
    if len(alike) > 1 or len({x.port is None for x in standins}) > 1 or gathered or joined is None:
        return None
    dim, placement, join = joined
    standins = [x.fetched for x in standins]
    ports = [x.port for x in standins if x.port is not None]
    path = " + ".join(x.use.path for x in standins[:3]) + (" + ..." if len(standins) > 3 else "")
    first = standins[0]
    use = dataclasses.replace(first.use, path=path, dim=dim, placement=placement, layer_dims=0)
    return first.over((join([x.source for x in standins]), join(ports) if ports else None), use=use)
