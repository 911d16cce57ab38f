"""How a first state gets into its shards without a full copy on any device. Global arrays, outside `shard_map`."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zero2jax.base.checks import is_whole, misfit, type_name
from zero2jax.base.memories import to_device
from zero2jax.base.mesh import moved, replicated
from zero2jax.base.pytrees import PyTree, check_alive, is_function
from zero2jax.zero.collectives import pad_to
from zero2jax.zero.rounding import rounded, widened
from zero2jax.zero.shard_plan import LeafPlan
from zero2jax.zero.state import Layout, TrainState, pad, unpad

Keep = Callable[[int, jax.Array], Any]
"""(position among the leaves of the state, a leaf where it is stored) -> what stands for it in the state."""

PIECE_BYTES = 64 * 2**20  # of a parameter that is read when it is sliced, in host memory at a time


def first_state(
    params: PyTree | Callable[[], PyTree],
    layout: Layout,
    mesh: Mesh,
    seed: int,
    keep: Keep,
    first_opt_state: Callable[[PyTree], PyTree],
) -> TrainState:
    """The state before the first step, from full parameters or a function that makes them."""
    make = make_params if is_function(params) else place_params
    placed = make(params, layout, mesh, _keep_finite(params, layout, keep))
    opt_state = first_opt_state(placed)
    first = functools.partial(layout.first_scalars, seed)
    step, rng, loss_scale = jax.jit(first, out_shardings=replicated(mesh))()
    return TrainState(step=step, params=placed, opt_state=opt_state, rng=rng, loss_scale=loss_scale)


def _keep_finite(params: PyTree | Callable[[], PyTree], layout: Layout, keep: Keep) -> Keep:
    """`keep`, but that a float16 master which is infinite there is a ValueError: every process sees the same one."""

    def kept(position: int, x: jax.Array) -> Any:
        leaf, trainable = layout.params.leaves[position - 1], layout.trainable[position - 1]
        if trainable and leaf.dtype == jnp.float16 and jax.jit(lambda x: jnp.isinf(x).any())(x):
            raise ValueError(
                f"making the state: {leaf.path!r} holds {_largest(params, position - 1)}, and its master is to be "
                f"stored in float16, which ends at 65504. Store masters in fp32 or bf16 (Precision's master_dtype; "
                f"fp16_master_weights_and_grads in a JSON), name the leaf in keep_fp32, or scale it in the loss."
            )
        return keep(position, x)

    return kept


def _largest(params: PyTree | Callable[[], PyTree], i: int) -> str:
    """The number of leaf `i` that is furthest from 0, in words."""
    if is_function(params):
        return f"{jax.jit(lambda: jnp.abs(jax.tree.leaves(params())[i]).max())():g}"
    x = jax.tree.leaves(params)[i]
    return "larger numbers" if is_lazy(x) else f"{jnp.abs(jnp.asarray(x)).max():g}"


def place_params(params: PyTree, layout: Layout, mesh: Mesh, keep: Keep) -> PyTree:
    """Full parameters -> padded shards, a leaf at a time and from host memory slice by slice."""
    plan = layout.params
    position = itertools.count(1)  # after `step`

    def placed(leaf: LeafPlan, x: Any, rest: Any) -> jax.Array:
        sharding = rest.sharding
        if isinstance(x, jax.Array) and not (x.is_fully_addressable and _is_numeric(x)):
            there = plan.sharding(leaf, mesh)
            single = jax.jit(lambda x: pad_to(x.astype(leaf.dtype), leaf.rest_shape), out_shardings=there)
            return moved([single(x)], [sharding])[0]
        if is_lazy(x):
            return _read(leaf, x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(
            leaf.rest_shape, sharding, lambda index: _slice(leaf, host, index or ())
        )

    place = lambda leaf, x, rest: keep(next(position), placed(leaf, x, rest))
    return plan.map(place, params, layout.abstract_state(mesh).params)


def is_lazy(x: Any) -> bool:
    """Whether `x` is read when it is sliced: it has a shape, a dtype and slices, and is not converted to an array."""
    return all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__")) and not hasattr(x, "__array__")


def _read(leaf: LeafPlan, x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """The shards of a parameter that is read when it is sliced, one device after the other."""
    shards = []
    for device, index in sharding.addressable_devices_indices_map(leaf.rest_shape).items():
        home = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(_read_shard(leaf, x, index or (), home).block_until_ready())
    return jax.make_array_from_single_device_arrays(leaf.rest_shape, sharding, shards)


def _read_shard(
    leaf: LeafPlan, x: Any, index: tuple[slice, ...], home: jax.sharding.SingleDeviceSharding
) -> jax.Array:
    """One shard; above `PIECE_BYTES` it is made on its device and filled there, rows of its first dim at a time."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.rest_shape, strict=True)]
    shape = tuple(stop - start for start, stop in bounds)
    num_bytes = math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    if num_bytes <= PIECE_BYTES:
        return jax.device_put(_slice(leaf, x, index), home)
    rows = max(1, shape[0] * PIECE_BYTES // num_bytes)
    shard = jnp.zeros(shape, leaf.dtype, device=home)
    for start in range(0, shape[0], rows):
        start = min(start, shape[0] - rows)  # the last piece has the size of the others
        first = bounds[0][0] + start
        piece = _slice(leaf, x, (slice(first, first + rows), *index[1:]))
        shard = _write_rows(shard, jax.device_put(piece, home), np.int32(start)).block_until_ready()
    return shard


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(shard: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(shard, rows, start, 0)


def _is_numeric(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _slice(leaf: LeafPlan, host: Any, index: tuple[slice, ...]) -> np.ndarray:
    """One shard of a padded leaf, a fresh copy: the state is donated, and the caller's array must not be."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.rest_shape, strict=True)]
    shard = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
    inside = tuple(slice(start, min(stop, n)) for (start, stop), n in zip(bounds, leaf.shape, strict=True))
    if all(s.start < s.stop for s in inside):  # else padding alone
        part = host[inside]
        with np.errstate(over="ignore"):  # float16 masters are judged over all processes, by `_keep_finite`
            shard[tuple(slice(0, size) for size in part.shape)] = part
    return shard


def check_init_arguments(params: PyTree | Callable[..., PyTree], args: tuple[Any, ...]) -> None:
    """Raise an error if these are neither parameters nor a function that makes them from these arguments.

    Raises:
      TypeError: they are something else, or the function takes other arguments.
      ValueError: a parameter was donated.
    """
    if hasattr(params, "params") and hasattr(params, "opt_state"):
        own = isinstance(params, TrainState)
        way_out = "Go on with it, or pass engine.params(state)" if own else "Pass its .params"
        raise TypeError(
            f"making a state: found a {type_name(params)}, which is a training state, and not parameters. {way_out}."
        )
    if not is_function(params):
        check_alive(params, "the parameters", "It was donated: pass parameters that are still there.")
        return
    if callable(getattr(params, "init", None)) and callable(getattr(params, "apply", None)):
        raise TypeError(
            f"making the parameters by a {type_name(params)}: it is a module, and what makes its parameters is its "
            f"init. Write engine.init(model.init, jax.random.key(0), x), with an input x of the model."
        )
    if problem := misfit(params, *args):
        signature, reason = problem
        raise TypeError(
            f"making the parameters by {getattr(params, '__name__', 'init_fn')}{signature} with {len(args)} arguments: "
            f"{reason}. What follows the function is passed on to it: engine.init(init_fn, jax.random.key(0))."
        )


def made_shapes(init_fn: Callable[..., PyTree], args: tuple[Any, ...]) -> PyTree:
    """The shapes that a function makes. A number in the place of its key is not known to be wrong until it fails."""
    try:
        return jax.eval_shape(functools.partial(init_fn, *args))
    except (TypeError, ValueError) as error:
        if args and is_whole(args[0]):
            error.add_note(
                f"zero2jax: engine.init passed {args[0]!r} on to the function that makes the parameters. If that is to "
                f"be a random key, write engine.init(init_fn, jax.random.key({args[0]!r}))."
            )
        raise


def make_params(make: Callable[[], PyTree], layout: Layout, mesh: Mesh, keep: Keep) -> PyTree:
    """Run a function that makes full parameters so that each device, of a host if there is one, makes its shards."""
    plan, home = layout.params, layout.host or mesh

    def build() -> PyTree:
        cast = lambda leaf, x: jnp.asarray(x).astype(leaf.dtype) if leaf.dtype != jnp.result_type(x) else x
        return pad(plan.map(cast, make()), plan, home)

    shardings = [x.sharding for x in jax.tree.leaves(layout.abstract_state(mesh).params)]
    there = plan.treedef.unflatten(shardings) if layout.pinned_state else plan.shardings(home)
    leaves = moved(jax.tree.leaves(jax.jit(build, out_shardings=there)()), shardings)
    # each let go as soon as it is kept elsewhere
    return plan.treedef.unflatten([keep(1 + i, leaves.pop(0)) for i in range(len(plan.leaves))])


def make_opt_state(tx: optax.GradientTransformation, params: PyTree, layout: Layout, mesh: Mesh) -> PyTree:
    """The optimizer's initial state in its shards, from parameters in theirs."""
    home = layout.host or mesh
    build = functools.partial(init_opt_state, tx, layout, home)
    trained, treedef = jax.tree.flatten(layout.trained(params))
    of_params, of_state = layout.homes(mesh)
    there = layout.opt_state.treedef.unflatten(of_state)
    if not layout.pinned_state:
        of_params = jax.tree.leaves(layout.trained_params.shardings(home))
        there = layout.opt_state.shardings(home)
    made = jax.jit(build, out_shardings=there)(jax.tree.unflatten(treedef, moved(trained, of_params)))
    return layout.opt_state.treedef.unflatten(moved(jax.tree.leaves(made), of_state))


def init_opt_state(tx: optax.GradientTransformation, layout: Layout, home: Mesh, trained: PyTree) -> PyTree:
    """The optimizer's initial state at rest on a mesh, from trainable parameters at rest there. To be jitted."""
    if layout.pinned_state:
        trained = jax.tree.map(to_device, trained)
    opt_state = tx.init(widened(unpad(trained, layout.trained_params, home)))
    return pad(rounded(opt_state, opt_state, layout.opt_state.tree), layout.opt_state, home)
