"""Live bytes at each instruction of a compiled schedule, by class. Pure Python over a parsed program.

Every instruction makes buffers as large as its type says. Those that only rename memory share a buffer: tuples and
their elements, bitcasts, `-done`s, a loop's operand, its state and its result, an in-place update of a slice, and an
output that takes the place of a donated argument. A buffer lives from the instruction that makes it to the last one
that uses it; a loop adds what its body makes to what lives around it. Arguments live throughout.

The compiler's allocation is the authority: it shares memory in more ways (an elementwise result in the place of an
operand that dies there is the only one imitated here) and packs with gaps. The walk says what its bytes are, and a
report sets both peaks side by side.

Classes start from what is known and follow the data: arguments by name; `parameters` from what all-gathers over the
data axis take and produce; `gradients` from what reductions over it take and produce; both pass through instructions
that only move data, gradients also through elementwise ones. The rest is `activations and temporaries`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from zero2jax.programs.formulas import CLASSES, GRADIENTS, OTHER, PARAMETERS
from zero2jax.programs.hlo import (
    Array,
    Collective,
    Instruction,
    Module,
    Type,
    arrays,
    collective_kind,
    make_collective,
)

Value = int | tuple["Value", ...]  # a buffer, or a tuple of values, in the structure of a type

_MOVES = frozenset(
    ("parameter", "constant", "bitcast", "reshape", "slice", "dynamic-slice", "dynamic-update-slice", "copy")
) | {"convert", "transpose", "tuple", "get-tuple-element", "iota", "broadcast", "concatenate", "pad"}
_INDEX_ARITHMETIC = frozenset(
    ["add", "subtract", "multiply", "compare", "select", "clamp", "maximum", "minimum", "and", "or"]
)
_FREE = frozenset(["constant", "after-all", "partition-id", "replica-id"])
_CALL_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
_NO_BUFFER = -1


@dataclasses.dataclass(frozen=True)
class Point:
    """Live bytes while one instruction runs.

    Attributes:
      name: the instruction.
      loops: the loop bodies around it; of a loop, one iteration is walked.
      by_class: bytes by class, arguments included.
    """

    name: str
    loops: tuple[str, ...]
    by_class: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all classes."""
        return sum(self.by_class.values())


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """The walk: a point per instruction of the schedule, and the arguments by class, before anything runs."""

    points: tuple[Point, ...]
    rest_by_class: dict[str, int]
    host_bytes: int

    @property
    def peak(self) -> Point:
        """The first point with the most live bytes."""
        rest = Point("", (), self.rest_by_class)
        return max((rest, *self.points), key=lambda point: point.total_bytes)


@dataclasses.dataclass
class _Event:
    """One instruction of a computation: the buffers it defines and uses, and the walk of what it runs."""

    instruction: Instruction
    defined: list[int]
    used: list[int]
    inner: list["_Event"] = dataclasses.field(default_factory=list)
    loop: str = ""


def walk(
    module: Module,
    argument_class: Callable[[str], str],
    over_data: Callable[[Collective], bool],
    small_bytes: int = 64 * 1024,
) -> Lifetimes:
    """Walk the schedule.

    Args:
      module: the program.
      argument_class: class of an argument by its name in the step's signature, `"state.params['w']"`.
      over_data: whether a collective moves parameters or gradients over the data axis; others classify nothing.
      small_bytes: reductions of at most this many bytes (losses, norms) classify nothing.
    """
    return _Walk(module, argument_class, over_data, small_bytes).result()


class _Walk:
    """Builds buffers, events and classes when made; `result` then reads live ranges off them."""

    def __init__(
        self,
        module: Module,
        argument_class: Callable[[str], str],
        over_data: Callable[[Collective], bool],
        small_bytes: int,
    ):
        self.module = module
        self.over_data = over_data
        self.small_bytes = small_bytes
        self.parent: list[int] = []
        self.sizes: list[int] = []
        self.elements: list[int] = []
        self.on_host: list[bool] = []
        self.tags: dict[int, str] = {}
        self.edges: list[tuple[int, int, bool]] = []  # (from, to, only moved); else elementwise
        self.arguments: dict[int, int] = {}  # number -> buffer
        self.events = self._run(module.entry, [], ())
        self._alias_outputs()
        self.roots = {number: self._find(b) for number, b in self.arguments.items()}
        names = {i.argument: i.op_name for i in module.instructions(module.entry) if i.opcode == "parameter"}
        self.fixed = {b: argument_class(names.get(str(number), "")) for number, b in self.roots.items()}
        self._propagate()

    # Buffers: union-find over indices, so that everything that shares memory is one.

    def _new(self, kind: Type) -> Value:
        if not isinstance(kind, Array):
            return tuple(self._new(inner) for inner in kind)
        self.parent.append(len(self.parent))
        self.sizes.append(kind.num_bytes)
        self.elements.append(kind.size)
        self.on_host.append(kind.on_host)
        return len(self.parent) - 1

    def _find(self, buffer: int) -> int:
        while self.parent[buffer] != buffer:
            self.parent[buffer] = self.parent[self.parent[buffer]]
            buffer = self.parent[buffer]
        return buffer

    def _share(self, a: Value, b: Value) -> None:
        for x, y in zip(_leaves(a), _leaves(b), strict=False):
            if x != _NO_BUFFER and y != _NO_BUFFER:
                first, second = sorted((self._find(x), self._find(y)))
                self.parent[second] = first
                self.sizes[first] = max(self.sizes[first], self.sizes[second])

    # One computation: values in, events and the value of its root out.

    def _run(self, name: str, parameters: Sequence[Value], loops: tuple[str, ...]) -> list[_Event]:
        values: dict[str, Value] = {}
        events: list[_Event] = []
        instructions = self.module.instructions(name)
        types = {i.name: i.type for i in instructions}
        done = {i.operands[0]: i for i in instructions if i.opcode.endswith("-done") and i.operands}
        for i in instructions:
            operands = [values[o] for o in i.operands if o in values]
            before = len(self.parent)
            event = _Event(i, [], _buffers(*operands))
            if i.opcode == "parameter":
                number = int(i.argument)
                value = parameters[number] if parameters else self._argument(number, i)
            else:
                value = self._value(i, operands, types, done, event, loops)
            values[i.name] = value
            if i.opcode != "parameter":
                event.defined = _buffers(value) if event.inner else [*range(before, len(self.parent))]
                self._classify(i, operands, value, types)
            events.append(event)
            if i.is_root:
                self.root = value
        return events

    def _argument(self, number: int, i: Instruction) -> Value:
        value = self._new(i.type)
        for b in _leaves(value):
            self.arguments[number] = b
        return value

    def _value(
        self,
        i: Instruction,
        operands: list[Value],
        types: dict[str, Type],
        done: dict[str, Instruction],
        event: _Event,
        loops: tuple[str, ...],
    ) -> Value:
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == "get-tuple-element":
            whole = operands[0]
            return whole[i.index] if isinstance(whole, tuple) else whole
        if i.opcode in _FREE:
            return _filled(i.type, _NO_BUFFER)
        if i.opcode in ("bitcast", "reshape", "opt-barrier") or (i.opcode.endswith("-done") and operands):
            return operands[0]
        if i.opcode == "while":
            return self._loop(i, operands[0], event, loops)
        if i.opcode in ("call", "conditional") and i.called:
            return self._call(i, operands, event, loops)
        value = self._new(done[i.name].type if i.name in done else i.type)
        for output, operand in self._in_place(i, len(operands)):
            target = value[output] if isinstance(value, tuple) else value
            self._share(operands[operand], target)
        return value

    def _loop(self, i: Instruction, state: Value, event: _Event, loops: tuple[str, ...]) -> Value:
        event.loop = i.body
        event.inner = self._run(i.body, [state], (*loops, i.body))
        self._share(state, self.root)
        return state

    def _call(self, i: Instruction, operands: list[Value], event: _Event, loops: tuple[str, ...]) -> Value:
        value = self._new(i.type)
        for n, target in enumerate(i.called):
            given = operands if i.opcode == "call" else operands[n + 1 : n + 2]
            event.inner += self._run(target, given, loops)
            self._share(value, self.root)
        return value

    def _in_place(self, i: Instruction, num_operands: int) -> Iterator[tuple[int, int]]:
        """(output, operand) pairs that share memory: of a dynamic-update-slice, alone or as the root of a fusion."""
        for output, operand in _CALL_ALIAS.findall(i.attributes) if i.opcode == "custom-call" else ():
            yield int(output or 0), int(operand)
        if i.opcode == "dynamic-update-slice":
            yield 0, 0
        elif i.opcode.startswith("fusion") and i.called:
            inside = {x.name: x for x in self.module.instructions(i.called[0])}
            root = next((x for x in inside.values() if x.is_root), None)
            if root is None:
                return
            outputs = root.operands if root.opcode == "tuple" else (root.name,)
            for n, output in enumerate(outputs):
                number = _updated_parameter(inside, output)
                if number is not None and number < num_operands:
                    yield n, number

    def _alias_outputs(self) -> None:
        for path, number in self.module.aliases.items():
            value: Value = self.root
            for index in path:
                value = value[index] if isinstance(value, tuple) else value
            if number in self.arguments:
                self._share(self.arguments[number], value)

    # Classes: seeds, then along the edges until nothing changes.

    def _classify(self, i: Instruction, operands: list[Value], value: Value, types: dict[str, Type]) -> None:
        kind = collective_kind(i)
        if kind:
            collective = make_collective(i, types, 1, ())
            if self.over_data(collective):
                name = PARAMETERS if kind == "all-gather" else GRADIENTS
                if kind == "all-gather" or collective.num_bytes > self.small_bytes:
                    for b in _buffers(*operands, value):
                        self.tags.setdefault(b, name)
        elif i.opcode in ("copy", "convert", "transpose", "copy-start") or i.opcode.startswith("fusion"):
            moved, elementwise = self._moves(i)
            for out in _buffers(value):
                for b in _buffers(*operands):
                    if moved or (elementwise and self.elements[b] == self.elements[out]):
                        self.edges.append((b, out, moved))

    def _moves(self, i: Instruction) -> tuple[bool, bool]:
        """Whether an instruction only moves data, and whether it works element by element."""
        moved, elementwise = True, True
        for name in i.called:
            for x in self.module.instructions(name):
                scalar = all(a.size == 1 for a in arrays(x.type))
                if x.opcode not in _MOVES and not (scalar and x.opcode in _INDEX_ARITHMETIC):
                    moved = False
                if x.opcode in ("dot", "convolution", "reduce", "scatter", "gather"):
                    elementwise = False
        return moved, elementwise

    def _propagate(self) -> None:
        tags = dict(self.fixed)
        for b, name in self.tags.items():
            tags.setdefault(self._find(b), name)
        pairs = {
            (self._find(a), self._find(b), moved) for a, b, moved in self.edges if _NO_BUFFER not in (a, b)
        }
        ordered = [p for p in sorted(pairs) if min(self.elements[p[0]], self.elements[p[1]]) > 1]
        before = -1
        while len(tags) != before:
            before = len(tags)
            for a, b, moved in ordered:
                if b not in tags and (tags.get(a) == GRADIENTS or (moved and tags.get(a) == PARAMETERS)):
                    tags[b] = tags[a]
                elif a not in tags and moved and tags.get(b) in (GRADIENTS, PARAMETERS):
                    tags[a] = tags[b]
        self.classes = tags

    # Live ranges.

    def result(self) -> Lifetimes:
        """The points of the whole schedule."""
        arguments = set(self.roots.values())
        host = sum(self.sizes[b] for b in arguments if self.on_host[b])
        rest = self._bytes(b for b in arguments if not self.on_host[b])
        outside = arguments | {_NO_BUFFER}
        return Lifetimes(tuple(self._points(self.events, (), outside, rest)), rest, host)

    def _bytes(self, buffers: "Iterator[int] | set[int]") -> dict[str, int]:
        found = dict.fromkeys(CLASSES, 0)
        for b in buffers:
            found[self.classes.get(b, OTHER)] += self.sizes[b]
        return found

    def _points(
        self, events: list[_Event], loops: tuple[str, ...], outside: set[int], around: dict[str, int]
    ) -> Iterator[Point]:
        """Points of one computation; `outside` lives elsewhere, `around` is what that amounts to."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for n, event in enumerate(events):
            for b in (*event.defined, *event.used):
                root = self._find(b)
                if root not in outside and not self.on_host[root]:
                    first.setdefault(root, n)
                    last[root] = n
        born: dict[int, list[int]] = {}
        dying: dict[int, list[int]] = {}
        for b in first:
            born.setdefault(first[b], []).append(b)
            dying.setdefault(last[b], []).append(b)
        live = dict(around)
        for n, event in enumerate(events):
            for b in born.get(n, ()):
                live[self.classes.get(b, OTHER)] += self.sizes[b]
            now = dict(live)
            for b in _reused(event, born.get(n, []), dying.get(n, []), self.sizes):
                now[self.classes.get(b, OTHER)] -= self.sizes[b]
            if event.inner:
                held = outside | {b for b in first if first[b] <= n <= last[b]}
                inner_loops = (*loops, event.loop) if event.loop else loops
                yield from self._points(event.inner, inner_loops, held, now)
            elif event.instruction.opcode != "parameter":
                yield Point(event.instruction.name, loops, now)
            for b in dying.get(n, ()):
                live[self.classes.get(b, OTHER)] -= self.sizes[b]


def _reused(event: _Event, born: list[int], dying: list[int], sizes: list[int]) -> list[int]:
    """Operands that die in an elementwise instruction, in whose place an output of their size is written."""
    if event.instruction.opcode != "fusion" or "kind=kLoop" not in event.instruction.attributes:
        return []
    outputs = [sizes[b] for b in born]
    taken = []
    for b in dying:
        if b not in born and sizes[b] in outputs:
            outputs.remove(sizes[b])
            taken.append(b)
    return taken


def _updated_parameter(inside: dict[str, Instruction], name: str) -> int | None:
    """The number of the fused parameter that a dynamic-update-slice writes into, if `name` is one."""
    x = inside.get(name)
    while x is not None and x.opcode in ("bitcast", "reshape", "copy") and x.operands:
        x = inside.get(x.operands[0])
    if x is None or x.opcode != "dynamic-update-slice":
        return None
    x = inside.get(x.operands[0])
    while x is not None and x.opcode in ("bitcast", "reshape") and x.operands:
        x = inside.get(x.operands[0])
    return int(x.argument) if x is not None and x.opcode == "parameter" else None


def _leaves(value: Value) -> list[int]:
    return [value] if isinstance(value, int) else [b for inner in value for b in _leaves(inner)]


def _buffers(*values: Value) -> list[int]:
    return [b for value in values for b in _leaves(value) if b != _NO_BUFFER]


def _filled(kind: Type, buffer: int) -> Value:
    return buffer if isinstance(kind, Array) else tuple(_filled(inner, buffer) for inner in kind)
