"""Where a traced loss function has its layers: the loops over stacked parameters, and the blocks of unrolled models.

Reads jaxprs and changes nothing. What counts is said in `remat_layers`. Blocks marked with `zero2jax.layer` go first:
if a program has any, a loop without a mark in its body (over chunks of a vocabulary, say) is no loop of layers.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from zero2jax.activations.remat import LAYER_MARK
from zero2jax.base import jaxprs

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """A loop over layers, or the blocks that stand side by side in one jaxpr.

    Attributes:
      num_layers: L.
      bodies: the jaxpr of a layer; of each block, if they are unrolled.
    """

    num_layers: int
    bodies: tuple[Any, ...]


def has_mark(jaxpr: Any) -> bool:
    """Whether a block marked with `zero2jax.layer` is anywhere in a jaxpr."""
    return any(
        jaxprs.call_name(eqn) == LAYER_MARK or any(map(has_mark, jaxprs.inner_jaxprs(eqn)))
        for eqn in jaxprs.equations(jaxpr)
    )


@dataclasses.dataclass(frozen=True)
class LayerSearch:
    """Finds layers in the jaxprs of one loss function; `marked` says whether it has marked blocks."""

    marked: bool

    def is_loop(self, eqn: Any, marks: Sequence[bool]) -> bool:
        """Whether an equation is a loop over layers; `marks` tells which operands come from parameters alone."""
        if not jaxprs.is_scan(eqn):
            return False
        parts = jaxprs.scan_parts(eqn)
        first = parts.num_consts + parts.num_carry
        carried = [v.aval for v in eqn.invars[parts.num_consts : first]]
        activation = any(a.shape and jnp.issubdtype(a.dtype, jnp.floating) for a in carried)
        return activation and any(marks[first:]) and (not self.marked or has_mark(parts.body))

    def blocks(self, jaxpr: Any, found: set[Any]) -> list[int]:
        """The positions of an unrolled model's blocks among the equations of one jaxpr.

        `found` are the variables that come from parameters alone.
        """
        eqns = jaxprs.equations(jaxpr)
        if any(self.is_loop(eqn, jaxprs.marks(eqn, found)) for eqn in eqns):
            return []
        if self.marked:
            return [i for i, eqn in enumerate(eqns) if jaxprs.call_name(eqn) == LAYER_MARK]
        alone = [i for i, eqn in enumerate(eqns) if jaxprs.is_checkpoint(eqn) and self._is_block(eqn, found)]
        return alone if len(alone) > 1 else []

    def _is_block(self, eqn: Any, found: set[Any]) -> bool:
        marks = jaxprs.marks(eqn, found)
        return any(marks) and not self.has_layers(jaxprs.body(eqn), marks)

    def groups(self, jaxpr: Any, from_params: Sequence[bool]) -> Iterator[LayerGroup]:
        """Every group of layers in a jaxpr; `from_params` tells which of its inputs are, or come from, parameters."""
        found = jaxprs.from_inputs(jaxpr, from_params)
        eqns = jaxprs.equations(jaxpr)
        blocks = self.blocks(jaxpr, found)
        if blocks:
            yield LayerGroup(len(blocks), tuple(jaxprs.body(eqns[i]) for i in blocks))
        for i, eqn in enumerate(eqns):
            marks = jaxprs.marks(eqn, found)
            if self.is_loop(eqn, marks):
                parts = jaxprs.scan_parts(eqn)
                yield LayerGroup(parts.options["length"], (parts.body,))
            elif i not in blocks:
                inside = layers_inside(eqn, marks)
                if inside is not None:
                    yield from self.groups(*inside)

    def has_layers(self, jaxpr: Any, from_params: Sequence[bool]) -> bool:
        """Whether there is any group."""
        return any(True for _ in self.groups(jaxpr, from_params))


def layers_inside(eqn: Any, marks: Sequence[bool]) -> tuple[Any, list[bool]] | None:
    """The jaxpr of an equation in which layers may be found, and which of its inputs come from parameters alone."""
    if jaxprs.is_call(eqn) or jaxprs.is_checkpoint(eqn):
        return jaxprs.body(eqn), list(marks)
    if jaxprs.is_scan(eqn):
        parts = jaxprs.scan_parts(eqn)
        first = parts.num_consts + parts.num_carry
        return parts.body, [*marks[: parts.num_consts], *[False] * parts.num_carry, *marks[first:]]
    return None


def checkpoint_around(jaxpr: Any) -> Any | None:
    """The `jax.checkpoint` equation that does all of a body's work, if there is one."""
    heavy = [e for e in jaxprs.equations(jaxpr) if e.primitive.name in _HEAVY or jaxprs.has_body(e)]
    if len(heavy) != 1:
        return None
    if jaxprs.is_checkpoint(heavy[0]):
        return heavy[0]
    return checkpoint_around(jaxprs.body(heavy[0])) if jaxprs.is_call(heavy[0]) else None


def own_checkpoint(eqn: Any) -> Any | None:
    """The `jax.checkpoint` of a block: the equation itself, or one that does all its work."""
    return eqn if jaxprs.is_checkpoint(eqn) else checkpoint_around(jaxprs.body(eqn))
