"""The state in a few large buffers: leaves are views of them inside the step. Global arrays; stands in for `Compiled`.

Between steps the fields `params` and `opt_state` of a `TrainState` are an `Arena` each, a buffer per dtype, donated to
the step as leaves are. The step takes its leaves out of them, does what it does without an arena on the tree, and
writes the new leaves into the buffers; so any optax transformation sees its tree, and the numbers are the same to the
bit, but for what fused multiply-adds of a CPU round otherwise (`docs/numerics.md`). A state that comes as a tree, from
a checkpoint say, is packed when it is first used.

What that buys is the time to hand a program its arguments: three buffers in place of thousands. It costs memory: new
leaves are made apart and copied into their buffer, small ones are copied out of it, too. See `docs/memory.md`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero2jax.base.losses import LossTerms
from zero2jax.base.pytrees import PyTree, check_alive, is_traced
from zero2jax.memory.arena_plan import ArenaPlan, Buffer, PartPlan, buffer_shapes
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.state import TrainState
from zero2jax.zero.state_checks import place_state
from zero2jax.zero.step import Metrics, StepProgram


class Arena(NamedTuple):
    """Parameters or optimizer state in buffers.

    Fields:
      buffers: one per dtype, global arrays (devices x elements,), sharded over all axes of the mesh.
      apart: leaves that are in no buffer, as they are stored.
    """

    buffers: tuple[jax.Array, ...]
    apart: tuple[jax.Array, ...]


def checked_arena(arena: Any, offload: Any) -> bool:
    """Whether the state is stored in an arena, where that can be.

    Raises:
      ValueError: it is asked for beside something that it does not go with.
    """
    if not isinstance(arena, bool):
        raise ValueError(f"building the engine: arena is {arena!r}; it is True or False.")
    if arena and offload is not None:
        raise ValueError(
            "building the engine: arena=True with offload: the host stores masters and optimizer state leaf by leaf, "
            "and updates them in chunks. Leave one of the two out."
        )
    return arena


def in_arena(state: TrainState) -> bool:
    """Whether a state is stored in an arena."""
    return isinstance(state, TrainState) and isinstance(state.params, Arena)


def delete_arena(state: TrainState) -> None:
    """Let go of the buffers of a state whose leaves are elsewhere now."""
    for x in jax.tree.leaves((state.params, state.opt_state)):
        if not x.is_deleted():
            x.delete()


def pack(tree: PyTree, part: PartPlan, mesh: Mesh) -> Arena:
    """Leaves as they are stored -> buffers. Global arrays, under `jax.jit`; communicates nothing."""
    leaves = list(map(_apart_from_others, part.plan.treedef.flatten_up_to(tree)))

    def local(buffer: Buffer, *shards: jax.Array) -> jax.Array:
        pieces: list[jax.Array] = []
        ends = [*(s.offset for s in buffer.segments[1:]), buffer.size]
        for segment, shard, end in zip(buffer.segments, shards, ends, strict=True):
            pieces.append(shard.reshape(-1))
            if gap := end - segment.offset - segment.size:
                pieces.append(jnp.zeros(gap, buffer.dtype))
        return jnp.concatenate(pieces)

    def packed(buffer: Buffer) -> jax.Array:
        indices = [s.index for s in buffer.segments]
        return jax.shard_map(
            functools.partial(local, buffer),
            mesh=mesh,
            in_specs=tuple(part.specs[i] for i in indices),
            out_specs=P(mesh.axis_names),
            check_vma=False,  # a replicated leaf becomes each device's own piece
        )(*(leaves[i] for i in indices))

    return Arena(tuple(map(packed, part.buffers)), tuple(leaves[i] for i in part.apart))


def unpack(arena: Arena, part: PartPlan, mesh: Mesh) -> PyTree:
    """Buffers -> leaves as they are stored. Global arrays, under `jax.jit`; communicates nothing.

    A leaf that is large is read where it lies. Small ones are copied out a group at a time: every slice of a program's
    argument costs XLA's CPU compiler some 15 ms, one of a copy next to nothing.
    """
    leaves: dict[int, jax.Array] = dict(zip(part.apart, arena.apart, strict=True))

    def local(buffer: Buffer, x: jax.Array) -> list[jax.Array]:
        views = []
        for group in buffer.groups:
            start, source = 0, x
            if len(group) > 1:
                start = group[0].offset
                source = _apart_from_others(jax.lax.slice(x, (start,), (group[-1].offset + group[-1].size,)))
            for s in group:
                at = s.offset - start
                views.append(jax.lax.slice(source, (at,), (at + s.size,)).reshape(s.shape))
        return views

    for buffer, x in zip(part.buffers, arena.buffers, strict=True):
        indices = [s.index for s in buffer.segments]
        views = jax.shard_map(
            functools.partial(local, buffer),
            mesh=mesh,
            in_specs=P(mesh.axis_names),
            out_specs=[part.specs[i] for i in indices],
            check_vma=False,
        )(x)
        leaves |= dict(zip(indices, views, strict=True))
    return part.plan.treedef.unflatten([leaves[i] for i in range(len(part.specs))])


def _apart_from_others(x: jax.Array) -> jax.Array:
    """`x`, with what makes it compiled apart from what uses it, as arguments and results of a program are: a compiler
    that fuses arithmetic with the copy rounds otherwise. XLA's for CPUs drops it before it fuses: see above."""
    return jax.lax.optimization_barrier(x)  # type: ignore[no-any-return]


def _kinds(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@dataclasses.dataclass(frozen=True)
class ArenaProgram(StepProgram):
    """A step whose state comes and goes in an arena; `gradients`, which are of a tree, stay as they are."""

    arena: ArenaPlan

    def packed(self, state: TrainState) -> TrainState:
        """A state of leaves in its arena."""
        params = pack(state.params, self.arena.params, self.mesh)
        return state._replace(params=params, opt_state=pack(state.opt_state, self.arena.opt_state, self.mesh))

    def unpacked(self, state: TrainState) -> TrainState:
        """The leaves of a state in an arena."""
        params = unpack(state.params, self.arena.params, self.mesh)
        return state._replace(
            params=params, opt_state=unpack(state.opt_state, self.arena.opt_state, self.mesh)
        )

    def step(
        self,
        state: TrainState,
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, Metrics]:
        """As without an arena, from buffers to buffers."""
        state, metrics = super().step(self.unpacked(state), batch, loss_args, extra_args)
        return self.packed(state), metrics

    def evaluate(self, state: TrainState, batch: PyTree, loss_args: Mapping[str, PyTree]) -> LossTerms:
        """As without an arena."""
        return super().evaluate(self.unpacked(state), batch, loss_args)

    def full_params(self, params: PyTree) -> PyTree:
        """As without an arena."""
        return super().full_params(unpack(params, self.arena.params, self.mesh))


class ArenaCompiled(Compiled):
    """The functions of one layout whose state is in an arena."""

    _program: ArenaProgram

    def __init__(self, program: StepProgram, options: CompilerOptions):
        fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(StepProgram)}
        self.arena = ArenaPlan.of(program.layout, program.mesh)
        super().__init__(ArenaProgram(**fields, arena=self.arena), options)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state in its arena."""
        tree = super().abstract_state()

        def part(plan: PartPlan, leaves: list[Any]) -> Arena:
            buffers: Any = buffer_shapes(plan, self._program.mesh)
            return Arena(buffers, tuple(leaves[i] for i in plan.apart))

        return tree._replace(
            params=part(self.arena.params, jax.tree.leaves(tree.params)),
            opt_state=part(self.arena.opt_state, jax.tree.leaves(tree.opt_state)),
        )

    def stored(self, state: TrainState) -> TrainState:
        """A state of leaves in an arena, a part after the other; the leaves are let go."""

        def part(tree: PyTree, pack_part: Any) -> Arena:
            packed = pack_part(tree)
            for x in jax.tree.leaves(tree):
                if not is_traced(x) and not any(x is y for y in packed.apart):
                    x.delete()
            return packed  # type: ignore[no-any-return]

        params = part(state.params, self._pack_params)
        return state._replace(params=params, opt_state=part(state.opt_state, self._pack_opt_state))

    def with_leaves(self, state: TrainState) -> tuple[TrainState, list[jax.Array]]:
        """A state in an arena that a program may take, from one or from leaves, and its arrays.

        Raises:
          TypeError, ValueError: as `zero.state_checks.place_state`; the arena is of another engine.
        """
        if not in_arena(state):
            state = place_state(state, self.layout, self._program.mesh)
            # what the caller still holds is not let go
            params = self._pack_params(state.params)
            state = state._replace(params=params, opt_state=self._pack_opt_state(state.opt_state))
            return state, jax.tree.leaves(state)
        check_alive(
            state,
            "the state",
            "This state was given to engine.step, which donates it: use the one that it returned, state, metrics = "
            "engine.step(state, batch).",
        )
        if _kinds(state) != self._own_kinds:
            raise ValueError(
                "reading the state: its arena is that of an engine of other parameters, another optimizer, mesh or "
                "stage. Take the state that this engine's init returned, or give it leaves: the other engine's "
                "engine.unpacked(state)."
            )
        return state, jax.tree.leaves(state)

    def unpacked(self, state: TrainState) -> TrainState:
        """The leaves of a state in an arena, copies; a state of leaves is itself."""
        if not in_arena(state):
            return state
        return self._unpack(self.placed(state))  # type: ignore[no-any-return]

    @functools.cached_property
    def _own_kinds(self) -> PyTree:
        return _kinds(self.abstract_state())

    @functools.cached_property
    def _pack_params(self) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state().params)
        mesh = self._program.mesh
        return jax.jit(lambda tree: pack(tree, self.arena.params, mesh), out_shardings=shardings)

    @functools.cached_property
    def _pack_opt_state(self) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state().opt_state)
        mesh = self._program.mesh
        return jax.jit(lambda tree: pack(tree, self.arena.opt_state, mesh), out_shardings=shardings)

    @functools.cached_property
    def _unpack(self) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, super().abstract_state())
        return jax.jit(self._program.unpacked, out_shardings=shardings)
