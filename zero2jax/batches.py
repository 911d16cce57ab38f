"""Batches: checked against devices and microbatches before anything is traced, and placed over the data axis."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.mesh import AxisName
from zero2jax.pytrees import PyTree, path_string, shapes_of


def check_batch(batch: PyTree, num_shards: int, num_microbatches: int, batch_size: int | None = None) -> int:
    """The number of examples in a global batch, after checking that it can be cut up.

    Raises:
      ValueError: no leaves; a leaf without a leading dim; leaves of different length; a length that is not a
        multiple of devices x microbatches, or not the batch size that was configured.
    """
    leaves = [(path_string(path), np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    if not leaves:
        raise ValueError(
            "reading the batch: it has no arrays. Pass a pytree of arrays of shape (batch, ...)."
        )
    for path, shape in leaves:
        if not shape:
            raise ValueError(
                f"reading the batch: leaf {path!r} is a scalar, without a leading dim to cut over devices. Every leaf "
                f"must be of shape (batch, ...): repeat the value per example, or close over it in the loss function."
            )
    path, shape = leaves[0]
    num_examples = shape[0]
    for other, other_shape in leaves[1:]:
        if other_shape[0] != num_examples:
            raise ValueError(
                f"reading the batch: leaf {path!r} has {num_examples} examples and leaf {other!r} has "
                f"{other_shape[0]}. All leaves must have the same leading dim."
            )
    parts = num_shards * num_microbatches
    if num_examples % parts or num_examples == 0:
        nearest = max(num_examples // parts, 1) * parts
        raise ValueError(
            f"cutting a batch of {num_examples} examples over {num_shards} devices x {num_microbatches} microbatches: "
            f"{num_examples} / ({num_shards} * {num_microbatches}) = {num_examples / parts:g}, and it must be a whole "
            f"number. Use {nearest} or {nearest + parts} examples, or another number of microbatches."
        )
    if batch_size is not None and num_examples != batch_size:
        raise ValueError(
            f"reading the batch: it has {num_examples} examples, and the batch size was set to {batch_size} "
            f"(over all {num_shards} devices and {num_microbatches} microbatches). Pass whole batches, or leave the "
            f"batch size out."
        )
    return num_examples


def place_batch(batch: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """The batch as global arrays cut over the data axis along their leading dim; arrays already there are kept."""
    sharding = NamedSharding(mesh, P(axis_name))

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.device_put(x, sharding)

    return jax.tree.map(one, batch)


def abstract_batch(batch: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Shapes of the batch as `place_batch` places it."""
    sharding = NamedSharding(mesh, P(axis_name))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, shapes_of(batch))
