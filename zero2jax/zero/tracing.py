"""How a loss function becomes a jaxpr inside the step. Per-device code, inside a `shard_map` over the data axes.

Types of arrays name the mesh that is in context. Arguments come without one, and values made inside with one, so a
library that compares types (Equinox: state, closures that are differentiated) finds that they differ; and a boxed Flax
parameter lays a sharding constraint on itself as soon as there is a mesh. So the loss is traced without the mesh,
as on one device. Collectives over the data axes work all the same: axis names do not come from that context.

On a mesh with further axes it stays in context: a loss may constrain to those, or map over them. So it does for a loss
that closes over an array on a mesh (a teacher's parameters), since only there JAX takes that mesh out of its type.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from zero2jax.base import jaxprs
from zero2jax.base.pytrees import PyTree

_WORTH_SAYING = 1e9  # FLOPs of a device's slice, forward: about a millisecond

_NO_MESH = AbstractMesh((), ())


def trace_loss(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """The closed jaxpr of `fun(*args)` over flat arguments (arrays or shapes), and the tree of its output shapes."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind != AxisType.Manual for kind in mesh.axis_types):
        return _trace_in_context(fun, *args)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        jaxpr, out = jaxprs.trace(fun, *jax.tree.map(_without_mesh, args))
    if any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in jaxprs.constants(jaxpr)):
        return _trace_in_context(fun, *args)
    return jaxpr, out


def _without_mesh(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _trace_in_context(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    try:
        return jaxprs.trace(fun, *args)
    except ValueError as error:
        if "can only refer to Auto axes" in str(error):
            error.add_note(
                "tracing the loss function: a sharding constraint in it names a data axis, over which the step has "
                "sharded the batch already. Constraints name other axes only. If they come from Flax's "
                "nn.with_partitioning, hand over flax.linen.meta.unbox(params), or name other axes there."
            )
        raise


def warn_of_wide_products(jaxpr: Any, compute_dtype: Any) -> None:
    """Say so when most of a loss function's matrix products are computed in a wider dtype than the one asked for."""
    products = [p for p in jaxprs.products(jaxpr) if jnp.issubdtype(p.dtype, jnp.floating)]
    wide = [p for p in products if p.dtype.itemsize > jnp.dtype(compute_dtype).itemsize]
    wide_flops, flops = (sum(p.flops for p in some) for some in (wide, products))
    if wide_flops < _WORTH_SAYING or wide_flops < flops / 2:
        return
    warnings.warn(
        f"{100 * wide_flops / flops:.0f} % of the loss function's matrix products are computed in {wide[0].dtype}, "
        f"though the compute dtype is {jnp.dtype(compute_dtype)}: an operand of that dtype makes the others as wide. "
        f"The first is at {wide[0].line}. Cast the batch, or give the layers dtype=jnp.{jnp.dtype(compute_dtype)} "
        f"(flax.nnx.Embed above all, whose default is the dtype that its parameters had when it was made); or pass "
        f"Precision(compute_dtype=jnp.{wide[0].dtype}) if that is what you want.",
        stacklevel=2,
    )


def tell_of_unused_leaves(jaxpr: Any, paths: Mapping[int, str], *, refuse: bool) -> None:
    """Say which leaves, by path under their index, the loss, the first output of a jaxpr, does not depend on.

    Raises:
      ValueError: there are such leaves, and `refuse`.
    """
    used = jaxprs.used_inputs(jaxpr)
    unused = [repr(path) for i, path in paths.items() if not used[i]]
    if not unused:
        return
    named = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
    which = "any of the trainable parameters" if len(unused) == len(paths) else "the trainable parameters"
    text = (
        f"tracing the loss function: it does not use {which}: {named}. Their gradients are zero. Compute with the "
        f"params that it is called with, not with those of a model that it closes over; or freeze what is not to be "
        f"trained: trainable=lambda path, leaf: ..."
    )
    if refuse:
        raise ValueError(text)
    warnings.warn(text, stacklevel=2)
