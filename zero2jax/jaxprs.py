"""Everything that knows the insides of a jaxpr, and how they differ between jax versions.

Stands below the rest: `point_of_use` walks a loss function's equations with these helpers and never looks at
an equation's parameters itself. Works on jax 0.10 (`scan` with `num_consts`, `ClosedJaxpr`, sub-functions from
`get_bind_params`) and on jax 0.12 (`scan` with `ft_in`, one `Jaxpr` class). The test of this module runs on
both and names what to look at when a new jax changes them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal

from zero2jax.pytrees import PyTree

CALL_PRIMITIVES = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINT_PRIMITIVES = frozenset({"checkpoint", "remat", "remat2"})


class Scan(NamedTuple):
    """The parts of a `scan` equation; its operands are `consts`, then `carry`, then the scanned-over `xs`."""

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]  # length, reverse, unroll of `jax.lax.scan`


def trace(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """The closed jaxpr of `fun(*args)` over flat arguments, and the tree of its output shapes."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def equations(jaxpr: Any) -> Sequence[Any]:
    """The equations of an open or closed jaxpr, in order."""
    return getattr(jaxpr, "jaxpr", jaxpr).eqns


def inputs(jaxpr: Any) -> Sequence[Any]:
    """The input variables of an open or closed jaxpr, constants left out."""
    return getattr(jaxpr, "jaxpr", jaxpr).invars


def evaluate(jaxpr: Any, args: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Run a jaxpr on `args`, handing each equation and its operands to `apply`; returns the outputs.

    Each call of `apply` happens under the equation's own name scope, source position and context (mesh,
    compute type, XLA metadata), so what it binds carries them on.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = getattr(jaxpr, "consts", ())
    env = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        with _context(eqn):
            outputs = apply(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in inner.outvars]


@contextlib.contextmanager
def _context(eqn: Any) -> Iterator[None]:
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def bind(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Apply an equation's primitive, with its own parameters, to plain arrays; always a sequence of outputs."""
    return bind_with(eqn, operands, eqn.params)


def bind_with(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """As `bind`, with other parameters."""
    bind_params = eqn.primitive.get_bind_params(params)
    # jax 0.10 returns (sub-functions, parameters); 0.12 returns the parameters alone
    functions, bind_params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    out = eqn.primitive.bind(*functions, *operands, **bind_params)
    return out if eqn.primitive.multiple_results else [out]


def is_call(eqn: Any) -> bool:
    """Whether the equation only calls its body (`jit` and the like) and may be inlined."""
    return eqn.primitive.name in CALL_PRIMITIVES


def is_checkpoint(eqn: Any) -> bool:
    """Whether the equation is a `jax.checkpoint`."""
    return eqn.primitive.name in CHECKPOINT_PRIMITIVES


def is_scan(eqn: Any) -> bool:
    """Whether the equation is a `jax.lax.scan`."""
    return eqn.primitive.name == "scan"


def body(eqn: Any) -> Any:
    """The jaxpr that a call or a `jax.checkpoint` runs."""
    return eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params["jaxpr"]


def checkpoint_options(eqn: Any) -> dict[str, Any]:
    """The keyword arguments that give the same `jax.checkpoint` again (with one `prevent_cse` for all operands)."""
    prevent_cse = eqn.params["prevent_cse"]
    if not isinstance(prevent_cse, bool):
        prevent_cse = any(prevent_cse)
    return {"policy": eqn.params["policy"], "prevent_cse": prevent_cse}


def has_body(eqn: Any) -> bool:
    """Whether the equation runs a jaxpr or a function of its own (`cond`, `while`, `custom_vjp`, kernels, ...)."""
    return any(_holds_code(value) for value in eqn.params.values())


def _holds_code(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_code(v) for v in value)
    return hasattr(value, "eqns") or hasattr(value, "jaxpr") or callable(value)


def scan_parts(eqn: Any) -> Scan:
    """The parts of a `scan` equation."""
    params = eqn.params
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(consts), len(carry)
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    return Scan(params["jaxpr"], num_consts, num_carry, options)
