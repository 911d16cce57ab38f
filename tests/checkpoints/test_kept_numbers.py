"""Numbers that an optimizer keeps as state: the checkpoint's count, and a warning says so."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax

PARAMS = {"w": np.full((3, 5), 0.5, np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def make_engine(tx, stage=2):
    engine = zero2jax.Engine(
        loss_fn, tx, zero2jax.make_mesh(data=4), stage=stage, precision=zero2jax.Precision(jnp.float32)
    )
    engine.abstract_state(PARAMS)
    return engine


def adamw(**numbers):
    return optax.inject_hyperparams(optax.adamw)(**numbers)


@pytest.fixture
def saved(tmp_path):
    engine = make_engine(adamw(learning_rate=0.1, weight_decay=0.25))
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, engine.init(PARAMS))
    return zero2jax.Checkpointer(tmp_path)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_a_restored_number_that_differs_is_named(tmp_path, wrap):
    first = make_engine(wrap(adamw(learning_rate=0.1, weight_decay=0.25)))
    with zero2jax.Checkpointer(tmp_path, first) as checkpointer:
        checkpointer.save(1, first.init(PARAMS))
    other = make_engine(wrap(adamw(learning_rate=0.5, weight_decay=0.25)), stage=3)
    with pytest.warns(zero2jax.CheckpointWarning) as caught:
        state, _ = zero2jax.Checkpointer(tmp_path).restore(other)
    (warning,) = caught
    assert "/hyperparams/learning_rate is 0.1" in str(warning.message).replace("0.10000000149011612", "0.1")
    assert "not 0.5" in str(warning.message)
    assert "weight_decay" not in str(warning.message)
    assert warning.filename == __file__
    _, metrics = other.step(state, np.ones((8, 3), np.float32))
    np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)


def test_the_ways_out_that_the_warning_names(saved):
    other = make_engine(adamw(learning_rate=0.5, weight_decay=0.25))
    name = "opt_state/hyperparams/learning_rate"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = saved.restore(other, into=other.init(PARAMS), select=lambda leaf, _: leaf != name)
        _, metrics = other.step(state, np.ones((8, 3), np.float32))
        np.testing.assert_allclose(metrics["learning_rate"], 0.5, rtol=1e-6)
        saved.restore(make_engine(adamw(learning_rate=0.1, weight_decay=0.25)))


def test_a_schedule_and_the_optimizer_of_a_file_are_not_warned_of(tmp_path):
    def scheduled(rate):
        return make_engine(adamw(learning_rate=lambda count: rate))

    def configured(rate):
        config = {"optimizer": {"type": "AdamW", "params": {"lr": rate}}, "zero_optimization": {"stage": 2}}
        engine = zero2jax.initialize(loss_fn, config=config, mesh=zero2jax.make_mesh(data=4))
        engine.abstract_state(PARAMS)
        return engine

    for name, make in (("scheduled", scheduled), ("configured", configured)):
        first, other = make(0.1), make(0.5)
        with zero2jax.Checkpointer(tmp_path / name, first) as checkpointer:
            checkpointer.save(1, first.init(PARAMS))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state, _ = zero2jax.Checkpointer(tmp_path / name).restore(other)
        _, metrics = other.step(state, np.ones((8, 3), np.float32))
        np.testing.assert_allclose(metrics["learning_rate"], 0.5, rtol=1e-6)
