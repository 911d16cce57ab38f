"""Which leading dims of each parameter are layers: read from the loss function, or guessed from the tree.

A stack of layers (L, ...) is used one layer at a time, so it must not be sharded on L, and it is gathered and reduced
layer by layer. Asked once, by `Engine.abstract_state`, before anything is allocated; shapes in, ints out. A wrong
answer costs memory in the step, and no correctness.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero2jax.base import jaxprs
from zero2jax.base.losses import Loss, SliceContext
from zero2jax.base.mesh import DataAxes
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.tracing import trace_loss


def layer_dims_of_loss(loss: Loss, shapes: PyTree, batch: PyTree, mesh: Mesh, axes: DataAxes) -> PyTree:
    """The number of leading layer dims per parameter, read from what the loss function does with it.

    Args:
      loss: from `losses.normalized`.
      shapes: full parameters as the loss function sees them; shapes are enough.
      batch: a global batch; shapes are enough.
      mesh: device mesh.
      axes: its data axes.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    depths: list[int] = []

    def local(batch: PyTree, rng: SliceContext) -> None:
        jaxpr, _ = trace_loss(loss, shapes, batch, rng)
        depths.extend(scan_depths(jaxpr, len(leaves)))

    # Inside a shard_map, since the loss function is written for a device's part of the batch and may name the data
    # axes. What leaves one are arrays, and a depth is none: so it is noted while the function is traced.
    rng = jax.eval_shape(
        lambda: SliceContext(jax.random.key_data(jax.random.key(0)), *jnp.zeros(2, jnp.int32))
    )
    per_device = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axes.batch), P()),
        out_specs=None,
        axis_names=set(axes.names),
        check_vma=False,
    )
    jax.eval_shape(per_device, batch, rng)
    return jax.tree.unflatten(treedef, depths)


def guess_layer_dims(shapes: PyTree) -> PyTree:
    """The number of leading layer dims per leaf, guessed from the tree: 1 inside a stack, else 0.

    A stack is the largest subtree of at least two leaves that all have two dims or more and the same leading
    size, as `nn.scan`, `nnx.scan` and `jax.vmap(init)` make them.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    keys = [tuple(str(k) for k in path) for path, _ in flat]
    for key, (_, leaf) in zip(keys, flat, strict=True):
        for depth in range(len(key) + 1):
            groups.setdefault(key[:depth], []).append(leaf.shape)

    def is_stack(members: list[tuple[int, ...]]) -> bool:
        same = len({shape[:1] for shape in members}) == 1
        return len(members) > 1 and same and all(len(shape) > 1 for shape in members)

    stacks = {key for key, members in groups.items() if is_stack(members)}
    in_stack = lambda key: any(key[:depth] in stacks for depth in range(len(key) + 1))
    return jax.tree.unflatten(treedef, [int(in_stack(key)) for key in keys])


def scan_depths(jaxpr: Any, num_leaves: int) -> list[int]:
    """For each of the first `num_leaves` inputs, how many leading dims scans and layer picks take off it.

    An input that is also used in full counts as a stack.
    """
    return input_depths(jaxpr)[:num_leaves]


def input_depths(jaxpr: Any) -> list[int]:
    """As `scan_depths`, of every input."""
    depth: dict[Any, int] = {}
    for eqn in reversed(jaxprs.equations(jaxpr)):  # from uses back to inputs
        for var, operand_depth in zip(eqn.invars, _operand_depths(eqn, depth), strict=False):
            if not isinstance(var, Literal):
                depth[var] = max(depth.get(var, 0), operand_depth)
    return [depth.get(v, 0) for v in jaxprs.inputs(jaxpr)]


def _operand_depths(eqn: Any, depth: dict[Any, int]) -> list[int]:
    """The depths of the operands of an equation, from those of its results."""
    if jaxprs.is_scan(eqn):
        parts = jaxprs.scan_parts(eqn)
        split = parts.num_consts + parts.num_carry
        return [0] * split + [1 + d for d in input_depths(parts.body)[split:]]
    if jaxprs.is_call(eqn) or jaxprs.is_checkpoint(eqn):
        return input_depths(jaxprs.body(eqn))
    return [_picked_depth(eqn, max((depth.get(v, 0) for v in eqn.outvars), default=0))]


def _picked_depth(eqn: Any, depth_of_result: int) -> int:
    """The depth of the first operand of an operation that may pick layers out of it."""
    name = eqn.primitive.name
    if name in ("slice", "dynamic_slice"):
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        one_layer = len(old) > 1 and old[0] > 1 and new[0] == 1 and old[1:] == new[1:]
        return max(int(one_layer), depth_of_result)
    if name == "unstack" and eqn.params["axis"] == 0:
        return 1 + depth_of_result
    if name == "convert_element_type":
        return depth_of_result
    if name == "reshape" and depth_of_result:
        leading = reshaped_leading(eqn.invars[0].aval.shape, eqn.params["new_sizes"], 1)
        return int(leading is not None)
    return 0


def reshaped_leading(old: tuple[int, ...], new: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """The new leading dims of a reshape that keeps `dim` and all later ones; None for any other reshape."""
    k = len(new) - (len(old) - dim)
    keeps = k >= 0 and tuple(new[k:]) == old[dim:] and math.prod(new[:k]) == math.prod(old[:dim])
    return tuple(new[:k]) if keeps else None
