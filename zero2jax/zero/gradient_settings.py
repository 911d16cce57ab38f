"""What is fixed about the gradients of a step: which leaves have one, how each is exchanged, and in which dtypes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero2jax.base.losses import WeightedSum
from zero2jax.base.mesh import DataAxes, axis_size
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.exchange import Use, use_of_leaf
from zero2jax.zero.precision import Precision
from zero2jax.zero.quantized import Wire
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.shard_plan import ShardPlan
from zero2jax.zero.state import Layout


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """What is fixed about the gradients when a step is built.

    Attributes:
      plan: where the parameters are stored.
      trainable: per leaf, whether it has a gradient.
      step: the settings of the step.
      num_batch_shards: devices that a batch is sharded over.
      pinned: the indices of leaves whose shards the loss takes from pinned host memory.
    """

    plan: ShardPlan
    trainable: tuple[bool, ...]
    step: StepSettings
    num_batch_shards: int
    pinned: frozenset[int] = frozenset()

    @classmethod
    def of(cls, layout: Layout, step: StepSettings, mesh: Mesh) -> "GradientSettings":
        """Those of a layout of the state on a mesh."""
        settings = cls(layout.params, layout.trainable, step, axis_size(mesh, step.axes.batch))
        if not layout.pinned_params:
            return settings
        pinned = frozenset(i for k, i in enumerate(settings.trained) if k not in layout.resident_params)
        return dataclasses.replace(settings, pinned=pinned)

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

    @property
    def trained(self) -> list[int]:
        """The indices of the trainable leaves."""
        return [i for i, trainable in enumerate(self.trainable) if trainable]

    def compute_dtype(self, i: int) -> Any:
        """The dtype in which the loss sees leaf `i`."""
        leaf = self.plan.leaves[i]
        return self.precision.compute(leaf) if self.trainable[i] else leaf.dtype

    def gradient_dtype(self, i: int) -> Any:
        """The dtype in which a step's gradient of leaf `i` is kept until it is complete."""
        leaf, accumulated = self.plan.leaves[i], self.step.num_microbatches > 1
        return self.precision.accumulate(leaf) if accumulated else self.precision.summed(leaf)

    def sum_dtype(self, i: int) -> Any:
        """The dtype in which the optimizer gets that gradient, which may be reduced when it is complete."""
        return self.gradient_dtype(i) if self.step.at_use else self.precision.summed(self.plan.leaves[i])

    @property
    def predivide(self) -> float:
        """What gradients are divided by before they are summed over the devices."""
        if self.precision.predivide is not None:
            return self.precision.predivide
        return 1.0 if self.step.loss_scale is None else float(self.num_batch_shards)

    @property
    def uses(self) -> list[Use]:
        """How each leaf is gathered for the loss, and its gradient reduced."""
        prescale = 1 / self.predivide
        uses = [
            use_of_leaf(leaf, self.compute_dtype(i), self.precision.reduce(leaf), self.axis_name)
            for i, leaf in enumerate(self.plan.leaves)
        ]
        in_order, kept = self.precision.fp32_sum, self._max_kept
        return [
            dataclasses.replace(
                use,
                prescale=prescale,
                in_order=in_order,
                max_kept=most,
                pinned=i in self.pinned,
                gather_wire=self._wires(i)[0],
                reduce_wire=self._wires(i)[1],
            )
            for i, (use, most) in enumerate(zip(uses, kept, strict=True))
        ]

    def _wires(self, i: int) -> tuple[Wire | None, Wire | None]:
        """How leaf `i` is quantised when it is gathered, and its gradient when it is reduced."""
        quantize, leaf, precision = self.precision.quantize, self.plan.leaves[i], self.precision
        if quantize is None or not quantize.takes(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None, None
        if not self.trainable[i]:
            return quantize.wire(quantize.frozen_bits), None
        wide = max(dtype.itemsize for dtype in (leaf.dtype, precision.compute(leaf), precision.reduce(leaf)))
        if wide > 4 or precision.is_kept(leaf.path, leaf):
            return None, None
        return quantize.wire(quantize.params_bits), quantize.wire(quantize.grads_bits)

    def held_layer_bytes(self, mesh: Mesh) -> int:
        """Bytes of the full layers, in stacks that are scanned over, that a device holds from forward to backward."""
        if not self.step.at_use or self.step.stage == 3:
            return 0
        return sum(
            math.prod(leaf.shape) // leaf.num_model_shards(mesh) * self.compute_dtype(i).itemsize
            for i, leaf in enumerate(self.plan.leaves)
            if leaf.layer_dims
        )

    @property
    def _max_kept(self) -> list[int]:
        """Per leaf, elements up to which stage 3 keeps it: none, once all that is kept would be more than the total."""
        most, left = self.step.max_kept_size, self.step.max_kept_total
        if left is None:
            return [most] * len(self.plan.leaves)
        result = []
        for leaf in self.plan.leaves:
            size = math.prod(leaf.shape)
            is_kept = math.prod(leaf.shape[leaf.layer_dims :]) <= most and size <= left
            left -= size if is_kept else 0
            result.append(most if is_kept else 0)
        return result

    def mean_weight(self, terms: WeightedSum) -> jax.Array:
        """The mean over the devices of a slice's weight. Per-device code."""
        return jax.lax.pmean(terms.weight, self.axes.batch)

    @property
    def compute_shapes(self) -> PyTree:
        """The parameters as the loss function sees them."""
        leaves = self.plan.leaves
        return self.plan.treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype(i)) for i, leaf in enumerate(leaves)]
        )
