"""Read a compiled program's text: instructions, loops with trip counts, collectives with bytes. Pure Python over text.

`compiled.as_text()` is the program as it will run: scheduled, with asynchronous collectives as `-start`/`-done` pairs
and loops with known trip counts. Bytes of a collective are those of the full value that it moves on one device: what
an all-gather produces, what a reduce-scatter or an all-reduce takes.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

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
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, \w[\w-]*\)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_HOST_SPACE = "S(5)"


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
        return self.size * _item_bytes(self.dtype)


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
    def known_trips(self) -> int | None:
        """How often a loop runs, if the compiler knows."""
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
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    aliases: Mapping[tuple[int, ...], int]

    def instructions(self, name: str) -> tuple[Instruction, ...]:
        """The instructions of one computation; none for a name that the text does not define."""
        return self.computations.get(name, ())

    def loop_trips(self) -> dict[str, int | None]:
        """How often each loop runs, by the name of its body; None where the compiler does not know."""
        loops = (i for name in self.computations for i in self.instructions(name) if i.opcode == "while")
        return {i.body: i.known_trips for i in loops}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      num_bytes: bytes of the full value, on one device, each time it runs.
      trips: how often it runs per step (product of the trip counts of the loops around it).
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
    for line in text.splitlines():
        if not line.startswith(" "):
            header = header or (line if line.startswith("HloModule") else "")
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
    return Module(entry, computations, _aliases(header))


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, from `compiled.as_text()`.

    A loop without a known trip count counts once.
    """
    return module_collectives(parse(text))


def module_collectives(module: Module) -> list[Collective]:
    """Every collective of a parsed program, in the order of the schedule."""
    return list(_walk(module, module.entry, 1, ()))


def _walk(module: Module, name: str, trips: int, loops: tuple[str, ...]) -> Iterator[Collective]:
    instructions = module.instructions(name)
    types = {i.name: i.type for i in instructions}
    for i in instructions:
        if collective_kind(i):
            yield make_collective(i, types, trips, loops)
        elif i.opcode == "while":
            yield from _walk(module, i.body, trips * (i.known_trips or 1), (*loops, i.body))
        elif i.opcode not in ("fusion", "reduce", "sort", "scatter", "map", "reduce-window", "custom-call"):
            for target in i.called:
                yield from _walk(module, target, trips, loops)


def collective_kind(instruction: Instruction) -> str:
    """Which of `KINDS` an instruction is or starts, or an empty string."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def make_collective(
    instruction: Instruction, types: Mapping[str, Type], trips: int, loops: tuple[str, ...]
) -> Collective:
    """A `Collective` from its instruction and the types of the instructions around it."""
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
        trips=trips,
        loops=loops,
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


def _item_bytes(dtype: str) -> int:
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


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a collective, from any of the ways to write them."""
    # mesh['data'=4,'model'=2] {'data'}: by name
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if mesh:
        names = re.findall(r"'([^']+)'=(\d+)", mesh.group(1))
        sizes = [int(size) for _, size in names]
        chosen = re.findall(r"'([^']+)'", mesh.group(2))
        axes = [[name for name, _ in names].index(name) for name in chosen]
        return axis_groups(sizes, axes)
    # [2,4]<=[4,2]T(1,0): 0, 1, 2, ... in the shape on the right, transposed, as 2 groups of 4
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = [int(d) for d in iota.group(3).split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota.group(4):
            ids = ids.transpose([int(d) for d in iota.group(4).split(",")])
        return _rows(ids.reshape(int(iota.group(1)), int(iota.group(2))))
    # {{0,1},{2,3}}
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return tuple(
            tuple(int(d) for d in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed.group(1))
        )
    pairs = re.search(r"source_target_pairs=\{([\d,{} ]*)\}", attributes)
    if pairs:
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)))
    return ()


def axis_groups(sizes: list[int], axes: list[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of a grid of devices along some of its axes: those that differ in these axes alone."""
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    kept = [i for i in range(len(sizes)) if i not in axes]
    size = math.prod(sizes[i] for i in axes)
    return _rows(ids.transpose([*kept, *axes]).reshape(-1, size))


def axis_names(groups: tuple[tuple[int, ...], ...], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which a collective's groups lie; empty if they lie along none of them."""
    # Sets, since neither groups nor the devices in them come in an order that means anything.
    wanted = {frozenset(g) for g in groups}
    names = [name for name, size in mesh_shape.items() if size > 1]
    sizes = [mesh_shape[name] for name in names]
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            if {frozenset(g) for g in axis_groups(sizes, list(chosen))} == wanted:
                return tuple(names[i] for i in chosen)
    return ()


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(x) for x in row) for row in ids)
