"""Where each leaf of the state lies in an arena: one buffer per dtype for the parameters, one for the optimizer state.

Arithmetic on shapes, before anything is allocated. A buffer is what one device holds: the shards of all leaves of a
dtype one after the other, each at an offset that is a multiple of the alignment. Alignment is the largest power of two
up to 256 bytes, as the allocators of GPUs have it, whose padding stays below one percent of the buffer; a state of many
scalars is packed without. A leaf that is replicated has a segment on every device, as it has a buffer there without an
arena. Random keys, which are no numbers, and leaves without elements stay apart.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan
from zero2jax.zero.state import Layout

MOST_WASTE = 0.01
GROUP_BYTES, GROUP_LEAVES = 2**20, 64  # of neighbours that are copied out together
_ALIGNMENTS = (256, 128, 64, 32, 16)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The place of one leaf: its index in the tree, offset in elements, and the shape of a device's shard."""

    index: int
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer, as each device has it.

    Attributes:
      dtype: of its leaves.
      alignment: of its segments, in bytes.
      size: elements, padding included.
      segments: in the order of their offsets.
    """

    dtype: Any
    alignment: int
    size: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """On each device."""
        return self.size * int(self.dtype.itemsize)

    @property
    def waste(self) -> float:
        """The part of it that is padding between segments."""
        return 1 - sum(s.size for s in self.segments) / self.size

    @property
    def groups(self) -> list[list[Segment]]:
        """Its segments in order: neighbours that are small together, of the others each alone."""
        groups: list[list[Segment]] = []
        for s in self.segments:
            held = groups[-1] if groups else []
            num_bytes = (s.offset + s.size - held[0].offset) * self.dtype.itemsize if held else 0
            if held and len(held) < GROUP_LEAVES and num_bytes <= GROUP_BYTES:
                held.append(s)
            else:
                groups.append([s])
        return groups


@dataclasses.dataclass(frozen=True)
class PartPlan:
    """The buffers of parameters or optimizer state, and the indices of leaves that stay apart.

    Attributes:
      plan: the shard plan of the same tree.
      specs: per leaf, where its dims are sharded, over all axes of the mesh.
    """

    plan: ShardPlan
    specs: tuple[P, ...]
    buffers: tuple[Buffer, ...]
    apart: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ArenaPlan:
    """The arena of a state on a mesh."""

    params: PartPlan
    opt_state: PartPlan

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh) -> "ArenaPlan":
        """That of a layout whose state is on the mesh."""
        return cls(plan_part(layout.params, mesh), plan_part(layout.opt_state, mesh))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All of them."""
        return (*self.params.buffers, *self.opt_state.buffers)

    def table(self) -> str:
        """The arena as text: a line per buffer."""
        rows = [("buffer", "leaves", "bytes/device", "alignment", "padding")]
        for name, part in (("params", self.params), ("opt_state", self.opt_state)):
            for b in part.buffers:
                cells = (
                    str(len(b.segments)),
                    readable_bytes(b.num_bytes),
                    str(b.alignment),
                    f"{b.waste:.3%}",
                )
                rows.append((f"{name} {b.dtype}", *cells))
        return "\n".join(aligned(rows, right=(1, 2, 3, 4)))

    __str__ = table


def plan_part(plan: ShardPlan, mesh: Mesh) -> PartPlan:
    """The buffers of a tree."""
    shardings = [plan.sharding(leaf, mesh) for leaf in plan.leaves]
    apart = tuple(i for i, leaf in enumerate(plan.leaves) if not _is_packed(leaf))
    by_dtype: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for i, (leaf, sharding) in enumerate(zip(plan.leaves, shardings, strict=True)):
        if i not in apart:
            by_dtype.setdefault(leaf.dtype, []).append((i, sharding.shard_shape(leaf.rest_shape)))
    buffers = tuple(_buffer(dtype, shards) for dtype, shards in by_dtype.items())
    return PartPlan(plan, tuple(s.spec for s in shardings), buffers, apart)


def _is_packed(leaf: LeafPlan) -> bool:
    return math.prod(leaf.rest_shape) > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _buffer(dtype: Any, shards: list[tuple[int, tuple[int, ...]]]) -> Buffer:
    """The segments of one dtype at the largest alignment that wastes less than `MOST_WASTE`."""
    itemsize = int(dtype.itemsize)
    for alignment in (*(a for a in _ALIGNMENTS if a > itemsize), itemsize):
        unit, offset, segments = alignment // itemsize, 0, []
        for index, shape in shards:
            segments.append(Segment(index, offset, shape))
            offset += -(-math.prod(shape) // unit) * unit
        buffer = Buffer(dtype, alignment, offset, tuple(segments))
        if buffer.waste < MOST_WASTE:
            break
    return buffer


def buffer_shapes(part: PartPlan, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The global arrays of a part: (devices x elements,), each device its own piece."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return tuple(
        jax.ShapeDtypeStruct((mesh.size * b.size,), b.dtype, sharding=sharding) for b in part.buffers
    )
