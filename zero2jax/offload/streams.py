"""An update of what lies in pinned host memory, on the devices: up, updated, down, a chunk at a time. Traced.

One program. A chunk comes up when the one before the last is down again, so that no more than two are on the devices;
stacks larger than a chunk are taken through a loop, a block of rows at a time, in place. Global arrays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zero2jax.base import jaxprs
from zero2jax.base.memories import to_device, to_host
from zero2jax.offload.blocks import Blocks, by_block
from zero2jax.offload.chunks import Flat
from zero2jax.offload.parts import Part, Split
from zero2jax.zero.shard_plan import LeafPlan
from zero2jax.zero.state import Layout

_ON_DEVICE = 2  # chunks


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Leaves that are updated together.

    Attributes:
      part: which.
      blocks: of their rows, if they are updated block by block.
    """

    part: Part
    blocks: Blocks | None = None


class StreamedUpdate:
    """An update of leaves in host memory.

    Args:
      flat: the update.
      layout: where each leaf is stored.
      mesh: of the devices.
      chunk_bytes: bytes of the masters of a chunk, about.
    """

    def __init__(self, flat: Flat, layout: Layout, mesh: Mesh, chunk_bytes: int):
        self._flat, num = flat, flat.num_params
        params, state = layout.trained_params.leaves, layout.opt_state.leaves
        self._leaves = [*params, *state]
        on_host = [i for i in range(num) if i not in layout.resident_params]
        self._copies_on_host = {flat.copies_at + i for i in on_host if layout.pinned_params}
        on_host += [num + j for j in range(len(state)) if j not in layout.resident_state]
        self._on_host = frozenset(on_host)
        self._mesh, self._chunk_bytes = mesh, chunk_bytes
        split = flat.split()
        self._shared = [num + j for j in split.shared]
        self.chunks = self._chunked(split)

    def _chunked(self, split: Split) -> list[Chunk]:
        """Neighbouring parts joined; those that are updated block by block alone."""
        sizes = [leaf.device_bytes(self._mesh) for leaf in self._leaves[: self._flat.num_params]]
        chunks: list[Chunk] = []
        waiting: list[Part] = []

        def close() -> None:
            parts = Split(tuple(waiting), ()).joined(sizes, self._chunk_bytes).parts
            chunks.extend(Chunk(part) for part in parts)
            waiting.clear()

        for part in split.parts:
            blocks = self._blocks(part, sum(sizes[i] for i in part.params))
            if blocks is None:
                waiting.append(part)
            else:
                close()
                chunks.append(Chunk(part, blocks))
        close()
        return chunks

    def _blocks(self, part: Part, num_bytes: int) -> Blocks | None:
        own = self._own(part)
        rows = {_rows(self._leaves[i]) for i in own}
        if num_bytes <= self._chunk_bytes or not self._on_host.issuperset(own) or len(rows) != 1:
            return None
        number = rows.pop()
        blocks = None if number is None else Blocks.of(number, num_bytes, self._chunk_bytes)
        if blocks is None or blocks.number == 1 or self._function(Chunk(part, blocks)) is None:
            return None
        return blocks

    def _own(self, part: Part) -> list[int]:
        return [*part.params, *[self._flat.num_params + j for j in part.state]]

    def _copies(self, part: Part) -> list[int]:
        return [self._flat.copies_at + i for i in part.params]

    def _function(self, chunk: Chunk) -> Any:
        """A chunk's results, parameters, state and copies, for a block; as `by_block`."""
        part, jaxpr = chunk.part, self._flat.jaxpr
        own, copies = self._own(part), self._copies(part)
        assert chunk.blocks is not None
        return by_block(jaxpr, [*own, *copies], {*own, *copies}, chunk.blocks)

    def __call__(self, values: Sequence[Any], copies: Sequence[Any]) -> dict[int, jax.Array]:
        """The results by index.

        Args:
          values: all arguments of the update; those in host memory are there.
          copies: for each parameter what the loss saw of it, which new copies may be written over.
        """
        values, results = list(values), dict[int, jax.Array]()
        shared = [*self._shared, *range(self._flat.copies_at + self._flat.num_params, self._flat.num_results)]
        results |= self._whole(shared, values)
        for k, chunk in enumerate(self.chunks):
            if k >= _ON_DEVICE:
                self._after(chunk, self.chunks[k - _ON_DEVICE], values, results)
            if chunk.blocks is None:
                results |= self._whole([*self._own(chunk.part), *self._copies(chunk.part)], values)
            else:
                results |= self._looped(chunk, values, copies)
        return results

    def _after(self, chunk: Chunk, before: Chunk, values: list[Any], results: dict[int, Any]) -> None:
        """Let a chunk come up when another is down."""
        waits = [i for i in self._own(chunk.part) if i in self._on_host]
        done = [i for i in self._own(before.part) if i in self._on_host]
        held, sent = jax.lax.optimization_barrier(([values[i] for i in waits], [results[i] for i in done]))
        for i, x in zip(waits, held, strict=True):
            values[i] = x
        results |= zip(done, sent, strict=True)

    def _whole(self, which: list[int], values: list[Any]) -> dict[int, jax.Array]:
        """Some results, from arguments that come up in full."""
        function, used = jaxprs.part_of(self._flat.jaxpr, which)
        made = function(*[self._fetched(i, values[i]) for i in used])
        return {i: self._sent(i, x) for i, x in zip(which, made, strict=True)}

    def _fetched(self, i: int, x: jax.Array) -> jax.Array:
        """An argument where it is computed with."""
        return to_device(x) if i in self._on_host else x

    def _sent(self, i: int, x: jax.Array) -> jax.Array:
        """A result where it is stored."""
        return to_host(x) if i in self._on_host or i in self._copies_on_host else x

    def _looped(self, chunk: Chunk, values: list[Any], copies: Sequence[Any]) -> dict[int, jax.Array]:
        """The results of a chunk, each written over its argument a block at a time."""
        blocks, own, made = chunk.blocks, self._own(chunk.part), self._copies(chunk.part)
        assert blocks is not None
        function, used = self._function(chunk)
        size, which = blocks.size, [*own, *made]

        def body(b: jax.Array, stacks: list[jax.Array]) -> list[jax.Array]:
            at = lambda x: jax.lax.dynamic_slice_in_dim(x, b * size, size)
            block = dict(zip(own, map(at, stacks), strict=False))  # copies come last, and are not read
            block |= {i: at(values[i]) for i in made}  # gradients have the indices of the copies
            results = function(*[self._fetched(i, block.get(i, values[i])) for i in used])
            put = lambda x, i, y: jax.lax.dynamic_update_slice_in_dim(x, self._sent(i, y), b * size, 0)
            return [put(x, i, y) for x, i, y in zip(stacks, which, results, strict=True)]

        first = [*[values[i] for i in own], *[copies[i] for i in chunk.part.params]]
        last = jax.lax.fori_loop(0, blocks.number, body, first)
        return dict(zip(which, last, strict=True))


def _rows(leaf: LeafPlan) -> int | None:
    """The size of a leading dim that is in full on every device."""
    placed = (leaf.dim == 0 and leaf.num_shards > 1) or (leaf.model_spec and leaf.model_spec[0] is not None)
    return leaf.shape[0] if leaf.shape and not placed else None
