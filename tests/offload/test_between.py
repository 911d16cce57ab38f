"""A state in host memory between two phases, and back."""

import jax
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, make_batch, make_engine, make_params

import zero2jax


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.fixture(scope="module")
def engine():
    return make_engine(3, stage=3, tx=optax.adam(1e-2), trainable=lambda path, leaf: path != "norm")


def test_a_state_comes_back_bit_for_bit_and_trains_on(engine, tmp_path):
    state, _ = engine.step(engine.init(make_params()), make_batch())
    before = jax.tree.map(np.array, state)
    moments = state.opt_state
    half = engine.offload_state(state, include=["opt_state"])
    assert (kinds(half.opt_state), kinds(half.params)) == ({"pinned_host"}, {"device"})
    assert all(x.is_deleted() for x in jax.tree.leaves(moments))
    away = engine.offload_state(half)
    assert kinds((away.params, away.opt_state)) == {"pinned_host"}
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, away)
    restored, _ = zero2jax.Checkpointer(tmp_path).restore(engine)
    assert_trees_equal(jax.tree.map(np.array, restored), before)
    for use in (engine.step, engine.evaluate):
        with pytest.raises(ValueError, match=r"waits in host memory.* state = engine.reload_state\(state\)"):
            use(away, make_batch())
    back = engine.reload_state(away)
    assert kinds(back) == {"device"}
    assert_trees_equal(jax.tree.map(np.array, back), before)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (back, engine.reload_state(back))), strict=True))
    state, _ = engine.step(back, make_batch(seed=2))
    expected, _ = engine.step(restored, make_batch(seed=2))
    assert_trees_equal(jax.tree.map(np.array, state), jax.tree.map(np.array, expected))


def test_a_part_that_is_none_is_refused(engine):
    with pytest.raises(ValueError, match=r"no part 'grads'. There are params, opt_state"):
        engine.offload_state(engine.init(make_params()), include=["grads"])


def test_one_part_may_be_named_alone(engine):
    away = engine.offload_state(engine.init(make_params()), "params")
    assert (kinds(away.opt_state), kinds(away.params)) == ({"device"}, {"pinned_host"})


def test_an_engine_that_offloads_moves_what_is_left_and_lets_its_copies_go():
    host = zero2jax.OffloadSettings(host_devices=tuple(jax.devices()[4:6]))
    engine = make_engine(2, offload=host, trainable=lambda path, leaf: path != "norm")
    state, _ = engine.step(engine.init(make_params()), make_batch())
    before = jax.tree.map(np.array, state)
    on = set(engine.mesh.devices.flat)
    copies = [x for x in jax.live_arrays() if x.shape == (8, 5) and x.sharding.device_set == on]
    assert copies
    del copies
    away = engine.offload_state(state)
    assert kinds(away.params["norm"]) == {"pinned_host"}
    assert away.params["embed"] is state.params["embed"]
    assert not [x for x in jax.live_arrays() if x.shape == (8, 5) and x.sharding.device_set == on]
    back = engine.reload_state(away)
    assert_trees_equal(jax.tree.map(np.array, back), before)
    engine.step(back, make_batch())
