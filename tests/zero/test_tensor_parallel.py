"""A mesh with a second axis: data 4 x model 2 gives what one device gives, and moves model shards only."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, assert_trees_close, bytes_on_device, oracle, train
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.programs.hlo import collectives

LAYERS, WIDTH, HIDDEN = 2, 6, 10
SPECS = {
    "down": P(None, "model", None),
    "embed": None,
    "gate": P(None, "model"),
    "scale": P(),
    "up": P(None, None, "model"),
}
BATCH = np.random.default_rng(0).integers(0, 7, (16, 2)).astype(np.int32)


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "down": 0.4 * jax.random.normal(keys[0], (LAYERS, HIDDEN, WIDTH)),
        "embed": jax.random.normal(keys[1], (7, WIDTH)),
        "gate": 1
        + 0.1 * jax.random.normal(keys[2], (LAYERS, HIDDEN)),  # its only dim belongs to the model axis
        "scale": jnp.ones(WIDTH),
        "up": 0.4 * jax.random.normal(keys[3], (LAYERS, WIDTH, HIDDEN)),
    }


def loss(params, batch):
    def block(x, layer):
        return x + (jnp.tanh(x @ layer["up"]) * layer["gate"][None]) @ layer["down"], None

    stack = {name: params[name] for name in ("down", "gate", "up")}
    x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][batch[:, 0]], stack)
    logits = (x * params["scale"][None]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1]).mean()


@functools.cache
def make_engine(stage, num_microbatches=1):
    mesh = zero2jax.make_mesh(data=4, model=2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    engine = zero2jax.Engine(
        loss, tx, mesh, stage=stage, precision=FP32, param_specs=SPECS, num_microbatches=num_microbatches
    )
    engine.abstract_state(make_params(), batch=BATCH)
    return engine


@functools.cache
def expected():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return oracle(loss, tx, make_params(), [BATCH, BATCH])


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_data_4_x_model_2_equals_one_device(stage, num_microbatches):
    engine = make_engine(stage, num_microbatches)
    state, metrics = train(engine, engine.init(make_params(), batch=BATCH), [BATCH, BATCH])
    params, losses, norms = expected()
    # fp32 sums in another order, as in test_step; two steps of Adam with a learning rate of 1e-2
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=5e-6)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=5e-6)
    assert_trees_close(engine.params(state), params, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_rests_on_both_axes(stage):
    engine = make_engine(stage)
    state = engine.init(make_params(), batch=BATCH)
    for tree in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        assert tree["up"].sharding.spec == P(None, "data", "model")
        assert tree["down"].sharding.spec == P(None, "model", "data")
        assert tree["gate"].sharding.spec == P(None, "model")
        assert tree["embed"].sharding.spec == P("data")  # 7 rows over 4 pad less than 6 columns
    up = 4 * LAYERS * 8 * HIDDEN // 8  # 6 rows, padded to 8, over 4 x 2 devices
    for device in jax.devices():
        assert bytes_on_device(state.params["up"], device) == up


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_over_data_move_this_devices_model_shard_only(stage):
    engine = make_engine(stage)
    found = [c for c in collectives(engine.lower(BATCH).compile().as_text()) if c.group_size == 4]
    shards = {leaf.path: 2 if "model" in leaf.model_spec else 1 for leaf in engine.layout.params.leaves}
    sharded = {
        leaf.path: 4 * math.prod(leaf.rest_shape) // shards[leaf.path]
        for leaf in engine.layout.params.leaves
        if leaf.dim is not None
    }
    assert sharded.keys() == {"down", "embed", "scale", "up"}
    reduced = sum(c.total_bytes for c in found if c.kind == "reduce-scatter")
    gathered = sum(c.total_bytes for c in found if c.kind == "all-gather")
    stacks, rest = sharded["down"] + sharded["up"], sharded["embed"] + sharded["scale"]
    if stage < 3:
        assert gathered == reduced == stacks + rest
    else:  # both uses of the embedding; layers once more in backward
        assert stacks + rest <= reduced <= stacks + rest + sharded["embed"]
        in_loops = [c for c in found if c.kind == "all-gather" and c.loops]
        assert sum(c.total_bytes for c in in_loops) == 2 * stacks
    assert not [c for c in found if c.kind in ("all-to-all", "collective-permute")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_slice_along_the_model_axis_gathers_first(stage):
    params = {"w": np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)}
    x = np.linspace(-2, 1, 144, dtype=np.float32).reshape(24, 6)
    sliced = lambda p, b: ((b @ p["w"][:3].T) ** 2).mean()
    engine = zero2jax.Engine(
        sliced,
        optax.sgd(0.1),
        zero2jax.make_mesh(data=2, model=4),
        stage=stage,
        precision=FP32,
        param_specs={"w": P("model", None)},
    )
    state, metrics = engine.step(engine.init(params), x)
    expected, grads = jax.value_and_grad(sliced)(params, x)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(engine.params(state)["w"], params["w"] - 0.1 * grads["w"], atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_summed_in_bf16_beside_a_model_axis(stage):
    """A sum in 16 bits over one automatic axis of two would end the process in XLA's CPU compiler."""
    params = {
        "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
        "placed": np.ones((4, 2), np.float32),
    }
    x = np.linspace(-2, 1, 24, dtype=np.float32).reshape(6, 4)
    tanh_loss = lambda p, b: (jnp.tanh(b @ p["w"]).sum(1) + (b @ p["placed"]).sum(1)).mean()
    after = {}
    for name, axes in {"data": {"data": 2}, "data x model": {"data": 2, "model": 2}}.items():
        specs = {"w": P(), "placed": P(None, "model")} if "model" in axes else None
        engine = zero2jax.Engine(
            tanh_loss, optax.sgd(0.1), zero2jax.make_mesh(**axes), stage=stage, param_specs=specs
        )
        after[name] = engine.params(engine.step(engine.init(params), x)[0])
    assert np.abs(after["data"]["w"] - params["w"]).max() > 1e-2
    # one bf16 rounding (2**-9) of a gradient below 2, times the learning rate
    assert_trees_close(after["data x model"], after["data"], atol=0.1 * 2 * 2**-9)
