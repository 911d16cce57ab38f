"""What crosses the data axis: shards in, full parameters out; full gradients in, shards of their sum out.

Per-device code, inside a `shard_map` that is manual over the data axes. One leaf of shape (..., d, ...), sharded over N
devices along d and padded there to a multiple of N:

  gather             this device's shard (..., ceil(d/N), ...) -> (..., d, ...) in the compute dtype
  reduce_grad        this device's gradient (..., d, ...) -> its shard (..., ceil(d/N), ...) of the devices' sum
  gather_and_reduce  the first forward, the second backward

A `Use` says how, for a leaf or for one layer of it. `by_layer` does it for all leaves, stacks of layers one layer at a
time: in one piece, the compiler copies the stack into another layout. (Where other mesh axes hold the layers, the loop
is that of `collectives`.)

ZeRO, arXiv:1910.02054, section 5.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.base.memories import to_device
from zero2jax.base.mesh import padded_size
from zero2jax.zero import quantized
from zero2jax.zero.collectives import all_gather, pad_to, psum, psum_scatter, scatter_in_order, sum_in_order
from zero2jax.zero.quantized import Wire
from zero2jax.zero.shard_plan import LeafPlan, Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """How a parameter, or one layer of it, comes from its shard and its gradient goes back: static and hashable.

    Attributes:
      path: the parameter's name.
      dim: sharded dim of the full parameter; None for one that is replicated.
      size: true size of that dim.
      num_shards: N; a shard is padded so that the dim divides by it.
      placement: other mesh axes of each dim, `()` for none.
      dtype: dtype of the full parameter.
      grad_dtype: dtype in which its gradient is summed over the devices.
      axis_name: axis to gather and reduce over.
      layer_dims: leading dims that are layers.
      prescale: factor of the gradient before it is summed.
      in_order: add in fp32, in a fixed order, what travels in `grad_dtype`.
      max_kept: elements up to which it, or a part of it, is kept from forward to backward at stage 3.
      gathered: the source is full already, and only gradients are still to be reduced.
      pinned: the shard lies in pinned host memory, and is fetched before it is gathered.
      gather_wire: how the shard is quantised on the way; None: it travels in `dtype`.
      reduce_wire: likewise the gradient; None: it travels in `grad_dtype`.
    """

    path: str
    dim: int | None
    size: int
    num_shards: int
    placement: Placement
    dtype: Any
    grad_dtype: Any
    axis_name: str
    layer_dims: int = 0
    prescale: float = 1.0
    in_order: bool = False
    max_kept: int = 0
    gathered: bool = False
    pinned: bool = False
    gather_wire: Wire | None = None
    reduce_wire: Wire | None = None

    @property
    def layer(self) -> "Use":
        """The same for one layer of a stack, without the leading dim."""
        dim = None if self.dim is None else self.dim - 1
        layer_dims = max(self.layer_dims - 1, 0)
        return dataclasses.replace(self, dim=dim, placement=self.placement[1:], layer_dims=layer_dims)

    @property
    def held_layers(self) -> int:
        """The layer dims, if other mesh axes hold some of them: no loop over the full stack then."""
        return self.layer_dims if any(self.placement[: self.layer_dims]) else 0

    @property
    def sum_dtype(self) -> Any:
        """The dtype that the sum of the gradients comes out in."""
        return jnp.promote_types(self.grad_dtype, jnp.float32) if self.in_order else self.grad_dtype


def use_of_leaf(leaf: LeafPlan, dtype: Any, grad_dtype: Any, axis_name: str) -> Use:
    """The `Use` of a leaf of a plan."""
    return Use(
        path=leaf.path,
        dim=leaf.dim,
        size=0 if leaf.dim is None else leaf.shape[leaf.dim],
        num_shards=leaf.num_shards,
        placement=leaf.model_spec if any(entry is not None for entry in leaf.model_spec) else (),
        dtype=dtype,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        layer_dims=0 if leaf.dim is None else leaf.layer_dims,  # what is replicated needs no loop
    )


def gather(use: Use, source: jax.Array) -> jax.Array:
    """The full parameter, without padding and in its compute dtype, from this device's shard."""
    x = to_device(source) if use.pinned else source
    if use.gathered or use.dim is None:
        return x.astype(use.dtype)
    with jax.named_scope("zero_gather"):
        if use.gather_wire is None:
            x = all_gather(x.astype(use.dtype), use.axis_name, use.dim, use.placement, use.held_layers)
        else:
            x = quantized.all_gather(x, use.axis_name, use.dim, use.gather_wire, use.dtype, use.placement)
    return jax.lax.slice_in_dim(x, 0, use.size, axis=use.dim)


def reduce_grad(use: Use, grad: jax.Array) -> jax.Array:
    """This device's shard of the sum of a full gradient over the devices; its padding is 0."""
    if use.prescale != 1.0:
        grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) * use.prescale
    if use.reduce_wire is None:
        grad = grad.astype(use.grad_dtype)
    if use.dim is None:
        return (sum_in_order if use.in_order else psum)(grad, use.axis_name, use.placement)
    rows = padded_size(use.size, use.num_shards)
    grad = pad_to(grad, (*grad.shape[: use.dim], rows, *grad.shape[use.dim + 1 :]))
    scatter = scatter_in_order if use.in_order else psum_scatter
    with jax.named_scope("zero_scatter"):
        if use.reduce_wire is not None:
            return quantized.scatter(grad, use.axis_name, use.dim, use.reduce_wire, use.placement)
        return scatter(grad, use.axis_name, use.dim, use.placement, use.held_layers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_and_reduce(use: Use, source: jax.Array, port: jax.Array) -> jax.Array:
    """The full parameter; its gradient, reduced, is the gradient of `port`, which is not read. `source` has none."""
    return gather(use, source)


gather_and_reduce.defvjp(
    lambda use, source, port: (gather(use, source), None),
    lambda use, _, grad: (None, reduce_grad(use, grad)),
)


def by_layer(
    fun: Callable[[Use, jax.Array], jax.Array], leaves: Sequence[tuple[Use, jax.Array]]
) -> list[jax.Array]:
    """`fun(use, array)` of each leaf, in a loop over its layers; stacks of equal length share a loop."""
    stacks: dict[int, list[tuple[Use, jax.Array]]] = {}
    looped = lambda use: use.layer_dims and not use.held_layers
    for use, x in leaves:
        if looped(use):
            stacks.setdefault(x.shape[0], []).append((use, x))
    done = {length: iter(_looped(fun, stack)) for length, stack in stacks.items()}
    return [next(done[x.shape[0]]) if looped(use) else fun(use, x) for use, x in leaves]


def _looped(
    fun: Callable[[Use, jax.Array], jax.Array], stacks: Sequence[tuple[Use, jax.Array]]
) -> list[jax.Array]:
    uses = [use.layer for use, _ in stacks]
    layer = lambda slices: by_layer(fun, list(zip(uses, slices, strict=True)))
    return jax.lax.map(layer, [x for _, x in stacks])  # type: ignore[no-any-return]
