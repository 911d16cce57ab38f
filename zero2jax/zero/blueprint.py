"""What an engine is told that decides how the state is stored and what a step is; both come from the shapes.

Global shapes; nothing is allocated.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero2jax.base.losses import Loss, LossTerms, SliceContext
from zero2jax.base.pytrees import LeafPredicate, PyTree
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.layer_dims import guess_layer_dims, layer_dims_of_loss
from zero2jax.zero.metadata import specs_of_metadata
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.state import Layout, make_layout
from zero2jax.zero.step import StepProgram


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blueprint:
    """See `Engine` for what each is.

    Attributes:
      loss: from `losses.normalized`.
      tx: the optax transformation.
      mesh: device mesh.
      settings: of a step.
      trainable: tree of booleans or predicate; None for every leaf.
      param_specs: PartitionSpecs of mesh axes other than the data axes; None to take those of Flax's metadata.
      layer_dims: leading layer dims per parameter; None to read or to guess them.
      host: the mesh of the hosts' CPU devices, where the state is offloaded.
    """

    loss: Loss
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    settings: StepSettings
    trainable: PyTree | LeafPredicate | None
    param_specs: PyTree | None
    layer_dims: PyTree | None
    host: Mesh | None

    def layout(self, shapes: PyTree, batch: PyTree | None, loss_args: Mapping[str, PyTree]) -> Layout:
        """How the state of parameters of these shapes is stored.

        Args:
          shapes: of the parameters.
          batch: shapes of a global batch, with shardings: layer dims are then read from the loss function's scans.
          loss_args: with `batch`, shapes of what the loss function takes besides.
        """
        layer_dims = self.layer_dims
        if layer_dims is None and batch is None:
            layer_dims = guess_layer_dims(shapes)
        elif layer_dims is None:
            layer_dims = self._layer_dims_of_loss(shapes, batch, loss_args)
        return self._layout(shapes, layer_dims)

    def program(self, layout: Layout, loss: Loss | None = None) -> StepProgram:
        """The step of a layout, of another loss if one is given."""
        return StepProgram(
            loss=loss or self.loss,
            tx=self.tx,
            mesh=self.mesh,
            layout=layout,
            settings=GradientSettings.of(layout, self.settings, self.mesh),
        )

    def start(self, layout: Layout) -> dict[str, Any]:
        """What every process must have been given alike, as plain values."""
        leaves = zip(layout.params.leaves, layout.trainable, strict=True)
        return {
            **self.settings.plain,
            "offload": self.host is not None,
            "names, shapes, dtypes and trainable of the parameters": [
                [leaf.path, list(leaf.shape), str(leaf.dtype), trainable] for leaf, trainable in leaves
            ],
        }

    def _layout(self, shapes: PyTree, layer_dims: Any) -> Layout:
        specs = self.param_specs
        if specs is None:
            specs = specs_of_metadata(shapes, self.mesh, self.settings.axes.names)
        return make_layout(
            shapes,
            self.tx,
            self.mesh,
            axes=self.settings.axes,
            why_replicated="stage 0 replicates the state" if self.settings.stage == 0 else "",
            layer_dims=layer_dims,
            trainable=self.trainable,
            param_specs=specs,
            precision=self.settings.precision,
            loss_scale=self.settings.loss_scale,
            host=self.host,
        )

    def _layer_dims_of_loss(self, shapes: PyTree, batch: PyTree, loss_args: Mapping[str, PyTree]) -> PyTree:
        """The layer dims as the loss function shows them; the layout it is traced for has none, which is no matter."""
        program = self.program(self._layout(shapes, 0))

        def loss(params: PyTree, batch: PyTree, rng: SliceContext) -> LossTerms:
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), dict(loss_args)
            )  # a trace reads no values
            return program.loss(params, batch, rng._replace(loss_args=zeros))

        axes = self.settings.axes
        return layer_dims_of_loss(loss, program.settings.compute_shapes, batch, self.mesh, axes)
