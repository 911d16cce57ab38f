"""Groups of devices: a mesh with an axis `replica` gives what one device gives, and little crosses the groups."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FP32,
    assert_trees_close,
    bytes_on_device,
    make_batches,
    make_params,
    mean_loss,
    oracle,
    train,
    weighted_loss,
)
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.base.mesh import DataAxes, axis_size, data_axes
from zero2jax.programs.audit import audit

BATCHES = make_batches(2, 48)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
GROUPS = {"2 x 4": (2, 4), "4 x 2": (4, 2), "3 x 2": (3, 2)}
# fp32 sums in another order, as in test_step; two steps of Adam with a learning rate of 1e-2
TOLERANCE = 5e-6


@functools.cache
def make_engine(groups="2 x 4", over=False, stage=2, num_microbatches=1, loss_fn=mean_loss):
    replica, data = GROUPS[groups]
    engine = zero2jax.Engine(
        loss_fn,
        TX,
        zero2jax.make_mesh(replica=replica, data=data),
        stage=stage,
        num_microbatches=num_microbatches,
        precision=FP32,
        shard_over_replicas=over,
    )
    engine.abstract_state(make_params(), batch=BATCHES[0])
    return engine


@functools.cache
def expected(loss_fn=mean_loss):
    return oracle(loss_fn, TX, make_params(), BATCHES)


# --- the axes --------------------------------------------------------------------------------------------------------


def test_the_batch_is_cut_over_groups_and_the_state_inside_them_or_over_all_devices():
    mesh = zero2jax.make_mesh(replica=2, data=4)
    axes = data_axes(mesh)
    assert (axes.batch, axes.rest) == (("replica", "data"), "data")
    assert (axis_size(mesh, axes.batch), axis_size(mesh, axes.rest)) == (8, 4)
    over = data_axes(mesh, rest_over_replicas=True)
    # inside a group first: gathering over the groups joins neighbours
    assert over.rest == ("data", "replica")
    assert data_axes(zero2jax.make_mesh(data=8)) == DataAxes("data", None)


def test_the_state_cannot_be_cut_over_groups_that_are_not_there():
    with pytest.raises(ValueError, match=r"axes \{'data': 8\} and none called 'replica'"):
        zero2jax.Engine(mean_loss, TX, zero2jax.make_mesh(data=8), shard_over_replicas=True)


def test_stage_0_has_nothing_to_cut_over_groups():
    with pytest.raises(ValueError, match="shard_over_replicas at stage 0"):
        make_engine(over=True, stage=0)
    config = {"zero_optimization": {"stage": 0, "zero_hpz_partition_size": 4}}
    assert zero2jax.initialize(mean_loss, TX, config).axes.rest == "data"


def test_a_batch_must_divide_over_all_groups():
    engine = make_engine()
    with pytest.raises(ValueError, match="12 examples over 8 devices"):
        engine.lower(jax.tree.map(lambda x: x[:12], BATCHES[0]))


@pytest.mark.parametrize("over", [False, True])
def test_parameters_cannot_be_placed_on_the_replica_axis(over):
    mesh = zero2jax.make_mesh(replica=2, data=4)
    engine = zero2jax.Engine(
        lambda p, b: (b @ p["w"]).mean(), TX, mesh, param_specs={"w": P("replica")}, shard_over_replicas=over
    )
    with pytest.raises(ValueError, match=r"'replica'.*Name only the other mesh axes"):
        engine.init({"w": jnp.ones((8, 8))})


# --- the numbers -----------------------------------------------------------------------------------------------------

CASES = [
    *[("2 x 4", over, stage, 1) for over in (False, True) for stage in (0, 1, 2, 3) if stage or not over],
    ("2 x 4", True, 1, 3),
    ("2 x 4", False, 2, 3),
    ("2 x 4", True, 2, 3),
    ("2 x 4", True, 3, 3),
    ("4 x 2", True, 2, 1),
    ("3 x 2", True, 3, 1),
    ("3 x 2", False, 2, 2),
]


@pytest.mark.parametrize(("groups", "over", "stage", "num_microbatches"), CASES)
def test_groups_equal_one_device(groups, over, stage, num_microbatches):
    engine = make_engine(groups, over, stage, num_microbatches)
    state, metrics = train(engine, engine.init(make_params(), batch=BATCHES[0]), BATCHES)
    params, losses, norms = expected()
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=TOLERANCE)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=TOLERANCE)
    assert_trees_close(engine.params(state), params, rtol=TOLERANCE, atol=TOLERANCE)
    loss = jax.jit(mean_loss)(params, BATCHES[0])
    np.testing.assert_allclose(engine.evaluate(state, BATCHES[0]), loss, rtol=TOLERANCE)


@pytest.mark.parametrize("over", [False, True])
def test_a_weighted_mean_is_exact_over_groups(over):
    engine = make_engine(over=over, loss_fn=weighted_loss)
    state, metrics = train(engine, engine.init(make_params(), batch=BATCHES[0]), BATCHES)
    params, losses, _ = expected(weighted_loss)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=TOLERANCE)
    assert_trees_close(engine.params(state), params, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("over", [False, True])
def test_frozen_leaves_and_sums_over_groups_are_those_of_one_level(over):
    """The frozen leaf comes first, so that a gradient's place among gradients is not its leaf's place."""
    after = {}
    for name, mesh, shard_over in (
        ("one level", zero2jax.make_mesh(data=8), False),
        ("groups", zero2jax.make_mesh(replica=2, data=4), over),
    ):
        engine = zero2jax.Engine(
            mean_loss,
            optax.sgd(1e-3),
            mesh,
            precision=FP32,
            reduction="sum",
            trainable=lambda path, _: path != "blocks/b",
            shard_over_replicas=shard_over,
        )
        state, _ = engine.step(engine.init(make_params(), batch=BATCHES[0]), BATCHES[0])
        after[name] = engine.params(state)
    assert_trees_close(after["groups"], after["one level"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(after["groups"]["blocks"]["b"], make_params()["blocks"]["b"])
    assert np.abs(after["groups"]["embed"] - make_params()["embed"]).max() > 100 * TOLERANCE


def test_bf16_parameters_gathered_over_groups_are_those_of_one_level():
    losses = {}
    for name, mesh, over in (
        ("one level", zero2jax.make_mesh(data=8), False),
        ("groups", zero2jax.make_mesh(replica=2, data=4), True),
    ):
        engine = zero2jax.Engine(mean_loss, TX, mesh, stage=3, shard_over_replicas=over)
        state = engine.init(make_params(), batch=BATCHES[0])
        losses[name] = float(engine.step(state, BATCHES[0])[1]["loss"])
    assert losses["groups"] == losses["one level"]  # a cast and then a gather, or the other way round


def test_keys_differ_on_every_device_of_every_group():
    def loss(params, batch, rng):
        drawn = jax.random.uniform(rng)
        return jnp.mean(batch * params["w"][0]), {"drawn": drawn, "square": drawn**2}

    aux = {}
    for mesh in (zero2jax.make_mesh(data=8), zero2jax.make_mesh(replica=2, data=4)):
        engine = zero2jax.Engine(loss, optax.sgd(0.1), mesh, precision=FP32)
        _, metrics = engine.step(engine.init({"w": jnp.ones(16)}), jnp.ones((8, 1)))
        aux[mesh.axis_names] = [float(metrics["aux"][name]) for name in ("drawn", "square")]
    one_level, groups = aux.values()
    np.testing.assert_allclose(groups, one_level, rtol=1e-6)
    assert groups[1] > groups[0] ** 2 * 1.01  # eight draws, not one


# --- the bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [False, True])
def test_state_rests_in_each_group_or_over_all_devices(over):
    engine = make_engine(over=over)
    state = engine.init(make_params(), batch=BATCHES[0])
    assert engine.num_shards == (8 if over else 4)
    plan = engine.layout.params
    for device in engine.mesh.devices.flat:
        assert bytes_on_device(state.params, device) == plan.rest_bytes
    whole = sum(
        math.prod(leaf.rest_shape) * leaf.dtype.itemsize for leaf in plan.leaves if leaf.dim is not None
    )
    kept = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in plan.leaves if leaf.dim is None)
    assert plan.rest_bytes == whole // engine.num_shards + kept
    places = jax.tree.map(lambda x: x.sharding, state)
    after, _ = engine.step(state, BATCHES[0])
    assert jax.tree.map(lambda x: x.sharding, after) == places


def big_engine(over, stage, num_microbatches=1):
    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["stack"])[0])

    mesh = zero2jax.make_mesh(replica=2, data=4)
    engine = zero2jax.Engine(
        loss,
        optax.adam(1e-2),
        mesh,
        stage=stage,
        num_microbatches=num_microbatches,
        precision=FP32,
        shard_over_replicas=over,
    )
    shapes = {"stack": jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)}
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    engine.abstract_state(shapes, batch=batch)
    found = audit(engine.lower(batch).compile(), mesh=mesh, devices_per_host=4)
    large = [row for row in found.rows() if row.largest_bytes > 1024]
    return {(row.kind, row.axis): (row.bytes_per_step, row.across) for row in large}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("over", [False, True])
def test_only_shards_cross_the_groups_once_per_step(over, stage, num_microbatches):
    rows = big_engine(over, stage, num_microbatches)
    whole = 3 * 64 * 64 * 4
    per_use = num_microbatches if stage == 3 else 1  # stage 2 gathers once if there are several microbatches
    expected = {
        ("all-gather", "data"): ((2 if stage == 3 else 1) * per_use * whole, False),
        ("reduce-scatter", "data"): (num_microbatches * whole, False),
    }
    if over:
        expected |= {
            ("all-gather", "replica"): (whole // 4, True),
            ("reduce-scatter", "replica"): (whole // 4, True),
        }
    else:
        expected |= {("all-reduce", "replica"): (whole // 4, True)}
    assert rows == expected


# --- DeepSpeed's keys ------------------------------------------------------------------------------------------------


def config(**zero):
    return {"train_batch_size": 16, "zero_optimization": {"stage": 3, **zero}}


@pytest.mark.parametrize(("key", "num_shards"), [("mics_shard_size", 2), ("zero_hpz_partition_size", 8)])
def test_deepspeeds_group_sizes_make_the_mesh(key, num_shards):
    engine = zero2jax.initialize(mean_loss, TX, config(**{key: 2}))
    assert dict(engine.mesh.shape) == {"replica": 4, "data": 2}
    assert (engine.num_shards, engine.num_batch_shards, engine.batch_size) == (num_shards, 8, 16)
    given = zero2jax.make_mesh(replica=2, data=2)
    assert zero2jax.initialize(mean_loss, TX, config(**{key: 2}), given).mesh is given


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_one_group_is_no_hierarchy(key):
    engine = zero2jax.initialize(mean_loss, TX, config(**{key: 8}), zero2jax.make_mesh(data=8))
    assert (engine.num_shards, engine.axes.replica) == (8, None)


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_a_group_size_must_fit_the_devices_or_the_mesh(key):
    with pytest.raises(zero2jax.ConfigError, match=rf"{key} = 3: there are 8 devices"):
        zero2jax.initialize(mean_loss, TX, config(**{key: 3}))
    with pytest.raises(zero2jax.ConfigError, match=rf"{key} = 4: the mesh has axes \{{'data': 8\}}"):
        zero2jax.initialize(mean_loss, TX, config(**{key: 4}), zero2jax.make_mesh(data=8))


def test_two_group_sizes_contradict_each_other():
    with pytest.raises(zero2jax.ConfigError, match="both give the size of a group"):
        zero2jax.initialize(mean_loss, TX, config(mics_shard_size=2, zero_hpz_partition_size=4))
