"""Evaluate an unmodified loss function so that each parameter appears where it is used. Per-device code.

The loss is traced to a jaxpr and evaluated again with each parameter replaced by a stand-in: this device's shard
(`source`), and a `port` of the shard's shape through which the gradient leaves. The stand-in travels through
`jit`, `jax.checkpoint`, as a scanned-over input of `scan`, and through operations that only pick layers out of a
stack. Anything else that touches it makes the parameter appear right there:

    forward    all_gather of the shard, cast to the compute dtype, padding cut off
    backward   psum_scatter of the cotangent into the port

So in a scanned model each layer's gradient leaves the backward loop as a shard, and the full stacked gradient never
exists. Two modes:

  held (stage 2)      a parameter appears once per scope and before a `jax.checkpoint`, whose saved input it becomes
                      (a stack that is scanned over inside is gathered before and appears inside, layer by layer)
  regather (stage 3)  it appears inside the `jax.checkpoint`, whose backward pass gathers it again; outside of one,
                      each operation whose backward pass reads it is wrapped in a `jax.checkpoint` of its own,
                      unless the parameter is small

The port is never read: it gives the cotangent a place, a shape and a dtype. Differentiate with respect to the
ports. A source may also be whole already (gathered once per step); then only the backward half is left.

Limits. A parameter that `cond`, `while`, a custom derivative or a kernel uses, or that a scan closes over, appears
just before, and in regather mode stays until its backward pass. A value computed from parameters alone
(`w1 @ w2`) is an activation like any other.

ZeRO, arXiv:1910.02054, sections 5.2 and 5.3.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base import jaxprs
from zero2jax.base.mesh import padded_size
from zero2jax.zero import exchange
from zero2jax.zero.shard_plan import LeafPlan, Placement


@dataclasses.dataclass(frozen=True)
class Use:
    """How a parameter, or one layer of it, appears from its shard: static and hashable.

    Attributes:
      path: the parameter's name.
      dim: sharded dim of what will appear; None for a leaf that every device holds whole.
      size: true size of that dim.
      num_shards: N; a shard is padded so that the dim divides by it.
      placement: other mesh axes of each dim.
      dtype: dtype of what appears.
      axis_name: axis to gather and reduce over.
      gathered: the source is whole already.
    """

    path: str
    dim: int | None
    size: int
    num_shards: int
    placement: Placement
    dtype: Any
    axis_name: str
    gathered: bool = False

    @property
    def layer(self) -> "Use":
        """How one layer of a stack appears: the same without the leading dim."""
        dim = None if self.dim is None else self.dim - 1
        return dataclasses.replace(self, dim=dim, placement=self.placement[1:])


def use_of_leaf(leaf: LeafPlan, dtype: Any, axis_name: str, *, gathered: bool = False) -> Use:
    """The `Use` of a whole leaf of a plan."""
    size = 0 if leaf.dim is None else leaf.shape[leaf.dim]
    placement = leaf.model_spec if any(entry is not None for entry in leaf.model_spec) else ()
    return Use(leaf.path, leaf.dim, size, leaf.num_shards, placement, dtype, axis_name, gathered)


def gather(use: Use, source: jax.Array) -> jax.Array:
    """The whole parameter, without padding and in its compute dtype, from this device's shard."""
    x = source.astype(use.dtype)
    if use.gathered or use.dim is None:
        return x
    x = exchange.all_gather(x, use.axis_name, use.dim, use.placement)
    return jax.lax.slice_in_dim(x, 0, use.size, axis=use.dim)


def reduce_grad(use: Use, grad: jax.Array, dtype: Any) -> jax.Array:
    """Sum a whole gradient over the devices in `dtype`, keeping this device's shard (padding filled with zeros)."""
    grad = grad.astype(dtype)
    if use.dim is None:
        return exchange.psum(grad, use.axis_name, use.placement)
    padding = padded_size(use.size, use.num_shards) - use.size
    if padding:
        grad = jnp.pad(grad, [(0, padding if i == use.dim else 0) for i in range(grad.ndim)])
    return exchange.psum_scatter(grad, use.axis_name, use.dim, use.placement)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _appear(use: Use, port_dtype: Any, source: jax.Array, port: jax.Array) -> jax.Array:
    return gather(use, source)


_appear.defvjp(
    lambda use, port_dtype, source, port: (gather(use, source), None),
    lambda use, port_dtype, _, grad: (None, reduce_grad(use, grad, port_dtype)),
)


@dataclasses.dataclass
class Standin:
    """A parameter that has not appeared yet.

    Attributes:
      use: how it appears.
      source: this device's shard at rest, or the whole parameter if `use.gathered`.
      port: what the loss is differentiated by, of the shard's shape and the dtype gradients are reduced in;
        None for a frozen parameter.
      pending: operations on it alone, put off until it appears: casts, in regather mode also changes of shape.
      origin: the stand-in that it is a cast of; where parameters are held, both appear as one.
      value: what has appeared, remembered where parameters are held.
    """

    use: Use
    source: jax.Array
    port: jax.Array | None
    pending: tuple[Any, ...] = ()
    origin: "Standin | None" = None
    value: jax.Array | None = None

    def appear(self) -> jax.Array:
        """The parameter, gathered at this point of the program."""
        if self.port is None:
            x = gather(self.use, self.source)
        else:
            x = _appear(self.use, self.port.dtype, self.source, self.port)
        return self.apply_pending(x)

    def apply_pending(self, x: jax.Array, already: int = 0) -> jax.Array:
        """The operations that were put off, but for the first `already`, applied to the parameter."""
        for eqn in self.pending[already:]:
            (x,) = jaxprs.bind(eqn, [x])
        return x

    @property
    def size(self) -> int:
        """How many elements appear."""
        if self.use.gathered or self.use.dim is None:
            return self.source.size
        return self.source.size // self.source.shape[self.use.dim] * self.use.size

    @property
    def keeps_layers(self) -> bool:
        """Whether what is pending commutes with taking layers out of a stack."""
        return all(eqn.primitive.name == "convert_element_type" for eqn in self.pending)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array | None]:
        """What of it crosses a transformation; `with_arrays` builds it again on the other side."""
        return self.source, self.port

    def with_arrays(self, arrays: tuple[jax.Array, jax.Array | None], **changes: Any) -> "Standin":
        """The same stand-in over other arrays, with no value remembered."""
        return dataclasses.replace(self, source=arrays[0], port=arrays[1], origin=None, value=None, **changes)


@dataclasses.dataclass(frozen=True)
class Mode:
    """How parameters appear in the scope that is being evaluated.

    Attributes:
      regather: stage 3; else a parameter that has appeared is held.
      recomputed: inside a `jax.checkpoint` that saves nothing, so holding a parameter costs nothing.
      in_loop: inside a scan, whose forward and backward loops the compiler cannot merge.
    """

    regather: bool
    recomputed: bool = False
    in_loop: bool = False

    @property
    def holds(self) -> bool:
        """Whether a parameter that appears stays for the rest of this scope."""
        return self.recomputed or not self.regather


def evaluate(jaxpr: Any, args: Sequence[Any], *, regather: bool) -> list[jax.Array]:
    """Evaluate a jaxpr whose `args` may be `Standin`s; returns its outputs, all of them arrays."""
    return _evaluate(jaxpr, args, Mode(regather))


def _evaluate(jaxpr: Any, args: Sequence[Any], mode: Mode) -> list[jax.Array]:
    return [_force(x, mode) for x in _walk(jaxpr, args, mode)]


def _walk(jaxpr: Any, args: Sequence[Any], mode: Mode) -> list[Any]:
    return jaxprs.evaluate(jaxpr, args, lambda eqn, operands: _apply(eqn, operands, mode))


def _force(x: Any, mode: Mode) -> Any:
    if not isinstance(x, Standin):
        return x
    if not mode.holds:
        return x.appear()
    if x.value is None:
        if x.origin is None:
            x.value = x.appear()
        else:  # what is pending in the origin comes first here too
            x.value = x.apply_pending(_force(x.origin, mode), already=len(x.origin.pending))
    return x.value


def _apply(eqn: Any, operands: list[Any], mode: Mode) -> Sequence[Any]:
    standins = [x for x in operands if isinstance(x, Standin)]
    if not standins:
        return jaxprs.bind(eqn, operands)
    if jaxprs.is_call(eqn):
        return _walk(jaxprs.body(eqn), operands, mode)
    if jaxprs.is_scan(eqn):
        return _scan(eqn, operands, mode)
    if jaxprs.is_checkpoint(eqn):
        return _checkpoint(eqn, operands, mode)
    first = operands[0]
    if isinstance(first, Standin) and len(standins) == 1:
        picked = _pick_layers(eqn, first, operands[1:], mode)
        if picked is not None:
            return picked
        cast = eqn.primitive.name == "convert_element_type"
        if len(operands) == 1 and (cast or (not mode.holds and eqn.primitive.name in _DEFERRABLE)):
            origin = first.origin or first
            return [dataclasses.replace(first, pending=(*first.pending, eqn), origin=origin, value=None)]
    cheap = _never_saved(eqn, operands) or (not mode.in_loop and all(x.size <= _SMALL for x in standins))
    if mode.holds or cheap or jaxprs.has_body(eqn):
        return jaxprs.bind(eqn, [_force(x, mode) for x in operands])
    return _recomputing(
        lambda *xs: jaxprs.bind(eqn, [_force(x, mode) for x in xs]), operands, prevent_cse=not mode.in_loop
    )


# Operations on a parameter alone that are cheap to repeat after each gather.
_DEFERRABLE = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "slice"}
)

# Operations whose backward pass does not read the parameter, so there is nothing to gather again.
_LINEAR = _DEFERRABLE | {"add", "add_any", "concatenate", "copy", "dynamic_slice", "gather", "neg", "pad"}
_LINEAR |= {"reduce_sum", "rev", "select_n", "sub"}
_INDICES = {"select_n": slice(0, 1), "gather": slice(1, None), "dynamic_slice": slice(1, None)}
"""Operands of these that backward does read: a predicate, indices."""

# Outside of loops a parameter with at most this many elements is kept for the backward pass: gathering it again
# costs more than it holds (DeepSpeed's default of `stage3_param_persistence_threshold`).
_SMALL = 100_000


def _never_saved(eqn: Any, operands: Sequence[Any]) -> bool:
    name = eqn.primitive.name
    read = operands[_INDICES.get(name, slice(0))]
    return name in _LINEAR and not any(isinstance(x, Standin) for x in read)


def _recomputing(
    fun: Callable[..., Sequence[jax.Array]], operands: Sequence[Any], **options: Any
) -> Sequence[jax.Array]:
    """`fun(*operands)` under `jax.checkpoint`, with stand-ins passed in rather than what they stand for."""
    arrays = tuple(x.arrays if isinstance(x, Standin) else x for x in operands)

    def inner(*inner_arrays: Any) -> Sequence[jax.Array]:
        return fun(
            *[
                x.with_arrays(a) if isinstance(x, Standin) else a
                for x, a in zip(operands, inner_arrays, strict=True)
            ]
        )

    return jax.checkpoint(inner, **options)(*arrays)


def _checkpoint(eqn: Any, operands: list[Any], mode: Mode) -> Sequence[jax.Array]:
    options = jaxprs.checkpoint_options(eqn)
    if not mode.regather:
        depths = _depths(jaxprs.body(eqn))
        operands = [_held(x, depth, mode) for x, depth in zip(operands, depths, strict=True)]
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
    inner_mode = dataclasses.replace(mode, recomputed=mode.recomputed or saves_nothing)
    return _recomputing(lambda *xs: _evaluate(jaxprs.body(eqn), xs, inner_mode), operands, **options)


def _held(x: Any, depth: int, mode: Mode) -> Any:
    """An operand of a `jax.checkpoint` that saves it: it appears now, or, if it is whole already, inside.

    A stack that is scanned over inside, `depth` dims deep, becomes whole now, a layer at a time, and appears inside:
    so its gradient is still reduced layer by layer.
    """
    if not isinstance(x, Standin) or x.use.gathered:
        return x
    appeared = (x.origin or x).value is not None
    if depth == 0 or x.use.dim is None or x.use.dim < depth or appeared or not x.keeps_layers:
        return _force(x, mode)
    whole = _gather_by_layer(x.use, depth, x.source)
    return x.with_arrays((whole, x.port), use=dataclasses.replace(x.use, gathered=True))


def _gather_by_layer(use: Use, depth: int, x: jax.Array) -> jax.Array:
    if depth == 0:
        return gather(use, x)
    return jax.lax.map(lambda layer: _gather_by_layer(use.layer, depth - 1, layer), x)


def _scan(eqn: Any, operands: list[Any], mode: Mode) -> Sequence[jax.Array]:
    body, num_consts, num_carry, options = jaxprs.scan_parts(eqn)
    split = num_consts + num_carry
    fixed = [_force(x, mode) for x in operands[:split]]
    consts, carry = fixed[:num_consts], tuple(fixed[num_consts:])
    xs = [_scanned(x, mode) for x in operands[split:]]
    arrays = tuple(x.arrays if isinstance(x, Standin) else x for x in xs)
    inner_mode = dataclasses.replace(
        mode, in_loop=True, recomputed=False
    )  # what it holds, the loop would stack

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        layers = [
            x.with_arrays(a, use=x.use.layer) if isinstance(x, Standin) else a
            for x, a in zip(xs, slices, strict=True)
        ]
        out = _evaluate(body, [*consts, *carry, *layers], inner_mode)
        return tuple(out[:num_carry]), tuple(out[num_carry:])

    carry, ys = jax.lax.scan(step, carry, arrays, **options)
    return [*carry, *ys]


def _scanned(x: Any, mode: Mode) -> Any:
    """A scanned-over operand: the stand-in itself if its shard has all the layers."""
    if not isinstance(x, Standin):
        return x
    if not x.keeps_layers or x.use.dim == 0:
        warnings.warn(
            f"parameter {x.use.path!r} is scanned over, and its shards do not hold whole layers (it is sharded on "
            f"the scanned dim, or reshaped before the scan), so the whole stack is gathered before the loop. Pass "
            f"`batch` to engine.init, so that the layers are found in the loss function, or set `layer_dims`.",
            stacklevel=2,
        )
        return _force(x, mode)
    return x


def _pick_layers(eqn: Any, x: Standin, indices: Sequence[Any], mode: Mode) -> list[Standin] | None:
    """The stand-ins of `eqn` applied to `x`, if that leaves the sharded dim alone and can act on the shard."""
    dim = x.use.dim
    appeared = (x.origin or x).value is not None
    if dim is None or not x.keeps_layers or (mode.holds and appeared):
        return None
    shape, params, placement = tuple(eqn.invars[0].aval.shape), eqn.params, x.use.placement
    if eqn.primitive.name in ("slice", "dynamic_slice"):
        cut = [old != new for old, new in zip(shape, eqn.outvars[0].aval.shape, strict=True)]
        if any(c and entry is not None for c, entry in zip(cut, placement, strict=False)):
            return None  # a dim that another mesh axis holds would not divide any more
    new_dim = dim
    match eqn.primitive.name:
        case "squeeze" if dim not in params["dimensions"]:
            dropped = params["dimensions"]
            placement = tuple(entry for i, entry in enumerate(placement) if i not in dropped)
            new_dim = dim - sum(i < dim for i in dropped)
            changes = [lambda a: jax.lax.squeeze(a, dropped)]
        case "unstack" if dim != params["axis"]:  # what iterating over an array is since jax 0.12
            axis = params["axis"]
            placement = (*placement[:axis], *placement[axis + 1 :])
            new_dim = dim - (axis < dim)
            pick = lambda i, a: jax.lax.index_in_dim(a, i, axis, keepdims=False)
            changes = [functools.partial(pick, i) for i in range(shape[axis])]
        case "slice" if _takes_all(params, dim, shape):
            start, limit, strides = params["start_indices"], params["limit_indices"], params["strides"]
            changes = [lambda a: jax.lax.slice(a, start, _put(limit, dim, a.shape[dim]), strides)]
        case "dynamic_slice" if params["slice_sizes"][dim] == shape[dim] and _same_everywhere(indices):
            sizes = params["slice_sizes"]
            start = _put(indices, dim, jnp.zeros_like(indices[dim]))
            changes = [lambda a: jax.lax.dynamic_slice(a, start, _put(sizes, dim, a.shape[dim]))]
        case "reshape":
            taken = [i for i, entry in enumerate(placement[:dim]) if entry is not None]
            kept = min([dim, *taken])  # this dim and all later ones are sharded, or stand between such
            leading = _reshaped_leading(shape, params["new_sizes"], kept)
            if leading is None:
                return None
            placement = (*[None] * len(leading), *placement[kept:]) if placement else ()
            new_dim = dim - kept + len(leading)
            changes = [lambda a: a.reshape(*leading, *a.shape[kept:])]
        case _:
            return None
    use = dataclasses.replace(x.use, dim=new_dim, placement=placement)
    arrays = [(change(x.source), None if x.port is None else change(x.port)) for change in changes]
    return [x.with_arrays(a, use=use) for a in arrays]


def _same_everywhere(indices: Sequence[Any]) -> bool:
    """Whether every device picks the same layers: a traced index may come from a device's batch or key."""
    return not any(isinstance(i, jax.core.Tracer) for i in indices)


def _takes_all(params: Any, dim: int, shape: tuple[int, ...]) -> bool:
    whole = params["start_indices"][dim] == 0 and params["limit_indices"][dim] == shape[dim]
    return whole and (params["strides"] is None or params["strides"][dim] == 1)


def _put(values: Sequence[Any], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _reshaped_leading(old: tuple[int, ...], new: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """The new leading dims of a reshape that keeps `dim` and all later ones; None for any other reshape."""
    k = len(new) - (len(old) - dim)
    keeps = k >= 0 and tuple(new[k:]) == old[dim:] and math.prod(new[:k]) == math.prod(old[:dim])
    return tuple(new[:k]) if keeps else None


def scan_depths(jaxpr: Any, num_leaves: int) -> list[int]:
    """For each of the first `num_leaves` inputs, how many leading dims scans and layer picks take off it.

    Reads the truth that `guess_layer_dims` guesses. An input used both ways counts as a stack.
    """
    return _depths(jaxpr)[:num_leaves]


def _depths(jaxpr: Any) -> list[int]:
    depth: dict[Any, int] = {}
    for eqn in reversed(jaxprs.equations(jaxpr)):  # from uses back to inputs
        if jaxprs.is_scan(eqn):
            parts = jaxprs.scan_parts(eqn)
            first = parts.num_consts + parts.num_carry
            found = [0] * first + [1 + d for d in _depths(parts.body)[first:]]
        elif jaxprs.is_call(eqn) or jaxprs.is_checkpoint(eqn):
            found = _depths(jaxprs.body(eqn))
        else:
            found = [_picked_depth(eqn, max((depth.get(v, 0) for v in eqn.outvars), default=0))]
        for var, d in zip(eqn.invars, found, strict=False):
            if not isinstance(var, jax.extend.core.Literal):
                depth[var] = max(depth.get(var, 0), d)
    return [depth.get(v, 0) for v in jaxprs.inputs(jaxpr)]


def _picked_depth(eqn: Any, depth_of_result: int) -> int:
    name = eqn.primitive.name
    if name in ("slice", "dynamic_slice"):
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        one_layer = len(old) > 1 and old[0] > 1 and new[0] == 1 and old[1:] == new[1:]
        return max(int(one_layer), depth_of_result)
    if name == "unstack" and eqn.params["axis"] == 0:
        return 1 + depth_of_result
    if name == "convert_element_type":
        return depth_of_result
    if name == "reshape" and depth_of_result:
        leading = _reshaped_leading(eqn.invars[0].aval.shape, eqn.params["new_sizes"], 1)
        return int(leading is not None)
    return 0
