"""`plan`: compile the training step for devices that need not be here, and read what it will take.

Nothing is allocated and nothing runs: the engine lowers its step from shapes, for compile-only devices of the target,
and XLA's compiler makes the program that those devices would run. Memory, collectives and schedule are read from that
program; the formulas of the ZeRO paper stand beside them.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from zero2jax.base.batches import check_batch
from zero2jax.base.losses import LossFn
from zero2jax.base.pytrees import LeafPredicate, PyTree
from zero2jax.base.tables import readable_bytes
from zero2jax.config.initialize import initialize
from zero2jax.config.reading import Source, read_config
from zero2jax.engine import Engine
from zero2jax.offload.settings import OffloadSettings
from zero2jax.planning.balance import unhidden
from zero2jax.planning.offload_plan import offload_plan
from zero2jax.planning.report import PlanReport, class_rows, shortened
from zero2jax.planning.targets import DEVICES_PER_HOST, MEMORY_FRACTION, Target, get_target, target_mesh
from zero2jax.programs.audit import Audit, audit
from zero2jax.programs.formulas import MASTER, OPTIMIZER, OTHER, PARAMETERS, Formula, class_formulas
from zero2jax.programs.hlo import Collective
from zero2jax.programs.liveness import walk
from zero2jax.programs.overlap import Rates, simulate
from zero2jax.programs.reductions import repeated_reductions
from zero2jax.zero.gradient_settings import GradientSettings

_WORDS = {"f32": "fp32", "f64": "fp64"}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is trained, as shapes: what the FUNCTION of `zero2jax plan MODULE:FUNCTION` returns.

    Attributes:
      loss_fn: as for `initialize`.
      params: shapes of the parameters (`jax.eval_shape(init_fn, key)`), or parameters.
      batch: shapes of a global batch, of all devices and microbatches of one step.
      tx: optax transformation; None takes the `optimizer` block of the configuration.
      param_specs: PartitionSpecs for mesh axes other than the data axis.
      offload: what is stored in host memory; None takes what the configuration says.
      notes: what reports about it should say.
      trainable: as for `initialize`: what is not trainable has neither gradient nor optimizer state.
    """

    loss_fn: LossFn
    params: PyTree
    batch: PyTree
    tx: optax.GradientTransformation | None = None
    param_specs: PyTree | None = None
    offload: OffloadSettings | None = None
    notes: tuple[str, ...] = ()
    trainable: PyTree | LeafPredicate | None = None

    @property
    def batch_size(self) -> int:
        """Examples per step, over all devices."""
        return int(np.shape(jax.tree.leaves(self.batch)[0])[0])

    def for_config(self, config: Source | None) -> "Program":
        """This program with the optimizer of a configuration that has one, instead of its own."""
        optimizer = read_config(config).optimizer if config is not None else None
        if optimizer is None or self.tx is None:
            return self
        note = (
            f"optimizer: the configuration's {optimizer.type!r} in place of the program's tx. "
            f"zero2jax.initialize(tx=...) does the contrary: it takes the tx given"
        )
        return dataclasses.replace(self, tx=None, notes=(*self.notes, note))


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for, besides the program and its configuration.

    Attributes:
      axes: size of each mesh axis.
      target: see `zero2jax.planning.targets`.
      devices_per_host: devices of one host.
      memory_fraction: part of a device's memory that the program may use.

    Raises:
      ValueError: a fraction or a number of devices that cannot be.

    Example:
      >>> settings = PlanSettings({"data": 8}, get_target("h200"), memory_fraction=0.9)
      >>> settings.target.usable_bytes(settings.memory_fraction)
      136257837465
    """

    axes: Mapping[str, int]
    target: Target
    devices_per_host: int = DEVICES_PER_HOST
    memory_fraction: float = MEMORY_FRACTION

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1 or self.devices_per_host < 1:
            raise ValueError(
                f"planning with memory_fraction={self.memory_fraction} and devices_per_host={self.devices_per_host}: "
                f"the first lies above 0 and at most at 1, the second is at least 1. Correct them."
            )


@dataclasses.dataclass(frozen=True)
class PreparedPlan:
    """An engine for the target's devices, made and checked, and what it was made from."""

    program: Program
    settings: PlanSettings
    engine: Engine
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoweredPlan:
    """A step ready to be compiled."""

    prepared: PreparedPlan
    lowered: Lowered


def plan(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    config: Source | None = None,
    axes: Mapping[str, int],
    target: str | Target,
    param_specs: PyTree | None = None,
    trainable: PyTree | LeafPredicate | None = None,
    offload: OffloadSettings | None = None,
    devices_per_host: int = DEVICES_PER_HOST,
    memory_fraction: float = MEMORY_FRACTION,
    in_node_bytes_per_s: float | None = None,
    across_bytes_per_s: float | None = None,
) -> PlanReport:
    """Compile the training step for a target, which need not be here, and report what it takes.

    Args:
      loss_fn: as for `initialize`, like `tx`, `config`, `param_specs` and `trainable`.
      params: shapes of the parameters, or parameters.
      batch: shapes of a global batch, of all devices and microbatches of one step.
      tx: optax transformation; None takes the one of the configuration.
      config: DeepSpeed-style configuration; None means stage 2 with bf16 compute.
      axes: size of each mesh axis: `{"data": 8}`, `{"data": 25, "model": 16}`.
      target: `"v100-32gb"`, `"a100-80gb"`, `"h100-80gb"`, `"h200"`, `"b200"`: needs the CUDA compiler's packages and
        no GPU; `"local"`: the devices here; `"cpu"`: simulated CPU devices; or a `Target` of your own.
      param_specs: PartitionSpecs for the mesh axes other than the data axis.
      offload: as for `initialize`; by default what the configuration says.
      devices_per_host: devices of one host.
      memory_fraction: part of a device's memory that the program may use; what is left over is for the CUDA
        context, NCCL, cuDNN and cuBLAS; what `XLA_CLIENT_MEM_FRACTION` will be.
      in_node_bytes_per_s: what one device can send to others of its host; by default the target's figure.
      across_bytes_per_s: what one device can send to other hosts; by default the target's figure.

    Raises:
      ValueError: unknown target; axes that do not fit the batch or the hosts; the CUDA compiler is missing.
      ConfigError: as for `initialize`.

    Example:
      >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> report = plan(loss, {"w": shape(64, 64)}, shape(8, 64), tx=optax.adam(1e-3), axes={"data": 1}, target="cpu")
      >>> report.by_class[0].rest_bytes  # the fp32 master
      16384
    """
    chosen = get_target(target).with_rates(in_node_bytes_per_s, across_bytes_per_s)
    settings = PlanSettings(dict(axes), chosen, devices_per_host, memory_fraction)
    program = Program(loss_fn, params, batch, tx, param_specs, offload=offload, trainable=trainable)
    return compile_plan(lower_plan(prepare_plan(program, config, settings)))


def prepare_plan(program: Program, config: Source | None, settings: PlanSettings) -> PreparedPlan:
    """Make the engine and check the batch, tracing nothing; warnings become notes. Raises as `plan` does."""
    mesh = target_mesh(settings.target, settings.axes, settings.devices_per_host)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = initialize(
            program.loss_fn,
            program.tx,
            config,
            mesh,
            param_specs=program.param_specs,
            trainable=program.trainable,
            offload=program.offload,
        )
    if not settings.target.has_bf16 and engine.precision.compute_dtype == jnp.bfloat16:
        raise ValueError(
            f"planning for {settings.target.name}: it has no bf16 arithmetic, and the step computes in bf16. Compute "
            f"in fp16 or fp32 there (the `fp16` block, or neither block, of the configuration)."
        )
    check_batch(program.batch, engine.num_batch_shards, engine.num_microbatches, engine.batch_size)
    notes = dict.fromkeys([*program.notes, *(str(w.message) for w in caught)])
    return PreparedPlan(program, settings, engine, tuple(notes))


def lower_plan(prepared: PreparedPlan) -> LoweredPlan:
    """Trace and lower the step; warnings become notes."""
    engine, batch = prepared.engine, prepared.program.batch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.abstract_state(prepared.program.params, batch=batch)
        lowered = engine.lower(batch)
    notes = dict.fromkeys([*prepared.notes, *(str(w.message) for w in caught)])
    return LoweredPlan(dataclasses.replace(prepared, notes=tuple(notes)), lowered)


def compile_plan(step: LoweredPlan) -> PlanReport:
    """Compile a lowered step and read the program."""
    start = time.perf_counter()
    compiled = step.lowered.compile()
    return _read(step.prepared, compiled, time.perf_counter() - start)


def _read(step: PreparedPlan, compiled: Compiled, compile_s: float) -> PlanReport:
    engine, settings, target = step.engine, step.settings, step.settings.target
    layout = engine.layout
    of_gradients = GradientSettings.of(layout, engine.settings, engine.mesh)
    read = audit(compiled, mesh=engine.mesh, devices_per_host=settings.devices_per_host)

    def over_data(c: Collective) -> bool:
        # What the optimizer communicates runs outside of the engine's shard_map.
        inside = not c.op_name or "shard_map" in c.op_name
        return inside and not set(engine.axes.names).isdisjoint(read.axis(c).split("+"))

    lifetimes = walk(read.module, _argument_class, over_data)
    rate = lambda c: target.bytes_per_s(c.kind, read.across(c))
    needed = [rate(c) for c in read.collectives]
    rates_known = target.peak_flops is not None and None not in needed
    rates = Rates(
        flops=target.peak_flops or math.inf,
        bytes_per_s=lambda c: rate(c) or math.inf,
        product_flops=lambda p: target.product_flops(p.dtype, p.precision) or math.inf,
    )
    # The CPU's compiler converts 16-bit operands to fp32 before it multiplies.
    on_cpu = engine.mesh.devices.flat[0].platform == "cpu"
    offload = offload_plan(engine, of_gradients, target, settings.devices_per_host)
    by_class = class_rows(lifetimes, _formulas(engine, of_gradients))
    if offload is not None:
        by_class = tuple(row.with_more(offload.moved_between_classes(row.name)) for row in by_class)
    report = PlanReport(
        target=target,
        axes=dict(settings.axes),
        jax_version=jax.__version__,
        stage=engine.stage,
        num_microbatches=engine.num_microbatches,
        batch_size=step.program.batch_size,
        num_params=sum(math.prod(x.shape) for x in layout.params.leaves),
        compute_dtype=jnp.dtype(engine.precision.compute_dtype).name,
        memory_fraction=settings.memory_fraction,
        usable_bytes=target.usable_bytes(settings.memory_fraction) or _local_limit(target, engine.mesh),
        by_class=by_class,
        offload=offload,
        audit=read,
        lifetimes=lifetimes,
        timeline=simulate(read.module, rates, as_before_conversion=on_cpu),
        timeline_with_memory=None
        if target.memory_bytes_per_s is None
        else simulate(
            read.module,
            dataclasses.replace(rates, memory_bytes_per_s=target.memory_bytes_per_s),
            as_before_conversion=on_cpu,
        ),
        rates_known=rates_known,
        compile_s=compile_s,
        compiler_options=engine.compiler_options,
        notes=(),
    )
    limits = _limits(step, lifetimes.peak.total_bytes, read.memory.total_bytes)
    notes = (*step.notes, *_widened(report), *_reduced_again(step, read, over_data))
    notes = (*notes, *unhidden(report, engine.axes), *limits)
    return dataclasses.replace(report, notes=notes)


def _formulas(engine: Engine, settings: GradientSettings) -> dict[str, Formula]:
    """The formula of each class that has one on the devices."""
    formulas = class_formulas(engine.layout, settings, engine.mesh)
    on_host = () if engine.offload is None else (MASTER, OPTIMIZER)
    return {name: formula for name, formula in formulas.items() if name not in on_host}


def _argument_class(name: str) -> str:
    if name.startswith("copies"):
        return PARAMETERS
    if name.startswith(("state.params", "masters")):
        return MASTER
    return OPTIMIZER if name.startswith(("state.opt_state", "opt_state")) else OTHER


def _local_limit(target: Target, mesh: Mesh) -> int | None:
    """What the allocator of the devices here may take, where it says so."""
    stats = mesh.devices.flat[0].memory_stats() if target.name == "local" else None
    return stats.get("bytes_limit") if stats else None


def _widened(report: PlanReport) -> list[str]:
    """What to know where products are wider than the compute dtype; nothing below half a percent of them."""
    first, share = report.first_widened, report.widened_flops / max(report.timeline.flops, 1.0)
    if first is None or share < 0.005:
        return []
    narrow, wide = (
        report.target.product_flops("bf16"),
        report.target.product_flops(first.dtype, first.precision),
    )
    rates = f" (about {wide / 1e12:.3g} in place of {narrow / 1e12:.3g} TFLOP/s)" if narrow and wide else ""
    operands = " x ".join(first.operand_dtypes)
    where = f"{first.op_name or 'unnamed'} of {operands}" + (
        f", {shortened(first.source)}" if first.source else ""
    )
    return [
        f"{share:.0%} of the matrix products are {_WORDS.get(first.dtype, first.dtype)} though compute is "
        f"{report.compute_dtype}{rates}. Where fp32 is not meant, give layers dtype={report.compute_dtype} (nnx.Embed, "
        f"too) and cast inputs. The first: {where}"
    ]


def _reduced_again(step: PreparedPlan, read: Audit, over_data: Callable[[Collective], bool]) -> list[str]:
    """Which parameters stage 3 reduces at several places of the loss, and how many elements that moves."""
    engine = step.engine
    if engine.stage < 3 or engine.axes.replica is not None:
        return []
    trained = zip(engine.layout.params.leaves, engine.layout.trainable, strict=True)
    leaves = [leaf for leaf, is_trained in trained if is_trained]
    scatters = [c for c in read.collectives if c.kind == "reduce-scatter" and over_data(c)]
    repeated = repeated_reductions(scatters, leaves, engine.num_microbatches, engine.mesh)
    if repeated is None:
        return []
    more = repeated.reduced_elements / max(repeated.expected_elements, 1)
    named = f" (by their size: {', '.join(repeated.leaves[:4])})" if repeated.leaves else ""
    return [
        f"reduced {more:.2f} times: stage 3 reduces the gradient of a parameter at each place where the loss uses it, "
        f"and some are used in several{named}. Stage 2 adds them up first; a penalty on parameters costs nothing in "
        f"the optimizer (optax.add_decayed_weights)"
    ]


def _limits(step: PreparedPlan, live_bytes: int, total_bytes: int) -> list[str]:
    """What the compiler does not know, or does not say, about these figures."""
    target, fraction = step.settings.target, step.settings.memory_fraction
    off = live_bytes / total_bytes - 1 if total_bytes else 0.0
    notes = [
        f"classes at peak: live bytes of the schedule, {off:+.1%} of the compiler's allocation; the latter fits or not",
        "at peak: what lives at the one moment when most does. A class is below its formula where part of it is not "
        "made yet or gone by then (parameters of layers that are done), and above it where copies in another dtype or "
        "layout live beside it",
    ]
    if target.memory_bytes is not None:
        left = readable_bytes(target.memory_bytes - (target.usable_bytes(fraction) or 0))
        notes.append(
            f"usable memory leaves {left} to the CUDA context, NCCL, cuDNN and cuBLAS, whose use the compiler does not "
            f"know; run with XLA_CLIENT_MEM_FRACTION={fraction:g} (jax takes 0.75 by itself)"
        )
    if target.gpu is not None:
        notes.append(
            "not in these figures: fragmentation of the allocator; kernels chosen by tuning on the device, whose "
            "scratch memory may differ. Compile-only devices know no host memory: state in it is counted apart"
        )
        notes.append(
            "exposed: what the schedule waits for if only matrix products take time, which hides too little where "
            f"memory-bound work runs beside a collective (it takes time in the second figure, at "
            f"{(target.memory_bytes_per_s or 0) / 1e12:.2f} TB/s); products at "
            f"{(target.peak_flops or 0) / 1e12:.0f} TFLOP/s in 16 bits and "
            f"{(target.product_flops('f32') or 0) / 1e12:.0f} in fp32, {(target.in_node_bytes_per_s or 0) / 1e9:.0f} "
            f"GB/s in node and {(target.across_bytes_per_s or 0) / 1e9:.0f} GB/s across hosts per device"
        )
    elif target.name != "local" or step.engine.mesh.devices.flat[0].platform == "cpu":
        notes.append(
            "temporary sizes, collectives and schedule are the CPU compiler's; sizes of the state are exact"
        )
    return notes
