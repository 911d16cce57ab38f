"""ZeRO's bytes per device: the names of the classes of memory, and the formula of each. Arithmetic on shapes.

P parameters, N shards; in bytes per parameter m of the master, k of the optimizer state, c of the compute dtype and
g of the gradient dtype (Adam in mixed precision: m = 4, k = 8, c = 2):

    stage   master   optimizer state   parameters          gradients
    0       m P      k P               c P                 g P
    1       m P / N  k P / N           c P                 g P
    2       m P / N  k P / N           c P                 g P / N
    3       m P / N  k P / N           those of one layer  g P / N

The first two are stored between steps, the others exist during a step, as does the fifth class, activations and
temporaries, which has no formula. A leaf that other mesh axes shard M ways counts as P / M. Padding is left out.

ZeRO, arXiv:1910.02054, section 5. `zero2jax.estimate` has the same formulas for a number of parameters alone.
"""

import dataclasses
import math

from jax.sharding import Mesh

from zero2jax.base.mesh import axis_size
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan
from zero2jax.zero.state import Layout

MASTER, OPTIMIZER, PARAMETERS, GRADIENTS, OTHER = CLASSES = (
    "master",
    "optimizer state",
    "parameters",
    "gradients",
    "activations and temporaries",
)


@dataclasses.dataclass(frozen=True)
class Formula:
    """What a formula gives: bytes per device, without padding, and what they are of."""

    num_bytes: int
    words: str


def class_formulas(layout: Layout, settings: GradientSettings, mesh: Mesh) -> dict[str, Formula]:
    """The formula of each class that has one, by name.

    Args:
      layout: where the state is stored.
      settings: stage and dtypes of the step.
      mesh: the mesh of the step, for the other axes that shard a leaf.
    """
    return {
        MASTER: master(layout, settings, mesh),
        OPTIMIZER: optimizer_state(layout, settings, mesh),
        PARAMETERS: parameters(settings, mesh),
        GRADIENTS: gradients(settings, mesh),
    }


def master(layout: Layout, settings: GradientSettings, mesh: Mesh) -> Formula:
    """Parameters as stored between steps: masters, and frozen leaves in their own dtype."""
    num_bytes = _stored_bytes(layout.params, mesh)
    return _over_shards("parameters at rest", num_bytes, settings, settings.step.stage >= 1)


def optimizer_state(layout: Layout, settings: GradientSettings, mesh: Mesh) -> Formula:
    """State of the optimizer."""
    num_bytes = _stored_bytes(layout.opt_state, mesh)
    return _over_shards("optimizer state", num_bytes, settings, settings.step.stage >= 1)


def parameters(settings: GradientSettings, mesh: Mesh) -> Formula:
    """Parameters as the loss sees them, as many as exist at one time."""
    leaves = list(enumerate(settings.plan.leaves))
    of_leaf = lambda i, leaf: _size(leaf, mesh) * int(settings.compute_dtype(i).itemsize)
    full = sum(of_leaf(i, leaf) for i, leaf in leaves)
    if settings.step.stage < 3:
        num_bytes, words = full, "parameters in the compute dtype"
    else:  # one layer of every stack, or one leaf outside of the stacks
        num_layers = lambda leaf: math.prod(leaf.shape[: leaf.layer_dims])
        stacks = [(i, leaf) for i, leaf in leaves if leaf.layer_dims]
        one_layer = sum(of_leaf(i, leaf) // max(num_layers(leaf), 1) for i, leaf in stacks)
        num_bytes = max(one_layer, *(of_leaf(i, leaf) for i, leaf in leaves if not leaf.layer_dims), 0)
        words = "those of one layer, or the largest outside"
    if settings.axes.rest_over_replicas:  # each group gathers its shards from the others first
        group = axis_size(mesh, settings.axes.shard)
        num_bytes, words = num_bytes + full // group, f"{words}, and a copy / {group}"
    return Formula(num_bytes, words)


def gradients(settings: GradientSettings, mesh: Mesh) -> Formula:
    """Gradients as the optimizer gets them, or as they accumulate over microbatches."""
    trained = [(i, leaf) for i, leaf in enumerate(settings.plan.leaves) if settings.trainable[i]]
    num_bytes = sum(_size(leaf, mesh) * int(settings.gradient_dtype(i).itemsize) for i, leaf in trained)
    return _over_shards("gradients", num_bytes, settings, settings.step.at_use)


def _over_shards(words: str, full_bytes: int, settings: GradientSettings, is_sharded: bool) -> Formula:
    """A shard of `full_bytes`, or all of them."""
    num_shards = settings.plan.num_shards if is_sharded else 1
    return Formula(full_bytes // num_shards, words + (f" / {num_shards}" if num_shards > 1 else ""))


def _stored_bytes(plan: ShardPlan, mesh: Mesh) -> int:
    return sum(_size(leaf, mesh) * int(leaf.dtype.itemsize) for leaf in plan.leaves)


def _size(leaf: LeafPlan, mesh: Mesh) -> int:
    """Elements of one model shard of a leaf."""
    return math.prod(leaf.shape) // leaf.num_model_shards(mesh)
