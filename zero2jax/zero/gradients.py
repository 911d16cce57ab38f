"""Gradients of one step, from shards of the parameters to shards of the gradients. Per-device code.

Runs inside a `shard_map` that is manual over the data axes; what leaves it are sums over devices and microbatches.

  stage 0, 1   parameters are gathered once; whole gradients accumulate on each device and are all-reduced (0) or
               reduce-scattered (1) once, after the last microbatch
  stage 2, 3   parameters appear at their point of use (`point_of_use`), where backward reduce-scatters their gradient;
               microbatches add into a sharded accumulator

With `gather_once`, stage 2 gathers whole parameters before the microbatches, P bytes instead of K x P for K
microbatches, and only the gradients are handled at the point of use. Whole stacks of layers are gathered and
scattered one layer at a time: in one piece, the compiler copies the whole stack into another layout.

Over a mesh with groups of devices (`mesh.DataAxes`) all of this happens inside a group; then the shards of the
gradients are summed over the groups, once per step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero2jax.base import jaxprs, losses
from zero2jax.base.losses import Loss, LossTerms, SliceKey
from zero2jax.base.mesh import DataAxes
from zero2jax.base.pytrees import PyTree
from zero2jax.zero import exchange
from zero2jax.zero.point_of_use import Standin, Use, evaluate, gather, reduce_grad, scan_depths, use_of_leaf
from zero2jax.zero.precision import Precision
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """What is fixed about the gradients when a step is built.

    Attributes:
      plan: where the parameters rest.
      trainable: per leaf, whether it has a gradient.
      step: the settings of the step.
    """

    plan: ShardPlan
    trainable: tuple[bool, ...]
    step: StepSettings

    @property
    def axes(self) -> DataAxes:
        """The mesh axes that hold different examples."""
        return self.step.axes

    @property
    def precision(self) -> Precision:
        """The dtypes of the step."""
        return self.step.precision

    @property
    def axis_name(self) -> str:
        """The data axis."""
        return self.axes.shard

    def compute_dtype(self, i: int) -> Any:
        """The dtype in which the loss sees leaf `i`."""
        leaf = self.plan.leaves[i]
        return self.precision.compute(leaf) if self.trainable[i] else leaf.dtype

    def gradient_dtype(self, i: int) -> Any:
        """The dtype in which a step's gradient of leaf `i` is kept until the optimizer sees it."""
        accumulated = self.step.num_microbatches > 1
        reduced = self.precision.reduce(self.plan.leaves[i])
        return jnp.dtype(self.precision.accumulate_dtype) if accumulated else reduced

    def use(self, i: int, *, gathered: bool = False) -> Use:
        """How leaf `i` appears."""
        return use_of_leaf(self.plan.leaves[i], self.compute_dtype(i), self.axis_name, gathered=gathered)

    @property
    def compute_shapes(self) -> PyTree:
        """The parameters as the loss function sees them."""
        leaves = self.plan.leaves
        return self.plan.treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype(i)) for i, leaf in enumerate(leaves)]
        )


class _Strategy(NamedTuple):
    """How gradients of the trainable leaves come about, in the order of the leaves.

    Fields:
      gradient: (batch, rng) -> (weight x gradient per leaf, weighted loss terms) of one microbatch.
      shapes: shape of each gradient.
      finish: accumulated gradients -> this device's shards of their sum over the devices.
    """

    gradient: Callable[[PyTree, SliceKey], tuple[list[jax.Array], LossTerms]]
    shapes: list[tuple[int, ...]]
    finish: Callable[[list[jax.Array]], list[jax.Array]]


def local_gradients(
    loss: Loss, settings: GradientSettings, params: PyTree, batch: PyTree, rng: SliceKey
) -> tuple[list[jax.Array], LossTerms]:
    """Sums over all devices and microbatches of weight x gradient, and of the weighted loss terms.

    Args:
      loss: from `losses.normalized`.
      settings: see `GradientSettings`.
      params: this device's shards at rest.
      batch: this device's part of the batch; every leaf (B, ...), with B a multiple of K.
      rng: key of this step, the same on all devices; each device and microbatch gets its own index.

    Returns:
      One gradient shard per trainable leaf, in the shape of its shard at rest and the leaf's reduce dtype, or the
      accumulation dtype if K > 1 and stage >= 2; and the totals, the same on every device.
    """
    shards = _group_shards(settings, params)
    strategy = (_whole if settings.step.stage <= 1 else _at_use)(loss, settings, shards)
    num = settings.step.num_microbatches
    first = jax.lax.axis_index(settings.axes.names) * num
    if num == 1:
        grads, terms = strategy.gradient(batch, rng._replace(slice_index=first))
    else:
        grads, terms = _accumulated(strategy, settings, batch, lambda i: rng._replace(slice_index=first + i))
    return _over_groups(settings, strategy.finish(grads)), losses.over_devices(terms, settings.axes.names)


def _accumulated(
    strategy: _Strategy, settings: GradientSettings, batch: PyTree, key: Callable[[jax.Array], SliceKey]
) -> tuple[list[jax.Array], LossTerms]:
    """Sum gradients over the microbatches in a loop, in the accumulation dtype."""
    num = settings.step.num_microbatches
    slices = jax.tree.map(lambda x: x.reshape(num, x.shape[0] // num, *x.shape[1:]), batch)  # (K, B/K, ...)

    def step(total: list[jax.Array], inputs: Any) -> tuple[list[jax.Array], LossTerms]:
        i, part = inputs
        grads, terms = strategy.gradient(part, key(i))
        return [t + g.astype(t.dtype) for t, g in zip(total, grads, strict=True)], terms

    zeros = [jnp.zeros(shape, settings.precision.accumulate_dtype) for shape in strategy.shapes]
    grads, stacked = jax.lax.scan(step, zeros, (jnp.arange(num), slices))
    return grads, losses.over_microbatches(stacked)


def _trainable(settings: GradientSettings) -> list[int]:
    return [i for i, trainable in enumerate(settings.trainable) if trainable]


def _weighted_loss(loss: Loss, params: PyTree, batch: PyTree, rng: SliceKey) -> tuple[jax.Array, LossTerms]:
    terms = losses.weighted(loss(params, batch, rng))
    return terms.loss, terms


def _whole(loss: Loss, settings: GradientSettings, shards: Sequence[jax.Array]) -> _Strategy:
    """Stages 0 and 1: whole parameters, whole gradients, reduced once."""
    trained, leaves = _trainable(settings), settings.plan.leaves
    params = gather_params(settings, shards)

    def objective(trainable: list[jax.Array], batch: PyTree, rng: SliceKey) -> tuple[jax.Array, LossTerms]:
        full = list(params)
        for i, x in zip(trained, trainable, strict=True):
            full[i] = x
        return _weighted_loss(loss, settings.plan.treedef.unflatten(full), batch, rng)

    def gradient(batch: PyTree, rng: SliceKey) -> tuple[list[jax.Array], LossTerms]:
        values = [params[i] for i in trained]
        (_, terms), grads = jax.value_and_grad(objective, has_aux=True)(values, batch, rng)
        return grads, terms

    shapes = [leaves[i].shape for i in trained]
    return _Strategy(gradient, shapes, lambda grads: _reduce_by_layer(settings, trained, grads))


def _at_use(loss: Loss, settings: GradientSettings, shards: Sequence[jax.Array]) -> _Strategy:
    """Stages 2 and 3: each parameter appears, and its gradient is reduced, where it is used."""
    trained = _trainable(settings)
    once = settings.step.gather_once
    sources = gather_params(settings, shards) if once else shards
    uses = [settings.use(i, gathered=once) for i in range(len(sources))]
    dtypes = [settings.precision.reduce(settings.plan.leaves[i]) for i in trained]

    def objective(ports: list[jax.Array], batch: PyTree, rng: SliceKey) -> tuple[jax.Array, LossTerms]:
        weighted = lambda params, batch, rng: _weighted_loss(loss, params, batch, rng)
        port_of = dict(zip(trained, ports, strict=True))
        standins = [
            Standin(use, x, port_of.get(i)) for i, (use, x) in enumerate(zip(uses, sources, strict=True))
        ]
        return _evaluated(weighted, settings, standins, batch, rng, regather=settings.step.stage == 3)

    def gradient(batch: PyTree, rng: SliceKey) -> tuple[list[jax.Array], LossTerms]:
        ports = [jnp.zeros(shards[i].shape, dtype) for i, dtype in zip(trained, dtypes, strict=True)]
        (_, terms), grads = jax.value_and_grad(objective, has_aux=True)(ports, batch, rng)
        return grads, terms

    return _Strategy(gradient, [shards[i].shape for i in trained], lambda grads: grads)


def local_loss(
    loss: Loss, settings: GradientSettings, params: PyTree, batch: PyTree, rng: SliceKey
) -> LossTerms:
    """Totals of the loss terms over all devices, without gradients; parameters appear where they are used."""
    shards = _group_shards(settings, params)
    standins = [Standin(settings.use(i), x, None) for i, x in enumerate(shards)]
    rng = rng._replace(slice_index=jax.lax.axis_index(settings.axes.names))
    terms = _evaluated(loss, settings, standins, batch, rng, regather=False)
    return losses.over_devices(losses.weighted(terms), settings.axes.names)


def _evaluated(
    fun: Callable[..., Any],
    settings: GradientSettings,
    standins: list[Standin],
    batch: PyTree,
    rng: SliceKey,
    *,
    regather: bool,
) -> Any:
    """`fun(params, batch, rng)` with stand-ins in the place of the parameters."""
    jaxpr, out = jaxprs.trace(fun, settings.compute_shapes, batch, rng)
    flat = evaluate(jaxpr, [*standins, *jax.tree.leaves((batch, rng))], regather=regather)
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def whole_params(settings: GradientSettings, params: PyTree) -> PyTree:
    """Parameters at rest, whole on every device, in their compute dtype and without padding."""
    return settings.plan.treedef.unflatten(gather_params(settings, _group_shards(settings, params)))


def _group_shards(settings: GradientSettings, params: PyTree) -> list[jax.Array]:
    """This device's shard inside its group of each leaf; gathered over the groups, if the state is cut over them."""
    shards = settings.plan.treedef.flatten_up_to(params)
    replica = settings.axes.replica
    if replica is None or not settings.axes.rest_over_replicas:
        return shards

    def one(i: int, use: Use, x: jax.Array) -> jax.Array:
        if use.dim is None:
            return x
        return exchange.all_gather(x.astype(use.dtype), replica, use.dim, use.placement)

    return _by_leaf(one, settings, list(range(len(shards))), shards)


def _over_groups(settings: GradientSettings, grads: list[jax.Array]) -> list[jax.Array]:
    """Gradients summed inside each group -> this device's shards at rest of their sum over the groups."""
    replica = settings.axes.replica
    if replica is None:
        return grads

    def one(i: int, use: Use, x: jax.Array) -> jax.Array:
        if use.dim is None or not settings.axes.rest_over_replicas:
            return exchange.psum(x, replica, use.placement)
        return exchange.psum_scatter(x, replica, use.dim, use.placement)

    return _by_leaf(one, settings, _trainable(settings), grads)


def gather_params(settings: GradientSettings, shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Every leaf whole, in its compute dtype and without padding, stacks of layers one layer at a time."""
    return _by_leaf(lambda i, use, x: gather(use, x), settings, list(range(len(shards))), shards)


def _reduce_by_layer(
    settings: GradientSettings, trained: list[int], grads: list[jax.Array]
) -> list[jax.Array]:
    """This device's shard of every trainable leaf's gradient, stacks of layers one layer at a time."""
    dtype = lambda i: settings.precision.reduce(settings.plan.leaves[i])
    return _by_leaf(lambda i, use, g: reduce_grad(use, g, dtype(i)), settings, trained, grads)


def _by_leaf(
    fun: Callable[[int, Use, jax.Array], jax.Array],
    settings: GradientSettings,
    indices: list[int],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """`fun(i, use, array)` for the arrays of some leaves, stacks of layers one layer at a time."""
    depths = [_loop_dims(settings.plan.leaves[i]) for i in indices]
    uses = [settings.use(i) for i in indices]
    return _by_layer(lambda k, use, x: fun(indices[k], use, x), uses, depths, arrays)


def _loop_dims(leaf: LeafPlan) -> int:
    """How many leading dims a loop over layers takes off; a leaf that is whole needs no loop."""
    return 0 if leaf.dim is None else leaf.layer_dims


def _by_layer(
    fun: Callable[[int, Use, jax.Array], jax.Array],
    uses: Sequence[Use],
    depths: Sequence[int],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """`fun(i, use, array)` for each array, in a loop over the first `depth` dims; stacks of equal length share it."""
    out = {i: fun(i, uses[i], x) for i, x in enumerate(arrays) if depths[i] == 0}
    stacks: dict[int, list[int]] = {}
    for i, depth in enumerate(depths):
        if depth:
            stacks.setdefault(arrays[i].shape[0], []).append(i)
    for members in stacks.values():

        def layer(slices: list[jax.Array], members: list[int] = members) -> list[jax.Array]:
            inner = lambda k, use, x: fun(members[k], use, x)
            return _by_layer(
                inner, [uses[i].layer for i in members], [depths[i] - 1 for i in members], slices
            )

        out.update(zip(members, jax.lax.map(layer, [arrays[i] for i in members]), strict=True))
    return [out[i] for i in range(len(arrays))]


def layer_dims_of_loss(loss: Loss, shapes: PyTree, batch: PyTree, rng: SliceKey) -> PyTree:
    """The number of leading layer dims per parameter, read from the loss function's scans; shapes are enough."""
    jaxpr, _ = jaxprs.trace(loss, shapes, batch, rng)
    leaves, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(treedef, scan_depths(jaxpr, len(leaves)))
