"""The largest tensors of a moment in the schedule, and the operation that computed each. Pure Python."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from zero2jax.programs.hlo import Array, Instruction, Module

_MOVES = frozenset(
    ("bitcast", "reshape", "copy", "convert", "transpose", "broadcast", "get-tuple-element")
) | {
    "dynamic-update-slice",
    "fusion-done",
}
_NOTHING = ("constant", "parameter", "while")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Buffers of one shape that one operation made.

    Attributes:
      count: how many of them.
      num_bytes: bytes of all of them.
      dtype: as XLA names it.
      shape: of each.
      class_name: the class of memory.
      op_name: the operation, as jax names it.
      source: file and line.
    """

    count: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    class_name: str
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True)
class Made:
    """What is known of one buffer: its array, its bytes (those of the largest that share it), its class, its maker."""

    array: Array
    num_bytes: int
    class_name: str
    maker: Instruction | None


def largest_tensors(module: Module, buffers: Iterable[Made], count: int) -> tuple[Tensor, ...]:
    """The largest of some buffers; those of one operation and shape are one tensor, as in layers without a loop."""
    groups: dict[tuple[Array, str, str, str], list[int]] = {}
    for one in buffers:
        named = (one.maker.op_name, module.source(one.maker)) if one.maker is not None else ("", "")
        groups.setdefault((one.array, one.class_name, *named), []).append(one.num_bytes)
    tensors = [
        Tensor(
            count=len(sizes),
            num_bytes=sum(sizes),
            dtype=array.dtype,
            shape=array.shape,
            class_name=class_name,
            op_name=op_name,
            source=source,
        )
        for (array, class_name, op_name, source), sizes in groups.items()
    ]
    return tuple(sorted(tensors, key=lambda t: (-t.num_bytes, t.op_name, t.shape))[:count])


def maker(module: Module, i: Instruction, output: int, inside: Mapping[str, Instruction]) -> Instruction:
    """The instruction that computed what another one puts into its output number `output`.

    Moves, conversions and the writing of a slice are followed back, into a fusion and out of it.

    Args:
      module: the program.
      i: the instruction.
      output: which of its outputs; 0 if it has one.
      inside: the instructions of its computation by name.
    """
    for x in _back(module, i, output, inside):
        i = x if x.op_name and x.opcode != "get-tuple-element" else i
    return i


def _back(
    module: Module, i: Instruction, output: int, inside: Mapping[str, Instruction]
) -> Iterator[Instruction]:
    """What an instruction takes its output from, step by step; an argument and a constant have computed nothing."""
    seen: set[str] = set()
    while i.opcode in _MOVES and i.name not in seen:
        seen.add(i.name)
        before = _before(i, inside)
        if before is None:
            return
        output = i.index if i.opcode == "get-tuple-element" else 0
        i = before
        yield i
    if not i.opcode.startswith("fusion") or not i.called:
        return
    fused = {x.name: x for x in module.instructions(i.called[0])}
    root = _output(fused, output)
    if root is None:
        return
    steps = [root, *_back(module, root, 0, fused)]
    yield from steps
    last = steps[-1]
    given = fused.get(last.operands[_moved(last)]) if last.opcode in _MOVES and last.operands else None
    outside = (
        None if given is None or given.opcode != "parameter" else inside.get(i.operands[int(given.argument)])
    )
    if outside is not None and outside.opcode not in _NOTHING:  # moved here, computed before
        yield outside
        yield from _back(module, outside, 0, inside)


def _before(i: Instruction, inside: Mapping[str, Instruction]) -> Instruction | None:
    """What a move moves; of the state of a loop, what the iteration before has put there."""
    before = inside.get(i.operands[_moved(i)])
    if before is not None and before.opcode == "parameter" and i.opcode == "get-tuple-element":
        root = next((x for x in inside.values() if x.is_root), None)
        before = inside.get(root.operands[i.index]) if root is not None and root.opcode == "tuple" else None
    return None if before is None or before.opcode in _NOTHING else before


def _moved(i: Instruction) -> int:
    """Which operand a move moves: a slice is written into the first one."""
    return 1 if i.opcode == "dynamic-update-slice" else 0


def _output(fused: Mapping[str, Instruction], output: int) -> Instruction | None:
    root = next((x for x in fused.values() if x.is_root), None)
    if root is None or root.opcode != "tuple":
        return root
    return fused.get(root.operands[output]) if output < len(root.operands) else None
