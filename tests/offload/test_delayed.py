"""Delayed updates against a plain loop: the gradient of a step is taken where the parameters were a step before."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FP32,
    assert_trees_close,
    assert_trees_equal,
    losses_per_example,
    make_batches,
    make_engine,
    make_params,
    train,
)

import zero2jax


def loss_fn(params, batch):
    return jnp.mean(losses_per_example(params, batch) * batch["weight"])


GRADIENT = jax.jit(jax.value_and_grad(loss_fn))
HOST = tuple(jax.devices()[4:6])
CLIP = 0.5


def engine_of(delay_after):
    offload = zero2jax.OffloadSettings(host_devices=HOST, delay_after=delay_after, chunk_bytes=1)
    common = {
        "loss_fn": loss_fn,
        "tx": optax.adam(1e-2),
        "precision": FP32,
        "clip_norm": CLIP,
        "skip_nonfinite": True,
    }
    return make_engine(2, offload=offload, **common)


def simulated(batches, delay_after, skipped=()):
    """Parameters and losses of a loop on one device, without the library.

    Of steps from 1 on, those after `delay_after` take their gradient at the parameters before the last update.
    """
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(1e-2))
    params = [make_params()]
    opt_state, losses = tx.init(params[0]), []
    for k, batch in enumerate(batches, 1):
        at = params[-2] if k > delay_after and k >= 2 else params[-1]
        loss, grads = GRADIENT(at, batch)
        losses.append(float(loss))
        if k in skipped:
            params.append(params[-1])
            continue
        updates, opt_state = tx.update(grads, opt_state, params[-1])
        params.append(optax.apply_updates(params[-1], updates))
    return params[-1], losses


@pytest.fixture(scope="module")
def delayed():
    return engine_of(2)


@pytest.mark.parametrize("delay_after", [0, 2])
def test_each_gradient_is_one_update_older_after_the_warm_up(delay_after, delayed, monkeypatch):
    state, batches = delayed.init(make_params()), make_batches(6)
    monkeypatch.setattr(delayed.functions, "_delay_after", delay_after)
    state, metrics = train(delayed, state, batches)
    params, losses = simulated(batches, delay_after)
    # sums over two devices are added in another order
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=1e-5)
    assert_trees_close(jax.tree.map(np.asarray, delayed.params(state)), params, rtol=1e-4, atol=1e-5)
    _, not_delayed = simulated(batches, 100)
    assert abs(losses[-1] - not_delayed[-1]) > 1e-3  # so that it would be seen


def test_a_step_that_is_skipped_delays_no_further(delayed):
    batches = make_batches(6)
    batches[3] = batches[3] | {"weight": np.full_like(batches[3]["weight"], np.nan)}
    state, metrics = train(delayed, delayed.init(make_params()), batches)
    params, losses = simulated(batches, 2, skipped={4})
    assert [bool(m["applied"]) for m in metrics] == [True, True, True, False, True, True]
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=1e-5)
    assert_trees_close(jax.tree.map(np.asarray, delayed.params(state)), params, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_has_all_updates_and_its_first_step_is_not_delayed(delayed, tmp_path):
    batches = make_batches(6)
    state, _ = train(delayed, delayed.init(make_params()), batches[:4])
    with zero2jax.Checkpointer(tmp_path, delayed) as checkpointer:
        checkpointer.save(4, state)
    loss = delayed.evaluate(state, batches[4])  # at the parameters after the last update
    plain = engine_of(None)
    plain.abstract_state(make_params())
    there, _ = zero2jax.Checkpointer(tmp_path).restore(plain)
    there, metrics = plain.step(there, batches[4])
    np.testing.assert_array_equal(metrics["loss"], loss)
    _, late = delayed.step(state, batches[4])
    assert float(late["loss"]) != float(loss)
    restored, _ = zero2jax.Checkpointer(tmp_path).restore(delayed)
    restored, _ = delayed.step(restored, batches[4])
    assert_trees_equal(*(jax.tree.map(np.asarray, x) for x in (restored, there)))
    _, second = delayed.step(restored, batches[5])  # delayed at once: the state is past the warm-up
    _, at_once = plain.step(there, batches[5])
    assert float(second["loss"]) != float(at_once["loss"])


def test_between_steps_the_devices_hold_the_copies_of_two_steps_once_they_are_delayed(delayed):
    on = set(delayed.mesh.devices.flat)

    def copies():
        gc.collect()  # of tests before
        return len([x for x in jax.live_arrays() if x.shape == (8, 5) and x.sharding.device_set == on])

    delayed.abstract_state(make_params())
    delayed.functions.forget_copies()
    others, found = copies(), []
    for num_steps in (1, 2):
        state, _ = train(delayed, delayed.init(make_params()), make_batches(num_steps))
        jax.block_until_ready(state)
        found.append(copies() - others)
    assert found == [1, 2]
    delayed.offload_state(state)
    assert copies() == others


def test_a_delay_that_is_none_is_refused():
    for value in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"delay_after is {value}"):
            zero2jax.OffloadSettings(delay_after=value)
    with pytest.raises(ValueError, match="delay_after and nvme_path are both given"):
        zero2jax.OffloadSettings(delay_after=1, nvme_path="/x")
