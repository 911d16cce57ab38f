"""What becomes of every DeepSpeed key: the one table that `zero2jax check` prints and a test freezes.

IMPLEMENTED does what DeepSpeed's key does; NO_EFFECT is read, checked and then pointless here, for the reason
given; CONVERTED is an old spelling; REFUSED is an error as soon as it asks for anything but its default.
A key that only ever accompanies a switch (`enabled`, `device`) shares the fate of the switch.
"""

from dataclasses import dataclass
from enum import StrEnum


class Treatment(StrEnum):
    """What this library does with a key."""

    IMPLEMENTED = "implemented"
    NO_EFFECT = "no effect"
    CONVERTED = "converted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """The treatment of one key and what it became, or why it has no effect."""

    treatment: Treatment
    becomes: str


def _table(treatment: Treatment, rows: dict[str, str], prefix: str = "") -> dict[str, Key]:
    return {prefix + name: Key(treatment, becomes) for name, becomes in rows.items()}


_COMPILER = "the compiler plans buffers, there is no pool to tune"
_STAGE3 = "gathers follow the program and its remat policy, not a size"
_POINT_OF_USE = "parameters are gathered where they are used, modules are unknown"
_TORCH = "chooses between torch implementations of the same update"
_WITH_NVME = "belongs to the device nvme, which offload_param does not have here"
_CHECKPOINT = "the step writes no checkpoint"
_LOCO = (
    "error feedback keeps what rounding cut off of every gradient: on each device a byte or more per parameter, which "
    "no shard divides, and for each place where backward makes it; use zero_quantized_gradients_bits: 8"
)
_OTHER = "changes the training itself and has no counterpart"

_IMPLEMENTED = {
    **_table(
        Treatment.IMPLEMENTED,
        {
            "train_batch_size": "global batch of one step",
            "train_micro_batch_size_per_gpu": "examples of one microbatch on one device of the data axis",
            "gradient_accumulation_steps": "microbatches per step, accumulated before the one update",
            "optimizer.type": "the optax transformation with DeepSpeed's defaults",
            "scheduler.type": "an optax schedule, advanced once per applied step",
            "gradient_clipping": "clip by global norm; 0.0 = none, also when absent (DeepSpeed 0.19.3: 1.0)",
            "communication_data_type": "dtype of the gradient reduction; null follows fp16/bf16, else fp32",
            "prescale_gradients": "gradients are divided by the number of devices before their sum, not after",
            "gradient_predivide_factor": "they are divided by it before their sum, and by what is left after",
            "bf16.bf16_master_weights_and_grads": "bf16 masters, rounded stochastically, and accumulated gradients",
            "bf16.bf16_optimizer_states": "bf16 moments, rounded stochastically",
            "bf16.enabled": "bf16 compute over fp32 masters; false and no fp16: plain fp32",
            "bf16.check_grad_overflow": "a step whose gradients are not finite is skipped",
            "fp16.fp16_master_weights_and_grads": "fp16 masters and accumulated gradients; without offloading, too",
            "fp16.enabled": "fp16 compute over fp32 masters, with a loss scale",
            "fp16.loss_scale": "0 is dynamic scaling, a number a static scale",
            "fp16.initial_scale_power": "the first scale is 2 to this power",
            "fp16.loss_scale_window": "steps without overflow until the scale doubles",
            "fp16.hysteresis": "how many overflows until one halves the scale",
            "fp16.consecutive_hysteresis": "every step without overflow forgets those before it",
            "fp16.min_loss_scale": "an overflow there is a zero2jax.LossScaleError, two steps later",
            "gradient_allreduce_op": "mean over the devices, or sum of their means",
            "data_types.grad_accum_dtype": "dtype of the gradient accumulator, every stage; null = that of the masters",
            "data_types.param_dtype": "must agree with fp16 and bf16",
            "memory_breakdown": "bytes in use and their peak in the metrics of each step",
            "xla_preset": "not DeepSpeed's: XLA's options of the step, latency, memory, once or deterministic",
            "steps_per_print": "a line every so many steps: loss, learning rate, gradient norm, throughput",
            "timers.throughput.enabled": "whether samples and tokens per second are in that line",
            "wall_clock_breakdown": "a line of times, of devices, loop and offloading, and the same to the monitors",
            "dump_state": "configuration, settings and shard plan, printed before the first step",
            "comms_logger": "counts and bytes of the step's collectives, printed before the first step",
            "flops_profiler.enabled": "a report of one step: operations by scope, phase and loop, bytes, time",
            "flops_profiler.profile_step": "steps before the one that is profiled",
            "flops_profiler.module_depth": "how deep named scopes are broken up; -1 as deep as they are",
            "flops_profiler.top_modules": "scopes that are named for each depth",
            "flops_profiler.detailed": "a line for each scope, loop and collective",
            "flops_profiler.output_file": "path of the report; null prints it",
            "tensorboard.enabled": "metrics of each step in an event file, by tensorboardX; see zero2jax.Monitors",
            "csv_monitor.enabled": "metrics of each step in a CSV file per metric; see zero2jax.Monitors",
            **{
                f"{name}.{key}": becomes
                for name in ("tensorboard", "csv_monitor")
                for key, becomes in (
                    ("output_path", "parent of the folder"),
                    ("job_name", "name of the folder"),
                )
            },
            "wandb.enabled": "metrics of each step to Weights & Biases; see zero2jax.Monitors",
            "wandb.group": "group of `wandb.init`",
            "wandb.team": "entity of `wandb.init`",
            "wandb.project": "project of `wandb.init`",
            "comet.enabled": "metrics to Comet; see zero2jax.Monitors",
            "comet.samples_log_interval": "examples between two writes",
            "comet.experiment_name": "name of the experiment",
            **{
                f"comet.{name}": f"{name} of `comet_ml.start`"
                for name in ("project", "workspace", "api_key", "experiment_key", "online", "mode")
            },
            "tensor_parallel": "autotp_size: size of the axis `model` that the mesh must have; see param_specs",
        },
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "stage": "0 replicated, 1 optimizer state, 2 + gradients, 3 + parameters in shards",
            "reduce_bucket_size": "reduce-scatter combine threshold on GPUs: elements x dtype bytes",
            "allgather_bucket_size": "all-gather combine threshold on GPUs: elements x dtype bytes",
            "ignore_unused_parameters": "false: parameters without gradient are an error before the first step",
            "stage3_param_persistence_threshold": "elements up to which a parameter, outside of loops, is not gathered "
            "again for backward",
            "stage3_model_persistence_threshold": "elements of all of these, the first ones in the tree",
            "overlap_comm": "latency-hiding scheduler of the step on GPUs",
            "mics_shard_size": "size of the data axis; each group of so many devices holds the state",
            "zero_hpz_partition_size": "size of the data axis; the state is stored sharded over all groups",
            "zero_quantized_weights": "matrices are gathered in int8; at stage 3 those of more elements than "
            "stage3_param_persistence_threshold; at stages 1 and 2, too",
            "zero_quantized_nontrainable_weights": "the same of frozen ones, which are stored as they are",
            "zero_quantized_gradients": "gradients of such matrices are summed by all-to-alls in int4, in a group and "
            "then between groups; at stages 1 and 2, too",
            "zero_quantized_gradients_bits": "not DeepSpeed's: 8 for int8 in place of int4",
        },
        "zero_optimization.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "device": "masters and optimizer state in host memory (cpu) or in files (nvme), updated by the host's CPU",
            "nvme_path": "with nvme, the folder; each process makes one of its own there",
            "buffer_count": "with nvme, buffers in host memory, of a chunk's masters in size; a chunk of Adam takes 4",
            "pipeline_read": "with nvme, buffer_count buffers more, so that a chunk is read while another is updated",
            "pipeline_write": "with nvme, buffer_count buffers more, so that a chunk is written meanwhile",
            "ratio": "part of their bytes that the host has; the devices keep and update the other leaves",
            "device_bytes": "not DeepSpeed's: the smallest ratio at which a device stores no more between steps",
            "delay_after": "not DeepSpeed's: after so many steps updates run beside the next step, one step late",
        },
        "zero_optimization.offload_optimizer.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "device": "cpu: at stage 3, 16-bit parameters in pinned host memory, fetched where they are used",
            "pin_memory": "parameters on the host are pinned; false leaves them so, which a note says",
        },
        "zero_optimization.offload_param.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "partition_activations": "saved boundary activations split over the axis `model`",
            "cpu_checkpointing": "saved boundary activations in pinned host memory",
            "contiguous_memory_optimization": "one buffer, which the loop over layers has; unrolled models are refused",
            "number_checkpoints": "segments that the layers are divided into; null = one per layer",
            "synchronize_checkpoint_boundary": "an optimization barrier at each boundary",
            "profile": "time and bytes of a segment: engine.activation_profile",
            "policy": "not DeepSpeed's: what a layer saves, `zero2jax.remat_policy`",
        },
        "activation_checkpointing.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "preallocate": "not DeepSpeed's, like this block: the pool of a GPU's client is taken at the start",
            "fraction": "part of a GPU's memory that the pool has",
            "allocator": "bfc, cuda_async, vmm or platform, as the installed jaxlib has them",
            "arena": "masters and optimizer state in a few large buffers between steps; the same numbers",
            "collective_memory_mb": "MiB of a second pool, for buffers of collectives",
        },
        "memory.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "lr": "learning rate, visible in the optimizer state",
            "betas": "decay of the moments",
            "eps": "placed where DeepSpeed's kernel has it",
            "weight_decay": "decoupled, but for SGD, Adagrad and Adam without adam_w_mode",
            "bias_correction": "correction of the moments' start from zero",
            "adam_w_mode": "Adam: false lets weight decay join the gradient",
            "eps_inside_sqrt": "Lamb: sqrt(v + eps) instead of sqrt(v) + eps",
            "max_coeff": "Lamb: upper bound of the trust ratio",
            "min_coeff": "Lamb: lower bound of the trust ratio",
            "momentum": "SGD and Muon",
            "nesterov": "SGD",
            "muon_lr": "learning rate of the matrices",
            "adam_lr": "learning rate of everything else",
        },
        "optimizer.params.",
    ),
    **_table(
        Treatment.IMPLEMENTED,
        {
            "lr_range_test_min_lr": "first learning rate",
            "lr_range_test_step_size": "steps per unit of the ramp",
            "lr_range_test_step_rate": "growth per unit",
            "lr_range_test_staircase": "full units only",
            "cycle_min_lr": "foot of the triangle",
            "cycle_max_lr": "top of the triangle",
            "decay_lr_rate": "after the cycle: min / (1 + rate * steps / decay_step_size)",
            "cycle_first_step_size": "steps up",
            "cycle_second_step_size": "steps down; null = as many",
            "cycle_first_stair_count": "stairs up; 0 = none",
            "cycle_second_stair_count": "stairs down; null = as many",
            "decay_step_size": "unit of the decay; 0 = no decay",
            "cycle_momentum": "b1 of the optimizer follows the triangle upside down, b2 becomes 0.99",
            "cycle_min_mom": "momentum at the top of the triangle",
            "cycle_max_mom": "momentum at its feet",
            "decay_mom_rate": "after the cycle: max * (1 + rate * steps / decay_step_size)",
            "warmup_min_lr": "first learning rate",
            "warmup_max_lr": "learning rate after warm-up; null = the optimizer's",
            "warmup_num_steps": "length of the warm-up, at least 2",
            "warmup_type": "log or linear",
            "total_num_steps": "end of the decay",
            "warmup_min_ratio": "first learning rate over the optimizer's",
            "cos_min_ratio": "last learning rate over the optimizer's",
        },
        "scheduler.params.",
    ),
}

_NO_EFFECT = {
    **_table(
        Treatment.NO_EFFECT,
        {
            "contiguous_gradients": "gradients lie in a planned block of the step; memory.arena: true is for the state",
            "reduce_scatter": "the mean is always taken by the collective the stage needs",
            "use_multi_rank_bucket_allreduce": "gradients are reduce-scattered, never all-reduced and sliced",
            "allgather_partitions": "parameters are always all-gathered",
            "load_from_fp32_weights": "the state holds one copy of each parameter, the master",
            "elastic_checkpoint": "deprecated in DeepSpeed; the step writes no checkpoint",
            "round_robin_gradients": "every gradient is split over all devices",
            "sub_group_size": _COMPILER,
            "stage3_prefetch_bucket_size": _STAGE3,
            "stage3_max_live_parameters": _STAGE3,
            "stage3_max_reuse_distance": _STAGE3,
            "stage3_gather_16bit_weights_on_model_save": "engine.params(state) gives full parameters",
            "stage3_module_granularity_threshold": _POINT_OF_USE,
            "stage3_use_all_reduce_for_fetch_params": "parameters are fetched by all-gather",
            "stage3_allgather_sequential": _STAGE3,
            "mics_hierarchical_params_gather": "parameters are gathered inside a group only",
            "memory_efficient_linear": "jax.grad already saves no more than the program needs",
            "pipeline_loading_checkpoint": "for DeepSpeed's pipeline modules",
            "override_module_apply": "there is no module to override",
            "log_trace_cache_warnings": "there is no trace cache of parameters",
            "enable_sanity_checks": "the order of gathers is fixed when the step is compiled",
            "save_muon_momentum_buffer_in_memory": _COMPILER,
            "leaf_module": _POINT_OF_USE,
            "grad_hooks": "there are no hooks; DeepSpeed dropped the key, files still carry it",
        },
        "zero_optimization.",
    ),
    **_table(
        Treatment.NO_EFFECT,
        {
            "pin_memory": "what the CPU updates is not pinned: the device's client moves it through pinned memory of "
            'its own. With OffloadSettings(update_on="device") all of it is pinned',
            "fast_init": "masters are made on the host, without a pass over the device",
            "cpuadam_cores_perc": "DeepSpeed's SuperOffload reads it; XLA's CPU backend uses all cores of the process",
        },
        "zero_optimization.offload_optimizer.",
    ),
    **_table(
        Treatment.NO_EFFECT,
        {
            "nvme_path": _WITH_NVME,
            "buffer_count": _WITH_NVME,
            "buffer_size": _WITH_NVME,
            "max_in_cpu": _WITH_NVME,
        },
        "zero_optimization.offload_param.",
    ),
    **_table(
        Treatment.NO_EFFECT,
        {
            "optimizer.legacy_fusion": _TORCH,
            "optimizer.params.torch_adam": _TORCH,
            "optimizer.params.fp32_optimizer_states": "optimizer state is fp32, without bf16.bf16_optimizer_states",
            "optimizer.params.set_grad_none": "there are no gradients between two steps",
            "optimizer.params.ns_method": "both ways compute the same Newton-Schulz iteration",
            "scheduler.params.last_batch_iteration": "the step count is part of the state",
            "zero_allow_untested_optimizer": "any optax transformation is right under any stage",
            "zero_force_ds_cpu_optimizer": _TORCH,
            "fp16.auto_cast": "a loss function casts its batch itself, to the dtype of the parameters it gets",
            "bf16.immediate_grad_update": "gradients join the accumulator in the backward pass as compiled",
            "data_types.buffer_dtype": "arrays that are no parameters keep their dtype",
            "seq_parallel_communication_data_type": "there is no sequence parallelism here",
            "sparse_gradients": "gradients are dense",
            "disable_allgather": "parameters are always all-gathered",
            "graph_harvesting": "a step is one compiled program",
            "log_level": "logging belongs to the program",
            "dataloader_drop_last": "the loop brings its own batches",
            "vocabulary_size": "DeepSpeed only warns with it",
            "flops_profiler.recompute_fwd_factor": "what is recomputed is counted in the compiled program",
            "timers.throughput.synchronized": "a step is timed when it is done, and nothing waits for it",
            "checkpoint.tag_validation": _CHECKPOINT,
            "checkpoint.load_universal": _CHECKPOINT,
            "checkpoint.use_node_local_storage": _CHECKPOINT,
            "checkpoint.parallel_write.pipeline_stage": _CHECKPOINT,
            "checkpoint.checkpoint_serialization": _CHECKPOINT,
            "checkpoint.writer": _CHECKPOINT,
            "aio": "settings of DeepSpeed's NVMe library",
            "compile": "a step is one compiled program",
            "data_parallel_size": "DeepSpeed reads it beside sequence_parallel_size only",
            "nebula": "a storage service for DeepSpeed's checkpoints",
            "datastates_ckpt": "a storage service for DeepSpeed's checkpoints",
            "autotuning": "read by DeepSpeed's launcher only",
            "pipeline": "DeepSpeed reads it for its PipelineModule only",
        },
    ),
}

_REFUSED = _table(
    Treatment.REFUSED,
    {
        "managed_gradient_accumulation": "engine.step takes the full batch and updates once; leave it true",
        "zero_optimization.legacy_stage1": "DeepSpeed removed it as well; use stage 1",
        "zero_optimization.offload_optimizer.super_offload": "it updates before the gradients are judged, and needs "
        "a second copy of the state to go back to; delay_after hides the update without one, a step late",
        "zero_optimization.zeropp_loco_param": _LOCO,
        "zero_optimization.zenflow": "stale, partial updates from the host have no counterpart",
        "optimizer.params.amsgrad": "DeepSpeed's kernels refuse it as well; pass an optax tx",
        "optimizer.params.dampening": "SGD's momentum takes the full gradient; pass an optax tx",
        "optimizer.params.lr_decay": "use a scheduler block",
        "optimizer.params.initial_accumulator_value": "Adagrad's sum starts at 0; pass an optax tx",
        "sequence_parallel_size": "sequence parallelism has no counterpart; shard the sequence in the model",
        "expert_parallel": "expert parallelism has no counterpart; shard the experts over an axis of the mesh",
        "use_data_before_expert_parallelism": "expert parallelism has no counterpart",
        "elasticity": "nothing restarts the job here; give the batch sizes instead",
        "torch_autocast": f"{_OTHER}; use bf16",
        "amp": f"{_OTHER}; use bf16",
        "hybrid_engine": _OTHER,
        "curriculum_learning": f"{_OTHER}; shape the batches in the loop",
        "data_efficiency": f"{_OTHER}; shape the batches in the loop",
        "progressive_layer_drop": _OTHER,
        "eigenvalue": _OTHER,
        "compression_training": _OTHER,
        "sparse_attention": f"{_OTHER}; it belongs to the model",
    },
)

_CONVERTED = _table(
    Treatment.CONVERTED,
    {
        "zero_optimization": "true or false: stage 1 or 0",
        "activation_checkpointing.partitioned_activations": "partition_activations; DeepSpeed documents this spelling",
        "allgather_size": "allgather_bucket_size, beside the true/false form of zero_optimization",
        "bfloat16": "bf16",
        "zero_optimization.cpu_offload": 'offload_optimizer {device: "cpu"}',
        "zero_optimization.cpu_offload_param": 'offload_param {device: "cpu"}',
        "zero_optimization.cpu_offload_use_pin_memory": "nothing; DeepSpeed drops it as well",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the key with 16bit in its name",
        "zero_optimization.prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "zero_optimization.param_persistence_threshold": "stage3_param_persistence_threshold",
        "zero_optimization.model_persistence_threshold": "stage3_model_persistence_threshold",
        "zero_optimization.max_live_parameters": "stage3_max_live_parameters",
        "zero_optimization.max_reuse_distance": "stage3_max_reuse_distance",
        "zero_optimization.gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.module_granularity_threshold": "stage3_module_granularity_threshold",
        "zero_optimization.use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.allgather_sequential": "stage3_allgather_sequential",
    },
)

SECRETS = frozenset({"comet.api_key"})
"""Keys whose values are neither printed nor recorded."""

IGNORED_BY_TYPE: dict[tuple[str, str], Key] = {
    ("adamw", "optimizer.params.adam_w_mode"): Key(
        Treatment.NO_EFFECT, "AdamW decouples weight decay anyway; DeepSpeed reads the key for Adam only"
    )
}
"""Keys that one type of optimizer ignores and another reads, by (type, key path)."""

KEYS: dict[str, Key] = {**_IMPLEMENTED, **_NO_EFFECT, **_REFUSED, **_CONVERTED}
"""Every key, by its path; a key of a file is looked up under the name of its field."""


def key_of(path: str, optimizer_type: str | None) -> Key:
    """What becomes of the key of a configuration with this type of optimizer (None if it has none)."""
    return IGNORED_BY_TYPE.get((optimizer_type or "", path)) or KEYS[path]
