"""Unknown keys: an error or a note, and what they may mean."""

import pytest
from config_errors import errors_of, zero

from zero2jax.config.blocks import names_of
from zero2jax.config.reading import Config, ConfigError, ConfigWarning, load_config, read_config


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
        ({"zero_stage": 3}, "zero_optimization.stage"),
        ({"bf16_enabled": True}, "bf16.enabled"),
        ({"model_parallel_size": 2}, "tensor_parallel"),
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


@pytest.mark.parametrize(
    "key", ["seed", "model_name", "train_data", "log_dir", "lr", "warmup", "project", "ratio", "profile"]
)
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


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("bf16.enabled", '{"bf16": {"enabled": ...}}'),
        ("bfloat16.enabled", '{"bfloat16": {"enabled": ...}}'),
        ("zero_optimization.stage", '{"zero_optimization": {"stage": ...}}'),
        ("optimizer.params.lr", '{"optimizer": {"params": {"lr": ...}}}'),
    ],
)
def test_a_key_path_in_the_place_of_blocks_is_an_error(key, written):
    assert errors_of({key: 1}) == (
        f"{key}: a key path, where JSON has blocks, so nothing reads it. Write {written}.",
    )


def test_blanks_in_a_key_can_be_seen():
    (error,) = errors_of({" train_batch_size": 8})
    assert error.startswith("' train_batch_size': unknown key. Did you mean 'train_batch_size'?")
    assert read_config({"": 1}).notes == ("'': unknown key. It is ignored.",)
