"""The state between steps, and how each leaf of it is stored.

Global arrays, outside `shard_map`. A leaf at rest is sharded, and padded where it does not divide. Per device and
parameter, with Adam: 12/N bytes (fp32 master, two moments), nothing else. ZeRO, arXiv:1910.02054, section 5.1; the
16-bit parameters and the gradients of that formula exist only during a step.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from zero2jax.base.memories import in_host_memory
from zero2jax.base.mesh import DataAxes, axis_size, replicated
from zero2jax.base.pytrees import (
    LeafPredicate,
    PyTree,
    path_names,
    path_string,
    select_leaves,
)
from zero2jax.base.transformation import refuse_multi_steps, takes_gradients
from zero2jax.zero.collectives import pad_to
from zero2jax.zero.loss_scale import LossScale, LossScaleState
from zero2jax.zero.precision import Precision
from zero2jax.zero.rounding import narrowed, widened
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan, check_model_axes, make_shard_plan, plan_like


class TrainState(NamedTuple):
    """What is kept between steps; every leaf a global array on the engine's mesh.

    Fields:
      step: int32 scalar, number of steps taken; replicated.
      params: masters of the trainable leaves (fp32, unless `Precision.master_dtype` says otherwise) and the frozen
        leaves as given, in the structure of the parameters; padded and sharded as the layout's plan says.
      opt_state: state of the optax transformation, each leaf padded and sharded by its own shape.
      rng: raw key data (uint32) from which every step's keys are derived; replicated.
      loss_scale: of an engine with a loss scale, replicated scalars; else None.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array
    loss_scale: LossScaleState | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the state is stored, decided from the parameters' shapes.

    Attributes:
      params: shard plan of the parameters, at the dtypes they are stored in.
      opt_state: shard plan of the optimizer state.
      trainable: per parameter leaf, whether it is trained.
      loss_scale: how the loss is scaled, if it is.
      host: the mesh of CPU devices in whose memory trainable parameters and optimizer state are stored, one in the
        place of each device of the mesh; None where they are stored on the mesh itself.
      on_disk: whether files stand for what is stored on `host`: leaves with shape, dtype, sharding and shards, but no
        arrays.
      pinned_state: they are stored in the pinned host memory of the mesh's own devices instead; `host` is the mesh.
      pinned_params: of parameters whose masters the host stores, what the loss sees lies in that memory until it is
        used.
      resident_params: of the trainable parameters, by index, those that are stored on the mesh all the same.
      resident_state: of the leaves of the optimizer state, by index, those.
      narrow_state: of the leaves of the optimizer state, by index, those that are fp32 to the optimizer and stored in
        16 bits.
    """

    params: ShardPlan
    opt_state: ShardPlan
    trainable: tuple[bool, ...]
    loss_scale: LossScale | None = None
    host: Mesh | None = None
    on_disk: bool = False
    pinned_state: bool = False
    pinned_params: bool = False
    resident_params: frozenset[int] = frozenset()
    resident_state: frozenset[int] = frozenset()
    narrow_state: frozenset[int] = frozenset()

    def homes(self, mesh: Mesh) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where each trainable parameter, and each leaf of the optimizer state, is stored."""

        def shardings(plan: ShardPlan, resident: frozenset[int]) -> list[NamedSharding]:
            pin = in_host_memory if self.pinned_state else lambda sharding: sharding
            home = lambda leaf: pin(plan.sharding(leaf, self.host or mesh))
            here = lambda leaf: plan.sharding(leaf, mesh)
            return [here(leaf) if i in resident else home(leaf) for i, leaf in enumerate(plan.leaves)]

        of_params = shardings(self.trained_params, self.resident_params)
        return of_params, shardings(self.opt_state, self.resident_state)

    def copies(self, mesh: Mesh) -> list[NamedSharding]:
        """Where what the loss sees of each trainable parameter lies between steps."""
        plan = self.trained_params
        pinned = lambda i: self.pinned_params and i not in self.resident_params
        shardings = [plan.sharding(leaf, mesh) for leaf in plan.leaves]
        return [in_host_memory(s) if pinned(i) else s for i, s in enumerate(shardings)]

    @property
    def trained_params(self) -> ShardPlan:
        """The plan of the trainable parameters, in the structure of `trained`."""
        return dataclasses.replace(
            self.params,
            leaves=tuple(leaf for leaf, t in zip(self.params.leaves, self.trainable, strict=True) if t),
            treedef=jax.tree.structure(self.trained(self.params.tree)),
        )

    @property
    def frozen_params(self) -> ShardPlan:
        """The plan of the other parameters, as a list."""
        leaves = [leaf for leaf, t in zip(self.params.leaves, self.trainable, strict=True) if not t]
        treedef = jax.tree.structure([0] * len(leaves))
        return dataclasses.replace(self.params, leaves=tuple(leaves), treedef=treedef)

    def trained(self, params: PyTree) -> PyTree:
        """The parameters as the optimizer sees them: frozen leaves become `optax.MaskedNode()`."""
        return select(params, self.trainable)

    def abstract_state(self, mesh: Mesh) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        everywhere = replicated(mesh)
        at = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        all_params, all_state = self.params.rest_shapes(mesh), self.opt_state.rest_shapes(mesh)
        of_params, of_state = self.homes(mesh)
        trained = [
            at(x, s) for x, s in zip(jax.tree.leaves(self.trained(all_params)), of_params, strict=True)
        ]
        opt_state = [at(x, s) for x, s in zip(jax.tree.leaves(all_state), of_state, strict=True)]
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        step, rng, loss_scale = jax.tree.map(place, jax.eval_shape(lambda: self.first_scalars(0)))
        return TrainState(
            step=step,
            params=merge(trained, all_params, self.trainable),
            opt_state=self.opt_state.treedef.unflatten(opt_state),
            rng=rng,
            loss_scale=loss_scale,
        )

    def first_scalars(self, seed: int) -> tuple[jax.Array, jax.Array, LossScaleState | None]:
        """`step`, `rng` and `loss_scale` of a new state."""
        scaler = self.loss_scale
        key = jax.random.key_data(jax.random.key(seed))
        return jnp.zeros((), jnp.int32), key, None if scaler is None else scaler.first()


def make_layout(
    shapes: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axes: DataAxes,
    why_replicated: str,
    layer_dims: PyTree,
    trainable: PyTree | LeafPredicate | None,
    param_specs: PyTree | None,
    precision: Precision,
    loss_scale: LossScale | None = None,
    host: Mesh | None = None,
) -> Layout:
    """Plan parameters and optimizer state.

    Args:
      shapes: tree of parameter shapes and dtypes, as the user gives them.
      tx: optimizer; its state is planned from `tx.init`'s output shapes.
      mesh: device mesh.
      axes: the data axes of the mesh.
      why_replicated: reason why every leaf is replicated, or empty.
      layer_dims: leading layer dims per leaf.
      trainable: tree of booleans or predicate; None means every leaf.
      param_specs: PartitionSpecs of the other axes.
      precision: in which dtypes they are stored.
      loss_scale: how the loss is scaled.
      host: where trainable parameters and optimizer state are stored; see `Layout`.

    Raises:
      ValueError: no leaf is trainable, or one that is not floating; a tree has another structure; a spec does not fit
        the mesh; an optimizer that takes gradients of its own beside a loss scale.
    """
    flags = tuple(select_leaves(shapes, trainable, default=True, name="trainable"))
    if not any(flags):
        paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
        said = (
            f"`trainable` selects none of the {len(paths)} leaves, {paths[:3]} first"
            if paths
            else "they are none"
        )
        raise ValueError(
            f"planning the state: no parameter is trained: {said}. Pass parameters, and a `trainable` that holds for "
            f"one of them at least."
        )
    _check_floating(shapes, flags)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    stored = [
        jax.ShapeDtypeStruct(x.shape, precision.stored(path_string(path), x)) if t else x
        for (path, x), t in zip(leaves, flags, strict=True)
    ]
    plan = make_shard_plan(
        jax.tree.unflatten(treedef, stored),
        axis_size(mesh, axes.rest),
        layer_dims=layer_dims,
        param_specs=param_specs,
        why_replicated=why_replicated,
        axis_name=axes.rest,
    )
    check_model_axes(plan, mesh, axes.names)
    layout = Layout(params=plan, opt_state=plan, trainable=flags, loss_scale=loss_scale, host=host)
    trained = jax.eval_shape(widened, layout.trained(jax.tree.unflatten(treedef, stored)))
    opt_shapes = jax.eval_shape(tx.init, trained)
    refuse_multi_steps(opt_shapes)
    if loss_scale is not None and takes_gradients(tx, opt_shapes, trained):
        raise loss_scale.unjudged()
    opt_plan, narrow = narrowed(plan_like(opt_shapes, plan), layout.trained_params, precision)
    return dataclasses.replace(layout, opt_state=opt_plan, narrow_state=narrow)


def select(params: PyTree, trainable: tuple[bool, ...]) -> PyTree:
    """`params` with `optax.MaskedNode()` in the place of each frozen leaf, as `optax.masked` does it."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(
        treedef, [x if t else optax.MaskedNode() for x, t in zip(leaves, trainable, strict=True)]
    )


def merge(trained: PyTree, params: PyTree, trainable: tuple[bool, ...]) -> PyTree:
    """`params` with its trainable leaves taken from `trained`, a tree as `select` makes it."""
    leaves, treedef = jax.tree.flatten(params)
    new = iter(jax.tree.leaves(trained))
    return jax.tree.unflatten(
        treedef, [next(new) if t else x for x, t in zip(leaves, trainable, strict=True)]
    )


def _check_floating(shapes: PyTree, trainable: tuple[bool, ...]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    wrong = [
        f"{path_string(path)!r} ({x.dtype}{list(x.shape)})"
        for (path, x), t in zip(leaves, trainable, strict=True)
        if t and not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        pair = (
            " Complex parameters are not supported: keep one as a real pair, a leaf of shape (..., 2), and join it in "
            "the loss function by jax.lax.complex(x[..., 0], x[..., 1])."
        )
        is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for _, x in leaves)
        raise ValueError(
            f"planning the state: trainable parameters that are not floating: {', '.join(wrong[:5])}{more}. Only "
            f"floating leaves are trained. Freeze these with trainable=, a tree of booleans or a predicate "
            f"(path, leaf) -> bool.{pair if is_complex else ''}"
        )


def unpad(tree: PyTree, plan: ShardPlan, mesh: Mesh) -> PyTree:
    """Leaves as they are stored -> leaves of true shape, sharded the same way, as the optimizer sees them.

    Under `jax.jit`, like `pad`: the compiler accepts uneven shards inside a program, so elementwise work on a leaf that
    does not divide still communicates nothing.
    """

    def unpadded(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        if leaf.rest_shape == leaf.shape:
            return x
        return _constrain(jax.lax.slice(x, [0] * x.ndim, leaf.shape), leaf, plan, mesh)

    return plan.map(unpadded, tree)


def pad(tree: PyTree, plan: ShardPlan, mesh: Mesh) -> PyTree:
    """Leaves of true shape -> leaves as they are stored: padded with zeros, and in their place."""
    return plan.map(lambda leaf, x: _constrain(pad_to(x, leaf.rest_shape), leaf, plan, mesh), tree)


def _constrain(x: jax.Array, leaf: LeafPlan, plan: ShardPlan, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, plan.sharding(leaf, mesh))


def store_frozen(params: PyTree, frozen: PyTree, layout: Layout) -> PyTree:
    """`params` with the new values of frozen leaves that the loss function returned. Global arrays of true shape.

    Raises:
      ValueError: a value belongs to no frozen leaf, or has another shape.
    """
    new = {path_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(frozen)}
    known = {
        leaf.names: leaf for leaf, t in zip(layout.params.leaves, layout.trainable, strict=True) if not t
    }
    for names, x in new.items():
        leaf = known.get(names)
        if not known:
            raise ValueError(
                f"storing aux['frozen']: the loss function returns a new value for leaf {'/'.join(names)!r}, and "
                f"no parameter is frozen. Say which are not trained, when the engine is built: "
                f"trainable=lambda path, leaf: not path.startswith({names[0] if names else ''!r})."
            )
        if leaf is None or leaf.shape != x.shape or _is_key(leaf) != _is_key(x):
            paths = sorted(leaf.path for leaf in known.values())
            kept = leaf and (f"{leaf.dtype} of " if _is_key(leaf) or _is_key(x) else "")
            rule = f"one of the frozen leaves {paths[:8]}" if leaf is None else f"{kept}shape {leaf.shape}"
            raise ValueError(
                f"storing aux['frozen']: leaf {'/'.join(names)!r} of shape {x.shape} does not fit, expected "
                f"{rule}. Return new values under the paths that the frozen leaves have in the parameters."
            )
    stored = lambda leaf, x: x if _is_key(leaf) else x.astype(leaf.dtype)
    pick = lambda leaf, x: stored(leaf, new[leaf.names]) if leaf.names in new else x
    return layout.params.map(pick, params)


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))
