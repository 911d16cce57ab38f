"""The training engine: `init`, `step`, `evaluate`, `params` on an unmodified loss function. Global arrays.

`jax.jit`, donation and the checks before tracing live here; `step` holds the pure functions that are jitted.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.profile import ActivationProfile, profile_loss
from zero2jax.base import losses
from zero2jax.base.batches import abstract_batch, check_batch, place_batch
from zero2jax.base.losses import Loss, LossFn
from zero2jax.base.mesh import DATA_AXIS, DataAxes, axis_size, data_axes, make_mesh, replicated
from zero2jax.base.pytrees import LeafPredicate, PyTree, is_function, shapes_of
from zero2jax.base.transformation import checked_transformation
from zero2jax.processes.agreement import expect_same_start, expect_same_step, spans_processes
from zero2jax.processes.progress import STEP_EVENT
from zero2jax.programs.memory import MemoryReport, measure_memory
from zero2jax.zero.gradients import GradientSettings
from zero2jax.zero.layer_dims import guess_layer_dims, layer_dims_of_loss
from zero2jax.zero.precision import Precision
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.shard_plan import ShardPlan
from zero2jax.zero.state import (
    Layout,
    TrainState,
    check_state,
    make_layout,
    make_opt_state,
    make_params,
    place_params,
)
from zero2jax.zero.step import Metrics, StepProgram

CompilerOptions = Mapping[str, Any] | Callable[[ShardPlan], Mapping[str, Any]] | None

_MAX_EVALUATIONS = 8  # loss functions whose evaluation stays compiled


class _Compiled:
    """The functions of one layout, each compiled when it is first called. Another layout gets another object."""

    def __init__(self, program: StepProgram, options: CompilerOptions):
        self.layout = program.layout
        self._program = program
        self._options = options
        self._replicated = replicated(program.mesh)
        self.evaluations: dict[int, Any] = {}  # by the identity of the loss: it may be unhashable
        self.compared = False  # whether the processes have agreed that they run the same step
        self.profile: ActivationProfile | None = None

    @functools.cached_property
    def step(self) -> Any:
        """`(state, batch, extra arguments) -> (state, metrics)`, the state donated."""
        options = self._options
        shardings = jax.tree.map(lambda x: x.sharding, self.layout.abstract_state(self._program.mesh))
        return jax.jit(
            self._program.step,
            donate_argnums=0,
            out_shardings=(shardings, self._replicated),
            compiler_options=dict(options(self.layout.params) if callable(options) else options or {})
            or None,
        )

    @functools.cached_property
    def params(self) -> Any:
        """`parameters at rest -> full ones`."""
        return jax.jit(self._program.full_params, out_shardings=self._replicated)

    def evaluate(self, loss_fn: LossFn) -> Any:
        """`(state, batch) -> mean loss terms` of a loss function; the last few stay compiled."""
        if (
            id(loss_fn) not in self.evaluations
        ):  # what is kept holds the loss function: its id is not used again
            while len(self.evaluations) >= _MAX_EVALUATIONS:
                self.evaluations.pop(next(iter(self.evaluations)))
            program = dataclasses.replace(self._program, loss=losses.normalized(loss_fn))
            self.evaluations[id(loss_fn)] = jax.jit(program.evaluate, out_shardings=self._replicated)
        return self.evaluations[id(loss_fn)]


class Engine:
    """Trains `loss_fn` with state sharded over the data axis of `mesh`, as ZeRO stage 0, 1, 2 or 3.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, rng)`, returning the mean over the examples it
        is given as a scalar, or `(scalar, aux)`; see `zero2jax.base.losses` for the names in `aux` that have a meaning.
      tx: any optax transformation.
      mesh: mesh with an axis `axis_name` and any further axes, all of type Auto; None puts all devices on that axis.
      stage: 0 replicates the state; 1 shards masters and optimizer state; 2 also reduces gradients into shards where
        backward makes them; 3 also gathers parameters again in backward instead of holding them.
      num_microbatches: each device's part of a batch is sliced into this many, whose gradients are summed.
      batch_size: if given, every batch must have this many examples over all devices.
      precision: dtypes; bf16 compute on fp32 masters by default.
      clip_norm: clip gradients to this global norm before `tx`; None for no clipping.
      reduction: "mean" over the devices, or "sum": N times that; the reported loss is the mean.
      skip_nonfinite: leave parameters and optimizer state as they are, with `applied` False in the metrics, when the
        gradient norm is not finite.
      trainable: tree of booleans or predicate `(path, leaf) -> bool`; what is not trainable gets neither gradient
        nor optimizer state. By default every leaf is trained.
      param_specs: a PartitionSpec per parameter for mesh axes other than the data axis.
      layer_dims: number of leading layer dims per parameter (tree of ints, or one int). By default read from the
        loss if `init` is given a batch, else guessed from the tree.
      gather: "use" gathers parameters where they are used, "once" gathers them once per step (stage 2), "auto"
        takes "once" when a stage-2 step has several microbatches.
      seed: seed of the keys that `loss_fn` gets; they differ per step, device and microbatch, not by stage.
      axis_name: mesh axis that state is sharded over.
      shard_over_replicas: on a mesh with an axis `replica`, shard the state at rest over that axis too, instead of
        keeping a copy of it in each group of devices; see `zero2jax.base.mesh.DataAxes`.
      activations: what is saved of the loss function's layers for backward, and where; None leaves it to the loss.
      compiler_options: for the compilation of this step alone, as for `jax.jit`; or a function that makes them
        from the shard plan of the parameters.

    Example:
      >>> import zero2jax
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> engine = Engine(loss, optax.adam(1e-2), zero2jax.make_mesh(data=1))
      >>> state = engine.init({"w": jnp.ones((4, 2))})
      >>> state, metrics = engine.step(state, jnp.ones((8, 4)))
      >>> float(metrics["loss"])
      16.0
    """

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh | None = None,
        *,
        stage: int = 2,
        num_microbatches: int = 1,
        batch_size: int | None = None,
        precision: Precision | None = None,
        clip_norm: float | None = None,
        reduction: str = "mean",
        skip_nonfinite: bool = False,
        trainable: PyTree | LeafPredicate | None = None,
        param_specs: PyTree | None = None,
        layer_dims: PyTree | None = None,
        gather: str = "auto",
        seed: int = 0,
        axis_name: str = DATA_AXIS,
        shard_over_replicas: bool = False,
        activations: ActivationSettings | None = None,
        compiler_options: CompilerOptions = None,
    ):
        if mesh is None:
            sizes: dict[str, Any] = {axis_name: -1}
            mesh = make_mesh(**sizes)
        self.loss_fn = loss_fn
        self.mesh = mesh
        self.settings = StepSettings(
            stage=stage,
            num_microbatches=num_microbatches,
            batch_size=batch_size,
            precision=precision or Precision(),
            clip_norm=clip_norm,
            reduction=reduction,
            skip_nonfinite=skip_nonfinite,
            gather=gather,
            seed=seed,
            axes=data_axes(mesh, axis_name, rest_over_replicas=shard_over_replicas),
        )
        self.num_shards = axis_size(mesh, self.axes.rest)
        self.num_batch_shards = axis_size(mesh, self.axes.batch)
        self.config: Mapping[str, Any] | None = None  # the configuration it was made from, for the record
        self.activations = activations
        # made once: it says what it has to say once
        self._loss = losses.normalized(loss_fn)
        if activations is not None:
            self._loss = remat_layers(self._loss, activations, mesh, data_axes=self.axes.names)
        self._tx = checked_transformation(tx)
        self._trainable = trainable
        self._param_specs = param_specs
        self._layer_dims = layer_dims
        self._compiler_options = compiler_options
        self._functions: _Compiled | None = None

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self.settings.stage

    @property
    def num_microbatches(self) -> int:
        """The number of slices of each device's part of a batch."""
        return self.settings.num_microbatches

    @property
    def batch_size(self) -> int | None:
        """Examples of every batch over all devices; None takes it from the data."""
        return self.settings.batch_size

    @property
    def precision(self) -> Precision:
        """The dtypes of a step."""
        return self.settings.precision

    @property
    def axes(self) -> DataAxes:
        """The mesh axes that hold different examples."""
        return self.settings.axes

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer."""
        return self._tx

    @property
    def layout(self) -> Layout:
        """The plans of parameters and optimizer state, known once `init` or `abstract_state` has seen the shapes.

        Raises:
          ValueError: no parameters have been seen.
        """
        return self._compiled.layout

    @property
    def _compiled(self) -> _Compiled:
        if self._functions is None:
            raise ValueError(
                "asking the engine how its state is stored: it has not seen the parameters. Call engine.init(params) "
                "first, or engine.abstract_state(shapes) if the state comes from elsewhere."
            )
        return self._functions

    def abstract_state(self, params: PyTree, *, batch: PyTree | None = None) -> TrainState:
        """Shapes, dtypes and shardings of the state, from parameters or their shapes; allocates nothing.

        Args:
          params: tree of arrays or `jax.ShapeDtypeStruct`s.
          batch: arrays or shapes of a global batch: the layer dims are then read from the loss function's scans.
        """
        shapes = shapes_of(params)
        layer_dims = self._layer_dims
        if layer_dims is None:
            layer_dims = guess_layer_dims(shapes) if batch is None else self._read_layer_dims(shapes, batch)
        layout = self._make_layout(shapes, layer_dims)
        if self._functions is None or layout != self.layout:
            self._functions = _Compiled(self._program(layout), self._compiler_options)
        return layout.abstract_state(self.mesh)

    def init(
        self, params: PyTree | Callable[..., PyTree], *args: Any, batch: PyTree | None = None
    ) -> TrainState:
        """The state before the first step, straight into shards: no device ever holds a full copy.

        Args:
          params: full parameters (NumPy or JAX arrays), or a function that makes them.
          *args: arguments for that function, a key say. It runs jitted, each device making its own shards.
          batch: arrays or shapes of a global batch: the layer dims are then read from the loss function's scans.

        Raises:
          ValueError: a trainable leaf is not floating; `param_specs` or `trainable` have another structure; processes
            were given different settings, parameters or arguments (named).
        """
        if is_function(params):
            make = functools.partial(params, *args)
            abstract = self.abstract_state(jax.eval_shape(make), batch=batch)
            expect_same_start(self._start(), self.mesh, args)
            placed = make_params(make, self.layout.params, self.mesh)
        else:
            abstract = self.abstract_state(params, batch=batch)
            expect_same_start(self._start(), self.mesh, params)
            placed = place_params(params, self.layout.params, self.mesh)
        opt_state = make_opt_state(self._tx, placed, self.layout, self.mesh)
        first = lambda: (jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(self.settings.seed)))
        step, rng = jax.jit(first, out_shardings=(abstract.step.sharding, abstract.rng.sharding))()
        return TrainState(step=step, params=placed, opt_state=opt_state, rng=rng)

    def step(self, state: TrainState, batch: PyTree, **extra_args: Any) -> tuple[TrainState, Metrics]:
        """Update once on a global batch. The state is donated: use the one that is returned.

        Args:
          state: from `init` or the previous step.
          batch: pytree of arrays (batch, ...), NumPy or JAX; sharded over devices, then sliced into microbatches.
          **extra_args: passed on to the transformation's update, arrays; `value` (the loss) is always passed.

        Returns:
          The new state, and metrics, replicated scalars unless said otherwise: `loss`, the (weighted) mean over the
          batch; `grad_norm` and `grad_norm_clipped`, the global norm before and after `clip_norm`; `learning_rate`,
          NaN if the optimizer's state does not show it (`optax.inject_hyperparams` does); `applied`, whether the
          update was; `weight`, the total weight; `aux`, what the loss function returned besides, averaged; with
          `profile` in the activation settings, `activation_profile`, measured before the first step.

        Raises:
          ValueError: the batch does not divide; the state has another structure; the loss is not a scalar;
            at the first step, processes were given different loss functions or optimizers (named).
        """
        # Processes compare how many steps they have begun.
        jax.monitoring.record_event(STEP_EVENT, num_devices=self.mesh.devices.size)
        check_state(state, self.layout)
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        placed = place_batch(batch, self.mesh, self.axes.batch)
        wanted = self.activations is not None and self.activations.profile
        profile = self._profiled(batch) if wanted else None  # before the state is donated
        compiled = self._compiled
        if not compiled.compared and spans_processes(self.mesh):
            expect_same_step(compiled.step.lower(state, placed, extra_args))
            compiled.compared = True
        state, metrics = compiled.step(state, placed, extra_args)
        # said here: inside the step, jax_debug_nans would stumble over it
        if metrics["learning_rate"] is None:
            metrics["learning_rate"] = np.float32(np.nan)
        if profile is not None:
            metrics["activation_profile"] = profile.as_dict()
        return state, metrics

    def evaluate(self, state: TrainState, batch: PyTree, *, loss_fn: LossFn | None = None) -> Any:
        """The mean loss over a global batch, without an update; `(loss, aux)` if the loss function returns that.

        Parameters are gathered where they are used, as in a step. `batch` must divide over the devices only.
        `loss_fn` stands in for the engine's, to turn dropout off, say. The state is not donated.
        """
        check_state(state, self.layout)
        check_batch(batch, self.num_batch_shards, 1)
        evaluate = self._compiled.evaluate(loss_fn or self.loss_fn)
        means = self._settled(evaluate(state, place_batch(batch, self.mesh, self.axes.batch)))
        return means.loss if means.aux is None else (means.loss, means.aux)

    def params(self, state: TrainState) -> PyTree:
        """Full parameters on every device, fp32 masters at their true shapes, gathered a layer at a time."""
        check_state(state, self.layout)
        return self._settled(self._compiled.params(state.params))

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """The step lowered for a batch of these shapes (arrays or shapes), to compile, count and audit."""
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        state = self.layout.abstract_state(self.mesh)
        return self._compiled.step.lower(state, abstract_batch(batch, self.mesh, self.axes.batch), {})  # type: ignore[no-any-return]

    def memory(self, state: TrainState, batch: PyTree) -> MemoryReport:
        """Measured bytes per device by class beside the formula; compiles the step for `batch` (arrays or shapes)."""
        check_state(state, self.layout)
        program = self._program(self.layout)
        shapes = (self.layout.abstract_state(self.mesh), abstract_batch(batch, self.mesh, self.axes.batch))
        gradients = jax.jit(program.gradients).lower(*shapes).compile()
        return measure_memory(
            state, self.lower(batch).compile(), gradients, self.layout, program.settings, self.mesh
        )

    def activation_profile(self, batch: PyTree) -> ActivationProfile:
        """Time and bytes of each kind of checkpointed segment, one microbatch of a batch of these shapes at a time.

        Compiles and runs the phases of a segment apart from the step; see `zero2jax.activations.profile`.

        Raises:
          ValueError: the engine has no activation settings.
        """
        if self.activations is None:
            raise ValueError(
                "profiling saved activations: this engine leaves them to the loss function. Pass "
                "Engine(activations=ActivationSettings(...)), or switch on a key of activation_checkpointing."
            )
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        shapes = self.layout.abstract_state(self.mesh), abstract_batch(batch, self.mesh, self.axes.batch)
        trace = lambda loss: jax.eval_shape(self._program(self.layout, loss).gradients, *shapes)
        device = self.mesh.local_devices[0]
        return profile_loss(losses.normalized(self.loss_fn), self.activations, trace, device)

    def _profiled(self, batch: PyTree) -> ActivationProfile:
        """The profile, measured and printed once."""
        compiled = self._compiled
        if compiled.profile is None:
            compiled.profile = self.activation_profile(batch)
            if jax.process_index() == 0:
                print(compiled.profile)
        return compiled.profile

    def _settled(self, result: Any) -> Any:
        """`result`, waited for on simulated devices: there, programs that do not depend on each other and run at the
        same time can each hold threads that the other's collectives wait for.
        """
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(result) if on_cpu else result

    def _start(self) -> dict[str, Any]:
        """What every process must have been given alike, as plain values."""
        leaves = zip(self.layout.params.leaves, self.layout.trainable, strict=True)
        return {
            **self.settings.plain,
            "names, shapes, dtypes and trainable of the parameters": [
                [leaf.path, list(leaf.shape), str(leaf.dtype), trainable] for leaf, trainable in leaves
            ],
        }

    def _read_layer_dims(self, shapes: PyTree, batch: PyTree) -> PyTree:
        """The layer dims as the loss function shows them; the layout it is traced for has none, which is no matter."""
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        program = self._program(self._make_layout(shapes, 0))
        placed = abstract_batch(batch, self.mesh, self.axes.batch)
        return layer_dims_of_loss(program.loss, program.settings.compute_shapes, placed, self.mesh, self.axes)

    def _make_layout(self, shapes: PyTree, layer_dims: PyTree) -> Layout:
        return make_layout(
            shapes,
            self._tx,
            self.mesh,
            axes=self.axes,
            whole="stage 0 replicates the state" if self.stage == 0 else "",
            layer_dims=layer_dims,
            trainable=self._trainable,
            param_specs=self._param_specs,
        )

    def _program(self, layout: Layout, loss: Loss | None = None) -> StepProgram:
        return StepProgram(
            loss=loss or self._loss,
            tx=self._tx,
            mesh=self.mesh,
            layout=layout,
            settings=GradientSettings(plan=layout.params, trainable=layout.trainable, step=self.settings),
        )
