"""Files as people write them load as expected; every file in configs/ loads and, where it can, trains."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.config.check import check_config
from zero2jax.config.reading import ConfigError, read_config, resolve_auto
from zero2jax.config.rules import key_values

DS_FILES = Path(__file__).parents[1] / "ds_files"
CONFIGS = Path(__file__).parents[2] / "configs"

# name -> (values by key path, words of the notes in their order)
LOADS = {
    "accelerate_zero2": (
        {
            "train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "bf16.enabled": True,
            "zero_optimization.offload_optimizer.device": "none",
            "zero_optimization.overlap_comm": False,
        },
        ["zero_allow_untested_optimizer"],
    ),
    "activation_checkpointing_and_monitors": (
        {
            "activation_checkpointing.cpu_checkpointing": True,
            "tensorboard.job_name": "run",
            "wandb.project": "mine",
            "checkpoint.tag_validation": "Fail",
            "comms_logger": True,
        },
        ["checkpoint.tag_validation"],
    ),
    "bert_lamb": (
        {
            "optimizer.type": "lamb",
            "optimizer.params.max_coeff": 0.3,
            "optimizer.params.betas": (0.9, 0.999),
            "optimizer.params.bias_correction": False,
        },
        [],
    ),
    "hf_zero2_auto": (
        {
            "train_batch_size": None,
            "fp16.enabled": False,
            "bf16.enabled": False,
            "optimizer.params.lr": 1e-3,
            "scheduler.params.warmup_max_lr": None,
            "zero_optimization.allgather_bucket_size": 200_000_000,
            "zero_optimization.reduce_bucket_size": 500_000_000,
        },
        [
            "allgather_partitions",
            'fp16.enabled and bf16.enabled = "auto" is read as false, so the loss is computed in fp32. Fill it in',
            'left at "auto", so the default is used: optimizer.params.lr = 0.001',
        ],
    ),
    "hf_zero3_offload": (
        {
            "zero_optimization.offload_param.buffer_count": 5,
            "zero_optimization.stage3_prefetch_bucket_size": 900_000,
            "zero_optimization.stage3_param_persistence_threshold": 10_000,
            "gradient_accumulation_steps": 4,
        },
        ["stage3_prefetch_bucket_size"],
    ),
    "lr_search": (
        {
            "optimizer.type": "sgd",
            "optimizer.params.nesterov": True,
            "scheduler.params.lr_range_test_min_lr": 1e-4,
            "scheduler.params.lr_range_test_step_rate": 5.0,
        },
        ["last_batch_iteration"],
    ),
    "megatron_gpt_fp16": (
        {"train_batch_size": 512, "zero_optimization.stage": 1, "fp16.initial_scale_power": 11},
        ["contiguous_gradients"],
    ),
    "neox_style": (
        {
            "optimizer.type": "adam",
            "optimizer.params.betas": (0.9, 0.95),
            "zero_optimization.overlap_comm": True,
        },
        ["allgather_partitions"],
    ),
    "old_boolean_zero": (
        {
            "zero_optimization.stage": 1,
            "zero_optimization.allgather_bucket_size": 200_000_000,
            "bf16.enabled": True,
            "optimizer.params.bias_correction": False,
        },
        ["allgather_size is deprecated", "zero_optimization = true is deprecated", "disable_allgather"],
    ),
    "old_cpu_offload": (
        {"zero_optimization.offload_optimizer.device": "cpu", "fp16.loss_scale": 128.0},
        ["cpu_offload_use_pin_memory is deprecated", "cpu_offload is deprecated", "torch_adam"],
    ),
    "stage2_with_stage3_leftovers": (
        {
            "zero_optimization.offload_param.device": "cpu",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
        },
        ["is deprecated", "offload_param is ignored at stage 2", "grad_hooks"],
    ),
    "strings_for_numbers": (
        {
            "train_batch_size": 128,
            "gradient_clipping": 0.5,
            "bf16.enabled": True,
            "zero_optimization.stage": 2,
            "zero_optimization.reduce_bucket_size": 50_000_000,
            "zero_optimization.overlap_comm": False,
            "optimizer.params.lr": 1e-4,
        },
        ["the string '128' was read as 128"] + ["was read as"] * 7,
    ),
    "zeropp": (
        {
            "zero_optimization.zero_quantized_weights": True,
            "zero_optimization.zero_quantized_gradients": True,
            "zero_optimization.zero_quantized_gradients_bits": 4,
            "zero_optimization.zero_hpz_partition_size": 8,
        },
        ["reduce_scatter, zero_optimization.contiguous_gradients"],
    ),
}

# name -> words of the errors in their order
FAILS = {
    "nvme_infinity": [
        "offload_param.device = 'nvme': not supported: a compiled step fetches parameters from pinned host memory"
    ],
    "bert_onebit": ["optimizer.type = 'OneBitAdam': not supported"],
    "hf_zero3_auto": ["scheduler.params.total_num_steps = 'auto'"],
    "megatron_moe_stage0": ["curriculum_learning = true: not supported"],
    "megatron_prescaled": ["prescale_gradients = true: with zero_optimization.reduce_scatter at stage 2"],
    "old_cpu_offload_and_new": ["its replacement zero_optimization.offload_optimizer is also given"],
    "typos": [
        "gradient_clip: unknown key. Did you mean 'gradient_clipping'?",
        "zero_optimisation: unknown key. Did you mean 'zero_optimization'?",
        "Did you mean 'stage'?",
        "Did you mean 'reduce_bucket_size'?",
        "Did you mean 'enabled'?",
    ],
}


def test_every_file_has_an_expectation():
    assert {path.stem for path in DS_FILES.iterdir()} == set(LOADS) | set(FAILS)


@pytest.mark.parametrize("name", LOADS)
def test_file_loads(name):
    values, notes = LOADS[name]
    config = read_config(DS_FILES / f"{name}.json")
    found = {path: value for path, value, _ in key_values(config)}
    assert {path: found[path] for path in values} == values
    assert len(config.notes) == len(notes)
    assert all(words in note for words, note in zip(notes, config.notes, strict=True))
    assert check_config(config).keys


@pytest.mark.parametrize("name", FAILS)
def test_file_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        read_config(DS_FILES / f"{name}.json")
    assert len(caught.value.errors) == len(FAILS[name])
    assert all(words in error for words, error in zip(FAILS[name], caught.value.errors, strict=True))
    assert f"{name}.json" in str(caught.value)


@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
def test_hugging_face_file_resolves():
    overrides = {
        "bf16.enabled": True,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"reduce_bucket_size": 4096 * 4096, "stage3_prefetch_bucket_size": 15_099_494},
        "optimizer": {"params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {"params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 2e-5}},
    }
    config = resolve_auto(DS_FILES / "hf_zero3_auto.json", overrides)
    assert config.batch_sizes(8) == (64, 8, 1)
    assert config.optimizer.params.betas == (0.9, 0.95)
    assert config.scheduler.params.total_num_steps == 100
    assert set(config.auto) == {
        "zero_optimization.stage3_param_persistence_threshold",
        "scheduler.params.warmup_min_lr",
    }


NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def test_the_readme_names_every_file():
    lines = (CONFIGS / "README.md").read_text().splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(named) == [f"{name}.json" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_config_loads_and_says_what_every_key_became(name):
    config = read_config(CONFIGS / f"{name}.json")
    report = check_config(config, 8)
    assert {row.key for row in report.keys} >= {
        path for path, _, _ in key_values(config) if path in config.given
    }
    assert report.trains
    assert name.startswith(f"stage{config.zero_optimization.stage}")


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"] + params["b"][None, :])
    return jnp.mean((hidden.astype(jnp.float32) - batch["y"]) ** 2)


@pytest.mark.filterwarnings("ignore::zero2jax.ConfigWarning")
@pytest.mark.filterwarnings("ignore:activation settings. the loss function has no layers:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_config_trains_for_two_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a relative nvme_path is
    config = read_config(CONFIGS / f"{name}.json")
    engine = zero2jax.initialize(loss_fn, config=config, mesh=zero2jax.make_mesh(data=8))
    total, _, _ = config.batch_sizes(8)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(total, 5)).astype(np.float32),
        "y": rng.normal(size=(total, 3)).astype(np.float32),
    }
    state = engine.init({"w": jnp.full((5, 3), 0.1), "b": jnp.zeros(3)})
    losses = []
    for _ in range(
        2 if engine.settings.loss_scale is None else 5
    ):  # the first scale overflows: steps are skipped
        state, metrics = engine.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert bool(metrics["applied"])
    if config.scheduler is None:
        assert losses[-1] < losses[0]
        np.testing.assert_allclose(metrics["learning_rate"], engine_rate(config), rtol=1e-6)


# what has no learning rate, or no number of steps, until it is filled in
FILLED_IN = {
    "hf_zero2_auto": {"optimizer": {"params": {"lr": 1e-3}}},
    "hf_zero3_auto": {
        "optimizer": {"params": {"lr": 1e-3}},
        "scheduler": {"params": {"total_num_steps": 100, "warmup_max_lr": 1e-3}},
    },
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # each file has its own; what they say is held elsewhere
@pytest.mark.parametrize("name", sorted(set(LOADS) | set(FILLED_IN)))
def test_file_of_the_wild_trains_for_two_steps(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # monitors write there
    path = DS_FILES / f"{name}.json"
    config = resolve_auto(path, FILLED_IN[name]) if name in FILLED_IN else read_config(path)
    tx = None if config.optimizer else optax.sgd(0.1)
    engine = zero2jax.initialize(loss_fn, tx, config, zero2jax.make_mesh(data=8))
    total, _, _ = config.batch_sizes(8, batch_size=16)
    batch = {"x": np.ones((total, 5), np.float32), "y": np.ones((total, 3), np.float32)}
    state = engine.init({"w": jnp.full((5, 3), 0.1), "b": jnp.zeros(3)})
    for _ in range(2):
        state, metrics = engine.step(state, batch)
    assert int(state.step) == 2
    assert np.isfinite(metrics["loss"])
    if engine.observers is not None:
        engine.observers.close()


def engine_rate(config):
    params = config.optimizer.params
    return params.muon_lr if config.optimizer.type == "muon" else params.lr
