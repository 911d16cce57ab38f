"""Everything that knows the insides of a jaxpr, and how they differ between jax versions.

A jaxpr is what `jax.make_jaxpr` returns: input variables, a list of equations, output variables. `evaluate` runs one,
equation by equation, with a function of ours in the place of each primitive; the other functions say what an equation
is and take it apart. Works on jax 0.10 (`scan` with `num_consts`, `ClosedJaxpr`, sub-functions from
`get_bind_params`) and on jax 0.12 (`scan` with `ft_in`, one `Jaxpr` class). The test of this module runs on
both and names what to look at when a new jax changes them.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from zero2jax.base.pytrees import PyTree

Apply = Callable[[Any, list[Any]], Sequence[Any]]
"""(equation, operands) -> outputs: what `evaluate` does in the place of an equation's primitive."""

CALL_PRIMITIVES = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINT_PRIMITIVES = frozenset({"checkpoint", "remat", "remat2"})


class Scan(NamedTuple):
    """The parts of a `scan` equation, whose operands are `consts`, then `carry`, then the scanned-over `xs`."""

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]  # length, reverse, unroll of `jax.lax.scan`


def trace(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """The closed jaxpr of `fun(*args)` over flat arguments, and the tree of its output shapes."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def _open(jaxpr: Any) -> Any:
    """The jaxpr inside a `ClosedJaxpr`, which jax 0.10 wraps around it and jax 0.12 does not know."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def equations(jaxpr: Any) -> Sequence[Any]:
    """The equations of an open or closed jaxpr, in order."""
    return _open(jaxpr).eqns


def inputs(jaxpr: Any) -> Sequence[Any]:
    """The input variables of an open or closed jaxpr, constants left out."""
    return _open(jaxpr).invars


def outputs(jaxpr: Any) -> Sequence[Any]:
    """The output variables of an open or closed jaxpr, literals among them."""
    return _open(jaxpr).outvars


def used_inputs(jaxpr: Any) -> list[bool]:
    """Per input, whether the first output depends on it, or a side effect does."""
    wanted = [i == 0 for i in range(len(outputs(jaxpr)))]
    return list(partial_eval.dce_jaxpr(_open(jaxpr), wanted)[1])


def constants(jaxpr: Any) -> list[Any]:
    """The arrays that a closed jaxpr, and what it runs, closes over."""
    inner = [x for eqn in equations(jaxpr) for body in inner_jaxprs(eqn) for x in constants(body)]
    return [*getattr(jaxpr, "consts", ()), *inner]


def evaluate(jaxpr: Any, args: Sequence[Any], apply: Apply) -> list[Any]:
    """Run a jaxpr on `args`, handing each equation and its operands to `apply`; returns the outputs.

    Each call of `apply` happens under the equation's own name scope, source position and context (mesh,
    compute type, XLA metadata), so what it binds carries them on.
    """
    env = _environment(jaxpr, args)
    for eqn in equations(jaxpr):
        _step(eqn, env, apply)
    return [_read(v, env) for v in outputs(jaxpr)]


def _environment(jaxpr: Any, args: Sequence[Any]) -> dict[Any, Any]:
    """The value of each variable that is known at the start: constants and inputs."""
    variables = [*_open(jaxpr).constvars, *inputs(jaxpr)]
    return dict(zip(variables, [*getattr(jaxpr, "consts", ()), *args], strict=True))


def _step(eqn: Any, env: dict[Any, Any], apply: Apply) -> None:
    with _context(eqn):
        results = apply(eqn, [_read(v, env) for v in eqn.invars])
    env.update(zip(eqn.outvars, results, strict=True))


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


@contextlib.contextmanager
def _context(eqn: Any) -> Iterator[None]:
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


class Run(NamedTuple):
    """Neighbouring equations of a jaxpr, `eqns[start:stop]`, as a function of what they read from outside."""

    eqns: Sequence[Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def runs(jaxpr: Any, ranges: Sequence[tuple[int, int]]) -> list[Run]:
    """The equations `[start, stop)` of each range, with the variables that go in and that are used afterwards."""
    result = []
    for start, stop in ranges:
        eqns = equations(jaxpr)[start:stop]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        later = {v for eqn in equations(jaxpr)[stop:] for v in eqn.invars if not isinstance(v, Literal)}
        later |= {v for v in outputs(jaxpr) if not isinstance(v, Literal)}
        kept = tuple(v for eqn in eqns for v in eqn.outvars if v in later)
        result.append(Run(eqns, tuple(v for v in read if v not in made), kept))
    return result


def evaluate_run(run: Run, args: Sequence[Any], apply: Apply) -> list[Any]:
    """As `evaluate`, of a part of a jaxpr: its outputs from its inputs."""
    env = dict(zip(run.inputs, args, strict=True))
    for eqn in run.eqns:
        _step(eqn, env, apply)
    return [env[v] for v in run.outputs]


def needed(jaxpr: Any, which: Sequence[int]) -> tuple[list[Any], list[int]]:
    """The equations that some outputs of a jaxpr need, in order, and the indices of the inputs.

    A call counts as a whole: see `inlined`.
    """
    wanted = {v for v in (outputs(jaxpr)[i] for i in which) if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(equations(jaxpr)):
        if not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return kept[::-1], [i for i, v in enumerate(inputs(jaxpr)) if v in wanted]


def part_of(
    jaxpr: Any, which: Sequence[int], apply: Apply | None = None
) -> tuple[Callable[..., list[Any]], list[int]]:
    """Some outputs of a closed jaxpr as a function of the inputs that they need, and the indices of these.

    Args:
      jaxpr: the jaxpr.
      which: indices of the outputs.
      apply: in the place of each primitive; by default it is bound.
    """
    apply = apply or (lambda eqn, operands: bind(eqn, arrays(eqn, operands)))
    results = [outputs(jaxpr)[i] for i in which]
    kept, used = needed(jaxpr, which)
    constants = dict(zip(_open(jaxpr).constvars, getattr(jaxpr, "consts", ()), strict=True))

    def part(*args: Any) -> list[Any]:
        env = constants | dict(zip([inputs(jaxpr)[i] for i in used], args, strict=True))
        for eqn in kept:
            _step(eqn, env, apply)
        return [_read(v, env) for v in results]

    return part, used


def dependencies(jaxpr: Any) -> list[int]:
    """Which inputs each output of a jaxpr is computed from, as the bits of an int."""
    found = {v: 1 << i for i, v in enumerate(inputs(jaxpr))}
    of = lambda v: 0 if isinstance(v, Literal) else found.get(v, 0)
    for eqn in equations(jaxpr):
        together = functools.reduce(operator.or_, map(of, eqn.invars), 0)
        found |= dict.fromkeys(eqn.outvars, together)
    return [of(v) for v in outputs(jaxpr)]


def inlined(jaxpr: Any) -> Any:
    """A closed jaxpr without calls: each result of a called function by itself."""

    def apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if is_call(eqn):
            return evaluate(body(eqn), operands, apply)
        return bind(eqn, arrays(eqn, operands))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs(jaxpr)]
    return trace(lambda *args: evaluate(jaxpr, args, apply), *shapes)[0]


def evaluate_by_runs(
    jaxpr: Any,
    args: Sequence[Any],
    parts: Sequence[Run],
    apply: Apply,
    apply_run: Callable[[Run, list[Any]], Sequence[Any]],
) -> list[Any]:
    """As `evaluate`, but the equations of each of `parts` go to `apply_run` all at once."""
    env = _environment(jaxpr, args)
    first = {id(part.eqns[0]): part for part in parts}
    inside = {id(eqn) for part in parts for eqn in part.eqns}
    for eqn in equations(jaxpr):
        part = first.get(id(eqn))
        if part is not None:
            results = apply_run(part, [env[v] for v in part.inputs])
            env.update(zip(part.outputs, results, strict=True))
        elif id(eqn) not in inside:
            _step(eqn, env, apply)
    return [_read(v, env) for v in outputs(jaxpr)]


def arrays(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of an equation, Python scalars as arrays of the dtypes that it was traced for."""
    is_scalar = lambda x: isinstance(x, (bool, int, float, complex))
    return [
        jnp.asarray(x, v.aval.dtype) if is_scalar(x) else x for x, v in zip(operands, eqn.invars, strict=True)
    ]


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


def detached(eqn: Any) -> Callable[..., Sequence[Any]]:
    """An equation as a function whose operands `jax.vjp` saves as they are, where its backward pass reads them.

    A `cond` of jax 0.10 saves copies, the outputs of its branches, unless a `jax.checkpoint` is around it. One that
    saves everything does not repeat anything, but would take the place of those in the branches.
    """
    run = lambda *operands: bind(eqn, operands)
    if eqn.primitive.name == "cond" and not any(_has_checkpoint(branch) for branch in inner_jaxprs(eqn)):
        return jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False)
    return run


def _has_checkpoint(jaxpr: Any) -> bool:
    return any(is_checkpoint(e) or any(map(_has_checkpoint, inner_jaxprs(e))) for e in equations(jaxpr))


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


def from_inputs(jaxpr: Any, marked: Sequence[bool]) -> set[Any]:
    """The variables that are computed from the marked inputs alone, those included."""
    alone = {v for v, mark in zip(inputs(jaxpr), marked, strict=True) if mark}
    for eqn in equations(jaxpr):
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        if read and all(v in alone for v in read):
            alone.update(eqn.outvars)
    return alone


def marks(eqn: Any, variables: set[Any]) -> list[bool]:
    """Which operands of an equation are among some variables."""
    return [not isinstance(v, Literal) and v in variables for v in eqn.invars]


def call_name(eqn: Any) -> str:
    """The name of the function that a `jit` equation calls; empty for other equations."""
    return str(eqn.params.get("name", "")) if is_call(eqn) else ""


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


def rebuild_scan(
    step: Callable[..., Sequence[Any]],
    num_consts: int,
    num_carry: int,
    operands: Sequence[Any],
    options: dict[str, Any],
) -> list[Any]:
    """A scan like the one that `scan_parts` took apart, with another body.

    Args:
      step: `step(*consts, *carry, *slices)` -> `[*carry, *ys]`.
      num_consts: how many operands come first that do not change.
      num_carry: how many are carried.
      operands: `[*consts, *carry, *xs]`; an element of `xs` may be a pytree of arrays.
      options: length, reverse, unroll of `jax.lax.scan`.

    Returns:
      `[*carry, *ys]`.
    """
    split = num_consts + num_carry
    consts, carry, xs = operands[:num_consts], operands[num_consts:split], operands[split:]

    def body(carry: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[Any, Any]:
        results = step(*consts, *carry, *slices)
        return tuple(results[:num_carry]), tuple(results[num_carry:])

    last, ys = jax.lax.scan(body, tuple(carry), tuple(xs), **options)
    return [*last, *ys]


class Product(NamedTuple):
    """A matrix product: the wider dtype of its operands, floating-point operations, and the source line it is from."""

    dtype: Any
    flops: float
    line: str


def products(jaxpr: Any, times: float = 1) -> list[Product]:
    """The matrix products of a jaxpr in order: a scan's as often as it runs, of a `cond` those of every branch."""
    found: list[Product] = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            lhs, rhs = (v.aval for v in eqn.invars[:2])
            contracted = math.prod(lhs.shape[i] for i in eqn.params["dimension_numbers"][0][0])
            flops = times * 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
            line = source_info_util.summarize(eqn.source_info)
            found.append(Product(max(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize), flops, line))
        inner_times = times * eqn.params["length"] if is_scan(eqn) else times
        for inner in inner_jaxprs(eqn):
            found += products(inner, inner_times)
    return found


def tensor_names(jaxpr: Any) -> set[str]:
    """Every `checkpoint_name` in a jaxpr and in what it runs."""
    names: set[str] = set()
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "name":
            names.add(eqn.params["name"])
        for inner in inner_jaxprs(eqn):
            names |= tensor_names(inner)
    return names


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    values = [
        v for value in eqn.params.values() for v in (value if isinstance(value, (tuple, list)) else [value])
    ]
    return [v for v in values if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
