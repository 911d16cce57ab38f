"""An update done to a block of its leaves at a time: what a device holds of a stack of layers that it updates. Traced.

Leaves whose leading dim is not sharded have rows, a layer each, say. Where an update makes each row of its results from
the same row of its arguments, and from scalars, it can run on blocks of rows. Whether it does is read from its jaxpr:
elementwise optimizers do; a norm of a leaf, a product of matrices or a factored moment does not.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zero2jax.base import jaxprs

_NAMES = """
    abs add add_any and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1
    floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of the rows of some leaves.

    Attributes:
      rows: how many rows there are.
      size: rows of a block; divides `rows`.
    """

    rows: int
    size: int

    @property
    def number(self) -> int:
        """How many blocks there are."""
        return self.rows // self.size

    @classmethod
    def of(cls, rows: int, num_bytes: int, block_bytes: int) -> "Blocks":
        """The largest blocks of about `block_bytes` at most, at least a row, of leaves with `num_bytes`."""
        most = max(block_bytes * rows // max(num_bytes, 1), 1)
        return cls(rows, max(size for size in range(1, min(most, rows) + 1) if rows % size == 0))


def by_block(
    jaxpr: Any, which: Sequence[int], stacks: Collection[int], blocks: Blocks
) -> tuple[Callable[..., list[Any]], list[int]] | None:
    """Some outputs of a jaxpr for a block of rows, and the indices of the inputs they need; None if it is not by row.

    Args:
      jaxpr: closed, without calls.
      which: indices of the outputs, all of which have rows.
      stacks: indices of the inputs of which a block is given; others are given as they are.
      blocks: how long a block is.
    """
    eqns, _ = jaxprs.needed(jaxpr, which)
    has_rows = {jaxprs.inputs(jaxpr)[i] for i in stacks}
    for eqn in eqns:
        made_by_row = _by_row(eqn, has_rows, blocks.rows)
        if made_by_row is None:
            return None
        has_rows |= {*eqn.outvars} if made_by_row else set()
    if not has_rows.issuperset(jaxprs.outputs(jaxpr)[i] for i in which):
        return None

    def apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        params = eqn.params
        if eqn.outvars[0] in has_rows:
            of_block = lambda sizes: (blocks.size, *sizes[1:])
            changed = {"broadcast_in_dim": "shape", "slice": "limit_indices"}.get(eqn.primitive.name)
            params = params | {changed: of_block(params[changed])} if changed else params
        return jaxprs.bind_with(eqn, jaxprs.arrays(eqn, operands), params)

    return jaxprs.part_of(jaxpr, which, apply)


def _by_row(eqn: Any, has_rows: Collection[Any], rows: int) -> bool | None:
    """Whether an equation's result has rows, each made from the same row; None if it mixes them."""
    name, params, marks = eqn.primitive.name, eqn.params, jaxprs.marks(eqn, set(has_rows))
    if not any(marks):
        shape = eqn.outvars[0].aval.shape
        spread = name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
        return spread and bool(shape) and shape[0] == rows
    others = [v for v, mark in zip(eqn.invars, marks, strict=True) if not mark]
    if any(v.aval.shape for v in others):
        return None
    starts = {"slice": lambda: params["start_indices"][0] == 0 and params["limit_indices"][0] == rows}
    starts["pad"] = lambda: params["padding_config"][0] == (0, 0, 0)
    starts["sharding_constraint"] = lambda: True
    if name in starts and starts[name]():
        return not (name == "slice" and params["strides"] is not None)
    return True if name in _ELEMENTWISE else None
