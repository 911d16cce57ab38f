"""The programs that are compared: one model, optimizer and batch, sharded in so many ways.

Each is made anew by `make(name, case)`, so that it can be traced again; nothing is allocated before `init`. State is
(fp32 parameters, optimizer state), in shards wherever it says so; `init` starts from the same arrays everywhere.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero2jax

CLIP_NORM, WEIGHT_DECAY = 1.0, 0.01

PyTree = Any
Loss = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained on what.

    Attributes:
      loss: (params, tokens, hooks) -> scalar; `hooks` are those of `gpt.py`, and nothing for a model without.
      shapes: of the parameters.
      devices: simulated or compile-only ones, along an axis "data".
      batch_shape: of a batch; int32.
      dtype: of what the loss computes in.
      num_microbatches: taken one after the other.
      layer_dims: leading dims of each parameter that are not sharded.
      hooks: makes the hooks; None for a model without.
      logical_axes: Flax's names of each parameter's dims, by the parameter's name.
      learning_rate: of AdamW, after clipping to a norm.
    """

    loss: Loss
    shapes: PyTree
    devices: tuple
    batch_shape: tuple[int, ...]
    dtype: Any = jnp.float32
    num_microbatches: int = 1
    layer_dims: PyTree = 0
    hooks: Callable[..., Any] | None = None
    logical_axes: dict[str, tuple[str, ...]] | None = None
    learning_rate: float = 1e-3

    @functools.cached_property
    def tx(self) -> optax.GradientTransformation:
        adamw = optax.adamw(self.learning_rate, weight_decay=WEIGHT_DECAY)
        return optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw)

    @property
    def mesh(self) -> Mesh:
        return zero2jax.make_mesh(devices=self.devices, data=len(self.devices))

    @property
    def batch(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.batch_shape, jnp.int32, sharding=NamedSharding(self.mesh, P("data")))

    @functools.cached_property
    def shard_specs(self) -> PyTree:
        """Where zero2jax shards each parameter: the same dims for those who may choose."""
        plan = zero2jax.make_shard_plan(self.shapes, len(self.devices), layer_dims=self.layer_dims)
        return plan.map(lambda leaf: leaf.spec())

    def cast(self, params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(self.dtype), params)


class Program(NamedTuple):
    """A step, not traced yet.

    Attributes:
      lower: traces and lowers it.
      init: full fp32 parameters (NumPy) -> state on the devices.
      step: (state, batch) -> (state, loss); the state is donated.
    """

    lower: Callable[[], jax.stages.Lowered]
    init: Callable[[PyTree], Any]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]


def make(name: str, case: Case) -> Program:
    """One of `PROGRAMS`."""
    return PROGRAMS[name](case)


def refusal(name: str, case: Case) -> str:
    """Why a program cannot be had of a case, or of the installed jax; "" if it can."""
    if name == "explicit, reduced types" and "reduced" not in inspect.signature(P.__new__).parameters:
        return f"jax {jax.__version__} has no PartitionSpec(reduced=...)"
    engine = name.startswith("zero2jax")
    if case.hooks is None and not engine and name not in (PLAIN, "constraints on the step"):
        return "it takes part in the model, which has no hooks"
    if case.num_microbatches > 1 and not engine and name != PLAIN:
        return "it takes one microbatch"
    return ""


def plain(case: Case) -> Program:
    """Plain data parallelism: state in full on every device, gradients all-reduced."""
    full = jax.tree.map(lambda _: P(), case.shapes)

    def grads_of(params: PyTree, batch: jax.Array) -> tuple[jax.Array, PyTree]:
        loss, grads = jax.value_and_grad(case.loss)(case.cast(params), batch)
        return loss, _like(grads, params)

    def mean_of(params: PyTree, batch: jax.Array) -> tuple[jax.Array, PyTree]:
        count = case.num_microbatches
        if count == 1:
            return grads_of(params, batch)
        # every device keeps its own sequences: (devices, microbatches, ...) -> (microbatches, batch, ...)
        parts = batch.reshape(len(case.devices), count, -1, *batch.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(count, -1, *batch.shape[1:])
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(case.mesh, P(None, "data")))
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, grads_of(params, part)), None)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda x: x / count, jax.lax.scan(add, zeros, parts)[0])

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, grads = mean_of(state[0], batch)
        return _updated(case.tx, grads, state), loss

    return _jitted(case, step, case.mesh, full)


def step_constraints(case: Case) -> Program:
    """State in shards, by constraints on the step: parameters gathered before the loss, gradients scattered after."""
    mesh, specs = case.mesh, case.shard_specs
    place = lambda tree, specs: jax.tree.map(
        lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs
    )

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        full = place(case.cast(state[0]), jax.tree.map(lambda _: P(), specs))
        loss, grads = jax.value_and_grad(case.loss)(full, batch)
        return _updated(case.tx, _like(place(grads, specs), state[0]), state), loss

    return _jitted(case, step, mesh, specs)


def model_constraints(case: Case) -> Program:
    """As MaxText-style code: Flax's logical axes place parameters and activations, the compiler decides the rest."""
    mesh = case.mesh
    rules = (("batch", "data"), ("embed", "data"))

    def box(path: tuple, x: jax.ShapeDtypeStruct) -> nn.LogicallyPartitioned:
        names = case.logical_axes[path[-1].key]
        return nn.LogicallyPartitioned(x, (*["layers"] * (x.ndim - len(names)), *names))

    specs = nn.logical_to_mesh(nn.get_partition_spec(jax.tree.map_with_path(box, case.shapes)), rules)
    constrain = functools.partial(
        nn.with_logical_constraint, logical_axis_resources=("batch", "length", None), rules=rules, mesh=mesh
    )
    hooks = case.hooks(weights=case.cast, activation=constrain)

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, grads = jax.value_and_grad(case.loss)(state[0], batch, hooks)
        return _updated(case.tx, grads, state), loss

    return _jitted(case, step, mesh, specs)


def explicit(case: Case) -> Program:
    """Sharding in types: parameters `reduced` over the axis, so gradients `unreduced` until one reshard to shards.

    Not norms and positions, 1/500 of the parameters: jax refuses an elementwise operation on something reduced and
    something sharded over the same axis. Their gradients are all-reduced.
    """
    mesh = Mesh(np.array(case.devices), ("data",), axis_types=(AxisType.Explicit,))
    specs = case.shard_specs
    reshard = functools.partial(jax.tree.map, jax.sharding.reshard)
    hooks = case.hooks(lookup=lambda embed, tokens: embed.at[tokens].get(out_sharding=P("data", None, None)))

    def used_as(path: tuple, _: jax.ShapeDtypeStruct) -> P:
        matrix = path[-1].key in ("embed", "qkv", "out", "up", "down")
        return P(reduced={"data"}) if matrix else P()

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        full = reshard(case.cast(state[0]), jax.tree.map_with_path(used_as, case.shapes))
        loss, grads = jax.value_and_grad(case.loss)(full, batch, hooks)
        return _updated(case.tx, _like(reshard(grads, specs), state[0]), state), loss

    return _jitted(case, step, mesh, specs)


def by_hand(case: Case) -> Program:
    """FSDP of the tutorials: `shard_map`, an all-gather where a layer starts, again in backward; optax outside."""
    mesh, specs = case.mesh, case.shard_specs
    dims: dict[str, int | None] = {}  # that each is gathered along, inside of a layer

    def note(path: tuple, x: jax.ShapeDtypeStruct, spec: P) -> None:
        stacked = x.ndim - len(case.logical_axes[path[-1].key])
        dims[path[-1].key] = spec.index("data") - stacked if "data" in spec else None

    jax.tree.map_with_path(note, case.shapes, specs)

    def gather(params: dict) -> dict:
        full = lambda x, dim: x if dim is None else jax.lax.all_gather(x, "data", axis=dim, tiled=True)
        return {name: full(x, dims[name]) for name, x in case.cast(params).items()}

    hooks = case.hooks(weights=gather)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check_vma=False
    )
    def value_and_grad(params: PyTree, batch: jax.Array) -> tuple[jax.Array, PyTree]:
        loss, grads = jax.value_and_grad(case.loss)(params, batch, hooks)
        # The transpose of a gather is a sum over devices; what was not gathered has not been summed.
        mean = lambda g, spec: (g if "data" in spec else jax.lax.psum(g, "data")) / len(case.devices)
        return jax.lax.pmean(loss, "data"), jax.tree.map(mean, grads, specs)

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, grads = value_and_grad(state[0], batch)
        return _updated(case.tx, grads, state), loss

    return _jitted(case, step, mesh, specs)


def zero(stage: int, case: Case) -> Program:
    """zero2jax's engine at a stage."""
    engine = zero2jax.Engine(
        case.loss,
        case.tx,
        case.mesh,
        stage=stage,
        num_microbatches=case.num_microbatches,
        precision=zero2jax.Precision(case.dtype),
    )

    def lower() -> jax.stages.Lowered:
        engine.abstract_state(case.shapes, batch=case.batch)
        return engine.lower(case.batch)

    def step(state: zero2jax.TrainState, batch: jax.Array) -> tuple[zero2jax.TrainState, jax.Array]:
        state, metrics = engine.step(state, batch)
        return state, metrics["loss"]

    return Program(lower, functools.partial(engine.init, batch=case.batch), step)


PROGRAMS: dict[str, Callable[[Case], Program]] = {
    "plain data parallel": plain,
    "constraints on the step": step_constraints,
    "constraints in the model": model_constraints,
    "explicit, reduced types": explicit,
    "shard_map by hand": by_hand,
    **{f"zero2jax stage {stage}": functools.partial(zero, stage) for stage in (1, 2, 3)},
}
PLAIN = next(iter(PROGRAMS))


def _like(grads: PyTree, params: PyTree) -> PyTree:
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _updated(tx: optax.GradientTransformation, grads: PyTree, state: PyTree) -> PyTree:
    params, opt_state = state
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _jitted(case: Case, step: Callable, mesh: Mesh, specs: PyTree) -> Program:
    """A step of state placed by `specs`, as a program."""
    placed = lambda shape, spec: jax.ShapeDtypeStruct(
        shape.shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    params = jax.tree.map(placed, case.shapes, specs)
    opt_shapes = jax.eval_shape(case.tx.init, case.shapes)
    opt_state = optax.tree_map_params(
        case.tx,
        lambda shape, param: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=param.sharding),
        opt_shapes,
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P())
        ),
    )
    shapes = params, opt_state
    places = jax.tree.map(lambda x: x.sharding, shapes)
    batch = jax.ShapeDtypeStruct(case.batch_shape, jnp.int32, sharding=NamedSharding(mesh, P("data")))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, NamedSharding(mesh, P())))

    def lower() -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return jitted.lower(shapes, batch)

    def init(full: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes[1])  # AdamW begins with them
        return jax.device_put((full, zeros), places)

    def run(state: PyTree, tokens: np.ndarray) -> tuple[PyTree, jax.Array]:
        with jax.set_mesh(mesh):
            return jitted(state, jax.device_put(tokens, batch.sharding))

    return Program(lower, init, run)
