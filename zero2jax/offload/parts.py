"""An update taken apart: leaves that can be updated on their own, in chunks of about equal size. Before any program.

The host updates one chunk while the gradients of the next come down and the parameters of the one before go up, and no
more than two chunks of either are in host memory at a time. Which leaves depend on each other is read from the update's
jaxpr: for an elementwise optimizer none do, whatever masks and groups it has; where the optimizer itself takes a global
norm, all do, and the update stays in one piece. What depends on no gradient (a count, a scheduled rate) is made once
and read by all. A sum over a leaf (LAMB's norms, Muon's products) may be added in another order than in one piece.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zero2jax.base import jaxprs


@dataclasses.dataclass(frozen=True)
class Part:
    """Leaves that are updated together.

    Attributes:
      params: indices of trainable parameters.
      state: indices of the leaves of the optimizer state that depend on their gradients.
    """

    params: tuple[int, ...]
    state: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """How an update is divided.

    Attributes:
      parts: its parts, in the order of the parameters.
      shared: leaves of the optimizer state that depend on no gradient.
    """

    parts: tuple[Part, ...]
    shared: tuple[int, ...]

    def joined(self, sizes: Sequence[int], chunk_size: int) -> "Split":
        """Neighbouring parts joined until each has `chunk_size`, by the sizes of its parameters."""
        parts: list[Part] = []
        size = 0
        for part in self.parts:
            if parts and (size < chunk_size or not part.params):
                parts[-1] = Part(parts[-1].params + part.params, parts[-1].state + part.state)
            else:
                parts.append(part)
                size = 0
            size += sum(sizes[i] for i in part.params)
        return dataclasses.replace(self, parts=tuple(parts))

    def only(self, params: frozenset[int]) -> "Split":
        """The parts of some parameters."""
        return dataclasses.replace(self, parts=tuple(p for p in self.parts if params.issuperset(p.params)))

    def on_host(self, param_bytes: Sequence[int], state_bytes: Sequence[int], ratio: float) -> "Split":
        """The first parts, so many that their bytes come nearest to `ratio` of all; at least one."""
        total = lambda part: (
            sum(param_bytes[i] for i in part.params) + sum(state_bytes[j] for j in part.state)
        )
        wanted, held, best = ratio * sum(map(total, self.parts)), 0, 1
        nearest = float("inf")
        for number, part in enumerate(self.parts, 1):
            held += total(part)
            if abs(held - wanted) < nearest:
                best, nearest = number, abs(held - wanted)
        return dataclasses.replace(self, parts=self.parts[:best])


def grouped(sizes: Sequence[int], group_size: int) -> list[list[int]]:
    """Neighbouring indices, together until their sizes reach `group_size`."""
    groups: list[list[int]] = []
    held = group_size
    for i, size in enumerate(sizes):
        if held >= group_size:
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += size
    return groups


def split_update(jaxpr: Any, num_params: int, num_state: int) -> Split:
    """Parts as small as the dependencies allow.

    Args:
      jaxpr: of an update, from parameters, state, gradients and whatever else to parameters, state, 16-bit parameters
        and perhaps a number of the state; flat.
      num_params: number of trainable parameters.
      num_state: number of leaves of the optimizer state.
    """
    state_at = num_params
    needs = jaxprs.dependencies(jaxpr)
    of_param = [1 << i | 1 << (num_params + num_state + i) for i in range(num_params)]
    state_bits = [1 << (state_at + j) for j in range(num_state)]
    own = _own(needs[state_at : state_at + num_state], state_bits, sum(of_param))
    bits = [*of_param, *[state_bits[j] for j in own]]
    groups = _Groups(len(bits))
    made = {state_at + j: num_params + k for k, j in enumerate(own)}
    made |= {i: i for i in range(num_params)} | {num_params + num_state + i: i for i in range(num_params)}
    for output, mask in enumerate(needs):
        nodes = [node for node, bit in enumerate(bits) if mask & bit]
        # What is no leaf's, the learning rate, is made by the first part.
        groups.join([*nodes, made[output]] if output in made else [0, *nodes] if nodes else [])
    together: dict[int, list[int]] = {}
    for node in range(len(bits)):
        together.setdefault(groups.of(node), []).append(node)
    parts = [
        Part(
            params=tuple(node for node in nodes if node < num_params),
            state=tuple(own[node - num_params] for node in nodes if node >= num_params),
        )
        for nodes in together.values()
    ]
    shared = tuple(j for j in range(num_state) if j not in own)
    return Split(tuple(parts) or (Part((), ()),), shared)


def _own(needs: Sequence[int], bits: Sequence[int], gradients: int) -> list[int]:
    """The leaves of a state that depend on parameters or gradients, themselves or through other leaves."""
    mask, own = gradients, list[int]()
    while True:
        found = [j for j, need in enumerate(needs) if need & mask]
        if found == own:
            return own
        own, mask = found, gradients | sum(bits[j] for j in found)


class _Groups:
    """Nodes that belong together (union-find)."""

    def __init__(self, num_nodes: int):
        self._parent = list(range(num_nodes))

    def of(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, nodes: Sequence[int]) -> None:
        for node in nodes[1:]:
            a, b = self.of(nodes[0]), self.of(node)
            self._parent[max(a, b)] = min(a, b)
