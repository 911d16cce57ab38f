"""The treatment of every key is decided, and frozen here: a change of the table is a change of this list."""

from zero2jax.config.blocks import names_of
from zero2jax.config.keys import KEYS, Treatment
from zero2jax.config.params import OPTIMIZERS, SCHEDULERS
from zero2jax.config.reading import read_config
from zero2jax.config.rules import key_values

FROZEN = {
    Treatment.IMPLEMENTED: """
        zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.ratio
        zero_optimization.offload_optimizer.device_bytes zero_optimization.offload_optimizer.delay_after
        zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.buffer_count
        zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write
        zero_optimization.offload_param.device zero_optimization.offload_param.pin_memory
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer.type
        scheduler.type gradient_clipping communication_data_type bf16.enabled
        prescale_gradients gradient_predivide_factor
        bf16.check_grad_overflow gradient_allreduce_op
        bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states fp16.fp16_master_weights_and_grads
        fp16.enabled fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
        fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale
        data_types.grad_accum_dtype data_types.param_dtype tensor_parallel zero_optimization.stage
        zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size
        zero_optimization.overlap_comm zero_optimization.mics_shard_size
        zero_optimization.zero_hpz_partition_size
        zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
        zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_gradients_bits
        activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
        activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.number_checkpoints
        activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
        activation_checkpointing.policy
        memory.preallocate memory.fraction memory.allocator memory.collective_memory_mb memory.arena
        xla_preset memory_breakdown
        zero_optimization.ignore_unused_parameters
        zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_model_persistence_threshold
        flops_profiler.enabled flops_profiler.profile_step flops_profiler.module_depth
        flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file
        dump_state comms_logger steps_per_print wall_clock_breakdown timers.throughput.enabled
        tensorboard.enabled tensorboard.output_path tensorboard.job_name
        csv_monitor.enabled csv_monitor.output_path csv_monitor.job_name wandb.enabled wandb.group
        wandb.team wandb.project comet.enabled comet.samples_log_interval comet.project comet.workspace
        comet.api_key comet.experiment_name comet.experiment_key comet.online comet.mode
    """,
    Treatment.NO_EFFECT: """
        zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.allgather_partitions
        zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
        zero_optimization.round_robin_gradients zero_optimization.sub_group_size
        zero_optimization.stage3_prefetch_bucket_size
        zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_module_granularity_threshold
        zero_optimization.stage3_use_all_reduce_for_fetch_params
        zero_optimization.stage3_allgather_sequential
        zero_optimization.mics_hierarchical_params_gather zero_optimization.memory_efficient_linear
        zero_optimization.pipeline_loading_checkpoint zero_optimization.override_module_apply
        zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks
        zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.leaf_module
        zero_optimization.grad_hooks zero_optimization.offload_optimizer.pin_memory
        zero_optimization.offload_optimizer.fast_init
        zero_optimization.offload_param.nvme_path
        zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
        zero_optimization.offload_param.max_in_cpu
        zero_optimization.offload_optimizer.cpuadam_cores_perc optimizer.legacy_fusion zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer fp16.auto_cast bf16.immediate_grad_update data_types.buffer_dtype
        seq_parallel_communication_data_type
        sparse_gradients disable_allgather graph_harvesting
        flops_profiler.recompute_fwd_factor log_level dataloader_drop_last vocabulary_size
        timers.throughput.synchronized checkpoint.tag_validation checkpoint.load_universal
        checkpoint.use_node_local_storage checkpoint.parallel_write.pipeline_stage
        checkpoint.checkpoint_serialization checkpoint.writer aio compile
        data_parallel_size nebula datastates_ckpt autotuning pipeline
    """,
    Treatment.REFUSED: """
        zero_optimization.offload_optimizer.super_offload
        zero_optimization.zeropp_loco_param
        managed_gradient_accumulation zero_optimization.legacy_stage1 zero_optimization.zenflow
        optimizer.params.amsgrad optimizer.params.dampening optimizer.params.lr_decay
        optimizer.params.initial_accumulator_value sequence_parallel_size expert_parallel
        use_data_before_expert_parallelism elasticity torch_autocast amp hybrid_engine curriculum_learning
        data_efficiency progressive_layer_drop eigenvalue compression_training sparse_attention
    """,
    Treatment.CONVERTED: """
        activation_checkpointing.partitioned_activations
        zero_optimization allgather_size bfloat16 zero_optimization.cpu_offload
        zero_optimization.cpu_offload_param zero_optimization.cpu_offload_use_pin_memory
        zero_optimization.stage3_gather_fp16_weights_on_model_save
        zero_optimization.prefetch_bucket_size zero_optimization.param_persistence_threshold
        zero_optimization.model_persistence_threshold zero_optimization.max_live_parameters
        zero_optimization.max_reuse_distance zero_optimization.gather_16bit_weights_on_model_save
        zero_optimization.module_granularity_threshold
        zero_optimization.use_all_reduce_for_fetch_params zero_optimization.allgather_sequential
    """,
}


def test_treatment_of_every_key_is_frozen():
    for treatment, names in FROZEN.items():
        found = {
            path
            for path, key in KEYS.items()
            if key.treatment is treatment and (".params." not in path or treatment is Treatment.REFUSED)
        }
        assert found == set(names.split()), treatment


def test_every_field_has_a_treatment_and_every_treatment_a_field():
    every_block = read_config(
        {
            "optimizer": {"type": "Adam"},
            "scheduler": {"type": "WarmupLR"},
            "zero_optimization": {"offload_optimizer": {}, "offload_param": {}},
        }
    )
    paths = {path for path, _, _ in key_values(every_block) if ".params." not in path}
    for kind, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        paths |= {f"{kind}.params.{name}" for cls in types.values() for name in names_of(cls)}
    converted = {path for path, key in KEYS.items() if key.treatment is Treatment.CONVERTED}
    assert set(KEYS) - converted == paths
    assert all(key.becomes for key in KEYS.values())
