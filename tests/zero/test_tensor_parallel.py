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


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
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


# --- every shape of mesh ---------------------------------------------------------------------------------------------

MESHES = {
    "4 x 2": {"data": 4, "model": 2},
    "2 x 4": {"data": 2, "model": 4},
    "8 x 1": {"data": 8, "model": 1},
    "1 x 8": {"data": 1, "model": 8},
    "2 x 2 x 2": {"replica": 2, "data": 2, "model": 2},
}
WIDE, VOCAB = 8, 7  # divides by every model axis; a vocabulary that divides by none
PLACED = {"head": None, "up": P(None, None, "model"), "down": P(None, "model"), "unplaced": None}
TX = optax.sgd(0.3, momentum=0.9)  # the size of a gradient counts, as it does not with Adam
BATCHES = [np.random.default_rng(i).integers(0, VOCAB, (16, 2)).astype(np.int32) for i in range(10)]


def make_wide_params():
    keys = jax.random.split(jax.random.key(1), 4)
    draw = lambda key, *shape: 0.4 * jax.random.normal(key, shape)
    return {
        "down": draw(keys[0], LAYERS, WIDE, WIDTH),
        "head": draw(keys[1], VOCAB, WIDTH),
        "unplaced": draw(keys[2], LAYERS, WIDTH, WIDTH),
        "up": draw(keys[3], LAYERS, WIDTH, WIDE),
    }


def wide_loss(params, batch, axes=()):
    """With a mean over all examples in the compute dtype, a sum in 16 bits that the loss asks for."""

    def block(x, layer):
        centre = x.mean(0)
        x = x - (jax.lax.pmean(centre, axes) if axes else centre)[None]
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"] + jnp.tanh(x @ layer["unplaced"]), None

    stack = {name: params[name] for name in ("down", "unplaced", "up")}
    x, _ = jax.lax.scan(jax.checkpoint(block), params["head"][batch[:, 0]], stack)
    logits = (x @ params["head"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1]).mean()


@functools.cache
def ten_steps_on_one_device():
    tx = optax.chain(optax.clip_by_global_norm(0.25), TX)
    return oracle(wide_loss, tx, make_wide_params(), BATCHES)


@pytest.mark.parametrize(
    ("mesh", "stage", "dtype"),
    [
        ("4 x 2", 2, jnp.float32),
        ("2 x 4", 1, jnp.float32),
        ("8 x 1", 3, jnp.float32),
        ("1 x 8", 2, jnp.float32),
        ("2 x 2 x 2", 2, jnp.float32),
        ("4 x 2", 0, jnp.bfloat16),
        ("2 x 4", 3, jnp.bfloat16),
        ("8 x 1", 1, jnp.bfloat16),
        ("1 x 8", 3, jnp.bfloat16),
        ("2 x 2 x 2", 2, jnp.bfloat16),
    ],
)
def test_ten_clipped_steps_equal_one_device_on_every_mesh(mesh, stage, dtype):
    axes = MESHES[mesh]
    loss = functools.partial(wide_loss, axes=tuple(name for name in axes if name != "model"))
    engine = zero2jax.Engine(
        loss,
        TX,
        zero2jax.make_mesh(**axes),
        stage=stage,
        precision=zero2jax.Precision(compute_dtype=dtype),
        clip_norm=0.25,
        param_specs=PLACED,
    )
    params, losses, norms = ten_steps_on_one_device()
    state, metrics = train(engine, engine.init(make_wide_params(), batch=BATCHES[0]), BATCHES)
    # In fp32 sums in another order, grown over ten steps. In bf16 a gradient passes parameters, activations, cotangents
    # and the sum over devices, each rounded by 2**-9 at most; no parameter moves by more than 0.5.
    rtol, atol = (2e-5, 2e-5) if dtype == jnp.float32 else (4 * 2**-9, 0.5 * 4 * 2**-9)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=rtol)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=rtol)
    assert min(norms) > 0.25  # every step is clipped
    np.testing.assert_allclose([float(m["grad_norm_clipped"]) for m in metrics], 0.25, rtol=1e-5)
    assert_trees_close(engine.params(state), params, rtol=0, atol=atol)
    found = {c.kind for c in collectives(engine.lower(BATCHES[0]).compile().as_text())}
    assert found <= {"all-reduce", "all-gather", "reduce-scatter"}


# --- what the layout costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stack_whose_layers_another_axis_holds_is_exchanged_where_its_layers_are(stage):
    """A loop over the full stack would take every layer from the device that has it; in one piece, the compiler would
    copy the stack into another layout.
    """
    params = {"w": jax.ShapeDtypeStruct((4, 6, 5), jnp.float32)}
    loss = lambda p, x: jnp.einsum("lij,bi->lbj", jnp.tanh(p["w"]), x).mean()
    engine = zero2jax.Engine(
        loss,
        optax.sgd(0.1),
        zero2jax.make_mesh(data=4, model=2),
        stage=stage,
        precision=FP32,
        param_specs={"w": P("model")},
        layer_dims=1,
    )
    engine.abstract_state(params)
    found = collectives(engine.lower(np.ones((8, 6), np.float32)).compile().as_text())
    moved = [(c.kind, c.trips, c.total_bytes) for c in found if c.kind != "all-reduce"]
    layer = 4 * 8 * 5  # 6 rows, padded to 8: two on each device of the data axis
    assert sorted(moved) == [("all-gather", 2, 2 * layer), ("reduce-scatter", 2, 2 * layer)]


def test_the_lowered_step_does_not_grow_with_the_number_of_devices():
    """Sizes divide by both, so that nothing is padded at one of them alone."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    stacks = {"down": shape(LAYERS, 8, 8), "unplaced": shape(LAYERS, 8, 8), "up": shape(LAYERS, 8, 8)}
    lines = []
    for data in (2, 4):
        mesh = zero2jax.make_mesh(data=data, model=2)
        engine = zero2jax.Engine(wide_loss, optax.adamw(1e-2), mesh, stage=3, param_specs=PLACED)
        engine.abstract_state({"head": shape(8, 8), **stacks}, batch=BATCHES[0])
        lines.append(len(engine.lower(BATCHES[0]).as_text().splitlines()))
    assert lines[0] == lines[1] > 100
