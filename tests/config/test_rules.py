"""Rules that join several keys, and what the engine does not have yet."""

import pytest
from config_errors import errors_of, zero

from zero2jax.config.reading import ConfigError, read_config
from zero2jax.config.rules import device_notes
from zero2jax.config.translate import translate


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("keys", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
def test_mean_by_reduce_scatter_excludes_pre_division(stage, keys):
    found = errors_of({**zero(stage=stage), **keys})
    assert "the mean is taken by the reduce-scatter" in found[0]
    read_config({**zero(stage=stage, reduce_scatter=False), **keys})


def test_pre_division_is_accepted_without_sharding():
    assert read_config({**zero(stage=0), "prescale_gradients": True}).prescale_gradients


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_communication_dtypes_of_reduce_scatter(dtype):
    assert read_config({**zero(stage=2), "communication_data_type": dtype}).communication_data_type == dtype


def test_fp16_and_bf16_exclude_each_other():
    assert "exclude each other" in errors_of({"fp16": {"enabled": True}, "bf16": {"enabled": True}})[0]


def test_param_dtype_must_agree_with_the_precision():
    raw = {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}}
    assert "must agree with the compute dtype, here bf16" in errors_of(raw)[0]


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
def test_dynamic_loss_scale_settings_are_checked_when_used(name):
    assert "at least 1" in errors_of({"fp16": {"enabled": True, name: 0}})[0]
    read_config({"fp16": {"enabled": False, name: 0}})
    read_config({"fp16": {"enabled": True, "loss_scale": 128, name: 0}})


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ({"initial_scale_power": 101}, "fp16.initial_scale_power = 101: must be at most 100"),
        (
            {"initial_scale_power": 2, "min_loss_scale": 8},
            "fp16.min_loss_scale = 8: the first scale, 2 to the power",
        ),
        ({"loss_scale": 1e38}, "fp16.loss_scale = 1e+38: must be at most 2 ** 100"),
    ],
)
def test_loss_scales_that_cannot_be_are_refused(block, error):
    assert error in errors_of({"fp16": {"enabled": True, **block}})[0]
    read_config({"fp16": {"enabled": False, **block}})


def test_a_part_of_the_optimizer_goes_to_the_host_at_any_stage_which_deepspeed_does_not_read():
    offload = {"device": "cpu", "ratio": 0.3}
    assert read_config(zero(stage=3, offload_optimizer=offload)).notes == ()
    for stage in (0, 1, 2):
        (note,) = read_config(zero(stage=stage, offload_optimizer=offload)).notes
        assert note.endswith(f"ratio = 0.3 at stage {stage}: in DeepSpeed it needs stage 3.")


def test_parameters_on_the_host_do_not_go_with_groups_that_have_shards_of_their_own():
    cpu = {"device": "cpu"}
    blocks = {"stage": 3, "zero_hpz_partition_size": 4, "offload_param": cpu}
    (error,) = errors_of(zero(**blocks, offload_optimizer=cpu))
    assert error.startswith("zero_optimization.zero_hpz_partition_size = 4: beside offload_param")
    read_config(zero(**blocks | {"offload_param": {"device": "none"}}, offload_optimizer=cpu))


def test_allgather_bucket_size_must_be_even():
    assert "must be even" in errors_of(zero(stage=2, allgather_bucket_size=1001))[0]
    read_config(zero(stage=2, allgather_bucket_size=1000))


def test_contiguous_activations_need_partition():
    found = errors_of({"activation_checkpointing": {"contiguous_memory_optimization": True}})
    assert [error.split(" = ")[0] for error in found] == ["activation_checkpointing.partition_activations"]
    both = {"partition_activations": True, "contiguous_memory_optimization": True}
    assert read_config({"activation_checkpointing": both}).activation_checkpointing.number_checkpoints is None


OFF = [
    {"amp": {"opt_level": "O1"}},
    {"progressive_layer_drop": {"theta": 0.5}},
    {"torch_autocast": {"dtype": "bfloat16"}},
    {"hybrid_engine": {"max_out_tokens": 512}},
    {"elasticity": {"max_train_batch_size": 64}},
    {"curriculum_learning": {"curriculum_type": "seqlen"}},
    {"eigenvalue": {"verbose": False}},
    {"data_efficiency": {"seed": 1}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"sparse_attention": {"mode": "dense"}},
    {"amp": {}},
    {"amp": {"enabled": "auto"}},
    {"amp": None},
]
ON = [
    {"amp": {"enabled": True, "opt_level": "O1"}},
    {"amp": True},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": "true"}}}},
    {"compression_training": {"layer_reduction": {"enabled": 1}}},
    {"sparse_attention": {"mode": "fixed", "block": 16}},
    {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
]


@pytest.mark.parametrize("raw", OFF)
def test_a_block_without_enabled_is_off(raw):
    assert read_config(raw) == read_config({})


@pytest.mark.parametrize("raw", ON)
def test_a_block_that_is_on_is_refused_if_there_is_nothing_for_it(raw):
    (error,) = errors_of(raw)
    assert " = true: not supported: " in error


def test_an_error_does_not_hide_the_others_nor_make_new_ones():
    raw = {
        "train_batch_size": 16,
        "fp16": {"enabled": True, "foo": 1},
        "amp": {"enabled": True},
        "prescale_gradients": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    assert [error.split(":")[0] for error in errors_of(raw)] == [
        "fp16.foo",
        "prescale_gradients = true",
        "amp = true",
    ]
    wrong = {
        "zero_optimization": {"stage": 9},
        "gradient_allreduce_op": "sum",
        "bfloat16": {"enable": True},
        "data_types": {"param_dtype": "bf16"},
        "activation_checkpointing": {"partition_activations": 3, "contiguous_memory_optimization": True},
        "optimizer": {"type": "SGD", "params": {"momentum": "much", "nesterov": True}},
    }
    assert len(errors_of(wrong)) == 4


def test_a_key_with_an_error_is_not_also_without_effect():
    with pytest.raises(ConfigError) as caught:
        read_config({**zero(stage=1), "prescale_gradients": True, "dump_state": False})
    assert len(caught.value.errors) == 1
    assert caught.value.notes == ()


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("SGD", {"nesterov": True}, "nesterov = true: there is no momentum to look ahead with"),
        (
            "Adam",
            {"lr": 1e300},
            "lr = 1e+300: must be within what fp32 holds, 3.4e38: the step computes with",
        ),
        ("SGD", {"momentum": 0.9, "dampening": 0.1}, "dampening = 0.1: not supported: SGD's momentum"),
        ("Adagrad", {"lr_decay": 0.1}, "lr_decay = 0.1: not supported: use a scheduler block"),
        (
            "Adam",
            {"betas": [0.9, 1.0]},
            "betas = [0.9, 1.0]: must be a list of two values, each a number of at",
        ),
        ("Lamb", {"betas": [1, 0.9]}, "betas = [1, 0.9]: must be a list of two values"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(kind, params, words):
    (error,) = errors_of({"optimizer": {"type": kind, "params": params}})
    assert error.startswith(f"optimizer.params.{words}")


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "dampening": 0}),
        ("Adagrad", {"lr_decay": 0, "initial_accumulator_value": 0.0}),
        ("Adam", {"torch_adam": "any string", "set_grad_none": False, "betas": [0, 0.999]}),
        ("Lion", {"set_grad_none": True}),
    ],
)
def test_what_an_optimizer_need_not_do_is_accepted(kind, params):
    config = read_config({"optimizer": {"type": kind, "params": params}})
    assert {f"optimizer.params.{name}" for name in params} <= set(config.given)


def test_sum_is_refused_at_stage_3_only():
    assert "stage 3 takes the mean" in errors_of({**zero(stage=3), "gradient_allreduce_op": "sum"})[0]
    read_config({**zero(stage=2), "gradient_allreduce_op": "sum"})


def test_offload_param_below_stage_3_warns_and_is_ignored():
    config = read_config(zero(stage=2, offload_param={"device": "cpu"}))
    assert any("offload_param is ignored at stage 2" in note for note in config.notes)
    read_config(zero(stage=2, offload_param={"device": "nvme"}))
    (error,) = errors_of(zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"}))
    assert error.startswith("zero_optimization.offload_param.device = 'nvme': not supported: a compiled step")
    alone = read_config(zero(stage=3, offload_param={"device": "cpu", "pin_memory": True}))
    assert any("offload_param without offload_optimizer moves nothing" in note for note in alone.notes)
    assert not any("pin_memory" in note for note in alone.notes)
    pageable = read_config(zero(stage=3, offload_param={"device": "cpu", "pin_memory": False}))
    assert any("offload_param.pin_memory = false: the devices fetch" in note for note in pageable.notes)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_device_saves_nothing_at_stages_1_and_2(stage):
    note = device_notes(read_config(zero(stage=stage)), 1)[0]
    assert "saves nothing" in note
    assert "offload_optimizer" in note
    assert "stage 3" in note
    assert device_notes(read_config(zero(stage=stage)), 2) == []
    assert device_notes(read_config(zero(stage=stage, offload_optimizer={"device": "cpu"})), 1) == []


def test_ignored_keys_are_named_once():
    config = read_config(
        zero(stage=2, contiguous_gradients=True, round_robin_gradients=True, grad_hooks=True)
    )
    assert config.notes == (
        "no effect here: zero_optimization.contiguous_gradients, zero_optimization.round_robin_gradients, "
        "zero_optimization.grad_hooks (`zero2jax check` says why).",
    )


def test_an_update_before_the_verdict_is_refused_where_there_is_one():
    words = "super_offload = true: not supported: it updates before the gradients are judged"
    assert words in errors_of(zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}))[0]
    block = {"device": "none", "super_offload": True}
    assert read_config(zero(stage=2, offload_optimizer=block)).notes == ()


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("WarmupLR", {"warmup_num_steps": 1e30}),
        ("WarmupDecayLR", {"total_num_steps": 2**30}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": 10**12}),
        ("LRRangeTest", {"lr_range_test_step_size": 10**12}),
    ],
)
def test_steps_beyond_the_counter_are_refused(kind, keys):
    (error,) = errors_of({"optimizer": {"type": "Adam"}, "scheduler": {"type": kind, "params": keys}})
    assert "must be at most 1073741823: steps are counted in 32 bits" in error


def test_a_missing_stage_is_said():
    said = "zero_optimization without a stage is stage 0, as in DeepSpeed: nothing is sharded."
    assert said in read_config({"zero_optimization": {"overlap_comm": True}}).notes
    assert said not in read_config({"zero_optimization": {"stage": 0, "overlap_comm": True}}).notes
    assert said not in read_config({}).notes


def test_nvme_becomes_files_and_as_many_buffers_as_its_keys_say():
    """Reading ahead and writing behind have buffers of their own."""
    block = {"device": "nvme", "nvme_path": "/x", "ratio": 0.5}
    for more, buffers in (
        ({}, 4),
        ({"buffer_count": 5, "pipeline_read": True}, 10),
        ({"buffer_count": 0}, 1),
    ):
        config = read_config(zero(stage=3, offload_optimizer=block | more))
        offload = translate(config, shards_from="").offload
        assert (offload.nvme_path, offload.ratio, offload.buffer_count) == ("/x", 0.5, buffers)
    both = zero(stage=3, offload_optimizer=block, offload_param={"device": "cpu"})
    assert translate(read_config(both), shards_from="").offload.params
    with pytest.raises(ConfigError, match=r"offload_optimizer.device = 'nvme': it needs nvme_path"):
        read_config(zero(stage=3, offload_optimizer={"device": "nvme"}))


def test_a_budget_chooses_the_ratio_and_a_delay_is_passed_on():
    block = {"device": "cpu", "device_bytes": 1000, "delay_after": 3}
    offload = translate(read_config(zero(stage=2, offload_optimizer=block)), shards_from="").offload
    assert (offload.ratio, offload.device_bytes, offload.delay_after) == ("auto", 1000, 3)
    read_config(zero(stage=3, offload_optimizer={**block, "ratio": "auto"}))  # the same, in words
    with pytest.raises(
        ConfigError, match=r"device_bytes = 1000: it chooses the ratio, and the file gives one"
    ):
        read_config(zero(stage=3, offload_optimizer=block | {"ratio": 0.5}))
    with pytest.raises(ConfigError, match=r"delay_after = 3: a step waits for its files"):
        read_config(zero(stage=3, offload_optimizer=block | {"device": "nvme", "nvme_path": "/x"}))
