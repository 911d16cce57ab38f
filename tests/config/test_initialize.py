"""`initialize`: what a configuration becomes, seen in the numbers of a step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.checkpoints.format import Checkpoint
from zero2jax.config import initialize

BATCH = np.arange(16, dtype=np.float32).reshape(8, 2) / 7 - 1


def loss_fn(params, batch):
    return jnp.mean((batch.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)


def first_step(config, tx=None, batch=BATCH, num_devices=2, **kwargs):
    engine = zero2jax.initialize(loss_fn, tx, config, zero2jax.make_mesh(data=num_devices), **kwargs)
    state, metrics = engine.step(engine.init({"w": np.full((2, 2), 0.5, np.float32)}), batch)
    return np.asarray(engine.params(state)["w"]), metrics


def gradient(scale=1.0):
    hidden = BATCH @ np.full((2, 2), 0.5)
    return scale * 2 * BATCH.T @ hidden / hidden.size


def test_without_a_precision_block_the_step_is_plain_fp32():
    params, metrics = first_step({"zero_optimization": {"stage": 2}}, optax.sgd(0.1))
    np.testing.assert_allclose(params, 0.5 - 0.1 * gradient(), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient()), rtol=1e-6)


def test_sum_adds_up_the_devices_means():
    config = {"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}
    params, metrics = first_step(config, optax.sgd(0.1), num_devices=4)
    np.testing.assert_allclose(params, 0.5 - 0.1 * gradient(4), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.mean((BATCH @ np.full((2, 2), 0.5)) ** 2), rtol=1e-6)


def test_gradient_clipping_clips_and_reports_both_norms():
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.25}
    params, metrics = first_step(config, optax.sgd(0.1))
    norm = np.linalg.norm(gradient())
    np.testing.assert_allclose(params, 0.5 - 0.1 * gradient() * 0.25 / norm, rtol=1e-5)
    np.testing.assert_allclose([metrics["grad_norm"], metrics["grad_norm_clipped"]], [norm, 0.25], rtol=1e-6)


def test_the_optimizer_block_builds_the_optimizer_and_shows_its_rate():
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    params, metrics = first_step(config)
    np.testing.assert_allclose(params, 0.5 - 0.1 * gradient(), rtol=1e-6)
    np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)


def sgd_config(lr, weight_decay, stage):
    params = {"lr": lr, "weight_decay": weight_decay}
    return {"optimizer": {"type": "SGD", "params": params}, "zero_optimization": {"stage": stage}}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_numbers_of_the_file_count_after_a_restore(tmp_path, stage):
    mesh = zero2jax.make_mesh(data=2)
    engine = zero2jax.initialize(loss_fn, config=sgd_config(0.1, 0.0, stage), mesh=mesh)
    state, _ = engine.step(engine.init({"w": np.full((2, 2), 0.5, np.float32)}), BATCH)
    before = np.asarray(engine.params(state)["w"], np.float64)
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, state)
    # What checkpoints of this optimizer are made of: those saved so far have these names.
    names = {name for name in Checkpoint(tmp_path / "1").leaves if name.startswith("opt_state/")}
    assert names == {"opt_state/count", "opt_state/hyperparams/learning_rate"}

    other = zero2jax.initialize(loss_fn, config=sgd_config(0.001, 0.5, stage), mesh=mesh)
    other.abstract_state({"w": np.full((2, 2), 0.5, np.float32)})
    state, _ = zero2jax.Checkpointer(tmp_path, other).restore()
    state, metrics = other.step(state, BATCH)
    step = 2 * BATCH.T.astype(np.float64) @ (BATCH @ before) / (len(BATCH) * 2) + 0.5 * before
    np.testing.assert_allclose(other.params(state)["w"], before - 0.001 * step, rtol=1e-6)
    np.testing.assert_allclose(metrics["learning_rate"], 0.001, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon"])
def test_every_optimizer_of_a_file_gets_its_numbers_after_a_restore(tmp_path, kind):
    def make(rate):
        config = {"optimizer": {"type": kind, "params": {"lr": rate}}, "zero_optimization": {"stage": 2}}
        engine = zero2jax.initialize(loss_fn, config=config, mesh=zero2jax.make_mesh(data=2))
        return engine, engine.init({"w": np.full((2, 2), 0.5, np.float32), "b": np.ones(3, np.float32)})

    engine, state = make(0.5)
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, state)
    other, expected = make(0.25)
    state, _ = zero2jax.Checkpointer(tmp_path, other).restore()
    assert state.opt_state.hyperparams.keys() >= {"learning_rate"}
    assert {float(x) for x in state.opt_state.hyperparams.values()} == {0.25}
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, expected)


def test_a_rate_that_is_set_by_hand_counts():
    engine = zero2jax.initialize(loss_fn, config=sgd_config(0.1, 0.0, 2), mesh=zero2jax.make_mesh(data=2))
    state = engine.init({"w": np.full((2, 2), 0.5, np.float32)})
    state.opt_state.hyperparams["learning_rate"] = jnp.float32(0.01)
    state, metrics = engine.step(state, BATCH)
    np.testing.assert_allclose(metrics["learning_rate"], 0.01, rtol=1e-6)
    np.testing.assert_allclose(engine.params(state)["w"], 0.5 - 0.01 * gradient(), rtol=1e-6)


def test_a_given_transformation_wins_over_the_block_with_a_warning():
    config = {"optimizer": {"type": "SGD", "params": {"lr": 9.0}}, "zero_optimization": {"stage": 2}}
    with pytest.warns(zero2jax.ConfigWarning, match=r"\['optimizer'\] are not used, since `tx` was given"):
        params, _ = first_step(config, optax.sgd(0.1))
    np.testing.assert_allclose(params, 0.5 - 0.1 * gradient(), rtol=1e-6)


def test_without_any_optimizer_the_way_out_is_named():
    with pytest.raises(zero2jax.ConfigError, match=r"Pass tx=optax.adamw\(...\), or add the block"):
        zero2jax.initialize(loss_fn, None, {"zero_optimization": {"stage": 2}}, zero2jax.make_mesh(data=2))


def test_what_the_engine_lacks_is_refused_by_name():
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    }
    words = r"1 error\n  - zero_optimization.offload_optimizer.super_offload = true: not supported"
    with pytest.raises(zero2jax.ConfigError, match=words):
        zero2jax.initialize(loss_fn, optax.sgd(0.1), config, zero2jax.make_mesh(data=2))


def start(config, mesh=None, tx=None):
    return zero2jax.initialize(loss_fn, tx or optax.sgd(0.1), config, mesh)


def test_an_absent_gradient_clipping_is_said_once():
    with pytest.warns(zero2jax.ConfigWarning, match="gradient_clipping is absent") as caught:
        engine = start({"zero_optimization": {"stage": 2}})
    assert (len(caught), engine.settings.clip_norm) == (1, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0})
        start(None)  # nothing was brought along from DeepSpeed


@pytest.mark.parametrize(
    ("keys", "axes", "words"),
    [
        (
            {"tensor_parallel": {"autotp_size": 2}},
            {"data": 8},
            "the mesh has axes {'data': 8}, and the axis 'model'",
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, {"data": 4, "model": 2}, r"tensor_parallel = 4: .*model=4"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, None, "tensor_parallel = 2: no mesh was given"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 8}},
            {"data": 8},
            "expert_parallel = true: not supp",
        ),
        (
            {"sequence_parallel_size": 2, "data_parallel_size": 4},
            {"data": 8},
            "sequence_parallel_size = 2: not supp",
        ),
        (
            {"use_data_before_expert_parallelism": True},
            {"data": 8},
            "before_expert_parallelism = true: not supp",
        ),
    ],
)
def test_another_parallelism_is_refused_unless_the_mesh_has_it(keys, axes, words):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, **keys}
    mesh = None if axes is None else zero2jax.make_mesh(**axes)
    with pytest.raises(zero2jax.ConfigError, match=words):
        start(config, mesh)


def test_tensor_parallelism_of_the_mesh_counts_in_the_batch():
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    assert start(config, zero2jax.make_mesh(data=4, model=2)).settings.batch_size == 4
    start({"tensor_parallel": {"autotp_size": 0}, "expert_parallel": {"enabled": False}})


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
@pytest.mark.parametrize("size", [3, 16, 64])
def test_groups_that_do_not_fit_the_devices_are_refused_with_sizes_that_do(key, size):
    config = {"zero_optimization": {"stage": 3, key: size}}
    found = f"{key} = {size}: there are 8 devices, which cannot be divided into groups of {size}."
    words = rf"{found} Choose a divisor .*\(1, 2, 4, 8\)"
    with pytest.raises(zero2jax.ConfigError, match=words):
        start(config)
    with pytest.raises(
        zero2jax.ConfigError, match=r"the mesh has axes {'data': 8}, and the axis 'data' must have"
    ):
        start(config, zero2jax.make_mesh(data=8))


AUTO_RATE = {"type": "AdamW", "params": {"lr": "auto"}}


@pytest.mark.filterwarnings("ignore:.*left at .auto.:UserWarning")
@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        (None, "optimizer.params.lr"),
        ({"type": "WarmupLR", "params": {}}, "optimizer.params.lr"),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}}, "optimizer.params.lr"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_max_lr": "auto"}},
            "scheduler.params.warmup_max_lr",
        ),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}, None),
        ({"type": "LRRangeTest"}, None),
    ],
)
def test_a_learning_rate_at_auto_is_not_trained_by(scheduler, key):
    config = {"optimizer": AUTO_RATE, **({} if scheduler is None else {"scheduler": scheduler})}
    mesh = zero2jax.make_mesh(data=2)
    if key is None:
        zero2jax.initialize(loss_fn, config=config, mesh=mesh)
        return
    with pytest.raises(zero2jax.ConfigError, match=f"{key} = 'auto': a learning rate needs a value"):
        zero2jax.initialize(loss_fn, config=config, mesh=mesh)
    with pytest.warns(zero2jax.ConfigWarning, match="not used, since `tx` was given"):
        start(config, mesh)


def test_batch_sizes_set_the_microbatches_and_are_checked():
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine = zero2jax.initialize(loss_fn, optax.sgd(0.1), config, zero2jax.make_mesh(data=2))
    assert engine.num_microbatches == 2
    state = engine.init({"w": np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match="it has 4 examples, and the batch size was set to 8"):
        engine.step(state, BATCH[:4])
    with pytest.raises(zero2jax.ConfigError, match=r"shards = 3 \(from axis 'data' of the mesh\)"):
        zero2jax.initialize(loss_fn, optax.sgd(0.1), config, zero2jax.make_mesh(data=3))


def test_a_step_with_bf16_and_a_gradient_that_is_not_finite_is_skipped():
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    engine = zero2jax.initialize(loss_fn, optax.adam(0.1), config, zero2jax.make_mesh(data=2))
    state = engine.init({"w": np.full((2, 2), 0.5, np.float32)})
    state, metrics = engine.step(state, BATCH)
    before = [np.asarray(x) for x in (*state.params.values(), *map(jnp.asarray, state.opt_state[0][:1]))]
    assert bool(metrics["applied"])
    state, metrics = engine.step(state, np.full_like(BATCH, np.inf))
    after = [np.asarray(x) for x in (*state.params.values(), *map(jnp.asarray, state.opt_state[0][:1]))]
    assert not bool(metrics["applied"])
    assert int(state.step) == 2
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    config["bf16"]["check_grad_overflow"] = False
    params, metrics = first_step(config, optax.sgd(0.1), np.full_like(BATCH, np.inf))
    assert bool(metrics["applied"])
    assert not np.isfinite(params).all()


@pytest.mark.filterwarnings("ignore:activation settings. the loss function has no layers:UserWarning")
def test_every_warning_points_at_the_line_that_called():
    config = {
        "seed": 1,
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 100},
        "activation_checkpointing": {"partition_activations": True},
    }
    with pytest.warns(zero2jax.ConfigWarning) as early:
        engine = zero2jax.initialize(loss_fn, optax.sgd(0.1), config, zero2jax.make_mesh(data=1))
    state = engine.init({"w": np.ones((2, 2), np.float32)})
    with pytest.warns(zero2jax.ConfigWarning) as late:  # only compilation learns of the platform
        engine.step(state, BATCH)
    found = [w for w in (*early, *late) if issubclass(w.category, zero2jax.ConfigWarning)]
    causes = (
        "seed: unknown",
        "gradient_clipping is absent",
        "on one device",
        "['optimizer'] are not used",
        "partition_activations",
        "reduce_bucket",
    )
    assert len(found) == len(causes)
    assert all(cause in str(w.message) for cause, w in zip(causes, found, strict=True))
    assert {w.filename for w in found} == {__file__}
    assert sorted({w.lineno for w in found}) == [early[0].lineno, late[0].lineno]


def test_one_device_warns_that_nothing_is_saved():
    with pytest.warns(zero2jax.ConfigWarning, match="on one device saves nothing"):
        zero2jax.initialize(
            loss_fn, optax.sgd(0.1), {"zero_optimization": {"stage": 2}}, zero2jax.make_mesh(data=1)
        )


def test_a_memory_block_has_no_effect_without_gpus_and_says_so(monkeypatch):
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0, "memory": {"fraction": 0.8}}
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    for mesh in (None, zero2jax.make_mesh(data=2)):
        with pytest.warns(zero2jax.ConfigWarning, match="memory.fraction: no effect on platform 'cpu'"):
            start(config, mesh)
    monkeypatch.setattr(initialize, "GPU_PLATFORMS", ("cpu",))
    with pytest.raises(
        zero2jax.ConfigError, match=r"memory: .* by fraction=0.8: a device has been used before"
    ):
        start(config)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.8")
    start(config)
    config["memory"] = {"allocator": "platform", "fraction": 0.8}
    with pytest.raises(zero2jax.ConfigError, match=r"fraction is 0\.8 and the allocator is 'platform'"):
        start(config)
    config["memory"] = {"allocator": "cub"}
    with pytest.raises(
        zero2jax.ConfigError, match=r"memory\.allocator = 'cub': must be one of 'default', 'bfc'"
    ):
        start(config)
