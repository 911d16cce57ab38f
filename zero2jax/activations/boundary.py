"""The boundary of a checkpointed segment: what is saved of the activation that enters it, and where. Per-device code.

`jax.checkpoint` saves the inputs of the function it wraps. Here the activation that enters a segment can be saved

  partitioned   this device's slice along a mesh axis (flattened, padded to a multiple of the axis), gathered again when
                the segment is recomputed
  offloaded     in pinned host memory, in full or this device's slice
  fenced        behind an optimization barrier, in forward and in backward, across which the compiler moves nothing

Partitioning pays where several devices hold the same activation, which is what tensor parallelism does: over the model
axis M, the saved bytes fall to 1/M for one all-gather per segment in backward, and one in forward: `jax.checkpoint`
runs the same equations both times. Over the data axis it saves nothing:
each data shard works on other examples, so there is no second copy to drop, and what one device leaves out nobody else
has. (The article on ZeRO-R, arXiv:1910.02054 section 6.1, names the model-parallel degree; the text that this feature
is often quoted from says data-parallel degree. DeepSpeed's code partitions over the model-parallel group.)

The slice is taken in an inner `shard_map` that is manual over the axis: a sharding constraint on the saved value is not
honoured by jax 0.10 inside a region that is manual over the data axis. Under a plain `jax.jit`, where the batch dim is
sharded over `data` automatically, the flattening makes the compiler move activations between data shards: use
partitioning inside `shard_map` over the data axis, as `Engine` does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero2jax.activations.policies import Either, Policy, TensorPolicy
from zero2jax.base.mesh import padded_size

BOUNDARY = "zero2jax_boundary"
"""Tensor name of what is saved at a boundary."""


@dataclasses.dataclass(frozen=True)
class Boundary:
    """How the activation that enters a segment is kept.

    Attributes:
      axis_name: mesh axis to partition it over, or None.
      num_shards: size of that axis.
      mesh: the mesh, for use outside of any `shard_map`.
      offload: keep it in pinned host memory.
      barrier: put an optimization barrier there.
    """

    axis_name: str | None = None
    num_shards: int = 1
    mesh: Mesh | None = None
    offload: bool = False
    barrier: bool = False

    def applies_to(self, x: Any) -> bool:
        """Whether an input of a segment is an activation that is worth partitioning or offloading."""
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return bool(floating) and len(x.shape) > 0 and math.prod(x.shape) >= self.num_shards

    def wrap(
        self, segment: Callable[..., Any], policy: Policy, is_boundary: Sequence[bool], *, prevent_cse: bool
    ) -> Callable[..., Any]:
        """`segment(*arrays)` under `jax.checkpoint`, the inputs marked in `is_boundary` being kept as said above."""
        if self.offload:
            policy = Either((TensorPolicy(offloaded=(BOUNDARY,)), policy))
        chosen = [i for i, mark in enumerate(is_boundary) if mark]

        def recomputed(saved: list[jax.Array], *arrays: jax.Array) -> Any:
            inputs = list(arrays)
            for i, x in zip(chosen, saved, strict=True):
                if self.offload:
                    x = checkpoint_name(x, BOUNDARY)
                inputs[i] = x if self.axis_name is None else _restored(self, x, arrays[i])
            return segment(*inputs)

        checkpointed = jax.checkpoint(recomputed, policy=policy, prevent_cse=prevent_cse)

        def wrapped(*arrays: jax.Array) -> Any:
            inputs = list(arrays)
            if self.barrier and chosen:
                fenced = jax.lax.optimization_barrier([inputs[i] for i in chosen])
                for i, x in zip(chosen, fenced, strict=True):
                    inputs[i] = x
            saved = [inputs[i] for i in chosen]
            if self.axis_name is not None:
                saved = [jax.lax.stop_gradient(self._slice(x)) for x in saved]
            return checkpointed(saved, *inputs)

        return wrapped

    def _slice(self, x: jax.Array) -> jax.Array:
        """This device's part of an activation: (...,) -> flat, padded, 1/M of it on each device of the axis."""
        size = padded_size(x.size, self.num_shards)
        part = size // self.num_shards

        def local(flat: jax.Array, index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(flat, index[0] * part, part)

        flat = jnp.pad(x.reshape(-1), (0, size - x.size))
        # Not `axis_index`, which is not allowed in an inner manual region of jax 0.10.
        index = jnp.arange(self.num_shards)
        return self._manual(local, (P(), P(self.axis_name)), P(self.axis_name))(flat, index)

    def _gathered(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The full activation, gathered from the slices that `_slice` took."""
        gather = lambda y: jax.lax.all_gather(y, self.axis_name, tiled=True)
        flat = self._manual(gather, P(self.axis_name), P())(x)
        return flat[: math.prod(shape)].reshape(shape)

    def _manual(
        self, fun: Callable[..., jax.Array], in_specs: Any, out_specs: Any
    ) -> Callable[..., jax.Array]:
        around = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            fun,
            mesh=self.mesh if around.empty else around,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis_name},
            check_vma=False,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _restored(boundary: Boundary, saved: jax.Array, x: jax.Array) -> jax.Array:
    """`x` from its saved slice; `x` is not read, it gives the cotangent a way out that needs no collective."""
    return boundary._gathered(saved, x.shape)


_restored.defvjp(
    lambda boundary, saved, x: (boundary._gathered(saved, x.shape), None),
    lambda boundary, _, grad: (None, grad),
)
