"""`initialize`: from a DeepSpeed-style configuration to an engine. The one place where the two vocabularies meet."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero2jax.activations.layers import ActivationSettings
from zero2jax.base.losses import LossFn
from zero2jax.base.mesh import DATA_AXIS, MODEL_AXIS, REPLICA_AXIS, DataAxes, axis_size, data_axes, make_mesh
from zero2jax.base.pytrees import LeafPredicate, PyTree
from zero2jax.config.compiler_options import compiler_options
from zero2jax.config.optimizers import make_optimizer
from zero2jax.config.reading import (
    Config,
    ConfigError,
    ConfigWarning,
    Source,
    device_notes,
    load_config,
    not_yet,
)
from zero2jax.engine import Engine
from zero2jax.processes.agreement import expect_same
from zero2jax.zero.precision import Precision
from zero2jax.zero.shard_plan import ShardPlan

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def initialize(
    loss_fn: LossFn,
    tx: optax.GradientTransformation | None = None,
    config: Source | None = None,
    mesh: Mesh | None = None,
    *,
    trainable: PyTree | LeafPredicate | None = None,
    param_specs: PyTree | None = None,
    keep_fp32: LeafPredicate | None = None,
    layer_dims: PyTree | None = None,
    use_muon: LeafPredicate | None = None,
    gather: str = "auto",
    seed: int = 0,
    axis_name: str = DATA_AXIS,
    shard_over_replicas: bool = False,
    activations: ActivationSettings | None = None,
) -> Engine:
    """An engine that trains `loss_fn` as a DeepSpeed-style configuration says.

    Args:
      loss_fn: as for `Engine`.
      tx: optax transformation; None builds the one of the configuration's `optimizer` and `scheduler` blocks.
      config: path of a JSON file, its text, a dict, or a `Config`. None means stage 2 with bf16 compute; a
        configuration with neither a `bf16` nor an `fp16` block means fp32, as in DeepSpeed.
      mesh: device mesh; None puts all devices on the data axis, or makes groups (an axis `replica`) of the size that
        `mics_shard_size` or `zero_hpz_partition_size` says.
      trainable: as for `Engine`, like the arguments below.
      param_specs: PartitionSpecs for the mesh axes other than the data axis.
      keep_fp32: predicate for leaves that are computed in fp32 (norms, say).
      layer_dims: leading layer dims per parameter.
      use_muon: predicate for the leaves that get Muon's matrix update, if the `optimizer` block says Muon; by
        default those with two dims.
      gather: "use", "once" or "auto".
      seed: seed of the keys that `loss_fn` gets.
      axis_name: mesh axis that state is sharded over.
      shard_over_replicas: as for `Engine`; `zero_hpz_partition_size` means it.
      activations: what is saved of the layers for backward; by default what the `activation_checkpointing` block
        says, if any of its keys is on.

    Raises:
      ConfigError: the configuration breaks a rule, asks for what the engine cannot do yet, or has no optimizer
        while `tx` is None.
      ValueError: processes were given different configurations (named), or the mesh cannot be used.

    Example:
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> engine = initialize(loss, optax.sgd(0.1), {"zero_optimization": {"stage": 3}}, make_mesh(data=1))
      >>> engine.stage
      3
    """
    settings = load_config(
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}} if config is None else config
    )
    missing = not_yet(settings)
    if missing:
        raise ConfigError(f"cannot train by {settings.name}: the engine does not have this yet", missing)
    mesh = _mesh(settings, mesh, axis_name)
    axes = data_axes(mesh, axis_name)
    for note in device_notes(settings, int(mesh.shape[axis_name])):
        warnings.warn(note, ConfigWarning, stacklevel=2)
    expect_same("the configuration and the mesh", [settings.source, dict(mesh.shape)])
    batch_size, num_microbatches = _batch(settings, mesh, axes)
    engine = Engine(
        loss_fn,
        _optimizer(settings, tx, use_muon),
        mesh,
        stage=settings.zero_optimization.stage,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        precision=_precision(settings, keep_fp32),
        clip_norm=settings.gradient_clipping or None,
        reduction=settings.gradient_allreduce_op,
        skip_nonfinite=settings.bf16.enabled and settings.bf16.check_grad_overflow,
        trainable=trainable,
        param_specs=param_specs,
        layer_dims=layer_dims,
        gather=gather,
        seed=seed,
        axis_name=axis_name,
        shard_over_replicas=shard_over_replicas or _over_replicas(settings, axes),
        activations=activations or _activations(settings, mesh),
        compiler_options=_options(settings, mesh),
    )
    engine.config = dict(settings.source)
    return engine


def _mesh(settings: Config, mesh: Mesh | None, axis_name: str) -> Mesh:
    """The given mesh, or one of all devices, with groups of the size that the configuration says."""
    zero = settings.zero_optimization
    if zero.mics_shard_size > 0:
        name, size = "mics_shard_size", zero.mics_shard_size
    elif zero.zero_hpz_partition_size > 1:
        name, size = "zero_hpz_partition_size", zero.zero_hpz_partition_size
    else:
        return make_mesh() if mesh is None else mesh
    if mesh is None and len(jax.devices()) % size == 0:
        sizes: Any = {REPLICA_AXIS: len(jax.devices()) // size, axis_name: size}
        return make_mesh(**sizes)
    if mesh is not None and mesh.shape.get(axis_name) == size:
        return mesh
    found = (
        f"there are {len(jax.devices())} devices" if mesh is None else f"the mesh has axes {dict(mesh.shape)}"
    )
    raise ConfigError(
        f"cannot train by {settings.name}",
        [
            f"zero_optimization.{name} = {size}: {found}, and the axis {axis_name!r} must have this size. Pass "
            f"mesh=make_mesh({REPLICA_AXIS}=..., {axis_name}={size}), or choose a divisor of the number of devices."
        ],
    )


def _over_replicas(settings: Config, axes: DataAxes) -> bool:
    """Whether `zero_hpz_partition_size` cuts the state over groups; at stage 0 nothing is cut."""
    zero = settings.zero_optimization
    return zero.zero_hpz_partition_size > 1 and axes.replica is not None and zero.stage > 0


def _batch(settings: Config, mesh: Mesh, axes: DataAxes) -> tuple[int | None, int]:
    """(batch size or None to take it from the data, number of microbatches)."""
    if settings.train_batch_size is None and settings.train_micro_batch_size_per_gpu is None:
        return None, settings.gradient_accumulation_steps or 1
    names = " x ".join(map(repr, axes.names))
    total, _, steps = settings.batch_sizes(
        axis_size(mesh, axes.batch), shards_from=f"axis {names} of the mesh"
    )
    return total, steps


def _optimizer(
    settings: Config, tx: optax.GradientTransformation | None, use_muon: LeafPredicate | None
) -> optax.GradientTransformation:
    if tx is not None:
        unused = [name for name in ("optimizer", "scheduler") if getattr(settings, name) is not None]
        if unused:
            warnings.warn(
                f"{settings.name}: the blocks {unused} are not used, since `tx` was given; an optax transformation "
                f"carries its own learning rate. Remove them, or pass no `tx`.",
                ConfigWarning,
                stacklevel=3,
            )
        return tx
    if settings.optimizer is None:
        way_out = "Pass tx=optax.adamw(...), or add the block."
        raise ConfigError(
            f"cannot train by {settings.name}",
            [f"optimizer: the file has no such block and `tx` is None. {way_out}"],
        )
    return make_optimizer(settings.optimizer, settings.scheduler, use_muon=use_muon)


def _precision(settings: Config, keep_fp32: LeafPredicate | None) -> Precision:
    compute = jnp.bfloat16 if settings.bf16.enabled else jnp.float32
    reduced, accumulated = settings.communication_data_type, settings.data_types.grad_accum_dtype
    return Precision(
        compute_dtype=compute,
        reduce_dtype=None if reduced is None else _DTYPES[reduced],
        accumulate_dtype=_DTYPES[accumulated or "fp32"],
        keep_fp32=keep_fp32,
    )


def _activations(settings: Config, mesh: Mesh) -> ActivationSettings | None:
    """What the block asks for; None if all of it is off, for then the model's own checkpoints stay as they are."""
    block = settings.activation_checkpointing
    if block == type(block)():
        return None
    partition = block.partition_activations
    if partition and MODEL_AXIS not in mesh.shape:
        warnings.warn(
            f"activation_checkpointing.partition_activations has nothing to save: the mesh has the axes "
            f"{dict(mesh.shape)}, and no other device holds a copy of an activation but along an axis {MODEL_AXIS!r}.",
            ConfigWarning,
            stacklevel=3,
        )
        partition = False
    try:
        return ActivationSettings(
            policy=block.policy,
            num_checkpoints=block.number_checkpoints,
            partition_axis=MODEL_AXIS if partition else None,
            offload=block.cpu_checkpointing,
            contiguous=block.contiguous_memory_optimization,
            barrier=block.synchronize_checkpoint_boundary,
            profile=block.profile,
        )
    except ValueError as error:
        raise ConfigError(
            f"cannot train by {settings.name}", [f"activation_checkpointing.policy: {error}"]
        ) from error


def _options(settings: Config, mesh: Mesh) -> Any:
    """Compiler options as a function of the plan: thresholds are capped by the model's bytes."""
    itemsize = 2 if settings.bf16.enabled else 4
    platform = mesh.devices.flat[0].platform

    def options(plan: ShardPlan) -> Mapping[str, Any]:
        param_bytes = itemsize * sum(math.prod(leaf.shape) for leaf in plan.leaves)
        return compiler_options(settings, platform, param_bytes)

    return options
