"""Operations of a compiled step by named scope, by phase and by loop. Pure Python over a parsed program.

Matrix products and convolutions alone, as often as they run per step, on one device. A scope is what `jax.named_scope`
(Flax names its modules so, too) put around an operation; a phase is told by the transformations that jax wrote down:
`jvp` is forward, `transpose` backward, and what `jax.checkpoint` runs again is `rematted_computation`.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from zero2jax.programs.hlo import Around, Module
from zero2jax.programs.products import Product, Products

PHASES = ("forward", "recompute", "backward", "update")

_MACHINERY = frozenset({"shard_map", "while", "body", "cond", "closed_call", "eval_jaxpr", "core_call"})
_MACHINERY |= {"zero_loss"}  # what the step puts around the loss function
_MACHINERY |= {"checkpoint", "rematted_computation", "custom_jvp_call", "custom_vjp_call", "scan", "remat"}
_WRAPPED = re.compile(r"^(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Scoped:
    """One product of a step and where it stands.

    Attributes:
      product: it; `trips` is how often it runs per step.
      scope: names of the scopes around it, outermost first.
      phase: one of `PHASES`.
      loops: how often each loop around it runs, outermost first; None for one that depends on data.
    """

    product: Product
    scope: tuple[str, ...]
    phase: str
    loops: tuple[int | None, ...]


def scoped_products(module: Module, *, as_before_conversion: bool = False) -> list[Scoped]:
    """Every product of a program, in the order of the schedule; for `as_before_conversion` see `Products`."""
    products = Products(module, as_before_conversion=as_before_conversion)
    return list(_walk(products, module.entry, Around(), ()))


def flops_by(products: list[Scoped], key: Callable[[Scoped], Key]) -> dict[Key, float]:
    """Operations per step by what `key` says of a product, most first."""
    sums: dict[Key, float] = {}
    for one in products:
        sums[key(one)] = sums.get(key(one), 0.0) + one.product.total_flops
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _walk(products: Products, name: str, around: Around, loops: tuple[int | None, ...]) -> Iterator[Scoped]:
    module = products.module
    for i in module.instructions(name):
        if i.opcode == "while":
            trips = module.trips(name, i)
            yield from _walk(products, i.body, around.inside(i.body, trips), (*loops, trips))
        elif i.opcode in ("call", "conditional", "async-start"):
            for target in i.called:
                yield from _walk(products, target, around, loops)
        else:
            for product in products.of(name, i):
                scope, phase = _place(product.op_name)
                yield Scoped(dataclasses.replace(product, trips=around.trips), scope, phase, loops)


def _place(op_name: str) -> tuple[tuple[str, ...], str]:
    """(scope, phase) of `jit(step)/shard_map/transpose(jvp(mlp))/while/body/dot_general`."""
    parts = _split(op_name)
    if "rematted_computation" in parts:
        phase = "recompute"
    elif any(part.startswith("transpose(") for part in parts):
        phase = "backward"
    else:
        phase = "forward" if any(part.startswith("jvp(") for part in parts) else "update"
    names = [name for part in parts[:-1] for name in _names(part)]
    return tuple(names), phase


def _names(part: str) -> list[str]:
    """The scopes in one part: of `transpose(jvp(layer))` that is `layer`; a function that is jitted is none."""
    if part.startswith(("jit(", "pjit(")):
        return []
    while found := _WRAPPED.match(part):
        part = found.group(1)
    if "/" in part:
        return [name for inner in _split(part) for name in _names(inner)]
    is_formula = "->" in part  # of an einsum
    return [part] if part and part not in _MACHINERY and not is_formula else []


def _split(path: str) -> list[str]:
    """The parts between slashes that stand in no parentheses."""
    parts, depth = [""], 0
    for c in path:
        depth += (c == "(") - (c == ")")
        if c == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts
