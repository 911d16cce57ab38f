"""From a `Config` to what an engine is told: the one translation. `initialize` passes it on, `check` puts it in words.

No mesh and no arrays: what a mesh has to say comes as the number of its devices and the names of its axes.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.activations.layers import ActivationSettings
from zero2jax.base.mesh import MODEL_AXIS, DataAxes
from zero2jax.base.pytrees import LeafPredicate
from zero2jax.config.compiler_options import compiler_options
from zero2jax.config.rules import param_device
from zero2jax.config.schema import (
    FP16,
    ActivationCheckpointing,
    Config,
    OffloadOptimizer,
    ZeroOptimization,
)
from zero2jax.config.values import ConfigError
from zero2jax.memory.configure import MemorySettings
from zero2jax.memory.step_options import installed_options, preset_options
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.loss_scale import LossScale
from zero2jax.zero.precision import Precision
from zero2jax.zero.quantized import QuantizeSettings
from zero2jax.zero.settings import StepSettings

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a configuration says of an engine, but for its optimizer.

    Attributes:
      config: the configuration.
      step: what is fixed about a step.
      offload: whether masters and optimizer state are stored in host memory, and how; None for on the devices.
      memory: how a GPU's client allocates.
      activations: what is saved of the layers for backward; None if the configuration has nothing of it switched on,
        for then the model's own checkpoints stay as they are.
    """

    config: Config
    step: StepSettings
    offload: OffloadSettings | None
    memory: MemorySettings
    activations: ActivationSettings | None

    @property
    def keywords(self) -> dict[str, Any]:
        """`step` as keyword arguments of `Engine`, which is given a mesh and the name of its data axis besides."""
        names = [field.name for field in dataclasses.fields(self.step) if field.name != "axes"]
        values = {name: getattr(self.step, name) for name in names}
        return {**values, "shard_over_replicas": self.step.axes.rest_over_replicas}

    def compiler_options(
        self, platform: str, num_params: int, device: jax.Device | None = None
    ) -> dict[str, Any]:
        """The XLA options of the step; warns where `platform` has none of those that the file sets.

        Of the preset that the file names only what the compiler for `device` has, if one is given.
        """
        preset, name = dict[str, Any](), self.config.xla_preset
        if name is not None:
            preset = preset_options(name, platform) if device is None else installed_options(name, device)
        itemsize = jnp.dtype(self.step.precision.compute_dtype).itemsize
        return compiler_options(self.config, platform, num_params * itemsize, preset)


def translate(
    config: Config,
    num_batch_shards: int | None = None,
    *,
    shards_from: str,
    axes: DataAxes | None = None,
    keep_fp32: LeafPredicate | None = None,
    gather: str = "auto",
    seed: int = 0,
) -> EngineSettings:
    """What an engine is told, by a configuration and by arguments that no configuration has.

    Args:
      config: the configuration.
      num_batch_shards: devices that the batch is sharded over; None leaves the batch sizes unfinished.
      shards_from: where that number is from, for messages.
      axes: the data axes of the mesh; one data axis by default. `zero_hpz_partition_size` shards the state over the
        groups too, where there are groups and a stage that shards.
      keep_fp32: as for `initialize`, like the arguments below.
      gather: "use", "once" or "auto".
      seed: seed of the keys that the loss function gets.

    Raises:
      ConfigError: the batch sizes do not fit the devices; a remat policy that is none.
      ValueError: `gather` or `axes` do not go with the stage.
    """
    zero, axes = config.zero_optimization, axes or DataAxes()
    if zero.zero_hpz_partition_size > 1 and axes.replica is not None and zero.stage > 0:
        axes = dataclasses.replace(axes, rest_over_replicas=True)
    batch_size, num_microbatches = batch_of(config, num_batch_shards, shards_from)
    most = zero.stage3_model_persistence_threshold
    reduced, accumulated = config.communication_data_type, config.data_types.grad_accum_dtype
    masters = _masters(config)
    step = StepSettings(
        stage=zero.stage,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        precision=Precision(
            compute_dtype=DTYPES[config.compute_dtype],
            reduce_dtype=None if reduced is None else DTYPES[reduced],
            accumulate_dtype=DTYPES[accumulated or masters],
            keep_fp32=keep_fp32,
            master_dtype=DTYPES[masters],
            state_dtype=DTYPES[
                "bf16" if config.bf16.enabled and config.bf16.bf16_optimizer_states else "fp32"
            ],
            quantize=_quantize(zero),
            predivide=_predivide(config, num_batch_shards),
        ),
        clip_norm=config.gradient_clipping or None,
        reduction=config.gradient_allreduce_op,
        skip_nonfinite=config.bf16.enabled and config.bf16.check_grad_overflow,
        loss_scale=_loss_scale(config.fp16),
        gather=gather,
        unused="warn" if zero.ignore_unused_parameters else "error",
        max_kept_size=zero.stage3_param_persistence_threshold,
        max_kept_total=None if most == sys.maxsize else most,
        seed=seed,
        axes=axes,
    )
    return EngineSettings(
        config=config,
        step=step,
        offload=_offload(
            zero.offload_optimizer,
            params=param_device(config) == "cpu",
            measure=config.wall_clock_breakdown,
        ),
        memory=config.memory.settings,
        activations=activations_of(config),
    )


def _predivide(config: Config, num_batch_shards: int | None) -> float | None:
    """What gradients are divided by before their sum: `prescale_gradients` is all of the division, and wins."""
    if config.prescale_gradients and num_batch_shards is not None:
        return num_batch_shards
    factor = config.gradient_predivide_factor
    return None if config.prescale_gradients or factor == 1.0 else factor


def _masters(config: Config) -> str:
    if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads:
        return "fp16"
    return "bf16" if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads else "fp32"


def _quantize(block: ZeroOptimization) -> QuantizeSettings | None:
    """What ZeRO++'s keys ask for; at stage 3 not of parameters that persist, which DeepSpeed does not gather."""
    weights, frozen = block.zero_quantized_weights, block.zero_quantized_nontrainable_weights
    if block.stage == 0 or not (weights or frozen or block.zero_quantized_gradients):
        return None
    persists = block.stage3_param_persistence_threshold + 1
    return QuantizeSettings(
        params_bits=8 if weights else None,
        frozen_bits=8 if frozen else None,
        grads_bits=block.zero_quantized_gradients_bits if block.zero_quantized_gradients else None,
        min_size=persists if block.stage == 3 else QuantizeSettings.min_size,
    )


def _offload(block: OffloadOptimizer | None, *, params: bool, measure: bool) -> OffloadSettings | None:
    """What `offload_optimizer` asks for; None for all on the devices."""
    if block is None or block.device == "none" or block.ratio == 0:
        return None
    budget: dict[str, Any] = {"ratio": "auto", "device_bytes": block.device_bytes}
    common = (budget if block.device_bytes else {"ratio": block.ratio}) | {
        "delay_after": block.delay_after,
        "params": params,
        "measure": measure,
    }
    if block.device == "cpu":
        return OffloadSettings(**common)
    # what is read ahead and what is written behind has buffers of its own
    buffers = max(1, block.buffer_count) * (1 + block.pipeline_read + block.pipeline_write)
    return OffloadSettings(**common, nvme_path=block.nvme_path, buffer_count=buffers)


def _loss_scale(block: FP16) -> LossScale | None:
    """What the `fp16` block asks for; None without it (float16 elsewhere brings a scale of its own)."""
    if not block.enabled:
        return None
    if block.loss_scale:
        return LossScale.of(block.loss_scale)
    initial = 2.0**block.initial_scale_power
    return LossScale(
        initial=initial,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        minimum=block.min_loss_scale,
        maximum=max(initial, LossScale.maximum),
    )


def batch_of(config: Config, num_shards: int | None, shards_from: str) -> tuple[int | None, int]:
    """(batch size or None to take it from the data, number of microbatches); a ConfigError if they do not fit."""
    total, steps = config.train_batch_size, config.gradient_accumulation_steps
    neither = total is None and config.train_micro_batch_size_per_gpu is None
    if neither or num_shards is None:
        return total, steps or 1
    total, _, steps = config.batch_sizes(num_shards, shards_from=shards_from)
    return total, steps


def activations_of(config: Config) -> ActivationSettings | None:
    """What the `activation_checkpointing` block asks for; a ConfigError for a policy that is none."""
    block = config.activation_checkpointing
    if block == ActivationCheckpointing():
        return None
    try:
        return ActivationSettings(
            policy=block.policy,
            num_checkpoints=block.number_checkpoints,
            partition_axis=MODEL_AXIS if block.partition_activations else None,
            offload=block.cpu_checkpointing,
            contiguous=block.contiguous_memory_optimization,
            barrier=block.synchronize_checkpoint_boundary,
            profile=block.profile,
        )
    except ValueError as error:
        raise ConfigError(
            f"cannot train by {config.name}", [f"activation_checkpointing.policy: {error}"]
        ) from error
