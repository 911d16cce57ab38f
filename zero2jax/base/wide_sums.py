"""Sums in bf16 over devices, computed in fp32 where XLA's compiler for CPUs cannot have them.

Beside an automatic axis the reducer of a `psum` in bf16 holds a sharding constraint, which becomes a copy, at which
XLA's pass AllReducePromotion ends the process ("Invalid binary instruction opcode copy"). The pass would compute that
sum in fp32; here a traced function does so itself, forward and backward, wherever the sum comes from: a loss that calls
`psum`, or the backward pass of a `shard_map` of its own. (An option of the compiler can leave the pass out, but a step
that becomes a part of a program of the user's has no options.)
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import AxisType, Mesh

from zero2jax.base import jaxprs

_SUMS = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter", "pmax", "pmin"})


def needs_wide_sums(mesh: Mesh, manual: Collection[str]) -> bool:
    """Whether a program that is manual over some axes of a mesh is for that compiler, beside automatic axes."""
    return mesh.devices.flat[0].platform == "cpu" and not set(mesh.axis_names) <= set(manual)


def with_wide_sums(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, traced, with those sums in fp32. Its arguments are pytrees of arrays. Not to be differentiated."""

    def wide(*args: Any) -> Any:
        jaxpr, out = jaxprs.trace(fun, *args)
        flat = jaxpr_as_fun(_Widening().of(jaxpr))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return wide


class _Widening:
    """Remembers what it has rewritten: a body that is called twice stays one body."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original, whose id is the key

    def of(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with its sums widened."""
        if id(jaxpr) not in self._done:
            inner = getattr(jaxpr, "jaxpr", jaxpr)
            if type(inner) is not type(jaxpr):  # closed, in jax 0.10
                new = jaxpr.replace(jaxpr=self.of(inner))
            else:
                new = jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in self._equations(eqn)])
            self._done[id(jaxpr)] = jaxpr, new
        return self._done[id(jaxpr)][1]

    def _equations(self, eqn: Any) -> Sequence[Any]:
        if eqn.primitive.name in _SUMS and any(map(_is_bf16, eqn.invars)) and _beside_automatic_axes(eqn):
            return _in_fp32(eqn)
        return [eqn.replace(params={name: self._parameter(value) for name, value in eqn.params.items()})]

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, tuple) and any(map(_is_jaxpr, value)):
            return tuple(map(self._parameter, value))
        return self.of(value) if _is_jaxpr(value) else value


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _is_bf16(variable: Any) -> bool:
    return getattr(variable.aval, "dtype", None) == jnp.bfloat16


def _beside_automatic_axes(eqn: Any) -> bool:
    with eqn.ctx.manager:
        return any(kind != AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types)


def _in_fp32(eqn: Any) -> Sequence[Any]:
    """A sum, its operands in bf16 as fp32, its results as bf16 again."""
    wide = lambda v: Var(v.aval.update(dtype=jnp.dtype(jnp.float32))) if _is_bf16(v) else v
    operands, results = list(map(wide, eqn.invars)), list(map(wide, eqn.outvars))
    before = [_conversion(eqn, *pair) for pair in zip(eqn.invars, operands, strict=True)]
    after = [_conversion(eqn, *pair) for pair in zip(results, eqn.outvars, strict=True)]
    return [e for e in (*before, eqn.replace(invars=operands, outvars=results), *after) if e is not None]


def _conversion(eqn: Any, source: Any, target: Any) -> Any:
    """An equation that converts one variable into another, where `eqn` stands; None if they are the same."""
    if source is target:
        return None
    shape = jax.ShapeDtypeStruct(source.aval.shape, source.aval.dtype)
    jaxpr, _ = jaxprs.trace(lambda x: jax.lax.convert_element_type(x, target.aval.dtype), shape)
    (template,) = jaxprs.equations(jaxpr)
    return template.replace(invars=[source], outvars=[target], source_info=eqn.source_info, ctx=eqn.ctx)
