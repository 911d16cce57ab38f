"""How a loss function becomes a jaxpr inside the step. Per-device code, inside a `shard_map` over the data axes.

Types of arrays name the mesh that is in context. Arguments come without one, and values made inside with one, so a
library that compares types (Equinox: state, closures that are differentiated) finds that they differ; and a boxed Flax
parameter lays a sharding constraint on itself as soon as there is a mesh. So the loss is traced without the mesh,
as on one device. Collectives over the data axes work all the same: axis names do not come from that context.

On a mesh with further axes it stays in context: a loss may constrain to those, or map over them. So it does for a loss
that closes over an array on a mesh (a teacher's parameters), since only there JAX takes that mesh out of its type.

A model written for FSDP constrains arrays to the data axes as well. The step has seen to that: a loss gets the data
shard of its batch. JAX refuses such a constraint inside of a `shard_map` over those axes, before anything is recorded
that could be changed, so `jax.lax.with_sharding_constraint` is another function while the loss is traced: what it drops
of a constraint is said once.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base import jaxprs, notices
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.quantized import QuantizeSettings

_WORTH_SAYING = 1e9  # FLOPs of a device's slice, forward: about a millisecond

_NO_MESH = AbstractMesh((), ())


_PATCHING = threading.RLock()


def trace_loss(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """The closed jaxpr of `fun(*args)` over flat arguments (arrays or shapes), and the tree of its output shapes."""
    mesh = jax.sharding.get_abstract_mesh()
    with _data_axes_dropped(mesh):
        if any(kind != AxisType.Manual for kind in mesh.axis_types):
            return jaxprs.trace(fun, *args)
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            jaxpr, out = jaxprs.trace(fun, *jax.tree.map(_without_mesh, args))
        if any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in jaxprs.constants(jaxpr)):
            return jaxprs.trace(fun, *args)
    return jaxpr, out


def _without_mesh(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


@contextlib.contextmanager
def _data_axes_dropped(mesh: AbstractMesh) -> Iterator[None]:
    """Inside, sharding constraints of this thread lose the manual axes of a mesh, and axes that it does not have."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kept = {name for name, kind in types.items() if kind != AxisType.Manual}
    given, thread = jax.lax.with_sharding_constraint, threading.get_ident()
    dropped: dict[str, Any] = {}

    def constrain(x: Any, sharding: Any) -> Any:
        spec = sharding if isinstance(sharding, P) else getattr(sharding, "spec", None)
        if spec is None or threading.get_ident() != thread:
            return given(x, sharding)
        lost = {name for entry in spec for name in _names(entry)} - kept
        if not lost:
            return given(x, sharding) if kept or not isinstance(sharding, P) else x
        dropped.update(dict.fromkeys(sorted(lost), spec))
        spec = P(*[_without(entry, lost) for entry in spec])
        return given(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec)) if kept else x

    def with_sharding_constraint(x: Any, shardings: Any) -> Any:
        """See `jax.lax.with_sharding_constraint`."""
        is_one = lambda s: s is None or isinstance(s, jax.sharding.Sharding | P)
        return jax.tree.map(
            lambda s, part: jax.tree.map(lambda y: constrain(y, s), part), shardings, x, is_leaf=is_one
        )

    with _PATCHING:
        jax.lax.with_sharding_constraint = with_sharding_constraint
        try:
            yield
        finally:
            jax.lax.with_sharding_constraint = given
    if dropped:
        _tell_of_dropped(dropped, mesh, types)


def _tell_of_dropped(dropped: Mapping[str, Any], mesh: AbstractMesh, types: Mapping[str, AxisType]) -> None:
    reason = lambda name: "a data axis" if name in types else "not an axis of the mesh"
    named = ", ".join(f"{name!r} ({reason(name)}, of {spec})" for name, spec in list(dropped.items())[:5])
    notices.warn(
        f"tracing the loss function: sharding constraints in it name {named}; these names are dropped. The batch is "
        f"sharded over the data axes already, and a parameter is gathered from them where it is used. Constraints that "
        f"name other axes of the mesh {dict(mesh.shape)} are kept."
    )


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def _without(entry: Any, lost: set[str]) -> Any:
    names = _names(entry)
    left = tuple(name for name in names if name not in lost)
    return entry if len(left) == len(names) else left[0] if len(left) == 1 else left or None


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


def warn_of_nothing_quantised(quantize: QuantizeSettings | None) -> None:
    """Say so when settings were given and no parameter is one that they quantise."""
    if quantize is None:
        return
    warnings.warn(
        f"quantising {', '.join(quantize.plain)}: no parameter is, and all travel as without. Quantised are sharded "
        f"matrices of at least {quantize.min_size} elements, of one layer where layers are stacked, that keep_fp32 "
        f"does not keep. Where matrices in one subtree were taken for stacks of layers, engine.init(..., batch=batch) "
        f"reads from the loss which are; for smaller ones there is QuantizeSettings(min_size=...).",
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
