"""How often a loop runs where the compiler has lost the count. Pure Python over a parsed program.

XLA writes the trip count of a loop beside it, and drops it where a later pass rewrites the loop (pipelined collectives
do). The count is still in the program: the state that the loop starts with, what the body makes of it, and the
condition. Here the integer scalars of the state are followed through both until the condition fails.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero2jax.programs.hlo import Instruction, Module

LIMIT = 100_000  # runs, after which a loop counts as one that does not end

_Scope = Callable[[int, int | None], int | None]
"""Number of a parameter, and of its element if it is a tuple -> the value, if that is a known integer."""

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}
_DIRECTIONS: Mapping[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
_RENAMES = ("bitcast", "copy", "reshape", "convert", "opt-barrier")


def counted_trips(module: "Module", around: str, loop: "Instruction") -> int | None:
    """How often a loop in the computation `around` runs; None where that depends on data.

    A loop inside of another one is started anew in each of its runs: a start that differs between them is not known.
    """
    integers = _Integers(module)
    start = integers.inside(around).get(loop.operands[0])
    body_root, condition_root = integers.root(loop.body), integers.root(loop.condition)
    tuples = start is not None and body_root is not None and start.opcode == body_root.opcode == "tuple"
    if start is None or body_root is None or condition_root is None or not tuples:
        return None
    state = _known({n: integers.value(around, name, _nothing) for n, name in enumerate(start.operands)})
    for trips in range(LIMIT):
        scope = lambda number, index, state=state: state.get(-1 if index is None else index)
        goes_on = integers.value(loop.condition, condition_root.name, scope)
        if not goes_on:
            return None if goes_on is None else trips
        before, state = (
            state,
            _known({n: integers.value(loop.body, body_root.operands[n], scope) for n in state}),
        )
        if state == before:  # for ever
            return None
    return None


class _Integers:
    """Values of integer scalars, each worked out when it is asked for; None where one cannot be known."""

    def __init__(self, module: "Module"):
        self.module = module
        self._inside: dict[str, dict[str, Instruction]] = {}

    def inside(self, computation: str) -> "dict[str, Instruction]":
        """The instructions of a computation by name."""
        if computation not in self._inside:
            self._inside[computation] = {i.name: i for i in self.module.instructions(computation)}
        return self._inside[computation]

    def root(self, computation: str) -> "Instruction | None":
        """What a computation returns."""
        return next((i for i in self.module.instructions(computation) if i.is_root), None)

    def value(self, computation: str, name: str, scope: _Scope) -> int | None:
        """The value of an instruction in one run of its computation, whose parameters `scope` knows."""
        inside = self.inside(computation)
        i = inside.get(name)
        if i is None or not i.is_integer:
            return None
        if i.opcode == "constant":
            return _constant(i.argument)
        if i.opcode == "parameter":
            return scope(int(i.argument), None)
        of = inside.get(i.operands[0]) if i.operands else None
        if i.opcode == "get-tuple-element" and of is not None and of.opcode == "parameter":
            return scope(int(of.argument), i.index)
        if i.opcode in _RENAMES:
            return self.value(computation, i.operands[0], scope)
        if i.opcode in ("fusion", "call") and i.called:
            root = self.root(i.called[0])
            given = lambda number, index: self.value(computation, i.operands[number], scope)
            return None if root is None else self.value(i.called[0], root.name, given)
        if i.opcode != "compare" and i.opcode not in _ARITHMETIC:
            return None
        a, b = (self.value(computation, operand, scope) for operand in i.operands)
        if a is None or b is None:
            return None
        work = _DIRECTIONS[i.direction] if i.opcode == "compare" else _ARITHMETIC[i.opcode]
        return int(work(a, b))


def _nothing(number: int, index: int | None) -> int | None:
    return None


def _known(values: Mapping[int, int | None]) -> dict[int, int]:
    return {n: value for n, value in values.items() if value is not None}


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if text.lstrip("-").isdigit() else None
