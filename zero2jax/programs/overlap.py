"""How much of the communication a compiled schedule hides behind arithmetic. Pure Python over a parsed program.

Walks the schedule with two clocks. Matrix products and convolutions advance the first at the target's rate; a
collective occupies the second, the link, for its bytes at the target's bandwidth, one after the other. A collective
that starts asynchronously runs beside whatever is scheduled up to its `-done`, where the first clock waits for what is
left; a synchronous one is waited for at once. What was waited for is exposed. Each iteration of a loop is alike.

Everything but products and convolutions is taken to cost no time, so the hidden share is a cautious one; memory-bound
work between start and done hides more. Latency is not counted, which matters for small collectives only.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping

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

_GEMM_TARGETS = re.compile(r'custom_call_target="(?:__cublas\S*|__onednn\$matmul|__gpu\$\S*gemm\S*)"')


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast things go; functions of a collective so that links may differ.

    Attributes:
      flops: floating-point operations per second of matrix products.
      bytes_per_s: bytes per second that one device sends for a given collective.
    """

    flops: float
    bytes_per_s: Callable[[Collective], float]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One collective of the schedule and what runs beside it.

    Attributes:
      collective: the collective.
      flops_inside: operations scheduled between its start and its done, each time it runs.
      seconds: time on the link, each time.
      exposed_s: the part of `seconds` that the schedule waits for.
    """

    collective: Collective
    flops_inside: float
    seconds: float
    exposed_s: float

    @property
    def exposed_bytes(self) -> float:
        """Bytes per step that are not hidden, in the unit of `Collective.num_bytes`."""
        share = self.exposed_s / self.seconds if self.seconds else 0.0
        return share * self.collective.total_bytes


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The schedule at given rates: arithmetic of one step and every collective, in the order of the schedule."""

    flops: float
    overlaps: tuple[Overlap, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds of a step that wait for communication."""
        return sum(o.exposed_s * o.collective.trips for o in self.overlaps)

    @property
    def communication_s(self) -> float:
        """Seconds of a step during which the link is busy."""
        return sum(o.seconds * o.collective.trips for o in self.overlaps)


def simulate(module: Module, rates: Rates) -> Timeline:
    """Run the two clocks over a program."""
    flops, _, overlaps = _Simulation(module, rates).run(module.entry, 1, ())
    return Timeline(flops, tuple(overlaps))


@dataclasses.dataclass
class _Pending:
    collective: Collective
    seconds: float
    end: float
    flops_before: float


class _Simulation:
    def __init__(self, module: Module, rates: Rates):
        self.module = module
        self.rates = rates

    def run(self, name: str, trips: int, loops: tuple[str, ...]) -> tuple[float, float, list[Overlap]]:
        """(operations, seconds, overlaps) of one run of a computation that runs `trips` times a step."""
        instructions = self.module.instructions(name)
        types = {i.name: i.type for i in instructions}
        now = link_free = flops = 0.0
        pending: dict[str, _Pending] = {}
        overlaps: list[Overlap] = []
        for i in instructions:
            if collective_kind(i):
                collective = make_collective(i, types, trips, loops)
                seconds = collective.wire_bytes / self.rates.bytes_per_s(collective)
                link_free = max(now, link_free) + seconds
                entry = _Pending(collective, seconds, link_free, flops)
                if collective.is_async:
                    pending[i.name] = entry
                else:
                    overlaps.append(_finished(entry, now, flops))
                    now = link_free
            elif i.opcode.endswith("-done") and i.operands and i.operands[0] in pending:
                entry = pending.pop(i.operands[0])
                overlaps.append(_finished(entry, now, flops))
                now = max(now, entry.end)
            else:
                more, seconds, inner = self._cost(i, types, trips, loops)
                flops, now, overlaps = flops + more, now + seconds, overlaps + inner
        return flops, now, overlaps

    def _cost(
        self, i: Instruction, types: Mapping[str, Type], trips: int, loops: tuple[str, ...]
    ) -> tuple[float, float, list[Overlap]]:
        """(operations, seconds, overlaps inside) of an instruction that is no collective."""
        if i.opcode == "while":
            n = i.known_trips or 1
            flops, seconds, overlaps = self.run(i.body, trips * n, (*loops, i.body))
            return flops * n, seconds * n, overlaps
        if i.opcode in ("call", "conditional", "async-start"):
            branches = [self.run(target, trips, loops) for target in i.called]
            return max(branches, key=lambda branch: branch[1], default=(0.0, 0.0, []))
        flops = instruction_flops(self.module, i, types)
        return flops, flops / self.rates.flops, []


def _finished(entry: _Pending, now: float, flops: float) -> Overlap:
    exposed = min(max(entry.end - now, 0.0), entry.seconds)
    return Overlap(
        collective=entry.collective,
        flops_inside=flops - entry.flops_before,
        seconds=entry.seconds,
        exposed_s=exposed,
    )


def instruction_flops(module: Module, i: Instruction, types: Mapping[str, Type]) -> float:
    """Floating-point operations of the products and convolutions in one instruction, called computations included."""
    operand = lambda n: _first_array(types.get(i.operands[n])) if n < len(i.operands) else None
    if i.opcode == "dot":
        return _dot_flops(i.type, operand(0), _dims(i.attributes, "lhs_contracting_dims"))
    if i.opcode == "convolution":
        return _convolution_flops(i, operand(1))
    if i.opcode == "custom-call":
        return _custom_call_flops(i, operand(0))
    if i.opcode.startswith("fusion") and i.opcode != "fusion-done":
        return sum(_computation_flops(module, name) for name in i.called)
    return 0.0


def _computation_flops(module: Module, name: str) -> float:
    instructions = module.instructions(name)
    types = {i.name: i.type for i in instructions}
    return sum(instruction_flops(module, i, types) for i in instructions)


def _dot_flops(result: Type, lhs: Array | None, contracted: list[int]) -> float:
    if lhs is None:
        return 0.0
    return 2.0 * arrays(result)[0].size * math.prod(lhs.shape[d] for d in contracted)


def _convolution_flops(i: Instruction, kernel: Array | None) -> float:
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    if kernel is None or labels is None:
        return 0.0
    outputs = kernel.shape[labels.group(1).index("o")]
    return 2.0 * arrays(i.type)[0].size * kernel.size / max(outputs, 1)


def _custom_call_flops(i: Instruction, lhs: Array | None) -> float:
    """Of a call to a library's matrix product; its configuration says which dims are contracted."""
    if not _GEMM_TARGETS.search(i.attributes):
        return 0.0
    match = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', i.attributes)
    if match is None:
        return 0.0
    return _dot_flops(i.type, lhs, [int(d) for d in json.loads(match.group(1))])


def _dims(attributes: str, name: str) -> list[int]:
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(d) for d in match.group(1).split(",") if d] if match else []


def _first_array(kind: Type | None) -> Array | None:
    return next(iter(arrays(kind)), None) if kind is not None else None
