"""What a refusal to restore says: every leaf that does not fit, and the way out that works for this kind of misfit."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_engine, make_params

from zero2jax import Checkpointer, CheckpointError

RENAME = "Names that changed go into rename="


def loss(params, batch):
    return sum(jnp.sum(x) for x in params.values()) * jnp.mean(batch)


PARAMS = {"a": np.ones(4, np.float32), "b": np.ones(3, np.float32)}


@pytest.fixture
def saved(tmp_path):
    engine = make_engine(2, loss_fn=loss, trainable=lambda name, _: name == "a")
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, engine.init(PARAMS))
    return tmp_path


def refusal(directory, params, trainable="a", **settings):
    engine = make_engine(2, loss_fn=loss, trainable=lambda name, _: name in trainable, **settings)
    state = engine.init(params)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(directory, engine).restore()
    return engine, state, str(error.value)


def test_other_shapes_alone_are_other_parameters_and_a_selection_restores_the_others(saved):
    engine, state, text = refusal(saved, {**PARAMS, "b": np.zeros(5, np.float32)})
    assert (
        "of another shape or dtype: 'params/b' float32[5]: the checkpoint has 'params/b' float32[3]" in text
    )
    assert "these are other parameters: take what fits with select=" in text
    assert "rename=" not in text
    restored, _ = Checkpointer(saved).restore(engine, into=state, select=lambda name, _: name != "params/b")
    np.testing.assert_array_equal(restored.params["a"][:4], PARAMS["a"])
    np.testing.assert_array_equal(restored.params["b"][:5], np.zeros(5))


def test_other_names_bring_the_hint_to_rename(saved):
    for params in ({"a": PARAMS["a"], "c": PARAMS["b"]}, {"a": np.ones(9, np.float32), "c": PARAMS["b"]}):
        _, _, text = refusal(saved, params)
        assert RENAME in text
        assert "other parameters" not in text
    assert "'params/a' float32[9]: the checkpoint has 'params/a' float32[4]" in text


def test_moments_of_newly_trained_parameters_are_taken_fresh(saved):
    engine, state, text = refusal(saved, PARAMS, trainable="ab")
    assert "not in the checkpoint: 'opt_state/0/mu/b' float32[3]" in text
    assert "checkpointer.restore(engine, strict=False, into=engine.init(...)) takes fresh ones there" in text
    assert RENAME not in text
    restored, _ = Checkpointer(saved).restore(engine, into=state, strict=False)
    np.testing.assert_array_equal(restored.opt_state[0].mu["b"], np.zeros_like(restored.opt_state[0].mu["b"]))


def test_another_optimizer_is_named_and_no_message_leaves_out_the_checkpointer(saved):
    engine, _, text = refusal(saved, PARAMS, tx=optax.sgd(0.1, momentum=0.9))
    assert "Only the optimizer's state differs" in text
    assert RENAME not in text
    with pytest.raises(CheckpointError) as error:
        Checkpointer(saved, engine).restore(select="params")
    for message in (text, str(error.value)):
        assert "checkpointer.restore(engine, " in message
        assert not re.search(r"(?<!checkpointer\.)\brestore\(", message)


def test_many_misfits_are_counted(tmp_path):
    params = {f"w{i:02}": np.ones(2, np.float32) for i in range(12)}
    engine = make_engine(1, loss_fn=loss, tx=optax.sgd(0.1))
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, engine.init(params))
    other = make_engine(1, tx=optax.sgd(0.1))
    other.abstract_state(make_params())
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).restore(other)
    assert str(error.value).count("only in the checkpoint: 'params/w") == 8
    assert "only in the checkpoint: and 4 more" in str(error.value)
