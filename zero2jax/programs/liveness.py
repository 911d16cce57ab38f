"""Live bytes at each instruction of a compiled schedule, by class. Pure Python over a parsed program.

Every instruction makes buffers as large as its type says. Those that only rename memory share a buffer: tuples and
their elements, bitcasts, `-done`s, a loop's operand, its state and its result, an in-place update of a slice, and an
output that takes the place of a donated argument. A buffer lives from the instruction that makes it to the last one
that uses it; a loop adds what its body makes to what lives around it. Arguments live throughout.

The compiler's allocation is the authority: it shares memory in more ways (an elementwise result in the place of an
operand that dies there is the only one imitated here) and packs with gaps. The walk says what its bytes are, and a
report sets both peaks side by side.

Three passes: `_Reading` turns computations into events and joins the `Buffers` that share memory; `_seeds_and_edges`
and `_spread` classify the joined buffers; `_LiveRanges` counts what lives at each event.

Classes start from what is known and follow the data: arguments by name; `parameters` from what all-gathers over the
data axis take and produce; `gradients` from what reductions over it take and produce; both pass through instructions
that only move data, gradients also through elementwise ones. Everything else is `activations and temporaries`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zero2jax.programs.buffers import Buffers, Value, buffers_of, element, without_buffers
from zero2jax.programs.formulas import CLASSES, GRADIENTS, OTHER, PARAMETERS
from zero2jax.programs.hlo import (
    Around,
    Collective,
    Instruction,
    Module,
    Type,
    arrays,
    collective_kind,
    make_collective,
)
from zero2jax.programs.tensors import Made, Tensor, largest_tensors, maker

NUM_LARGEST = 5  # tensors that are named at the peak

_Edge = tuple[int, int, bool]  # from, to, whether data is only moved; else it is computed element by element

_MOVES = frozenset(
    ("parameter", "constant", "bitcast", "reshape", "slice", "dynamic-slice", "dynamic-update-slice", "copy")
) | {"convert", "transpose", "tuple", "get-tuple-element", "iota", "broadcast", "concatenate", "pad"}
_INDEX_ARITHMETIC = frozenset(
    ("add", "subtract", "multiply", "compare", "select", "clamp", "maximum", "minimum", "and", "or")
)
_FREE = frozenset(("constant", "after-all", "partition-id", "replica-id"))
_CALL_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")


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
    """The walk: a point per instruction of the schedule, and the arguments by class, before anything runs.

    Attributes:
      points: in the order of the schedule.
      rest_by_class: bytes of the arguments.
      host_bytes: bytes of arguments in host memory.
      largest_at_peak: what takes most at the peak, arguments left out.
    """

    points: tuple[Point, ...]
    rest_by_class: dict[str, int]
    host_bytes: int
    largest_at_peak: tuple[Tensor, ...] = ()

    @property
    def peak(self) -> Point:
        """The first point with the most live bytes."""
        rest = Point("", (), self.rest_by_class)
        return max((rest, *self.points), key=lambda point: point.total_bytes)


@dataclasses.dataclass
class _Event:
    """One instruction of a computation: the value it makes, the buffers it defines and uses, and what it runs.

    Attributes:
      instruction: the instruction.
      operands: the values that it takes.
      value: the value that it makes.
      collective: what it communicates, if it is or starts a collective.
      defined: buffers that begin to exist with it.
      inner: the events of the computations it calls, in order.
      loop: name of the body, for a loop.
    """

    instruction: Instruction
    operands: list[Value]
    value: Value = ()
    collective: Collective | None = None
    defined: list[int] = dataclasses.field(default_factory=list)
    inner: list["_Event"] = dataclasses.field(default_factory=list)
    loop: str = ""

    @property
    def used(self) -> list[int]:
        """Buffers of the operands."""
        return buffers_of(*self.operands)


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
    buffers = Buffers()
    parameters = [i for i in module.instructions(module.entry) if i.opcode == "parameter"]
    arguments = {int(i.argument): buffers.new(i.type) for i in parameters}
    events, root = _Reading(module, buffers).run(module.entry, arguments)
    for path, number in module.aliases.items():
        if number in arguments:
            buffers.share(arguments[number], element(root, path))
    # Roots are final from here on: everything that shares memory is joined.
    known = {
        buffers.root(b): argument_class(i.op_name)
        for i in parameters
        for b in buffers_of(arguments[int(i.argument)])
    }
    tags, edges = _seeds_and_edges(module, buffers, events, over_data, small_bytes)
    classes = _spread(buffers, known, tags, edges)
    lifetimes, at_peak = _LiveRanges(buffers, classes).result(events, set(known))
    makers = _makers(module, buffers, events)
    made = [
        Made(buffers.arrays[b], buffers.sizes[b], classes.get(b, OTHER), makers.get(b))
        for b in sorted(at_peak - set(known))
    ]
    return dataclasses.replace(lifetimes, largest_at_peak=largest_tensors(module, made, NUM_LARGEST))


@dataclasses.dataclass(frozen=True)
class _Reading:
    """From the computations of a module to events, allotting buffers on the way."""

    module: Module
    buffers: Buffers

    def run(self, name: str, parameters: Mapping[int, Value]) -> tuple[list[_Event], Value]:
        """(events, value of the root) of one run of a computation.

        A computation that is called twice is read twice: its buffers are other ones each time. `parameters` are the
        values of its parameters by number.
        """
        values: dict[str, Value] = {}
        events: list[_Event] = []
        root: Value = ()
        instructions = self.module.instructions(name)
        types = {i.name: i.type for i in instructions}
        done = {i.operands[0]: i for i in instructions if i.opcode.endswith("-done") and i.operands}
        for i in instructions:
            event = _Event(i, [values[o] for o in i.operands if o in values])
            if i.opcode == "parameter":
                event.value = parameters[int(i.argument)]
            else:
                # A start's type repeats its operands and adds context; what it makes is what its done returns.
                self._make(event, done[i.name].type if i.name in done else i.type)
                event.collective = make_collective(i, types, Around()) if collective_kind(i) else None
            values[i.name] = event.value
            events.append(event)
            root = event.value if i.is_root else root
        return events, root

    def _make(self, event: _Event, kind: Type) -> None:
        """Set the value of an event, the buffers it defines and the events inside of it."""
        i, before = event.instruction, len(self.buffers)
        if i.opcode == "while":
            # One buffer per element of the state: operand, parameter of the body, its root and the result.
            event.value, event.loop = event.operands[0], i.body
            self._call(event, i.body, event.operands)
        elif i.opcode in ("call", "conditional") and i.called:
            event.value = self.buffers.new(i.type)
            for n, target in enumerate(i.called):
                # Operand 0 of a conditional chooses; branch n takes operand n + 1.
                given = event.operands if i.opcode == "call" else event.operands[n + 1 : n + 2]
                self._call(event, target, given)
        else:
            event.value = self._value(i, event.operands, kind)
        # What a called computation makes besides its result is born, and dies, among the inner events.
        event.defined = buffers_of(event.value) if event.inner else [*range(before, len(self.buffers))]

    def _call(self, event: _Event, target: str, operands: Sequence[Value]) -> None:
        inner, root = self.run(target, dict(enumerate(operands)))
        event.inner += inner
        self.buffers.share(event.value, root)

    def _value(self, i: Instruction, operands: list[Value], kind: Type) -> Value:
        """What an instruction that calls nothing makes: a name for memory that is there, or new buffers."""
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == "get-tuple-element":
            return element(operands[0], (i.index,))
        if i.opcode in _FREE:
            return without_buffers(i.type)
        if i.opcode in ("bitcast", "reshape", "opt-barrier") or (i.opcode.endswith("-done") and operands):
            return operands[0]
        value = self.buffers.new(kind)
        for output, operand in self.in_place(i, len(operands)):
            self.buffers.share(operands[operand], element(value, (output,)))
        return value

    def in_place(self, i: Instruction, num_operands: int) -> Iterator[tuple[int, int]]:
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


def _seeds_and_edges(
    module: Module,
    buffers: Buffers,
    events: Sequence[_Event],
    over_data: Callable[[Collective], bool],
    small_bytes: int,
) -> tuple[dict[int, str], list[_Edge]]:
    """The buffers of which collectives say the class, and along which edges that class may spread."""
    tags: dict[int, str] = {}
    edges: list[_Edge] = []
    for event in _all_events(events):
        i, collective = event.instruction, event.collective
        if collective is not None:
            gathers = collective.kind == "all-gather"
            if over_data(collective) and (gathers or collective.num_bytes > small_bytes):
                for b in buffers_of(*event.operands, event.value):
                    tags.setdefault(b, PARAMETERS if gathers else GRADIENTS)
        elif i.opcode in ("copy", "convert", "transpose", "copy-start") or i.opcode.startswith("fusion"):
            moved, elementwise = _moves(module, i)
            for out in buffers_of(event.value):
                for b in event.used:
                    # A fusion of a gradient and a scalar, or of a slice, makes no gradient: sizes must agree.
                    if moved or (elementwise and buffers.elements[b] == buffers.elements[out]):
                        edges.append((b, out, moved))
    return tags, edges


def _moves(module: Module, i: Instruction) -> tuple[bool, bool]:
    """Whether an instruction only moves data, and whether it works element by element."""
    moved, elementwise = True, True
    for name in i.called:
        for x in module.instructions(name):
            scalar = all(a.size == 1 for a in arrays(x.type))
            if x.opcode not in _MOVES and not (scalar and x.opcode in _INDEX_ARITHMETIC):
                moved = False
            if x.opcode in ("dot", "convolution", "reduce", "scatter", "gather"):
                elementwise = False
    return moved, elementwise


def _spread(
    buffers: Buffers, known: Mapping[int, str], tags: Mapping[int, str], edges: Sequence[_Edge]
) -> dict[int, str]:
    """The class of each buffer that has one, by root: what is known, then tags, then along the edges.

    A class is never taken back, so the loop ends; the edges are sorted so that it ends alike on every run.
    """
    classes = dict(known)
    for b, name in tags.items():
        classes.setdefault(buffers.root(b), name)
    pairs = sorted({(buffers.root(a), buffers.root(b), moved) for a, b, moved in edges})
    # Scalars meet everything, and would lead from any class to any other.
    pairs = [p for p in pairs if min(buffers.elements[p[0]], buffers.elements[p[1]]) > 1]
    before = -1
    while len(classes) != before:
        before = len(classes)
        for a, b, moved in pairs:
            if b not in classes and (classes.get(a) == GRADIENTS or (moved and classes.get(a) == PARAMETERS)):
                classes[b] = classes[a]
            # backwards too: what is copied into the operand of a reduction is a gradient already
            elif a not in classes and moved and classes.get(b) in (GRADIENTS, PARAMETERS):
                classes[a] = classes[b]
    return classes


@dataclasses.dataclass(frozen=True)
class _LiveRanges:
    """From events to live bytes, once buffers are joined and classified."""

    buffers: Buffers
    classes: Mapping[int, str]

    def result(self, events: list[_Event], arguments: set[int]) -> tuple[Lifetimes, set[int]]:
        """The points of the whole schedule, and what lives at the first one with most; arguments live throughout."""
        on_device = {b for b in arguments if not self.buffers.on_host[b]}
        rest = dict.fromkeys(CLASSES, 0)
        self._add(rest, on_device, 1)
        host_bytes = sum(self.buffers.sizes[b] for b in arguments - on_device)
        points: list[Point] = []
        at_peak: set[int] = set()
        most = sum(rest.values())
        for point, *live in self._points(events, (), arguments, rest):
            points.append(point)
            if point.total_bytes > most:
                most, at_peak = point.total_bytes, set().union(*live)
        return Lifetimes(tuple(points), rest, host_bytes), at_peak

    def _add(self, by_class: dict[str, int], some: Iterable[int], sign: int) -> None:
        for b in some:
            by_class[self.classes.get(b, OTHER)] += sign * self.buffers.sizes[b]

    def _points(
        self, events: list[_Event], loops: tuple[str, ...], outside: set[int], around: dict[str, int]
    ) -> Iterator[tuple[Point, set[int], set[int]]]:
        """(point, what lives elsewhere, what lives here) of one computation, whose sets change with the next point.

        `outside` lives elsewhere, `around` is what that amounts to.
        """
        first, last = self._ranges(events, outside)
        born, dying = _by_value(first), _by_value(last)
        live = dict(around)
        here: set[int] = set()
        for n, event in enumerate(events):
            self._add(live, born.get(n, ()), 1)
            here.update(born.get(n, ()))
            now = dict(live)
            reused = _reused(event, born.get(n, []), dying.get(n, []), self.buffers.sizes)
            self._add(now, reused, -1)
            here.difference_update(reused)
            if event.inner:
                # What lives across the call is outside of what it runs: neither born nor dying there.
                held = outside | {b for b in first if first[b] <= n <= last[b]}
                inner_loops = (*loops, event.loop) if event.loop else loops
                yield from self._points(event.inner, inner_loops, held, now)
            elif event.instruction.opcode != "parameter":
                yield Point(event.instruction.name, loops, now), outside, here
            self._add(live, dying.get(n, ()), -1)
            here.difference_update(dying.get(n, ()))

    def _ranges(self, events: list[_Event], outside: set[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Per buffer of one computation, the numbers of the first and of the last event that touches it."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for n, event in enumerate(events):
            for b in (*event.defined, *event.used):
                root = self.buffers.root(b)
                if root not in outside and not self.buffers.on_host[root]:
                    first.setdefault(root, n)
                    last[root] = n
        return first, last


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


def _makers(module: Module, buffers: Buffers, events: Sequence[_Event]) -> dict[int, Instruction]:
    """What computed each buffer, by root: what is written into it slice by slice, else what defined it."""
    defined: dict[int, Instruction] = {}
    written: dict[int, Instruction] = {}
    inside = {event.instruction.name: event.instruction for event in events}
    reading = _Reading(module, buffers)
    for event in events:
        for b, instruction in _makers(module, buffers, event.inner).items():
            written.setdefault(b, instruction)
        for output, operand in reading.in_place(event.instruction, len(event.operands)):
            for b in buffers_of(event.operands[operand]):
                written.setdefault(buffers.root(b), maker(module, event.instruction, output, inside))
        for number, b in enumerate(buffers_of(event.value) if event.defined else ()):
            defined.setdefault(buffers.root(b), maker(module, event.instruction, number, inside))
    return defined | written


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


def _all_events(events: Iterable[_Event]) -> Iterator[_Event]:
    for event in events:
        yield from _all_events(event.inner)
        yield event


def _by_value(numbers: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for key, number in numbers.items():
        found.setdefault(number, []).append(key)
    return found
