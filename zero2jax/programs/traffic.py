"""Bytes of device memory that each instruction of a compiled program reads and writes. Pure Python.

A fusion reads its parameters and writes its results; what lives inside of it stays in registers. A slice counts as what
it takes, an in-place update as what it writes: a loop over layers touches a layer of a stack in each iteration, not the
stack.
"""

from collections.abc import Iterator, Mapping

from zero2jax.programs.hlo import Array, Instruction, Module, Type, arrays

# They rename memory, or hold what others have computed.
_FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier")
) | {"partition-id", "replica-id"}
_RENAMES = frozenset(("bitcast", "reshape"))
_PASSED_ON = _RENAMES | {"convert", "copy"}
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))


class Traffic:
    """Reads the bytes out of the instructions of one module."""

    def __init__(self, module: Module):
        self.module = module
        self._of_fused: dict[str, int] = {}

    def of(self, i: Instruction, types: Mapping[str, Type]) -> int:
        """Bytes that one instruction reads and writes; 0 for those that run other computations of the schedule.

        Args:
          i: the instruction.
          types: those of the instructions of its computation, by name.
        """
        if i.opcode in _FREE or i.opcode.endswith("-done"):
            return 0
        if i.opcode.startswith("fusion"):
            return sum(self._fused(name) for name in i.called)
        if i.opcode == "dynamic-update-slice":
            return 2 * _device_bytes(types.get(i.operands[1], ()))
        if i.opcode in _SLICES:
            return 2 * _device_bytes(i.type)
        written = (
            0 if i.opcode.endswith("-start") else _device_bytes(i.type)
        )  # a start's type names its operands too
        return written + sum(_device_bytes(types[name]) for name in i.operands if name in types)

    def _fused(self, name: str) -> int:
        if name not in self._of_fused:
            self._of_fused[name] = _fusion_bytes(self.module.instructions(name))
        return self._of_fused[name]


def _fusion_bytes(instructions: tuple[Instruction, ...]) -> int:
    by_name = {i.name: i for i in instructions}
    users: dict[str, list[Instruction]] = {}
    for i in instructions:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    root = next(i for i in instructions if i.is_root)
    total, updated = 0, set()
    for name in root.operands if root.opcode == "tuple" else (root.name,):
        output = _behind(by_name[name], by_name, _PASSED_ON)
        if output.opcode != "dynamic-update-slice":
            total += _device_bytes(by_name[name].type)
            continue
        total += _device_bytes(by_name[output.operands[1]].type)
        updated.add(_behind(by_name[output.operands[0]], by_name, _PASSED_ON).name)
    for i in instructions:
        if i.opcode == "parameter":
            uses = list(_uses(i.name, users))
            if i.name in updated and all(user.opcode == "dynamic-update-slice" for user, _ in uses):
                continue
            total += _read_bytes(i, uses)
    return total


def _behind(i: Instruction, by_name: Mapping[str, Instruction], through: frozenset[str]) -> Instruction:
    """What a value was before it was renamed or passed on."""
    while i.opcode in through and i.operands and i.operands[0] in by_name:
        i = by_name[i.operands[0]]
    return i


def _uses(name: str, users: Mapping[str, list[Instruction]]) -> Iterator[tuple[Instruction, str]]:
    """The instructions that use a value, and under which name, renamings followed."""
    for user in users.get(name, []):
        if user.opcode in _RENAMES:
            yield from _uses(user.name, users)
        else:
            yield user, name


def _read_bytes(parameter: Instruction, uses: list[tuple[Instruction, str]]) -> int:
    """Bytes of a fusion's parameter that are read: its slices, if nothing else of it is used."""
    full = _device_bytes(parameter.type)
    if uses and all(user.opcode in _SLICES and user.operands[0] == name for user, name in uses):
        return min(full, sum(_device_bytes(user.type) for user, _ in uses))
    return full


def _device_bytes(kind: Type) -> int:
    return sum(a.num_bytes for a in arrays(kind) if isinstance(a, Array) and not a.on_host)
