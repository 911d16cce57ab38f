"""Matrix products and convolutions of a compiled program: operations, and the dtype in which they are multiplied.

A product is as wide as the wider one of its operands. The CPU's compiler converts 16-bit operands to fp32 before it
multiplies; there the operands count as narrow as they were before they were converted. Pure Python.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator

from zero2jax.programs.hlo import Array, Instruction, Module, Type, arrays, item_bytes

_GEMM_TARGETS = re.compile(r'custom_call_target="(?:__cublas\S*|__onednn\$matmul|__gpu\$\S*gemm\S*)"')
_PRECISION = re.compile(r"operand_precision=\{(\w+)|\"operand_precision\":\[\"(\w+)")
_CONVERTS = frozenset(
    (
        "convert",
        "bitcast",
        "copy",
        "transpose",
        "reshape",
        "broadcast",
        "slice",
        "dynamic-slice",
        "opt-barrier",
    )
)


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product or convolution.

    Attributes:
      flops: floating-point operations, each time it runs.
      operand_dtypes: dtypes of both operands as XLA names them, before they were converted for the product.
      dtype: what they are multiplied in: `bf16`, `f32`, ...
      precision: what jax asks for: `default`, `high` or `highest`.
      op_name: where it comes from, as jax names it.
      source: file and line.
      trips: how often it runs per step.
    """

    flops: float
    operand_dtypes: tuple[str, ...]
    dtype: str
    precision: str = "default"
    op_name: str = ""
    source: str = ""
    trips: int = 1

    @property
    def total_flops(self) -> float:
        """Operations per step."""
        return self.flops * self.trips

    @property
    def is_wide(self) -> bool:
        """Whether it multiplies in more than 16 bits."""
        return item_bytes(self.dtype) > 2

    @property
    def promotes(self) -> bool:
        """Whether one operand was converted to the wider dtype of the other."""
        return len(set(self.operand_dtypes)) > 1


class Products:
    """Reads products out of the instructions of one module.

    Args:
      module: the program.
      as_before_conversion: whether operands count in the dtype they had before they were converted: for programs of
        the CPU's compiler.
    """

    def __init__(self, module: Module, *, as_before_conversion: bool = False):
        self.module, self.as_before_conversion = module, as_before_conversion
        self._inside = {name: {i.name: i for i in module.instructions(name)} for name in module.computations}
        self._callers: dict[str, tuple[str, Instruction]] = {}
        for name in module.computations:
            for i in module.instructions(name):
                self._callers |= dict.fromkeys(i.called, (name, i))

    def of(self, computation: str, i: Instruction) -> Iterator[Product]:
        """The products in one instruction of a computation, fused ones included."""
        if i.opcode.startswith("fusion") and i.opcode != "fusion-done":
            for name in i.called:
                for inner in self.module.instructions(name):
                    yield from self.of(name, inner)
        flops = self._flops(computation, i)
        if not flops:
            return
        given = [a for a in (self._array(computation, name) for name in i.operands[:2]) if a is not None]
        before = tuple(self._narrowest(computation, name) for name in i.operands[: len(given)])
        dtypes = before if self.as_before_conversion else tuple(a.dtype for a in given)
        found = _PRECISION.search(i.attributes)
        yield Product(
            flops=flops,
            operand_dtypes=before,
            dtype=max(dtypes, key=item_bytes),
            precision=(found.group(1) or found.group(2)).lower() if found else "default",
            op_name=i.op_name,
            source=self.module.source(i),
        )

    def _flops(self, computation: str, i: Instruction) -> float:
        operand = lambda n: self._array(computation, i.operands[n]) if n < len(i.operands) else None
        if i.opcode == "dot":
            return _dot_flops(i.type, operand(0), _dims(i.attributes, "lhs_contracting_dims"))
        if i.opcode == "convolution":
            return _convolution_flops(i, operand(1))
        return _custom_call_flops(i, operand(0)) if i.opcode == "custom-call" else 0.0

    def _array(self, computation: str, name: str) -> Array | None:
        i = self._inside[computation].get(name)
        return next(iter(arrays(i.type)), None) if i is not None else None

    def _narrowest(self, computation: str, name: str, element: int = 0) -> str:
        """The narrowest dtype that a value has had since it was computed or given: conversions are followed back."""
        i = self._inside[computation][name]
        parts = i.type if isinstance(i.type, tuple) else (i.type,)
        own = next(iter(arrays(parts[element])), None) if element < len(parts) else None
        narrowest = own.dtype if own is not None else ""
        for origin in self._origins(computation, i, element):
            before = self._narrowest(*origin)
            narrowest = (
                min(before, narrowest, key=item_bytes) if before and narrowest else before or narrowest
            )
        return narrowest

    def _origins(self, computation: str, i: Instruction, element: int) -> Iterator[tuple[str, str, int]]:
        """(computation, name, element) of what an instruction only converts or moves, if it does."""
        if i.opcode in _CONVERTS:
            yield computation, i.operands[0], element
        elif i.opcode == "get-tuple-element":
            yield computation, i.operands[0], i.index
        elif i.opcode == "tuple" or (
            i.opcode in ("all-gather", "all-gather-start") and element < len(i.operands)
        ):
            yield computation, i.operands[element], 0
        elif i.opcode == "all-gather-done":
            yield computation, i.operands[0], element
        elif i.opcode in ("fusion", "call") and i.called:
            root = next((x for x in self.module.instructions(i.called[0]) if x.is_root), None)
            if root is not None:
                yield i.called[0], root.name, element
        elif i.opcode == "parameter" and computation in self._callers:
            around, caller = self._callers[computation]
            if caller.opcode == "while" and self._is_kept(computation, i, element):
                yield around, caller.operands[0], element
            elif caller.opcode in ("fusion", "call"):
                yield around, caller.operands[int(i.argument)], element

    def _is_kept(self, body: str, parameter: Instruction, element: int) -> bool:
        """Whether a loop hands an element of its state on as it is."""
        inside = self._inside[body]
        root = next((i for i in inside.values() if i.is_root), None)
        kept = inside.get(root.operands[element]) if root is not None and root.opcode == "tuple" else None
        if kept is None or kept.opcode != "get-tuple-element":
            return False
        return (kept.operands[0], kept.index) == (parameter.name, element)


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
