"""A state, or parts of it, in the host memory of its own devices between two phases, and back. Global arrays.

Nothing is computed there: a generation phase, say, gets the device memory that training had. Bit for bit.
"""

from collections.abc import Collection

import jax
from jax.sharding import Mesh

from zero2jax.base.memories import HOST_MEMORY, in_host_memory, memory_kinds
from zero2jax.base.mesh import moved
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.state import Layout, TrainState

PARTS = ("params", "opt_state")


def to_host(state: TrainState, layout: Layout, mesh: Mesh, include: Collection[str]) -> TrainState:
    """The state with its parts in pinned host memory; their device memory is free. What is on the host stays there.

    Raises:
      ValueError: there is no part of that name, or the devices have no such memory.
    """
    include = [include] if isinstance(include, str) else include
    unknown = [name for name in include if name not in PARTS]
    if unknown:
        raise ValueError(
            f"moving a state to host memory: it has no part {unknown[0]!r}. There are {', '.join(PARTS)}; step, "
            f"rng and loss_scale are a few bytes and stay."
        )
    kinds = memory_kinds(mesh)
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"moving a state to host memory: the devices have the memories {kinds} and no {HOST_MEMORY!r}. Use a newer "
            f"jax, or save a checkpoint and restore it later."
        )
    on_devices = layout.abstract_state(mesh)

    def part(tree: PyTree, rest: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        homes = [x.sharding for x in jax.tree.leaves(rest)]
        targets = [
            in_host_memory(home) if home.mesh == mesh and isinstance(x, jax.Array) else home
            for x, home in zip(leaves, homes, strict=True)
        ]
        there = moved(leaves, targets)
        for x, y in zip(leaves, there, strict=True):
            if y is not x:
                x.delete()
        return jax.tree.unflatten(treedef, there)

    parts = {name: part(getattr(state, name), getattr(on_devices, name)) for name in include}
    return state._replace(**parts)


def from_host(state: TrainState, layout: Layout, mesh: Mesh) -> TrainState:
    """The state where a step takes it; what is there already stays as it is."""
    leaves, treedef = jax.tree.flatten(state)
    shardings = [x.sharding for x in jax.tree.leaves(layout.abstract_state(mesh))]
    return jax.tree.unflatten(treedef, moved(leaves, shardings))  # type: ignore[no-any-return]
