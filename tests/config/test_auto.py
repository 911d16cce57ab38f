"""Values for keys at "auto": by every spelling, compared by what they are read as."""

import contextlib
import dataclasses

import numpy as np
import pytest
from config_errors import errors_of, zero
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2jax.config.auto import spellings
from zero2jax.config.reading import ConfigError, ConfigWarning, read_config, resolve_auto

AUTO = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
}


def test_auto_without_default_is_an_error_that_names_the_way_out():
    found = errors_of(AUTO)
    assert len(found) == 1
    assert found[0].startswith("scheduler.params.total_num_steps = 'auto'")
    assert "resolve_auto(config, overrides)" in found[0]


def test_resolve_auto_by_path_and_nested():
    overrides = {
        "train_batch_size": 64,
        "optimizer.params.lr": 3e-4,
        "scheduler": {"params": {"total_num_steps": 100, "warmup_num_steps": 10}},
        "bf16.enabled": True,
    }
    with pytest.warns(
        ConfigWarning, match='left at "auto", so the default is used: optimizer.params.betas = '
    ):
        config = resolve_auto(AUTO, overrides)
    assert (config.train_batch_size, config.optimizer.params.lr) == (64, 3e-4)
    assert config.scheduler.params.total_num_steps == 100
    assert config.auto == (
        "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
        "optimizer.params.betas",
    )
    assert not config.bf16.enabled, "the file has no bf16 block: the override fills nothing"


def test_resolve_auto_of_a_loaded_config():
    config = read_config({"train_batch_size": "auto"})
    assert resolve_auto(config, {"train_batch_size": 4}).train_batch_size == 4


BF16_AUTO = 'bf16.enabled = "auto" is read as false, so the loss is computed in fp32'


@pytest.mark.parametrize("written", ["bf16", "bfloat16"])
@pytest.mark.parametrize("filled", ["bf16", "bfloat16"])
def test_auto_under_either_spelling(written, filled):
    raw = {written: {"enabled": "auto", "immediate_grad_update": True}}
    config = read_config(raw)
    assert any(BF16_AUTO in note for note in config.notes)
    assert "no effect here: bf16.immediate_grad_update" in config.notes[0]
    with pytest.warns(ConfigWarning, match="no effect here"):
        assert resolve_auto(raw, {f"{filled}.enabled": True}).bf16.enabled


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("param_persistence_threshold", "stage3_param_persistence_threshold"),
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    ],
)
@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
def test_every_alias_can_be_filled(written, filled):
    config = resolve_auto(zero(stage=3, **{written: "auto"}), {"zero_optimization": {filled: 1}})
    assert config.auto == ()
    block = dataclasses.asdict(config.zero_optimization)
    assert block.get(filled, block.get(written)) == 1


@pytest.mark.parametrize(
    ("raw", "overrides"),
    [
        ({"gradient_accumulation_steps": "8"}, {"gradient_accumulation_steps": 8}),
        ({"bf16": {"enabled": "true"}}, {"bf16.enabled": True}),
        (zero(reduce_bucket_size="5e8"), {"zero_optimization.reduce_bucket_size": 500_000_000}),
        ({"optimizer": {"type": "adamw"}}, {"optimizer": {"type": "AdamW"}}),
        ({"train_batch_size": 8}, {"train_batch_size": np.int64(8)}),
        (
            {"activation_checkpointing": {"policy": {"x": "save"}}},
            {"activation_checkpointing": {"policy": {"x": "save"}}},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
def test_an_override_that_says_what_the_file_says(raw, overrides):
    assert resolve_auto(raw, overrides) == read_config(raw)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*spellings(), "nothing", "bf16.x", "optimizer.params.lr.x", ""]),
        st.sampled_from(
            ["auto", 1, True, None, "x", [1], {"enabled": True}, {}, np.float32(0.5), np.ones(3)]
        ),
        max_size=4,
    )
)
@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
def test_any_overrides_give_a_config_or_a_config_error(overrides):
    with contextlib.suppress(ConfigError):
        resolve_auto({**AUTO, "bf16": {"enabled": "auto"}, "wandb": {"group": [1, 2]}}, overrides)


def test_overrides_that_cannot_be_used():
    for overrides, words in (
        (None, "overrides = null: must be an object from key paths to values"),
        ({"bf16.enabled": True}, "override bf16.enabled = true: the file says bf16 = 3"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_auto({"bf16": 3} if overrides else {}, overrides)
        assert caught.value.errors[0].startswith(words)


def test_override_against_the_file_or_of_an_unknown_key_is_an_error():
    with pytest.raises(ConfigError) as caught:
        resolve_auto({"train_batch_size": 8}, {"train_batch_size": 16, "optimizer.params.lrr": 1.0})
    assert "the file says 8" in caught.value.errors[0]
    assert "Did you mean 'optimizer.params.lr'" in caught.value.errors[1]
