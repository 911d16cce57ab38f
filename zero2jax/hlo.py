"""Read collectives, loops and their trip counts out of a compiled program's text. Pure Python over text.

`compiled.as_text()` is the program as it will run: asynchronous collectives as `-start`/`-done` pairs, some inside a
computation of their own; loops with known trip counts. Bytes are those of the whole value a collective moves on one
device: what an all-gather produces, what a reduce-scatter or an all-reduce takes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_ITEM_BYTES = {"pred": 1, "token": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$|^(ENTRY )?%?([\w.\-]+) \{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ?([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      num_bytes: bytes of the whole value, on one device, each time it runs.
      trips: how often it runs per step (product of the trip counts of the loops around it).
      loops: the loop bodies around it, outermost first; empty outside of loops.
      group_size: number of devices that take part.
      name: the instruction's name.
    """

    kind: str
    num_bytes: int
    trips: int
    loops: tuple[str, ...]
    group_size: int
    name: str

    @property
    def total_bytes(self) -> int:
        """Bytes per step."""
        return self.num_bytes * self.trips


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    rest: str


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, from `compiled.as_text()`.

    A loop without a known trip count counts once.
    """
    entry, computations = _computations(text)
    return list(_walk(entry, computations, 1, ())) if entry else []


def _walk(
    name: str, computations: dict[str, list[_Instruction]], trips: int, loops: tuple[str, ...]
) -> Iterator[Collective]:
    instructions = computations.get(name, [])
    types = {i.name: i.type for i in instructions}
    for i in instructions:
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            num_bytes = sum(_type_bytes(types.get(o, "")) for o in _operands(i.rest))
            if kind == "all-gather":  # what it produces; the type of a start names its operands too
                num_bytes = _type_bytes(i.type) - (num_bytes if i.opcode != kind else 0)
            yield Collective(kind, num_bytes, trips, loops, _group_size(i.rest), i.name)
        elif i.opcode == "while":
            found = _TRIPS.search(i.rest)
            body = re.search(r"body=%?([\w.\-]+)", i.rest)
            if body:
                inner = trips * int(found.group(1)) if found else trips
                yield from _walk(body.group(1), computations, inner, (*loops, body.group(1)))
        else:
            for called in _CALLED.findall(i.rest):
                for target in called.replace("%", "").split(", "):
                    yield from _walk(target, computations, trips, loops)


def _computations(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    entry, current = "", ""
    found: dict[str, list[_Instruction]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head:
                current = head.group(2) or head.group(4)
                found[current] = []
                if line.startswith("ENTRY"):
                    entry = current
            continue
        match = _INSTRUCTION.match(line)
        if match and current:
            found[current].append(_Instruction(*match.groups()))
    return entry, found


def _operands(rest: str) -> list[str]:
    """Names of the operands, from the text behind an instruction's opening parenthesis."""
    depth, end = 1, len(rest)
    for i, char in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            end = i
            break
    return re.findall(r"%([\w.\-]+)", rest[:end])


def _type_bytes(text: str) -> int:
    return sum(
        _item_bytes(kind) * math.prod(int(d) for d in dims.split(",") if d)
        for kind, dims in _ARRAY.findall(text)
    )


def _item_bytes(kind: str) -> int:
    if kind in _ITEM_BYTES:
        return _ITEM_BYTES[kind]
    bits = re.search(r"\d+", kind)
    return max(int(bits.group()) // 8, 1) if bits else 0


def _group_size(rest: str) -> int:
    """Number of devices in a replica group, from any of the three ways to write it."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
        return math.prod(sizes.get(name, 1) for name in re.findall(r"'(\w+)'", mesh.group(2)))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    return len(listed.group(1).split(",")) if listed else 1
