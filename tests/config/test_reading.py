"""Loading: sources, conversions, errors that name key, value, rule and way out; "auto"."""

import argparse
import base64
import contextlib
import dataclasses
import json
import warnings

import numpy as np
import pytest
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
    resolve_auto,
)
from zero2jax.config.rules import not_yet


def errors_of(source):
    with pytest.raises(ConfigError) as caught:
        read_config(source)
    return caught.value.errors


def zero(**keys):
    return {"train_batch_size": 8, "zero_optimization": keys}


# Sources


def test_path_text_dict_and_config_mean_the_same(tmp_path):
    raw = {"train_batch_size": 32, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw))
    loaded = load_config(raw)
    for source in (path, str(path), json.dumps(raw), loaded):
        assert load_config(source) == loaded
    assert hash(load_config(path)) == hash(loaded)


def test_hjson_comments_trailing_commas_and_bare_braces():
    text = """
    # a comment
    train_batch_size: 32
    zero_optimization: {
      stage: 2,  // two
      reduce_bucket_size: 5e8,
    }
    """
    config = load_config(text)
    assert (config.train_batch_size, config.zero_optimization.stage) == (32, 2)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000


def test_dict_source_is_not_changed_nor_watched():
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    before = json.dumps(raw)
    config = read_config(raw)
    assert json.dumps(raw) == before
    raw["zero_optimization"]["stage"] = 3
    assert config.source["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/no/such/file.json", "cannot be read"),
        ("", "cannot be read"),
        ("/dev/null", "the file is empty: no key is set"),
        ("\n  \n", "the file is empty: no key is set"),
        ("# nothing\n", "the file is empty: no key is set"),
        ("{ /*", "not JSON or hjson"),
        ('{"a": 1 /* x', "not JSON or hjson"),
        ("{a: '''x", "not JSON or hjson"),
        ('{"a": ', "not JSON or hjson"),
        ('{"train_batch_size": 1e999}', "not JSON or hjson"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "not JSON or hjson"),
        ('[{"a": 1}]', "must be one JSON object"),
        (3, "a path, a dict, JSON text or a Config"),
    ],
)
def test_unreadable_source(source, words):
    assert words in errors_of(source)[0]


@pytest.mark.parametrize("name", ["run:1.json", "a{b}.json", "stage: 3"])
def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text('{"zero_optimization": {"stage": 3}}')
    monkeypatch.chdir(tmp_path)
    for source in (name, tmp_path / name, str(tmp_path / name)):
        assert read_config(source).zero_optimization.stage == 3


def test_an_empty_file_is_an_error_and_an_empty_object_is_not(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text("")
    assert "the file is empty" in errors_of(path)[0]
    path.write_text("{}")
    assert read_config(path) == Config()


def test_base64_of_a_text_is_read_as_by_deepspeed():
    encoded = base64.urlsafe_b64encode(b'{"zero_optimization": {"stage": 3}}').decode()
    assert read_config(encoded).zero_optimization.stage == 3


def test_duplicate_keys_are_named_with_their_path():
    found = errors_of(
        '{"bf16": {"enabled": true, "enabled": false}, "train_batch_size": 1, "train_batch_size": 2}'
    )
    assert found == (
        "bf16.enabled = false: the key is given twice. Keep one.",
        "train_batch_size = 2: the key is given twice. Keep one.",
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


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ({"gradient_clip": 1.0}, "gradient_clipping"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"Zero_Optimization": {"stage": 3}}, "zero_optimization"),
        ({"zero-optimization": {"stage": 3}}, "zero_optimization"),
        ({"zeroOptimization": {"stage": 3}}, "zero_optimization"),
        ({"zero": {"stage": 3}}, "zero_optimization"),
        ({"stage": 3}, "zero_optimization.stage"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"BF16": {"enabled": True}}, "bf16"),
        ({"fp_16": {"enabled": True}}, "fp16"),
        ({"train_batchsize": 8}, "train_batch_size"),
        ({"optimiser": {"type": "Adam"}}, "optimizer"),
        ({"lr_scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"gradient_accumulation": 4}, "gradient_accumulation_steps"),
        ({"partition_activations": True}, "activation_checkpointing.partition_activations"),
        ({"max_grad_norm": 1.0}, "gradient_clipping"),
        ({"micro_batch_size": 4}, "train_micro_batch_size_per_gpu"),
        ({"cpu_offload": True}, "zero_optimization.cpu_offload"),
        ({"loss_scale": 128}, "fp16.loss_scale"),
        ({"activation_checkpoint": {"cpu_checkpointing": True}}, "activation_checkpointing"),
    ],
)
def test_a_top_level_key_that_must_mean_a_known_one_is_an_error_that_names_it(raw, meant):
    found = errors_of({"train_micro_batch_size_per_gpu": 1, **raw})
    way_out = "If it is a key of your own, begin its name with an underscore."
    assert found == (f"{next(iter(raw))}: unknown key. Did you mean '{meant}'? {way_out}",)


@pytest.mark.parametrize("key", ["_comment", "_fp16", "comment", "comments", "_"])
def test_a_comment_is_nobodys_business(key):
    config = load_config({key: {"enabled": True}})
    assert (config, config.notes) == (Config(), ())


@pytest.mark.parametrize("key", ["seed", "model_name", "train_data", "log_dir", "lr", "warmup", "project"])
def test_a_top_level_key_that_resembles_nothing_is_a_note(key):
    with pytest.warns(ConfigWarning, match=rf"\(dict\): {key}: unknown key. It is ignored"):
        assert load_config({key: {"enabled": True}}) == Config()


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (zero(cpu_offload_pin_memory=True), "Did you mean 'cpu_offload_use_pin_memory'?"),
        (zero(gradient_clipping=1.0), "Remove it."),
        (zero(partition_activations=True), "Did you mean 'activation_checkpointing.partition_activations'?"),
        (zero(warmup=3), "Remove it."),
        (zero(param=3), "Remove it."),
        ({"fp16": {"stage": 3}}, "Did you mean 'zero_optimization.stage'?"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "Did you mean 'lr'?"),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 1}}}, "Remove it."),
    ],
)
def test_what_an_unknown_key_of_a_block_may_mean(raw, sentence):
    (error,) = errors_of(raw)
    assert error.endswith(f": unknown key. {sentence}")


def test_many_and_long_unknown_keys_are_cut_short():
    with pytest.raises(ConfigError) as caught:
        read_config({f"own_{i}": i for i in range(600_000)})
    assert caught.value.errors == ("the file: 599000 more unknown keys. Give a DeepSpeed JSON.",)
    assert len(caught.value.notes) == 1000
    (note,) = read_config({"k" * 10_000_000: 1}).notes
    assert note == f"{'k' * 80}...: unknown key. It is ignored."
    found = errors_of(zero(**{f"own_{i}": i for i in range(1500)}))
    assert (len(found), found[-1]) == (
        1001,
        "zero_optimization: 500 more unknown keys. Give a DeepSpeed JSON.",
    )


@pytest.mark.parametrize(
    "name", [name for name in names_of(Config) if name not in ("optimizer", "scheduler")]
)
def test_a_missing_letter_is_noticed_in_every_known_key(name):
    misspelt = name[0] + name[2:]
    with pytest.raises(ConfigError, match=f"{misspelt}: unknown key. Did you mean '"):
        read_config({misspelt: 1})


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
    assert not_yet(config) == []


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


@pytest.mark.parametrize(
    "raw",
    [
        {"train_batch_size": 8, "steps_per_print": float("inf")},
        {"train_batch_size": np.int64(8), "gradient_clipping": np.float32(0.5)},
        {"train_batch_size": np.array(8), "bf16": {"enabled": np.bool_(True)}},
        {"optimizer": {"type": "Adam", "params": {"betas": (np.float64(0.9), 0.95)}}},
    ],
)
def test_values_that_deepspeed_takes_from_a_dict(raw):
    config = read_config(raw)
    assert set(raw) <= {path.split(".")[0] for path in config.given}
    json.dumps(config.source)


def test_a_policy_by_tensor_can_be_hashed():
    config = read_config({"activation_checkpointing": {"policy": {"x": "save"}}})
    assert hash(config) == hash(read_config({"activation_checkpointing": {"policy": {"x": "save"}}}))
    assert config.activation_checkpointing.policy == {"x": "save"}
    (error,) = errors_of({"activation_checkpointing": {"policy": {"a": 5}}})
    assert "must be a remat policy" in error


# "auto"

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
        (
            {"activation_checkpointing": {"policy": {"x": "save"}}},
            {"activation_checkpointing": {"policy": {"x": "save"}}},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
def test_an_override_that_says_what_the_file_says(raw, overrides):
    assert resolve_auto(raw, overrides) == read_config(raw)


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
    not_yet(config)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="{}[]\":,#\n abtrue019.e-\\/*'", max_size=30).map(lambda text: "{" + text))
def test_random_text_gives_a_config_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        read_config(text)


def test_a_misspelt_top_level_key_is_told_along_with_the_errors():
    with pytest.raises(ConfigError) as caught:
        load_config(
            {"data_path": "x", "train_batchsize": 8, "optimizer": {"type": "Adam", "params": {"beta": 1}}}
        )
    assert [error.split(" = ")[0].split(":")[0] for error in caught.value.errors] == [
        "train_batchsize",
        "optimizer.params.beta",
    ]
    assert any("data_path" in note for note in caught.value.notes)
    assert "noticed: data_path" in str(caught.value)
