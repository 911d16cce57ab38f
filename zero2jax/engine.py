"""The training engine: `init`, `step`, `evaluate`, `params` on an unmodified loss function. Global arrays.

The checks before tracing live here; `zero.step` holds the pure functions, and `zero.compiled` jits them.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.profile import ActivationProfile, ProfileOnce, profile_loss
from zero2jax.base import batches, losses
from zero2jax.base.losses import LossFn
from zero2jax.base.mesh import DATA_AXIS, axis_size, data_axes, make_mesh
from zero2jax.base.pytrees import LeafPredicate, PyTree, has_tracers, is_function, is_traced, shapes_of
from zero2jax.base.transformation import checked_transformation
from zero2jax.memory.arena import ArenaCompiled, checked_arena, delete_arena, in_arena
from zero2jax.memory.breakdown import StepMemory
from zero2jax.memory.out_of_memory import explained
from zero2jax.memory.step_options import step_options
from zero2jax.monitors.observers import Observers
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
from zero2jax.zero.placement import check_init_arguments, first_state, made_shapes
from zero2jax.zero.precision import Precision
from zero2jax.zero.running import running, settled
from zero2jax.zero.settings import MAX_KEPT_SIZE, StepSettings, WithSettings
from zero2jax.zero.state import Layout, TrainState
from zero2jax.zero.state_checks import check_state
from zero2jax.zero.step import Metrics

LossArgs = Mapping[str, PyTree] | None
"""Arrays that are not per example, by the names that the loss function has for them."""


class Engine(WithSettings):
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
      unused: "warn" of trainable parameters that the loss does not use, or raise an "error" before the first step.
      max_kept_size: stage 3 keeps parameters of at most so many elements, outside of loops, from forward to backward
        instead of gathering them again.
      max_kept_total: elements of all of these, the first ones in the tree; None for any number.
      seed: seed of the keys that `loss_fn` gets; they differ per step, device and microbatch, not by stage.
      axis_name: mesh axis that state is sharded over.
      shard_over_replicas: on a mesh with an axis `replica`, shard the state at rest over that axis too, instead of
        keeping a copy of it in each group of devices; see `zero2jax.base.mesh.DataAxes`.
      activations: what is saved of the loss function's layers for backward, and where; None leaves it to the loss.
      offload: what is stored in host memory, and where it is updated; None keeps all of it on the devices.
      arena: store the state in a few large buffers, of which the leaves are views inside the step: fewer arguments, for
        memory; see `zero2jax.memory.arena`. `unpacked` has the leaves.
      compiler_options: for the compilation of this step alone: "latency", "memory", "once", "deterministic", see
        `zero2jax.memory.step_options`; options as for `jax.jit`; or a function that makes them from the shard plan of
        the parameters. What the installed compiler does not have is named.
      memory_breakdown: put the devices' memory into the metrics of each step.

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
        unused: str = "warn",
        max_kept_size: int = MAX_KEPT_SIZE,
        max_kept_total: int | None = None,
        seed: int = 0,
        axis_name: str = DATA_AXIS,
        shard_over_replicas: bool = False,
        activations: ActivationSettings | None = None,
        offload: OffloadSettings | None = None,
        arena: bool = False,
        compiler_options: str | CompilerOptions = None,
        memory_breakdown: bool = False,
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
            unused=unused,
            max_kept_size=max_kept_size,
            max_kept_total=max_kept_total,
            seed=seed,
            axes=data_axes(mesh, axis_name, rest_over_replicas=shard_over_replicas),
        )
        self.num_shards = axis_size(mesh, self.axes.rest)
        self.num_batch_shards = axis_size(mesh, self.axes.batch)
        self.config: Mapping[str, Any] | None = None  # the configuration it was made from, for the record
        self.observers: Observers | None = None  # who is told of each step
        self.activations, self.offload = activations, offload
        self.arena = checked_arena(arena, offload)
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
            host=None if offload is None else host_mesh(mesh, offload, self.settings),
        )
        self._compiler_options = step_options(compiler_options, mesh)
        self._functions: Compiled | None = None
        self.overflow_watch = ExhaustionWatch(self.settings.loss_scale)
        self._memory = StepMemory() if memory_breakdown else None
        self._profile = ProfileOnce()

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer."""
        return self._blueprint.tx

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options of the step, those that the installed compiler has; known when `layout` is."""
        return self._compiled.options

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
            batches.check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
            batch = batches.abstract_batch(batch, self.mesh, self.axes.batch)
        layout = self._blueprint.layout(shapes, batch, shapes_of(dict(loss_args or {})))
        if self.offload is not None:
            layout = offloaded_layout(self._blueprint.program(layout), self.offload)
        if self._functions is None or layout != self.layout:
            args = self._blueprint.program(layout), self._compiler_options
            plain = ArenaCompiled if self.arena else Compiled
            self._functions = functions_of(*args, self.offload) if self.offload else plain(*args)
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
          params: full parameters (NumPy or JAX arrays), or a function that makes them. A leaf with `shape`, `dtype` and
            slices that is no array (it has no `__array__`) is read by slices, each at most 64 MiB or one row.
          *args: arguments for that function, a key say. It runs jitted, each device making its own shards.
          batch: arrays or shapes of a global batch: the layer dims are then read from the loss function's scans.
          loss_args: with `batch`, what the loss function takes besides, as for `step`; shapes are enough.

        Raises:
          ValueError: a trainable leaf is not floating; `param_specs` or `trainable` have another structure; processes
            were given different settings, parameters or arguments (named).
          TypeError: the function takes other arguments.
        """
        makes = is_function(params)
        with self._running():
            check_init_arguments(params, args)
            shapes = made_shapes(params, args) if makes else params
            self.abstract_state(shapes, batch=batch, loss_args=loss_args)
            expect_same_start(self._blueprint.start(self.layout), self.mesh, args if makes else params)
            self.functions.check_room(gather_over(self.mesh))
            made = functools.partial(params, *args) if makes else params
            how = self.functions.keep, self.functions.first_opt_state
            first = first_state(made, self.layout, self.mesh, self.settings.seed, *how)
            state = self.functions.stored(first)
        self.overflow_watch.forget()
        return state

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
          `activation_profile`, measured before the first step, with `profile` in the activation settings;
          `memory_in_use_bytes` and others, numbers, with `memory_breakdown` (`zero2jax.memory.breakdown`).

        Raises:
          ValueError: the batch does not divide; the state has another structure or was donated; the loss is not a
            scalar, or leaves out parameters with `unused="error"`; at the first step, processes were given different
            loss functions or optimizers (named).
          TypeError: the loss function takes other arguments.
          OutOfMemoryError: a device has no room; says who holds what, and the cheapest ways out.
          LossScaleError: two steps before, gradients overflowed at the minimum loss scale.
        """
        # Processes compare how many steps they have begun.
        jax.monitoring.record_event(STEP_EVENT, num_devices=self.mesh.devices.size)
        compiled = self._compiled
        state, leaves = compiled.with_leaves(state)
        batches.check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        others = {"the batch": batch, "loss_args": loss_args, "the extra arguments": extra_args}
        traced = has_tracers(given := [*leaves, *jax.tree.leaves(others)])
        batches.check_apart(state, others, given)
        seen = self.observers and self.observers.begin(state, batch, loss_args)
        args = (state, *self._placed(batch, loss_args), extra_args)
        if seen:
            seen.placed(args[1])
        profile = None
        if self.activations is not None and self.activations.profile:  # before the state is donated
            measure = functools.partial(self.activation_profile, batch, loss_args=loss_args)
            profile = self._profile.of(compiled, measure)
        with self._running(traced, state):
            if not traced:
                self.overflow_watch.check()
            if not compiled.compared and spans_processes(self.mesh) and not traced:
                expect_same_step(compiled.programs(*args))
                compiled.compared = True
            state, metrics = (compiled.step_inside if traced else compiled.step)(*args)
        if not traced:
            self.overflow_watch.note(metrics)
        # said here: inside the step, jax_debug_nans would stumble over it
        if metrics["learning_rate"] is None:
            metrics["learning_rate"] = np.float32(np.nan)
        if self._memory is not None and not traced:
            metrics |= self._memory.metrics()
        if profile is not None:
            metrics["activation_profile"] = profile.as_dict()
        if seen:
            seen.done(state, metrics)
        return state, metrics

    def evaluate(
        self, state: TrainState, batch: PyTree, *, loss_fn: LossFn | None = None, loss_args: LossArgs = None
    ) -> Any:
        """The mean loss over a global batch, without an update; `(loss, aux)` if the loss function returns that.

        Parameters are gathered where they are used, as in a step. `batch` must divide over the devices only.
        `loss_fn` stands in for the engine's, to turn dropout off, say; `loss_args` as for `step`. The state is not
        donated.
        """
        state = self._compiled.placed(state)
        batches.check_batch(batch, self.num_batch_shards, 1)
        args = (self._compiled.on_devices(state), *self._placed(batch, loss_args))
        evaluate = self._compiled.evaluate(loss_fn or self.loss_fn)
        with self._running(is_traced(args), state):
            means = settled(evaluate(*args), self.mesh)
        return means.loss if means.aux is None else (means.loss, means.aux)

    def params(self, state: TrainState) -> PyTree:
        """Full parameters on every device, masters as stored, at their true shapes, gathered a layer at a time."""
        state = self._compiled.placed(state)
        with self._running(is_traced(state)):
            return settled(self._compiled.params(state.params), self.mesh)

    def offload_state(
        self, state: TrainState, include: Collection[str] = ("params", "opt_state")
    ) -> TrainState:
        """The state with the parts named moved to pinned host memory, for a phase that needs the devices' memory.

        The buffers on the devices are gone: use the state that is returned. It can be saved; a step takes it after
        `reload_state`. Of an engine that offloads, the copies on the devices are let go, too.

        Raises:
          ValueError: a part is neither "params" nor "opt_state"; the devices have no pinned host memory.
        """
        check_state(leaves := self.unpacked(state), self.layout)
        self._compiled.forget_copies()
        there = to_host(leaves, self.layout, self.mesh, include)
        if leaves is not state:
            delete_arena(state)
        return there

    def reload_state(self, state: TrainState) -> TrainState:
        """The state of `offload_state` back where a step takes it, bit for bit; of another state, itself."""
        if in_arena(state):
            return state
        check_state(state, self.layout)
        return from_host(state, self.layout, self.mesh)

    def unpacked(self, state: TrainState) -> TrainState:
        """The state with its leaves in trees: of an arena copies, which any method takes; else the state itself."""
        return self._compiled.unpacked(state)

    def lower(self, batch: PyTree, *, loss_args: LossArgs = None) -> jax.stages.Lowered:
        """The step lowered for a batch of these shapes (arrays or shapes), to compile, count and audit.

        Of an engine whose state is updated on the host, the half that runs on the devices: gradients, norm and verdict.
        """
        batches.check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        with self._running():
            shapes = self._compiled.abstract_state(), *self._abstract(batch, loss_args)[1:]
            return self._compiled.step.lower(*shapes, {})  # type: ignore[no-any-return]

    def memory(self, state: TrainState, batch: PyTree, *, loss_args: LossArgs = None) -> MemoryReport:
        """Measured bytes per device by class beside the formula; compiles the step for `batch` (arrays or shapes)."""
        state = self._compiled.placed(state)
        program = self._blueprint.program(self.layout)
        with self._running():
            jitted = jax.jit(program.gradients)
            gradients = jitted.lower(*self._abstract(batch, loss_args)).compile()
        compiled = self.lower(batch, loss_args=loss_args).compile()
        seen = self._compiled.on_devices(state)
        return measure_memory(state, seen, compiled, gradients, self.layout, program.settings, self.mesh)

    def activation_profile(self, batch: PyTree, *, loss_args: LossArgs = None) -> ActivationProfile:
        """Time and bytes of each kind of checkpointed segment, one microbatch of a batch of these shapes at a time.

        Compiles and runs the phases of a segment apart from the step; see `zero2jax.activations.profile`.

        Raises:
          ValueError: the engine has no activation settings.
        """
        trace = functools.partial(self.trace_with, batch, loss_args)
        device = self.mesh.local_devices[0]
        return profile_loss(losses.normalized(self.loss_fn), self.activations, trace, device)

    def _running(self, traced: bool = False, state: TrainState | None = None) -> AbstractContextManager[None]:
        """Around a program of ours; see `running`, and `explained` for a device without room."""
        program = lambda: None if self._functions is None else self._functions.program
        return running(self.mesh, self.axes.names, explained(program, state), traced)

    def trace_with(self, batch: PyTree, loss_args: LossArgs, loss: losses.Loss) -> Any:
        """Trace the gradients of a batch of these shapes with a loss in the place of the engine's; their shapes."""
        batches.check_batch(batch, self.num_batch_shards, self.num_microbatches, self.batch_size)
        gradients = self._blueprint.program(self.layout, loss).gradients
        return jax.eval_shape(gradients, *self._abstract(batch, loss_args))

    def _placed(self, batch: PyTree, loss_args: LossArgs) -> tuple[PyTree, dict[str, PyTree]]:
        return batches.place_batch(batch, self.mesh, self.axes.batch), batches.place_loss_args(
            loss_args, self.mesh
        )

    def _abstract(self, batch: PyTree, loss_args: LossArgs) -> tuple[TrainState, PyTree, dict[str, PyTree]]:
        """The shapes of what the devices take in a step, with shardings."""
        placed = (
            batches.abstract_batch(batch, self.mesh, self.axes.batch),
            batches.abstract_loss_args(loss_args, self.mesh),
        )
        return self._compiled.abstract_on_devices(), *placed
