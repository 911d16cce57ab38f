"""Read a compiled program's text: instructions, loops with trip counts, collectives with bytes. Pure Python over text.

`compiled.as_text()` is the program as it will run: scheduled, with asynchronous collectives as `-start`/`-done` pairs
and loops with known trip counts. Bytes of a collective are those of the full value that it moves on one device: what
an all-gather produces, what a reduce-scatter or an all-reduce takes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zero2jax.programs.groups import replica_groups
from zero2jax.programs.trips import counted_trips

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# A computation is a head line, its instructions and a closing brace; an instruction is one line:
#   [ROOT] %name = type opcode(operands), attribute=value, ..., metadata={op_name="..."}
_ITEM_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\]((?:\{[^}]*\})?)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|called_computations|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, \w[\w-]*\)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_HOST_SPACE = "S(5)"
# Where instructions come from, in tables before the first computation: `stack_frame_id=5` in an instruction's metadata
# is a row of StackFrames, which names a row of FileLocations and the frame of the caller; ids begin at 1.
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_NOT_THE_USERS = ("/site-packages/", f"{Path(__file__).parents[1]}/", "<frozen ")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's type: dtype name, shape, and whether it lies in host memory."""

    dtype: str
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes, without the padding of a tiled layout."""
        return self.size * item_bytes(self.dtype)


Type = Array | tuple["Type", ...]
"""The type of an instruction: an array, or a tuple of types."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its name, without `%`.
      type: what it produces.
      opcode: `fusion`, `all-gather-start`, ...
      operands: names of its operands.
      attributes: the text behind the operands.
      argument: the text between the parentheses: the number of a parameter, the index of nothing else.
      is_root: whether it is what its computation returns.
    """

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    argument: str
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, the condition of a loop left out."""
        names = ", ".join("".join(pair) for pair in _CALLED.findall(self.attributes))
        return tuple(name for name in names.replace("%", "").split(", ") if name)

    @property
    def body(self) -> str:
        """Name of the body of a loop."""
        match = _BODY.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def condition(self) -> str:
        """Name of the computation that says whether a loop goes on."""
        match = _CONDITION.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def direction(self) -> str:
        """How a comparison compares: LT, LE, GT, GE, EQ or NE."""
        match = _DIRECTION.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer or boolean scalar."""
        return isinstance(self.type, Array) and not self.type.shape and self.type.dtype[0] in "sup"

    @property
    def known_trips(self) -> int | None:
        """How often a loop runs, if the compiler says so; `Module.trips` finds it elsewhere, too."""
        match = _TRIPS.search(self.attributes)
        return int(match.group(1)) if match else None

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def op_name(self) -> str:
        """Where the instruction comes from, `jit(step)/shard_map/...`; for an argument, its name in the signature."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1).replace("\\'", "'") if match else ""

    @property
    def frame(self) -> int:
        """Number of its stack frame in `Module.frames`; 0 where the text does not say."""
        match = _FRAME_OF.search(self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def is_synchronous(self) -> bool:
        """Whether the compiler marked a start/done pair as one operation that nothing overlaps."""
        return '"is_sync":true' in self.attributes


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and which argument each output takes the place of.

    Attributes:
      entry: name of the computation that runs.
      computations: instructions by computation, in the order they are scheduled.
      aliases: output index (a path into the result) -> number of the donated argument.
      frames: stack frames by number: file, line and the number of the caller's frame.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    aliases: Mapping[tuple[int, ...], int]
    frames: Mapping[int, tuple[str, int, int]] = dataclasses.field(default_factory=dict, repr=False)

    def instructions(self, name: str) -> tuple[Instruction, ...]:
        """The instructions of one computation; none for a name that the text does not define."""
        return self.computations.get(name, ())

    def trips(self, around: str, loop: Instruction) -> int | None:
        """How often a loop in the computation `around` runs; None where that depends on data."""
        key = around, loop.name
        if key not in self._trips:
            known = loop.known_trips
            self._trips[key] = counted_trips(self, around, loop) if known is None else known
        return self._trips[key]

    def loop_trips(self) -> dict[str, int | None]:
        """How often each loop runs, by the name of its body; None where that depends on data."""
        loops = (
            (name, i) for name in self.computations for i in self.instructions(name) if i.opcode == "while"
        )
        return {i.body: self.trips(name, i) for name, i in loops}

    def source(self, instruction: Instruction) -> str:
        """File and line that an instruction comes from, outside of installed packages where there is such a line."""
        places, number = [], instruction.frame
        while number in self.frames:
            file, line, number = self.frames[number]
            places.append(f"{file}:{line}")
        own = (place for place in places if not any(part in place for part in _NOT_THE_USERS))
        return next(own, places[0] if places else "")

    @functools.cached_property
    def _trips(self) -> dict[tuple[str, str], int | None]:
        return {}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      num_bytes: bytes of the full value, on one device, each time it runs.
      trips: how often it runs per step (product of the trip counts of the loops around it).
      operands: the arrays that it takes.
      trips_known: whether that is so; a loop whose count depends on data counts once, and `trips` is a lower bound.
      loops: the loop bodies around it, outermost first; empty outside of loops.
      group_size: number of devices that take part.
      name: the instruction's name.
      groups: the devices of each group, as positions in the device assignment; empty if the text does not say.
      is_async: whether it is a start/done pair that other work may run beside.
      op_name: where it comes from, as jax names it.
    """

    kind: str
    num_bytes: int
    trips: int
    loops: tuple[str, ...]
    group_size: int
    name: str
    groups: tuple[tuple[int, ...], ...] = ()
    is_async: bool = False
    op_name: str = ""
    operands: tuple[Array, ...] = ()
    trips_known: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes per step."""
        return self.num_bytes * self.trips

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends each time, by the ring algorithms that bus bandwidths are quoted for."""
        if self.group_size <= 1:
            return 0.0
        if self.kind == "collective-permute":
            return float(self.num_bytes)
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.num_bytes * (self.group_size - 1) / self.group_size


def parse(text: str) -> Module:
    """The program in `compiled.as_text()`."""
    entry, current = "", ""
    lines: dict[str, list[Instruction]] = {}
    header = ""
    tables: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            header = header or (line if line.startswith("HloModule") else "")
            tables += [line] if not current else []
            head = _HEAD.match(line)
            if head:
                current = head.group(2)
                lines[current] = []
                entry = current if head.group(1) else entry
        elif current:
            instruction = _instruction(line)
            if instruction is not None:
                lines[current].append(instruction)
    computations = {name: tuple(instructions) for name, instructions in lines.items()}
    return Module(entry, computations, _aliases(header), _frames(tables))


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, from `compiled.as_text()`.

    A loop whose trip count depends on data counts once.
    """
    return module_collectives(parse(text))


def module_collectives(module: Module) -> list[Collective]:
    """Every collective of a parsed program, in the order of the schedule."""
    return list(_walk(module, module.entry, Around()))


@dataclasses.dataclass(frozen=True)
class Around:
    """The loops around a computation: their bodies, outermost first, and how often it runs per step in all.

    Attributes:
      loops: names of the bodies.
      trips: product of the trip counts.
      known: whether all of them are known; one that is not counts once.
    """

    loops: tuple[str, ...] = ()
    trips: int = 1
    known: bool = True

    def inside(self, body: str, trips: int | None) -> "Around":
        """The same, one loop further inside."""
        known = trips is not None
        return Around((*self.loops, body), self.trips * (1 if trips is None else trips), self.known and known)


def _walk(module: Module, name: str, around: Around) -> Iterator[Collective]:
    instructions = module.instructions(name)
    types = {i.name: i.type for i in instructions}
    for i in instructions:
        if collective_kind(i):
            yield make_collective(i, types, around)
        elif i.opcode == "while":
            yield from _walk(module, i.body, around.inside(i.body, module.trips(name, i)))
        elif i.opcode not in ("fusion", "reduce", "sort", "scatter", "map", "reduce-window", "custom-call"):
            for target in i.called:
                yield from _walk(module, target, around)


def collective_kind(instruction: Instruction) -> str:
    """Which of `KINDS` an instruction is or starts, or an empty string."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def make_collective(instruction: Instruction, types: Mapping[str, Type], around: Around) -> Collective:
    """A `Collective` from its instruction, the types of its neighbours and the loops around it."""
    kind = collective_kind(instruction)
    num_bytes = sum(type_bytes(types[o]) for o in instruction.operands if o in types)
    if (
        kind == "all-gather"
    ):  # what it produces; the type of a start repeats its operands: (operands, results)
        num_bytes = type_bytes(instruction.type) - (num_bytes if instruction.opcode != kind else 0)
    groups = replica_groups(instruction.attributes)
    return Collective(
        kind=kind,
        num_bytes=num_bytes,
        trips=around.trips,
        trips_known=around.known,
        operands=tuple(a for o in instruction.operands if o in types for a in arrays(types[o])),
        loops=around.loops,
        group_size=max((len(g) for g in groups), default=1),
        name=instruction.name,
        groups=groups,
        is_async=instruction.opcode != kind and not instruction.is_synchronous,
        op_name=instruction.op_name,
    )


def arrays(kind: Type) -> list[Array]:
    """The arrays of a type, depth first."""
    return [kind] if isinstance(kind, Array) else [a for inner in kind for a in arrays(inner)]


def type_bytes(kind: Type) -> int:
    """Bytes of all arrays of a type."""
    return sum(a.num_bytes for a in arrays(kind))


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    text = line[match.end() :]
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    argument = text[opcode.end() : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", argument))
    return Instruction(
        name=match.group(2),
        type=_type(text[:end]),
        opcode=opcode.group(1),
        operands=operands,
        attributes=text[close + 1 :],
        argument=argument,
        is_root=match.group(1) is not None,
    )


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


@functools.lru_cache(maxsize=4096)
def _type(text: str) -> Type:
    if not text.startswith("("):
        match = _ARRAY.match(text)
        if match is None:
            return Array("opaque", ())
        dims = tuple(int(d.removeprefix("<=")) for d in match.group(2).split(",") if d)
        return Array(match.group(1), dims, _HOST_SPACE in match.group(3))
    parts, depth, start = [], 0, 1
    inner = re.sub(r"/\*.*?\*/", "", text)  # long tuples are numbered, /*index=5*/, between their elements
    for i, char in enumerate(inner):
        depth += (char in "({[") - (char in ")}]")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(inner[start:i].strip())
            start = i + 1
    return tuple(_type(part) for part in parts if part)


def _frames(lines: Iterable[str]) -> dict[int, tuple[str, int, int]]:
    """Stack frames by number, from the tables before the first computation."""
    files: dict[int, str] = {}
    places: dict[int, tuple[str, int]] = {}
    frames: dict[int, tuple[str, int, int]] = {}
    section = ""
    for line in lines:
        section = section if line[:1].isdigit() else line.strip()
        if section == "FileNames" and (match := _FILE.match(line)):
            files[int(match.group(1))] = match.group(2)
        elif match := _LOCATION.match(line):
            places[int(match.group(1))] = files.get(int(match.group(2)), ""), int(match.group(3))
        elif (match := _FRAME.match(line)) and int(match.group(2)) in places:
            number, caller = (
                int(match.group(1)),
                int(match.group(3) or 1) - 1,
            )  # callers are written one too high
            frames[number] = (*places[int(match.group(2))], min(caller, number - 1))
    return frames


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype by its name in the text; at least 1."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 0


def _aliases(header: str) -> dict[tuple[int, ...], int]:
    start = header.find("input_output_alias={")
    if start < 0:
        return {}
    depth, end = 0, len(header)
    for i in range(header.index("{", start), len(header)):
        depth += (header[i] == "{") - (header[i] == "}")
        if depth == 0:
            end = i
            break
    pairs = _ALIAS.findall(header[start:end])  # {0, 1}: (3, {}, may-alias)
    return {tuple(int(d) for d in path.split(",") if d.strip()): int(number) for path, number in pairs}
