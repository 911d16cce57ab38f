"""State in pinned host memory that the devices update; and parameters there that the loss fetches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_trees_close,
    assert_trees_equal,
    make_batch,
    make_batches,
    make_engine,
    make_params,
    mean_loss,
    train,
)

import zero2jax
from zero2jax.offload import host_memory

NUM = 2
SETTINGS = {"stage": 3, "clip_norm": 0.5, "trainable": lambda path, leaf: path != "norm"}
STREAMED = zero2jax.OffloadSettings(update_on="device", params=True, chunk_bytes=64)


def boosted(params, batch):
    """A loss whose gradients overflow float16 where an example is boosted."""
    return mean_loss(params, batch) * batch["weight"].astype(params["scale"].dtype).mean()


@pytest.fixture(scope="module")
def engines():
    """An engine that streams state and parameters, and one that offloads nothing, otherwise alike."""
    return tuple(
        make_engine(NUM, offload=offload, precision=zero2jax.Precision(), **SETTINGS)
        for offload in (STREAMED, None)
    )


def kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


as_numpy = lambda tree: jax.tree.map(np.asarray, tree)


def test_state_and_parameters_wait_on_the_host_and_scalars_on_the_devices(engines):
    engine, plain = engines
    state, metrics = train(engine, engine.init(make_params()), make_batches(2))
    expected, others = train(plain, plain.init(make_params()), make_batches(2))
    # b, w and embed; norm is frozen, scale a scalar
    assert kinds(state.params) == ["pinned_host"] * 3 + ["device"] * 2
    assert kinds(state.opt_state) == [
        "device",
        *["pinned_host"] * 3,
        "device",
        *["pinned_host"] * 3,
        "device",
    ]
    assert set(kinds((state.step, state.rng, metrics[-1]["loss"], metrics[-1]["grad_norm"]))) == {"device"}
    assert kinds(engine._compiled.on_devices(state).params) == ["pinned_host"] * 3 + ["device"] * 2
    # A chunk of one leaf multiplies by the reciprocal of a bias correction, where several divide by it: an ulp of the
    # update, and what two steps make of it.
    assert_trees_close(as_numpy((state, metrics)), as_numpy((expected, others)), rtol=1e-5, atol=1e-7)
    full = engine.params(state), plain.params(expected)
    assert_trees_close(*map(as_numpy, full), rtol=1e-5, atol=1e-7)
    report = engine.memory(state, make_batch())
    size = host_memory.pinned_param_bytes(
        engine.layout, engine._blueprint.program(engine.layout).settings, engine.mesh
    )
    assert report["parameters, on the host"].measured_bytes == size > 2 * 125 // NUM  # of 125, in bf16
    assert report["parameters between steps"].measured_bytes == 0
    assert report.held == ("master", "optimizer state", "parameters between steps", "temporary")


def test_a_third_step_compiles_nothing_and_what_it_took_is_donated(engines, caplog):
    engine, _ = engines
    first = engine.init(make_params())
    state, _ = train(engine, first, make_batches(2))
    assert all(x.is_deleted() for x in jax.tree.leaves((first.opt_state, first.step)))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        state, _ = train(engine, state, make_batches(1))
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
    # Other parameters are those that count, and full ones are sharded again.
    other = engine.init(make_params(seed=5))
    swapped = state._replace(params=other.params)
    loss = engine.evaluate(swapped, make_batch())
    assert float(engine.step(swapped, make_batch())[1]["loss"]) == float(loss)


def test_checkpoints_go_both_ways_and_a_state_waits_between_phases(engines, tmp_path):
    engine, plain = engines
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, state)
    reader = zero2jax.Checkpointer(tmp_path)
    there, here = reader.restore(plain)[0], reader.restore(engine)[0]
    assert kinds(here) == kinds(state)
    assert set(kinds(there)) == {"device"}
    assert_trees_equal(as_numpy(there), as_numpy(state))
    before = as_numpy(state)
    waiting = engine.offload_state(state)
    assert set(kinds((waiting.params, waiting.opt_state))) == {"pinned_host"}
    with pytest.raises(ValueError, match="waits in host memory"):  # of frozen parameters
        engine.step(waiting, make_batch())
    again = engine.reload_state(waiting)
    assert kinds(again) == kinds(here)
    assert_trees_equal(as_numpy(again), before)
    (from_plain, _), (expected, _) = engine.step(there, make_batch()), engine.step(here, make_batch())
    assert_trees_equal(as_numpy(from_plain), as_numpy(expected))


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_full_parameters_put_back_into_a_state_are_sharded_again(update_on):
    host = tuple(jax.devices()[4 : 4 + NUM]) if update_on == "host" else None
    offload = zero2jax.OffloadSettings(update_on=update_on, host_devices=host)
    loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()
    engine = make_engine(NUM, loss_fn=loss_fn, tx=optax.sgd(0.1), offload=offload)
    batch, params = np.ones((4, 4), np.float32), {"w": jnp.arange(16.0).reshape(4, 4)}
    state = engine.init(params)
    state, metrics = engine.step(state._replace(params=engine.params(state)), batch)
    assert float(metrics["loss"]) == float(loss_fn(params, batch))
    expected, _ = engine.step(engine.init(params), batch)
    assert_trees_equal(as_numpy(state), as_numpy(expected))
    assert state.params["w"].sharding.is_equivalent_to(expected.params["w"].sharding, 2)


def test_a_step_that_overflows_leaves_the_state_as_it_is():
    engine = make_engine(
        NUM, loss_fn=boosted, offload=STREAMED, precision="float16", stage=3, num_microbatches=3
    )
    state = engine.init(make_params())
    state, metrics = engine.step(state, make_batch())
    before, bad = as_numpy(state), make_batch()
    bad["weight"][7] = 6e4
    state, metrics = engine.step(state, bad)
    assert not metrics["applied"]
    after = as_numpy(state)
    assert_trees_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert int(after.step) == int(before.step) + 1
    assert float(after.loss_scale.scale) <= float(before.loss_scale.scale)


def test_what_it_cannot_do_is_an_error_that_says_so(engines, monkeypatch):
    engine, _ = engines
    state = engine.init(make_params())
    with pytest.raises(ValueError, match=r"running a step inside of a program of yours .* engine offloads"):
        jax.jit(lambda batch: engine.step(state, batch))(make_batch())
    with pytest.raises(
        ValueError, match="update_on is 'gpu'; it is 'host', where the CPU updates, or 'device'"
    ):
        zero2jax.OffloadSettings(update_on="gpu")
    with pytest.raises(ValueError, match="params is 1; it is True or False"):
        zero2jax.OffloadSettings(params=1)
    with pytest.raises(ValueError, match=r"offloading parameters .* at stage 2: .* Use stage=3"):
        make_engine(NUM, stage=2, offload=STREAMED)
    mesh = zero2jax.make_mesh(replica=2, data=2)
    with pytest.raises(
        ValueError, match=r"offloading parameters .* with shard_over_replicas: .* Use stage=3"
    ):
        zero2jax.Engine(
            mean_loss, optax.adam(1e-2), mesh, stage=3, shard_over_replicas=True, offload=STREAMED
        )
    asks = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda grads, state, params=None, *, temperature: (grads, state)
    )
    half = make_engine(NUM, tx=asks, offload=zero2jax.OffloadSettings(ratio=0.5))
    with pytest.raises(ValueError, match=r"which leaves go is decided .* or offload all of it: ratio=1"):
        half.abstract_state(make_params())
    monkeypatch.setattr("zero2jax.offload.host_mesh.has_host_memory", lambda mesh: False)
    with pytest.raises(
        ValueError, match=re.escape("no 'pinned_host'. Use a newer jax, or OffloadSettings()")
    ):
        make_engine(NUM, stage=3, offload=STREAMED)
