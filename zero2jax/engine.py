"""The training engine: `init`, `step`, `evaluate`, `params` on an unmodified loss function. Global arrays.

The checks before tracing live here; `zero.step` holds the pure functions, and `zero.compiled` jits them.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.profile import ActivationProfile, profile_loss
from zero2jax.base import losses
from zero2jax.base.batches import (
    abstract_batch,
    abstract_loss_args,
    check_apart,
    check_batch,
    place_batch,
    place_loss_args,
)
from zero2jax.base.losses import LossFn
from zero2jax.base.mesh import DATA_AXIS, DataAxes, axis_size, data_axes, make_mesh
from zero2jax.base.pytrees import LeafPredicate, PyTree, check_alive, is_function, is_traced, shapes_of
from zero2jax.base.transformation import checked_transformation
from zero2jax.offload.between import from_host, to_host
from zero2jax.offload.functions import functions_of, offloaded_layout
from zero2jax.offload.host_mesh import host_mesh
from zero2jax.offload.settings import OffloadSettings
from zero2jax.processes.agreement import (
    expect_same_start,
    expect_same_step,
    gather_over,
    spans_processes,
)
from zero2jax.processes.progress import STEP_EVENT
from zero2jax.processes.start import expect_joined
from zero2jax.programs.memory import MemoryReport, measure_memory
from zero2jax.zero.blueprint import Blueprint
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.loss_scale import ExhaustionWatch, LossScale
from zero2jax.zero.placement import (
    check_init_arguments,
    made_shapes,
    make_params,
    place_params,
)
from zero2jax.zero.precision import Precision
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.state import Layout, TrainState, check_state, place_state
from zero2jax.zero.step import Metrics

LossArgs = Mapping[str, PyTree] | None
"""Arrays that are not per example, by the names that the loss function has for them."""


class Engine:
    """Trains `loss_fn` with state sharded over the data axis of `mesh`, as ZeRO stage 0, 1, 2 or 3.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, rng)`, returning the mean over the examples it
        is given as a scalar, or `(scalar, aux)`; see `zero2jax.base.losses` for the names in `aux` that have a meaning.
      tx: an optax transformation; its update may ask for the loss as a function, see `step`.
      mesh: mesh with an axis `axis_name` and any further axes, all of type Auto; None puts all devices on that axis.
      stage: 0 replicates the state; 1 shards masters and optimizer state; 2 also reduces gradients into shards where
        backward makes them; 3 also gathers parameters again in backward instead of holding them.
      num_microbatches: each device's part of a batch is sliced into this many, whose gradients are summed.
      batch_size: if given, every batch must have this many examples over all devices.
      precision: dtypes; bf16 compute on fp32 masters by default. A dtype or its name alone is the compute dtype.
      clip_norm: clip gradients to this global norm before `tx`; None for no clipping.
      reduction: "mean" over the devices, or "sum": N times that; the reported loss is the mean.
      skip_nonfinite: leave parameters and optimizer state as they are, with `applied` False in the metrics, when the
        gradient norm is not finite.
      loss_scale: of backward, a number being a static scale; steps whose gradients overflow are skipped. By default
        dynamic with float16 in `precision`, else none.
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
      offload: what is stored in host memory, and where it is updated; None keeps all of it on the devices.
      compiler_options: for the compilation of this step alone, as for `jax.jit`; or a function that makes them
        from the shard plan of the parameters.

    Example:
      >>> import jax.numpy as jnp, optax, zero2jax
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> engine = zero2jax.Engine(loss, optax.adam(1e-2), zero2jax.make_mesh(data=1))
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
        precision: Precision | DTypeLike | None = None,
        clip_norm: float | None = None,
        reduction: str = "mean",
        skip_nonfinite: bool = False,
        loss_scale: LossScale | float | None = None,
        trainable: PyTree | LeafPredicate | None = None,
        param_specs: PyTree | None = None,
        layer_dims: PyTree | None = None,
        gather: str = "auto",
        seed: int = 0,
        axis_name: str = DATA_AXIS,
        shard_over_replicas: bool = False,
        activations: ActivationSettings | None = None,
        offload: OffloadSettings | None = None,
        compiler_options: CompilerOptions = None,
    ):
        expect_joined()
        self.loss_fn = loss_fn
        self.mesh = mesh = make_mesh(**dict[str, Any]({axis_name: -1})) if mesh is None else mesh
        self.settings = StepSettings(
            stage=stage,
            num_microbatches=num_microbatches,
            batch_size=batch_size,
            precision=Precision.of(precision),
            clip_norm=clip_norm,
            reduction=reduction,
            skip_nonfinite=skip_nonfinite,
            loss_scale=LossScale.of(loss_scale),
            gather=gather,
            seed=seed,
            axes=data_axes(mesh, axis_name, rest_over_replicas=shard_over_replicas),
        )
        self.num_shards = axis_size(mesh, self.axes.rest)
        self.num_batch_shards = axis_size(mesh, self.axes.batch)
        self.config: Mapping[str, Any] | None = None  # the configuration it was made from, for the record
        self.activations = activations
        self.offload = offload
        # made once: it says what it has to say once
        loss = losses.normalized(loss_fn)
        if activations is not None:
            loss = remat_layers(loss, activations, mesh, data_axes=self.axes.names)
        self._blueprint = Blueprint(
            loss=loss,
            tx=checked_transformation(tx),
            mesh=mesh,
            settings=self.settings,
            trainable=trainable,
            param_specs=param_specs,
            layer_dims=layer_dims,
            host=None if offload is None else host_mesh(mesh, offload),
        )
        self._compiler_options = compiler_options
        self._functions: Compiled | None = None
        self._watch = ExhaustionWatch(self.settings.loss_scale)
        self._profile: tuple[Compiled, ActivationProfile] | None = None

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
        return self._blueprint.tx

    @property
    def layout(self) -> Layout:
        """The plans of parameters and optimizer state, known once `init` or `abstract_state` has seen the shapes.

        Raises:
          ValueError: no parameters have been seen.
        """
        return self._compiled.layout

    @property
    def functions(self) -> Compiled:
        """What the engine runs, jitted for the layout."""
        return self._compiled

    @property
    def _compiled(self) -> Compiled:
        if self._functions is None:
            raise ValueError(
                "asking the engine how its state is stored: it has not seen the parameters. Call engine.init(params) "
                "first, or engine.abstract_state(shapes) if the state comes from elsewhere."
            )
        return self._functions

    def abstract_state(
        self, params: PyTree, *, batch: PyTree | None = None, loss_args: LossArgs = None
    ) -> TrainState:
        """Shapes, dtypes and shardings of the state, from parameters or their shapes; allocates nothing.

        Args:
          params: tree of arrays or `jax.ShapeDtypeStruct`s.
          batch: arrays or shapes of a global batch: the layer dims are then read from the loss function's scans.
          loss_args: with `batch`, what the loss function takes besides, as for `step`; shapes are enough.
        """
        shapes = shapes_of(params)
        if batch is not None:
            check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
            batch = abstract_batch(batch, self.mesh, self.axes.batch)
        layout = self._blueprint.layout(shapes, batch, shapes_of(dict(loss_args or {})))
        if self.offload is not None:
            layout = offloaded_layout(self._blueprint.program(layout), self.offload)
        if self._functions is None or layout != self.layout:
            program = self._blueprint.program(layout)
            self._functions = functions_of(program, self._compiler_options, self.offload)
        return layout.abstract_state(self.mesh)

    def init(
        self,
        params: PyTree | Callable[..., PyTree],
        *args: Any,
        batch: PyTree | None = None,
        loss_args: LossArgs = None,
    ) -> TrainState:
        """The state before the first step, straight into shards: no device ever holds a full copy.

        Args:
          params: full parameters (NumPy or JAX arrays), or a function that makes them.
          *args: arguments for that function, a key say. It runs jitted, each device making its own shards.
          batch: arrays or shapes of a global batch: the layer dims are then read from the loss function's scans.
          loss_args: with `batch`, what the loss function takes besides, as for `step`; shapes are enough.

        Raises:
          ValueError: a trainable leaf is not floating; `param_specs` or `trainable` have another structure; processes
            were given different settings, parameters or arguments (named).
          TypeError: the function takes other arguments.
        """
        with self._running():
            check_init_arguments(params, args)
            is_made = is_function(params)
            if not is_made:
                check_alive(params, "the parameters", "It was donated: pass parameters that are still there.")
            shapes = made_shapes(params, args) if is_made else params
            abstract = self.abstract_state(shapes, batch=batch, loss_args=loss_args)
            expect_same_start(self._blueprint.start(self.layout), self.mesh, args if is_made else params)
            self.functions.check_room(gather_over(self.mesh))
            where = self.layout, self.mesh, self.functions.keep
            made = functools.partial(params, *args) if is_made else params
            placed = make_params(made, *where) if is_made else place_params(made, *where)
            opt_state = self._compiled.first_opt_state(placed)
            first = functools.partial(self.layout.first_scalars, self.settings.seed)
            step, rng, loss_scale = jax.jit(first, out_shardings=abstract.step.sharding)()
        self._watch.forget()
        return TrainState(step=step, params=placed, opt_state=opt_state, rng=rng, loss_scale=loss_scale)

    def step(
        self, state: TrainState, batch: PyTree, *, loss_args: LossArgs = None, **extra_args: Any
    ) -> tuple[TrainState, Metrics]:
        """Update once on a global batch. The state is donated: use the one that is returned.

        Args:
          state: from `init` or the previous step.
          batch: pytree of arrays (batch, ...), NumPy or JAX; sharded over devices, then sliced into microbatches.
          loss_args: arrays that are not per example, by name: the loss function gets each as a keyword argument, as it
            is on every device and in every microbatch. Other values compile nothing.
          **extra_args: passed on to the transformation's update, arrays. What it asks for of `value`, `grad` (the loss
            and its gradient), `value_fn`, `obj_fn` and `grad_fn` (of other parameters, the same batch) it gets.

        Returns:
          The new state, and metrics, replicated scalars unless said otherwise: `loss`, the (weighted) mean over the
          batch; `grad_norm`, the global norm, and, with `clip_norm`, `grad_norm_clipped`, the norm after it;
          `learning_rate`, NaN if the optimizer's state does not show it (`optax.inject_hyperparams` does); `applied`,
          whether the update was; `weight`, the total weight; `aux`, what the loss function returned besides, if it did,
          averaged; `loss_scale`, `num_skipped` and `loss_scale_exhausted` with a loss scale (`LossScale.after`);
          `activation_profile`, measured before the first step, with `profile` in the activation settings.

        Raises:
          ValueError: the batch does not divide; the state has another structure or was donated; the loss is not a
            scalar; at the first step, processes were given different loss functions or optimizers (named).
          TypeError: the loss function takes other arguments.
          LossScaleError: two steps before, gradients overflowed at the minimum loss scale.
        """
        # Processes compare how many steps they have begun.
        jax.monitoring.record_event(STEP_EVENT, num_devices=self.mesh.devices.size)
        state = place_state(state, self.layout, self.mesh)
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        check_apart(state, {"the batch": batch, "loss_args": loss_args, "the extra arguments": extra_args})
        args = (state, *self._placed(batch, loss_args), extra_args)
        wanted = self.activations is not None and self.activations.profile
        profile = self._profiled(batch, loss_args) if wanted else None  # before the state is donated
        compiled, traced = self._compiled, is_traced(args)
        with self._running(traced):
            if not traced:
                self._watch.check()
            if not compiled.compared and spans_processes(self.mesh) and not traced:
                expect_same_step(compiled.programs(*args))
                compiled.compared = True
            state, metrics = (compiled.step_inside if traced else compiled.step)(*args)
        if not traced:
            self._watch.note(metrics)
        # said here: inside the step, jax_debug_nans would stumble over it
        if metrics["learning_rate"] is None:
            metrics["learning_rate"] = np.float32(np.nan)
        if profile is not None:
            metrics["activation_profile"] = profile.as_dict()
        return state, metrics

    def evaluate(
        self, state: TrainState, batch: PyTree, *, loss_fn: LossFn | None = None, loss_args: LossArgs = None
    ) -> Any:
        """The mean loss over a global batch, without an update; `(loss, aux)` if the loss function returns that.

        Parameters are gathered where they are used, as in a step. `batch` must divide over the devices only.
        `loss_fn` stands in for the engine's, to turn dropout off, say; `loss_args` as for `step`. The state is not
        donated.
        """
        state = place_state(state, self.layout, self.mesh)
        check_batch(batch, self.num_batch_shards, 1)
        evaluate = self._compiled.evaluate(loss_fn or self.loss_fn)
        args = (self._compiled.on_devices(state), *self._placed(batch, loss_args))
        with self._running(is_traced(args)):
            means = self._settled(evaluate(*args))
        return means.loss if means.aux is None else (means.loss, means.aux)

    def params(self, state: TrainState) -> PyTree:
        """Full parameters on every device, fp32 masters at their true shapes, gathered a layer at a time."""
        state = place_state(state, self.layout, self.mesh)
        with self._running(is_traced(state)):
            return self._settled(self._compiled.params(state.params))

    def offload_state(
        self, state: TrainState, include: Collection[str] = ("params", "opt_state")
    ) -> TrainState:
        """The state with the parts named moved to pinned host memory, for a phase that needs the devices' memory.

        The buffers on the devices are gone: use the state that is returned. It can be saved; a step takes it after
        `reload_state`. Of an engine that offloads, the copies on the devices are let go, too.

        Raises:
          ValueError: a part is neither "params" nor "opt_state"; the devices have no pinned host memory.
        """
        check_state(state, self.layout)
        self._compiled.forget_copies()
        return to_host(state, self.layout, self.mesh, include)

    def reload_state(self, state: TrainState) -> TrainState:
        """The state of `offload_state` back where a step takes it, bit for bit; of another state, itself."""
        check_state(state, self.layout)
        return from_host(state, self.layout, self.mesh)

    def lower(self, batch: PyTree, *, loss_args: LossArgs = None) -> jax.stages.Lowered:
        """The step lowered for a batch of these shapes (arrays or shapes), to compile, count and audit.

        Of an engine whose state is updated on the host, the half that runs on the devices: gradients, norm and verdict.
        """
        check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        with self._running():
            return self._compiled.step.lower(*self._abstract(batch, loss_args), {})  # type: ignore[no-any-return]

    def memory(self, state: TrainState, batch: PyTree, *, loss_args: LossArgs = None) -> MemoryReport:
        """Measured bytes per device by class beside the formula; compiles the step for `batch` (arrays or shapes)."""
        state = place_state(state, self.layout, self.mesh)
        program = self._blueprint.program(self.layout)
        with self._running():
            gradients = jax.jit(program.gradients).lower(*self._abstract(batch, loss_args)).compile()
        compiled = self.lower(batch, loss_args=loss_args).compile()
        seen = self._compiled.on_devices(state)
        return measure_memory(state, seen, compiled, gradients, self.layout, program.settings, self.mesh)

    def activation_profile(self, batch: PyTree, *, loss_args: LossArgs = None) -> ActivationProfile:
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
        shapes = self._abstract(batch, loss_args)
        trace = lambda loss: jax.eval_shape(self._blueprint.program(self.layout, loss).gradients, *shapes)
        device = self.mesh.local_devices[0]
        return profile_loss(losses.normalized(self.loss_fn), self.activations, trace, device)

    def _profiled(self, batch: PyTree, loss_args: LossArgs) -> ActivationProfile:
        """The profile, measured and printed once."""
        if self._profile is None or self._profile[0] is not self._compiled:
            self._profile = self._compiled, self.activation_profile(batch, loss_args=loss_args)
            if jax.process_index() == 0:
                print(self._profile[1])
        return self._profile[1]

    @contextlib.contextmanager
    def _running(self, traced: bool = False) -> Iterator[None]:
        """Around a program of ours: under the engine's mesh, if `jax.set_mesh` has set one, and errors explained."""
        set_by_user = not (traced or jax.sharding.get_abstract_mesh().empty)
        own = jax.set_mesh(self.mesh) if set_by_user else contextlib.nullcontext()
        with losses.noted_errors(self.axes.names), own:
            yield

    def _placed(self, batch: PyTree, loss_args: LossArgs) -> tuple[PyTree, dict[str, PyTree]]:
        return place_batch(batch, self.mesh, self.axes.batch), place_loss_args(loss_args, self.mesh)

    def _abstract(self, batch: PyTree, loss_args: LossArgs) -> tuple[TrainState, PyTree, dict[str, PyTree]]:
        """The shapes of what the devices take in a step, with shardings."""
        placed = abstract_batch(batch, self.mesh, self.axes.batch), abstract_loss_args(loss_args, self.mesh)
        return self._compiled.abstract_on_devices(), *placed

    def _settled(self, result: Any) -> Any:
        """`result`, waited for on simulated devices, where programs that run at the same time may each hold threads
        that the other's collectives wait for."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(result) if on_cpu and not is_traced(result) else result
