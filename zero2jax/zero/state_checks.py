"""Whether a state is one that a program may take. Global arrays, outside `shard_map`.

A step asks this each time, of thousands of leaves: `KeptState` answers for a state as the last step left it, and what
differs is looked at leaf by leaf.
"""

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zero2jax.base.checks import type_name
from zero2jax.base.memories import HOST_MEMORY
from zero2jax.base.mesh import replicated
from zero2jax.base.pytrees import are_arrays, check_alive, check_same_structure
from zero2jax.zero.state import Layout, TrainState

_is_deleted = operator.methodcaller("is_deleted")


class KeptState:
    """What a state of a layout is like as a step leaves it, in lists: a step compares thousands of leaves."""

    def __init__(self, layout: Layout, mesh: Mesh):
        self._layout, self._mesh = layout, mesh
        leaves, self._treedef = jax.tree.flatten(layout.abstract_state(mesh))
        self._shapes, self._dtypes = [x.shape for x in leaves], [x.dtype for x in leaves]
        self._avals: list[
            Any
        ] = []  # of the last state that was alike: a compiled step hands out the same objects
        # Without a host, trained leaves lie in one place and frozen ones in one, so that one leaf tells.
        trainable = layout.trainable
        firsts = {1 + trainable.index(kind) for kind in set(trainable)}  # after `step`
        self._places = {i: leaves[i].sharding for i in firsts}

    def placed(self, state: TrainState) -> tuple[TrainState, list[jax.Array]]:
        """A state that a program may take, see `place_state`, and its leaves."""
        leaves, treedef = jax.tree.flatten(state)
        if not self._is_like(leaves, treedef):
            state = place_state(state, self._layout, self._mesh)
            leaves = jax.tree.leaves(state)
        return state, leaves

    def _is_like(self, leaves: list[Any], treedef: jax.tree_util.PyTreeDef) -> bool:
        alike = (
            self._layout.host is None
            and treedef == self._treedef
            and are_arrays(leaves)
            and not any(map(_is_deleted, leaves))
            and all(leaves[i].sharding == place for i, place in self._places.items())
        )
        if not alike:
            return False
        avals = [x.aval for x in leaves]
        if not all(map(operator.is_, avals, self._avals)) or len(avals) != len(self._avals):
            alike = [x.shape for x in avals] == self._shapes and [x.dtype for x in avals] == self._dtypes
            self._avals = avals if alike else []
        return alike


def check_state(state: TrainState, layout: Layout) -> None:
    """Raise an error if this is no state, or its parameters or optimizer state have another structure or shape."""
    _check_structure(state, layout)
    _check_leaves(state, layout)


def place_state(state: TrainState, layout: Layout, mesh: Mesh) -> TrainState:
    """A state that a program may take: checked, still there, with numbers and NumPy arrays in it put in their place.

    Raises:
      TypeError, ValueError: as `check_state`; the state was donated.
    """
    _check_structure(state, layout)
    check_alive(
        state,
        "the state",
        "This state was given to engine.step, which donates it: use the one that it returned, state, metrics = "
        "engine.step(state, batch). To keep one beside, copy it before the step: jax.tree.map(jnp.copy, state).",
    )
    _check_devices(state, layout, mesh)
    if not all(issubclass(kind, jax.Array) for kind in set(map(type, jax.tree.leaves(state)))):
        state = jax.tree.map(_as_kept, state, layout.abstract_state(mesh))
    _check_leaves(state, layout)
    return state


def _check_structure(state: TrainState, layout: Layout) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"reading the state: found {type_name(state)}, expected the TrainState that engine.init or the step "
            f"before returned. A step is state, metrics = engine.step(state, batch)."
        )
    for plan, tree, name, given in (
        (layout.params, state.params, "the parameters", "`state.params`"),
        (layout.opt_state, state.opt_state, "the optimizer state", "`state.opt_state`"),
    ):
        if jax.tree.structure(tree) != plan.treedef:
            check_same_structure(plan.tree, tree, name, given)
    if (state.loss_scale is None) != (layout.loss_scale is None):
        has, wants = ("no", "a") if state.loss_scale is None else ("a", "no")
        raise ValueError(
            f"reading the state: it has {has} loss scale and this engine has {wants} loss scaling. Take the state that "
            f"this engine's init returned; to go on with parameters of another precision, restore a checkpoint of "
            f"them with select= and into=."
        )


def _check_devices(state: TrainState, layout: Layout, mesh: Mesh) -> None:
    if not layout.on_disk and any(_is_file(x) for x in jax.tree.leaves((state.params, state.opt_state))):
        raise ValueError(
            "reading the state: it is in the files of an engine with nvme_path, and this one keeps arrays. A state "
            "goes from the one to the other by a checkpoint."
        )
    frozen = [x for x, t in zip(jax.tree.leaves(state.params), layout.trainable, strict=True) if not t]
    offloaded = jax.tree.leaves((layout.trained(state.params), state.opt_state))
    for part, may_wait in ((frozen, False), (offloaded, layout.pinned_state)):
        arrays = (x for x in part if isinstance(x, jax.Array))
        # Without a host a part lies in one place, so that one leaf tells.
        for x in itertools.islice(arrays, 1 if layout.host is None else None):
            _check_device(x, layout, mesh, may_wait)


def _is_file(x: Any) -> bool:
    return hasattr(x, "files")


def _check_device(x: jax.Array, layout: Layout, mesh: Mesh, may_wait: bool) -> None:
    if isinstance(x, jax.core.Tracer):
        return
    if x.sharding.memory_kind == HOST_MEMORY and not may_wait:
        raise ValueError(
            "reading the state: it waits in host memory, where engine.offload_state put it. Bring it back first: "
            "state = engine.reload_state(state)."
        )
    there, here = x.sharding.device_set, replicated(mesh).device_set
    if there != here and (layout.host is None or there != replicated(layout.host).device_set):
        raise ValueError(
            f"reading the state: it lies on {len(there)} devices and the mesh of this engine has "
            f"{'other ones' if len(there) == len(here) else len(here)}. A state goes from mesh to mesh by a "
            f"checkpoint: save it with its own engine's zero2jax.Checkpointer, and restore it with this one's."
        )


def _check_leaves(state: TrainState, layout: Layout) -> None:
    for plan, tree in ((layout.params, state.params), (layout.opt_state, state.opt_state)):
        for leaf, x in zip(plan.leaves, jax.tree.leaves(tree), strict=True):
            shape, dtype = np.shape(x), getattr(x, "dtype", type(x).__name__)
            if shape != leaf.rest_shape or dtype != leaf.dtype:
                raise ValueError(
                    f"reading the state: leaf {leaf.path!r} is {dtype}{list(shape)} and this engine keeps it as "
                    f"{leaf.dtype}{list(leaf.rest_shape)}. The state belongs to an engine of other parameters or "
                    f"another mesh or stage: take the one that this engine's init returned."
                )


def _as_kept(x: Any, like: jax.ShapeDtypeStruct) -> Any:
    """A number (a new learning rate, say) or a NumPy array as the leaf that it stands for, if it can be that."""
    fits = isinstance(x, np.ndarray | np.generic) and (x.shape, x.dtype) == (like.shape, like.dtype)
    if isinstance(x, bool | int | float) and like.shape == ():
        kind = jnp.issubdtype(like.dtype, jnp.floating)
        fits = fits or bool(kind or np.can_cast(type(x), like.dtype, "same_kind"))
    return jax.device_put(np.array(x, like.dtype), like.sharding) if fits else x
