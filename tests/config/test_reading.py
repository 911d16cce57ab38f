"""Loading: conversions, and errors that name key, value, rule and way out."""

import argparse
import dataclasses
import warnings

import pytest
from config_errors import errors_of, zero
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2jax.config.blocks import names_of
from zero2jax.config.params import OPTIMIZERS, SCHEDULERS
from zero2jax.config.reading import (
    Config,
    ConfigError,
    ConfigWarning,
    add_config_arguments,
    load_config,
    read_config,
)

# Values


def test_all_errors_of_a_file_come_together():
    raw = {
        "train_batch_size": 0,
        "zero_optimization": {"stage": 5, "overlap_com": True, "reduce_bucket_size": -1},
        "fp16": {"enabled": "maybe"},
        "optimizer": {"type": "OneBitAdam"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    }
    found = errors_of(raw)
    assert len(found) == 7
    text = "\n".join(found)
    assert "zero_optimization.stage = 5: must be an integer from 0 to 3. The default is 0." in text
    assert "zero_optimization.overlap_com: unknown key. Did you mean 'overlap_comm'?" in text
    assert "fp16.enabled = 'maybe': must be true or false" in text
    assert "optimizer.type = 'OneBitAdam': not supported" in text
    with pytest.raises(ConfigError, match=r"cannot load the configuration \(dict\): 7 errors"):
        load_config(raw)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"train_batch_size": 1.5}, "train_batch_size"),
        ({"train_batch_size": True}, "train_batch_size"),
        ({"train_batch_size": [8]}, "train_batch_size"),
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"gradient_clipping": 1e-320}, "gradient_clipping"),  # 0 in fp32: no parameter would ever change
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"zero_optimization": 2}, "zero_optimization"),
        (zero(stage=2, offload_optimizer={"device": "disk"}), "zero_optimization.offload_optimizer.device"),
        (zero(stage=3, offload_optimizer={"ratio": 2}), "zero_optimization.offload_optimizer.ratio"),
        ({"optimizer": {"params": {}}}, "optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "optimizer.params.max_grad_norm"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"scheduler": {"type": "StepLR"}}, "scheduler.type"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}}, "scheduler.params.cycle_min_lr"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}}},
            "scheduler.params.warmup_min_lr",
        ),
        ({"tensorboard": {"enabled": 2}}, "tensorboard.enabled"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        (zero(stage=1, legacy_stage1=True), "zero_optimization.legacy_stage1"),
        (zero(stage=2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    ],
)
def test_bad_value_is_named(raw, path):
    found = errors_of(raw)
    assert len(found) == 1
    assert found[0].startswith(f"{path} = ")
    rule, way_out = found[0].split(": ", 1)[1].split(". ", 1)
    assert rule
    assert way_out


def test_strings_for_numbers_and_booleans_are_converted_with_a_warning():
    with pytest.warns(ConfigWarning) as caught:
        config = load_config(
            {"train_batch_size": "32", "bf16": {"enabled": "true"}, "gradient_clipping": "1e-1"}
        )
    assert (config.train_batch_size, config.bf16.enabled, config.gradient_clipping) == (32, True, 0.1)
    assert sorted(str(w.message).split(": ", 1)[1] for w in caught) == [
        "bf16.enabled: the string 'true' was read as true.",
        "gradient_clipping: the string '1e-1' was read as 0.1.",
        "train_batch_size: the string '32' was read as 32.",
    ]


@pytest.mark.parametrize(("stage", "expected"), [(0, False), (1, False), (2, False), (3, True)])
def test_overlap_comm_default_follows_the_stage(stage, expected):
    assert read_config(zero(stage=stage)).zero_optimization.overlap_comm is expected
    assert read_config(zero(stage=stage, overlap_comm=None)).zero_optimization.overlap_comm is expected
    assert (
        read_config(zero(stage=stage, overlap_comm=not expected)).zero_optimization.overlap_comm
        is not expected
    )


def test_defaults_are_deepspeeds():
    config = load_config({})
    block = config.zero_optimization
    assert (block.stage, block.reduce_bucket_size, block.allgather_bucket_size) == (
        0,
        500_000_000,
        500_000_000,
    )
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (
        16,
        1000,
        2,
    )
    assert (config.gradient_clipping, config.communication_data_type) == (0.0, None)
    assert (config.optimizer, config.scheduler, block.offload_optimizer) == (None, None, None)
    assert config.bf16.check_grad_overflow


def test_empty_offload_block_offloads_nothing():
    config = load_config(zero(stage=2, offload_optimizer={}))
    assert config.zero_optimization.offload_optimizer.device == "none"


# Old spellings


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_boolean_zero_optimization(value, stage):
    with pytest.warns(ConfigWarning, match="deprecated"):
        config = load_config({"zero_optimization": value, "allgather_size": 200})
    assert config.zero_optimization.stage == stage
    assert config.zero_optimization.allgather_bucket_size == 200


def test_deprecated_keys_are_converted():
    raw = zero(
        stage=3,
        cpu_offload=True,
        cpu_offload_param=True,
        cpu_offload_use_pin_memory=True,
        stage3_gather_fp16_weights_on_model_save=True,
    )
    config = read_config(raw)
    block = config.zero_optimization
    assert sum("deprecated" in note for note in config.notes) == 4
    assert (block.offload_optimizer.device, block.offload_param.device) == ("cpu", "cpu")
    assert block.stage3_gather_16bit_weights_on_model_save
    off = read_config(zero(stage=2, cpu_offload=False)).zero_optimization
    assert off.offload_optimizer is None


def test_old_and_new_key_together_are_an_error():
    found = errors_of(zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}))
    assert "its replacement zero_optimization.offload_optimizer is also given" in found[0]


def test_aliases_of_stage3_keys_and_bfloat16():
    raw = {
        **zero(stage=3, param_persistence_threshold=7, max_live_parameters=5),
        "bfloat16": {"enabled": True},
    }
    config = read_config(raw)
    assert config.zero_optimization.stage3_param_persistence_threshold == 7
    assert config.zero_optimization.stage3_max_live_parameters == 5
    assert config.bf16.enabled
    found = errors_of({"bf16": {}, "bfloat16": {}})
    assert "the same setting is also given as 'bf16'" in found[0]


def test_the_spelling_of_deepspeeds_documentation_is_read_with_a_note():
    config = read_config({"activation_checkpointing": {"partitioned_activations": True}})
    assert config.activation_checkpointing.partition_activations
    (note,) = config.notes
    assert note.startswith(
        "activation_checkpointing.partitioned_activations stands in DeepSpeed's documentation"
    )
    assert note.endswith(": read as activation_checkpointing.partition_activations.")


# Values of keys without effect


def test_a_policy_by_tensor_can_be_hashed():
    config = read_config({"activation_checkpointing": {"policy": {"x": "save"}}})
    assert hash(config) == hash(read_config({"activation_checkpointing": {"policy": {"x": "save"}}}))
    assert config.activation_checkpointing.policy == {"x": "save"}
    (error,) = errors_of({"activation_checkpointing": {"policy": {"a": 5}}})
    assert "must be a remat policy" in error


# Scripts


def test_config_arguments():
    parser = add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")
    assert parser.parse_args([]).deepspeed_config is None


# Anything at all


def _known_names(cls=Config):
    for name, (field, _) in names_of(cls).items():
        yield name
        if dataclasses.is_dataclass(field.metadata.get("block")):
            yield from _known_names(field.metadata["block"])


NAMES = sorted(
    {*_known_names(), "params", "cpu_offload", "allgather_size", *OPTIMIZERS, *SCHEDULERS, "lr", "betas"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**12)
    | st.floats()
    | st.sampled_from(["auto", "Adam", "WarmupLR", "OneCycle", "cpu", "fp16", "1e400", "true", "\ud800", ""])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), JSON, max_size=6))
def test_random_dicts_give_a_config_or_a_config_error(raw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            config = load_config(raw)
        except ConfigError:
            return
    assert hash(config) == hash(read_config(config))
