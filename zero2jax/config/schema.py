"""The configuration as a tree of frozen dataclasses, every field named exactly as DeepSpeed names the key.

`Config` is the root. Field defaults are DeepSpeed's, with one exception: an absent `gradient_clipping` is
0.0 (no clipping; DeepSpeed >= 0.19.3 clips at 1.0). What each key becomes is in `keys`, reading in
`reading`. Batch arithmetic: TB = MB * GAS * N, with TB `train_batch_size`, MB
`train_micro_batch_size_per_gpu`, GAS `gradient_accumulation_steps`, N shards of the data axis.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero2jax.config.blocks import block, setting
from zero2jax.config.params import OptimizerParams, SchedulerParams
from zero2jax.config.values import (
    ConfigError,
    any_part_enabled,
    asked_for,
    boolean,
    choice,
    integer,
    interval,
    norm,
    not_empty,
    number,
    one_of,
    optional,
    remat_rule,
    steps,
    tensor_parallel_size,
    text,
)
from zero2jax.memory.configure import MemorySettings

_DTYPE = optional(choice("fp16", "bf16", "fp32"))
_COUNT = integer(0)
_POLICY = optional(remat_rule())


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """`zero_optimization.offload_optimizer`."""

    device: str = setting("none", choice("none", "cpu", "nvme"))
    nvme_path: str | None = setting(None, optional(text()))
    buffer_count: int = setting(4, _COUNT)
    pin_memory: bool = setting(True, boolean())
    pipeline_read: bool = setting(False, boolean())
    pipeline_write: bool = setting(False, boolean())
    fast_init: bool = setting(False, boolean())
    ratio: float = setting(1.0, number(0.0, 1.0))
    device_bytes: int | None = setting(None, optional(integer(1)))
    delay_after: int | None = setting(None, optional(_COUNT))
    super_offload: bool = setting(False, boolean())
    cpuadam_cores_perc: float = setting(0.8, number(0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """`zero_optimization.offload_param`."""

    device: str = setting("none", choice("none", "cpu", "nvme"))
    nvme_path: str | None = setting(None, optional(text()))
    buffer_count: int = setting(5, _COUNT)
    buffer_size: int = setting(100_000_000, _COUNT)
    max_in_cpu: int = setting(1_000_000_000, _COUNT)
    pin_memory: bool = setting(True, boolean())


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization:
    """`zero_optimization`. Bucket sizes count elements, not bytes."""

    stage: int = setting(0, integer(0, 3))
    contiguous_gradients: bool = setting(True, boolean())
    reduce_scatter: bool = setting(True, boolean())
    reduce_bucket_size: int = setting(500_000_000, _COUNT)
    use_multi_rank_bucket_allreduce: bool = setting(True, boolean())
    allgather_partitions: bool = setting(True, boolean())
    allgather_bucket_size: int = setting(500_000_000, _COUNT)
    # Absent or null: true at stage 3, false below; filled in when the file is read.
    overlap_comm: bool = setting(False, optional(boolean()))
    load_from_fp32_weights: bool = setting(True, boolean())
    elastic_checkpoint: bool = setting(False, boolean())
    offload_optimizer: OffloadOptimizer | None = field(default=None, metadata=block(OffloadOptimizer))
    offload_param: OffloadParam | None = field(default=None, metadata=block(OffloadParam))
    round_robin_gradients: bool = setting(False, boolean())
    ignore_unused_parameters: bool = setting(True, boolean())
    sub_group_size: int = setting(1_000_000_000, _COUNT)
    legacy_stage1: bool = setting(False, boolean())
    stage3_prefetch_bucket_size: int = setting(50_000_000, _COUNT, aliases=("prefetch_bucket_size",))
    stage3_param_persistence_threshold: int = setting(
        100_000, _COUNT, aliases=("param_persistence_threshold",)
    )
    stage3_model_persistence_threshold: int = setting(
        sys.maxsize, _COUNT, aliases=("model_persistence_threshold",)
    )
    stage3_max_live_parameters: int = setting(1_000_000_000, _COUNT, aliases=("max_live_parameters",))
    stage3_max_reuse_distance: int = setting(1_000_000_000, _COUNT, aliases=("max_reuse_distance",))
    stage3_gather_16bit_weights_on_model_save: bool = setting(
        False,
        boolean(),
        aliases=("gather_16bit_weights_on_model_save",),
        old=("stage3_gather_fp16_weights_on_model_save",),
    )
    stage3_module_granularity_threshold: int = setting(0, _COUNT, aliases=("module_granularity_threshold",))
    stage3_use_all_reduce_for_fetch_params: bool = setting(
        False, boolean(), aliases=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: bool = setting(False, boolean(), aliases=("allgather_sequential",))
    zero_hpz_partition_size: int = setting(1, _COUNT)
    zero_quantized_weights: bool = setting(False, boolean())
    zero_quantized_nontrainable_weights: bool = setting(False, boolean())
    zero_quantized_gradients: bool = setting(False, boolean())
    zero_quantized_gradients_bits: int = setting(4, one_of(4, 8))
    zeropp_loco_param: bool = setting(False, asked_for(not_empty))
    mics_shard_size: int = setting(-1, integer(-1))
    mics_hierarchical_params_gather: bool = setting(False, boolean())
    memory_efficient_linear: bool = setting(True, boolean())
    pipeline_loading_checkpoint: bool = setting(False, boolean())
    override_module_apply: bool = setting(True, boolean())
    log_trace_cache_warnings: bool = setting(False, boolean())
    enable_sanity_checks: bool = setting(False, boolean())
    save_muon_momentum_buffer_in_memory: bool = setting(False, boolean())
    leaf_module: bool = setting(False, asked_for(not_empty))
    zenflow: bool = setting(False, asked_for(not_empty))
    grad_hooks: bool = setting(True, boolean())


@dataclass(frozen=True, kw_only=True)
class FP16:
    """`fp16`; `loss_scale` 0 is dynamic scaling from 2 ** `initial_scale_power`."""

    enabled: bool = setting(False, boolean())
    auto_cast: bool = setting(False, boolean())
    loss_scale: float = setting(0.0, number(0.0))
    initial_scale_power: int = setting(16, _COUNT)
    loss_scale_window: int = setting(1000, steps(0))
    hysteresis: int = setting(2, steps(0))
    consecutive_hysteresis: bool = setting(False, boolean())
    min_loss_scale: int = setting(1, _COUNT)
    fp16_master_weights_and_grads: bool = setting(False, boolean())


@dataclass(frozen=True, kw_only=True)
class BF16:
    """`bf16`: 16-bit compute over fp32 masters or bf16 ones, no loss scale."""

    enabled: bool = setting(False, boolean())
    immediate_grad_update: bool = setting(False, boolean())
    check_grad_overflow: bool = setting(True, boolean())
    bf16_master_weights_and_grads: bool = setting(False, boolean())
    bf16_optimizer_states: bool = setting(False, boolean())


@dataclass(frozen=True, kw_only=True)
class DataTypes:
    """`data_types`; null `grad_accum_dtype` is that of the masters."""

    grad_accum_dtype: str | None = setting(None, _DTYPE)
    param_dtype: str | None = setting(None, _DTYPE)
    buffer_dtype: str | None = setting(None, _DTYPE)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """`activation_checkpointing`; `policy` is not a key of DeepSpeed, which ignores it."""

    partition_activations: bool = setting(False, boolean(), documented=("partitioned_activations",))
    cpu_checkpointing: bool = setting(False, boolean())
    contiguous_memory_optimization: bool = setting(False, boolean())
    number_checkpoints: int | None = setting(None, optional(integer(1)))
    synchronize_checkpoint_boundary: bool = setting(False, boolean())
    profile: bool = setting(False, boolean())
    policy: Any = setting(None, _POLICY)  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class Memory:
    """`memory`, no block of DeepSpeed's: how a GPU's client allocates; null leaves it to the environment. And the
    arena, which is on any device."""

    preallocate: bool | None = setting(None, optional(boolean()))
    fraction: float | None = setting(None, optional(number(0.0, 1.0)))
    allocator: str | None = setting(None, optional(choice("default", "bfc", "cuda_async", "vmm", "platform")))
    collective_memory_mb: int | None = setting(None, optional(_COUNT))
    arena: bool = setting(False, boolean())

    @property
    def settings(self) -> MemorySettings:
        """What of it the client is told; a ValueError where it contradicts itself."""
        return MemorySettings(
            preallocate=self.preallocate,
            fraction=self.fraction,
            allocator=self.allocator,
            collective_memory_mb=self.collective_memory_mb,
        )


@dataclass(frozen=True, kw_only=True)
class FlopsProfiler:
    """`flops_profiler`."""

    enabled: bool = setting(False, boolean())
    recompute_fwd_factor: float = setting(0.0, number(0.0))
    profile_step: int = setting(1, _COUNT)
    module_depth: int = setting(-1, integer(-1))
    top_modules: int = setting(1, _COUNT)
    detailed: bool = setting(True, boolean())
    output_file: str | None = setting(None, optional(text()))


@dataclass(frozen=True, kw_only=True)
class FileMonitor:
    """`tensorboard` and `csv_monitor`."""

    enabled: bool = setting(False, boolean())
    output_path: str = setting("", text())
    job_name: str = setting("DeepSpeedJobName", text())


@dataclass(frozen=True, kw_only=True)
class WandbMonitor:
    """`wandb`."""

    enabled: bool = setting(False, boolean())
    group: str | None = setting(None, optional(text()))
    team: str | None = setting(None, optional(text()))
    project: str = setting("deepspeed", text())


@dataclass(frozen=True, kw_only=True)
class CometMonitor:
    """`comet`."""

    enabled: bool = setting(False, boolean())
    samples_log_interval: int = setting(100, integer(1))
    project: str | None = setting(None, optional(text()))
    workspace: str | None = setting(None, optional(text()))
    api_key: str | None = setting(None, optional(text()))
    experiment_name: str | None = setting(None, optional(text()))
    experiment_key: str | None = setting(None, optional(text()))
    online: bool | None = setting(None, optional(boolean()))
    mode: str | None = setting(None, optional(text()))


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """`timers.throughput`."""

    enabled: bool = setting(True, boolean())
    synchronized: bool = setting(True, boolean())


@dataclass(frozen=True, kw_only=True)
class Timers:
    """`timers`."""

    throughput: Throughput = field(default_factory=Throughput, metadata=block(Throughput))


@dataclass(frozen=True, kw_only=True)
class ParallelWrite:
    """`checkpoint.parallel_write`."""

    pipeline_stage: bool = setting(False, boolean())


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`checkpoint`."""

    tag_validation: str = setting("Warn", choice("Warn", "Ignore", "Fail"))
    load_universal: bool = setting(False, boolean())
    use_node_local_storage: bool = setting(False, boolean())
    parallel_write: ParallelWrite = field(default_factory=ParallelWrite, metadata=block(ParallelWrite))
    checkpoint_serialization: bool = setting(True, boolean())
    writer: bool = setting(False, asked_for())


@dataclass(frozen=True)
class OptimizerBlock:
    """`optimizer`: the type in lower case and its parameters with DeepSpeed's defaults."""

    type: str
    params: OptimizerParams
    legacy_fusion: bool = False


@dataclass(frozen=True)
class SchedulerBlock:
    """`scheduler`: the type in lower case and its parameters with DeepSpeed's defaults."""

    type: str
    params: SchedulerParams


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration file; made by `load_config`, hashable, equal when it means the same.

    `given` and `auto` are the key paths written in the file and those of them left at "auto"; `notes` what
    was converted, ignored or has no effect; `unused` the overrides of "auto" values that no key of the file asks for;
    `source` the JSON object as written, `name` what to call it.
    """

    train_batch_size: int | None = setting(None, optional(integer(1)))
    train_micro_batch_size_per_gpu: int | None = setting(None, optional(integer(1)))
    gradient_accumulation_steps: int | None = setting(None, optional(integer(1)))
    managed_gradient_accumulation: bool = setting(True, boolean())
    optimizer: OptimizerBlock | None = field(default=None, metadata=block(OptimizerBlock))
    scheduler: SchedulerBlock | None = field(default=None, metadata=block(SchedulerBlock))
    zero_optimization: ZeroOptimization = field(
        default_factory=ZeroOptimization, metadata=block(ZeroOptimization)
    )
    zero_allow_untested_optimizer: bool = setting(False, boolean())
    zero_force_ds_cpu_optimizer: bool = setting(True, boolean())
    fp16: FP16 = field(default_factory=FP16, metadata=block(FP16))
    bf16: BF16 = field(default_factory=BF16, metadata=block(BF16, aliases=("bfloat16",)))
    data_types: DataTypes = field(default_factory=DataTypes, metadata=block(DataTypes))
    gradient_clipping: float = setting(0.0, norm())
    prescale_gradients: bool = setting(False, boolean())
    gradient_predivide_factor: float = setting(1.0, number(above=0))
    gradient_allreduce_op: str = setting("mean", choice("mean", "sum"))
    communication_data_type: str | None = setting(None, _DTYPE)
    seq_parallel_communication_data_type: str = setting("fp32", choice("fp16", "bf16", "fp32"))
    sparse_gradients: bool = setting(False, boolean())
    disable_allgather: bool = setting(False, boolean())
    graph_harvesting: bool = setting(False, boolean())
    activation_checkpointing: ActivationCheckpointing = field(
        default_factory=ActivationCheckpointing, metadata=block(ActivationCheckpointing)
    )
    steps_per_print: int = setting(0, interval())
    wall_clock_breakdown: bool = setting(False, boolean())
    memory_breakdown: bool = setting(False, boolean())
    dump_state: bool = setting(False, boolean())
    log_level: str | None = setting(None, optional(text()))
    dataloader_drop_last: bool = setting(False, boolean())
    vocabulary_size: int | None = setting(None, optional(integer(1)))
    xla_preset: str | None = setting(None, optional(choice("latency", "memory", "once", "deterministic")))
    memory: Memory = field(default_factory=Memory, metadata=block(Memory))
    flops_profiler: FlopsProfiler = field(default_factory=FlopsProfiler, metadata=block(FlopsProfiler))
    tensorboard: FileMonitor = field(default_factory=FileMonitor, metadata=block(FileMonitor))
    csv_monitor: FileMonitor = field(default_factory=FileMonitor, metadata=block(FileMonitor))
    wandb: WandbMonitor = field(default_factory=WandbMonitor, metadata=block(WandbMonitor))
    timers: Timers = field(default_factory=Timers, metadata=block(Timers))
    checkpoint: Checkpoint = field(default_factory=Checkpoint, metadata=block(Checkpoint))
    comet: CometMonitor = field(default_factory=CometMonitor, metadata=block(CometMonitor))
    comms_logger: bool = setting(False, asked_for())
    aio: bool = setting(False, asked_for())
    compile: bool = setting(False, asked_for())
    tensor_parallel: int = setting(0, tensor_parallel_size())
    sequence_parallel_size: int = setting(1, integer(1))
    data_parallel_size: int | None = setting(None, optional(integer(1)))
    expert_parallel: bool = setting(False, asked_for())
    use_data_before_expert_parallelism: bool = setting(False, boolean())
    nebula: bool = setting(False, asked_for())
    datastates_ckpt: bool = setting(False, asked_for())
    autotuning: bool = setting(False, asked_for())
    elasticity: bool = setting(False, asked_for())
    torch_autocast: bool = setting(False, asked_for())
    amp: bool = setting(False, asked_for())
    pipeline: bool = setting(False, asked_for())
    hybrid_engine: bool = setting(False, asked_for())
    curriculum_learning: bool = setting(False, asked_for())
    data_efficiency: bool = setting(False, asked_for())
    progressive_layer_drop: bool = setting(False, asked_for())
    eigenvalue: bool = setting(False, asked_for())
    compression_training: bool = setting(False, asked_for(any_part_enabled))
    sparse_attention: bool = setting(False, asked_for(lambda block: block.get("mode", "fixed") != "dense"))

    given: tuple[str, ...] = field(default=(), compare=False, repr=False)
    auto: tuple[str, ...] = field(default=(), compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="defaults", compare=False, repr=False)

    @property
    def compute_dtype(self) -> str:
        """What the loss is computed in: "fp16", "bf16" or "fp32"."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def batch_sizes(
        self,
        num_shards: int,
        *,
        batch_size: int | None = None,
        shards_from: str = "the data axis of the mesh",
    ) -> tuple[int, int, int]:
        """(train_batch_size, micro batch per device, accumulation steps) for N = `num_shards`.

        Args:
          num_shards: size of the data axis; tensor-parallel axes do not count.
          batch_size: global batch of the data, used where the file gives neither batch size.
          shards_from: where `num_shards` came from, for the error message.

        Raises:
          ConfigError: too little is given, or TB != MB * GAS * N.
        """
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if total is None and micro is None:
            total = batch_size
        known = f"train_batch_size = {_or_null(total)}, train_micro_batch_size_per_gpu = {_or_null(micro)}, "
        known += (
            f"gradient_accumulation_steps = {_or_null(steps)}, shards = {num_shards} (from {shards_from})"
        )
        formula = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * shards"
        doing = f"cannot find the batch sizes of {self.name}"
        if total is None and micro is None:
            left = [key for key in self.auto if "." not in key]
            hint = f' Still at "auto": {", ".join(left)}.' if left else ""
            way_out = (
                "Give train_batch_size or train_micro_batch_size_per_gpu, or a batch to take the size from."
            )
            raise ConfigError(
                doing, [f"{known}: it needs {formula}, and neither batch size is given.{hint} {way_out}"]
            )
        if total is None:
            assert micro is not None
            steps = 1 if steps is None else steps
            total = micro * steps * num_shards
        elif micro is None:
            steps = 1 if steps is None else steps
            micro = total // num_shards // steps
        elif steps is None:
            steps = total // micro // num_shards
        if min(total, micro, steps) < 1 or total != micro * steps * num_shards:
            micro, steps = max(1, micro), max(1, steps)  # one that is not given is 1 at least
            near = micro * steps * num_shards
            found = f"here {total} != {micro} * {steps} * {num_shards} = {near}"
            way_out = f"Change one of the three keys, for instance train_batch_size = {near}."
            raise ConfigError(doing, [f"{known}: the rule is {formula}, {found}. {way_out}"])
        return total, micro, steps


def _or_null(value: int | None) -> str:
    return "not given" if value is None else str(value)
