"""The one translation of a configuration: its values, that the engine has them, and that `check` says them."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.activations.layers import ActivationSettings
from zero2jax.base.mesh import DataAxes
from zero2jax.config.check import check_config
from zero2jax.config.reading import DEFAULT_CONFIG, ConfigError, read_config
from zero2jax.config.translate import translate
from zero2jax.zero.precision import Precision
from zero2jax.zero.quantized import QuantizeSettings
from zero2jax.zero.settings import StepSettings

RAW = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "communication_data_type": "fp32",
    "gradient_allreduce_op": "sum",
    "data_types": {"grad_accum_dtype": "bf16"},
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {
        "stage": 2,
        "ignore_unused_parameters": False,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_model_persistence_threshold": 1e6,
    },
    "activation_checkpointing": {"number_checkpoints": 3, "policy": "dots"},
}
STEP = StepSettings(
    stage=2,
    num_microbatches=2,
    batch_size=32,
    precision=Precision(jnp.bfloat16, jnp.float32, jnp.bfloat16),
    clip_norm=0.5,
    reduction="sum",
    skip_nonfinite=True,
    gather="use",
    unused="error",
    max_kept_size=10_000,
    max_kept_total=1_000_000,
    seed=7,
)
ACTIVATIONS = ActivationSettings(policy="dots", num_checkpoints=3)


def test_a_breakdown_of_times_has_offloading_measured():
    for asked, block, measured in ((False, {}, False), (True, {}, True), (True, {"delay_after": 1}, True)):
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **block}}
        config = read_config({"zero_optimization": zero, "wall_clock_breakdown": asked})
        assert translate(config, shards_from="").offload.measure is measured


@pytest.mark.parametrize(("ratio", "offload"), [(1.0, 1.0), (0.25, 0.25), (0, None)])
def test_the_ratio_of_offload_optimizer_is_that_of_the_engine(ratio, offload):
    block = {"device": "cpu", "ratio": ratio}
    found = translate(
        read_config({"zero_optimization": {"stage": 3, "offload_optimizer": block}}), shards_from=""
    )
    assert (found.offload and found.offload.ratio) == offload


def test_every_key_of_a_step_is_translated():
    settings = translate(read_config(RAW), 4, shards_from="here", gather="use", seed=7)
    assert settings.step == STEP
    assert settings.activations == ACTIVATIONS
    with pytest.raises(ConfigError, match=r"shards = 5 \(from here\)"):
        translate(read_config(RAW), 5, shards_from="here")
    assert translate(read_config(RAW), shards_from="here").step.batch_size == 32


def test_the_keys_of_quantised_collectives_become_settings_of_the_precision():
    def read(stage, **keys):
        return read_config({"zero_optimization": {"stage": stage, **keys}})

    def found(stage, **keys):
        return translate(read(stage, **keys), shards_from="here").step.precision.quantize

    every = {f"zero_quantized_{name}": True for name in ("weights", "nontrainable_weights", "gradients")}
    persists = {"stage3_param_persistence_threshold": 9}
    expected = QuantizeSettings(params_bits=8, frozen_bits=8, grads_bits=4, min_size=10)
    assert found(3, **every, **persists) == expected
    eight = {"zero_quantized_gradients": True, "zero_quantized_gradients_bits": 8}
    assert found(3, **eight) == QuantizeSettings(grads_bits=8, min_size=100_001)
    assert found(2, **eight, **persists) == QuantizeSettings(grads_bits=8)
    assert found(3, zero_quantized_gradients_bits=8) is None
    words = "gradients int8 in blocks of 256, from 100001 on"
    assert check_config(read(3, **eight)).effective["quantised between devices"] == words
    said = "zero_optimization.zero_quantized_gradients at stage 2: acts here, too"
    assert any(note.startswith(said) for note in read(2, **eight).notes)
    with pytest.raises(ConfigError, match=r"gradients = true: at stage 0 nothing is gathered.*from 1 up"):
        read(0, **eight)
    with pytest.raises(ConfigError, match="gradients_bits = 16: must be 4 or 8"):
        read(3, zero_quantized_gradients_bits=16)
    with pytest.raises(ConfigError, match=r"zeropp_loco_param.*error feedback.*gradients_bits: 8"):
        read(3, zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024})


def test_the_engine_is_told_the_translation_and_check_says_it():
    mesh = zero2jax.make_mesh(data=4)
    loss = lambda params, batch: jnp.mean(batch @ params["w"])
    engine = zero2jax.initialize(loss, optax.sgd(0.1), read_config(RAW), mesh, gather="use", seed=7)
    assert engine.settings == STEP
    assert engine.activations == ACTIVATIONS
    effective = check_config(read_config(RAW), 4).effective
    assert effective["ZeRO stage"] == "2, sharded: optimizer state and gradients"
    assert effective["batch"] == "32 examples = 4 per device x 2 microbatches x 4 devices"
    assert effective["compute dtype"] == "bf16"
    assert effective["gradient accumulation dtype"] == "bf16"
    assert effective["gradient reduction dtype"] == "fp32"
    assert effective["gradient clipping"] == "global norm 0.5"
    assert effective["non-finite gradients"] == "the step is skipped"
    assert effective["activations"] == "policy 'dots', num_checkpoints 3"


def test_whatever_a_step_has_the_engine_takes():
    keywords = translate(read_config({}), shards_from="here").keywords
    assert set(keywords) < set(inspect.signature(zero2jax.Engine).parameters)
    assert keywords == {
        "stage": 0,
        "num_microbatches": 1,
        "batch_size": None,
        "precision": Precision(jnp.float32),
        "clip_norm": None,
        "reduction": "mean",
        "skip_nonfinite": False,
        "loss_scale": None,
        "unused": "warn",
        "max_kept_size": 100_000,
        "max_kept_total": None,
        "gather": "auto",
        "seed": 0,
        "shard_over_replicas": False,
    }


@pytest.mark.parametrize(("stage", "expected"), [(0, False), (1, True), (3, True)])
def test_a_second_partition_shards_over_groups_where_there_are_groups_and_shards(stage, expected):
    config = read_config({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": 2}})
    groups = DataAxes(replica="replica")
    assert translate(config, shards_from="", axes=groups).step.axes.rest_over_replicas is expected
    assert not translate(config, shards_from="", axes=DataAxes()).step.axes.rest_over_replicas


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_compute_dtype_has_one_home(dtype):
    switches = {name: {"enabled": name == dtype} for name in ("fp16", "bf16")}
    config = read_config({"zero_optimization": {"stage": 1}, **switches})
    assert config.compute_dtype == dtype
    assert check_config(config).effective["compute dtype"] == dtype
    expected = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32}[dtype]
    assert translate(config, shards_from="").step.precision.compute_dtype == expected


def test_the_fp16_block_becomes_a_loss_scale():
    scale = lambda **raw: translate(read_config(raw), shards_from="").step.loss_scale
    block = {"initial_scale_power": 40, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4}
    assert scale(fp16={"enabled": True}) == zero2jax.LossScale()
    assert scale(fp16={"enabled": True, "consecutive_hysteresis": True, **block}) == zero2jax.LossScale(
        initial=2.0**40, window=7, hysteresis=3, consecutive_hysteresis=True, minimum=4, maximum=2.0**40
    )
    assert scale(fp16={"enabled": True, "loss_scale": "128"}) == zero2jax.LossScale(
        initial=128.0, dynamic=False
    )
    assert scale(bf16={"enabled": True}) is None
    # fp16 sums of bf16 gradients need one as well
    assert scale(bf16={"enabled": True}, communication_data_type="fp16") == zero2jax.LossScale()
    raw = {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 128}}
    words = check_config(read_config(raw)).effective
    assert (words["loss scale"], words["non-finite gradients"]) == ("static 128", "the step is skipped")


def test_what_is_divided_before_the_sum_is_as_in_deepspeed():
    def predivide(num=4, **raw):
        config = read_config({"zero_optimization": {"stage": 2, "reduce_scatter": False}, **raw})
        return translate(config, num, shards_from="").step.precision.predivide

    assert predivide() is predivide(gradient_predivide_factor=1.0) is None
    assert predivide(gradient_predivide_factor=2) == 2
    assert predivide(prescale_gradients=True, gradient_predivide_factor=2) == 4  # of all devices
    assert predivide(None, prescale_gradients=True) is None  # their number is not known yet


def test_masters_and_moments_of_16_bits_are_asked_for_by_their_switches():
    def precision(**raw):
        return translate(read_config(raw), shards_from="").step.precision

    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert precision(bf16=bf16) == Precision("bf16", accumulate_dtype="bf16", master_dtype="bf16")
    both = precision(bf16={**bf16, "bf16_optimizer_states": True}, data_types={"grad_accum_dtype": "fp32"})
    assert both == Precision("bf16", master_dtype="bf16", state_dtype="bf16")
    fp16 = {"enabled": True, "fp16_master_weights_and_grads": True}
    assert precision(fp16=fp16) == Precision("fp16", accumulate_dtype="fp16", master_dtype="fp16")
    off = {"enabled": False, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert precision(bf16=off) == Precision("fp32")
    raw = {"train_batch_size": 8, "bf16": {**bf16, "bf16_optimizer_states": True}}
    words = check_config(read_config(raw)).effective
    assert words["masters"] == words["optimizer state"] == "bf16, rounded stochastically"
    rule = r"bf16\.bf16_optimizer_states = true: bf16 optimizer states need bf16 masters, as in DeepSpeed"
    with pytest.raises(ConfigError, match=rule):
        read_config({"bf16": {"enabled": True, "bf16_optimizer_states": True}})


def test_no_configuration_means_the_default_one():
    mesh = zero2jax.make_mesh(data=2)
    engine = zero2jax.initialize(lambda params, batch: jnp.mean(batch), optax.sgd(0.1), mesh=mesh)
    assert engine.config == DEFAULT_CONFIG == {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert (engine.stage, engine.precision.compute_dtype) == (2, jnp.bfloat16)


def test_a_policy_that_is_none_is_refused_by_check_too():
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing\.policy: .*'dotz'.* Did you mean 'dots'"
    ):
        check_config(read_config({"activation_checkpointing": {"policy": "dotz"}}))


@pytest.mark.parametrize(
    ("stage", "param", "expected"), [(3, "cpu", True), (2, "cpu", False), (3, "none", False)]
)
def test_offload_param_puts_the_engines_parameters_on_the_host_at_stage_3(stage, param, expected):
    blocks = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": param}}
    config = read_config({"zero_optimization": {"stage": stage, **blocks}})
    assert translate(config, shards_from="").offload.params is expected
    assert ("parameters" in check_config(config).effective) is expected
