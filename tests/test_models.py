"""Unmodified models of Flax Linen, Flax NNX, Equinox and plain containers, against one device.

Tolerances as in test_step: fp32 sums in another order, a learning rate of 1e-2 and two steps of Adam.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_models import LAYERS, WIDTH, LinenModel, NnxModel
from helpers import assert_trees_close, make_engine, oracle, train

RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(8, WIDTH)).astype(np.float32), "y": RNG.normal(size=(8, WIDTH)).astype(np.float32)}
    for _ in range(2)
]


def check(loss, params, *, stages=(1, 2, 3), num_shards=4, **settings):
    """Two steps at each stage equal two steps on one device; returns the last engine, state and metrics."""
    tx = optax.adam(1e-2)
    expected, losses, norms = oracle(loss, tx, params, BATCHES)
    for stage in stages:
        engine = make_engine(num_shards, loss_fn=loss, tx=tx, stage=stage, **settings)
        state, metrics = train(engine, engine.init(params, batch=BATCHES[0]), BATCHES)
        np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=5e-6)
        np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=5e-6)
        assert_trees_close(engine.params(state), expected, rtol=5e-6, atol=5e-6)
    return engine, state, metrics


# --- Flax Linen --------------------------------------------------------------------------------------------------


def linen_loss(model):
    return lambda params, batch: ((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


def linen_params(model):
    return model.init(jax.random.key(0), BATCHES[0]["x"])["params"]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_linen_models_match_one_device(scanned, remat):
    model = LinenModel(scanned, remat)
    params = jax.jit(linen_params, static_argnums=0)(model)
    engine, _, _ = check(linen_loss(model), params, stages=(2, 3))
    depths = {leaf.path: leaf.layer_dims for leaf in engine.layout.params.leaves}
    assert all(depth == (1 if path.startswith("blocks") else 0) for path, depth in depths.items())


def test_a_scanned_model_trains_like_the_unrolled_one():
    scanned, unrolled = LinenModel(True, True), LinenModel(False, False)
    stacked = jax.jit(linen_params, static_argnums=0)(scanned)
    pick = lambda i: jax.tree.map(lambda x: x[i], stacked["blocks"])
    params = {f"block_{i}": pick(i) for i in range(LAYERS)} | {"head": stacked["head"]}
    after = {}
    for name, model, start in (("scanned", scanned, stacked), ("unrolled", unrolled, params)):
        engine = make_engine(4, loss_fn=linen_loss(model), stage=2)
        state, _ = train(engine, engine.init(start), BATCHES)
        after[name] = engine.params(state)
    restacked = jax.tree.map(
        lambda *xs: jnp.stack(xs), *[after["unrolled"][f"block_{i}"] for i in range(LAYERS)]
    )
    assert_trees_close(
        after["scanned"], {"blocks": restacked, "head": after["unrolled"]["head"]}, rtol=5e-6, atol=5e-6
    )


# --- Flax NNX ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_nnx_models_match_one_device(scanned, remat):
    graph, params = nnx.split(NnxModel(scanned, remat, nnx.Rngs(0)), nnx.Param)
    loss = lambda params, batch: ((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2).mean()
    engine, _, _ = check(loss, params, stages=(2, 3))
    depths = {leaf.path: leaf.layer_dims for leaf in engine.layout.params.leaves}
    assert all(depth == (1 if scanned and path.startswith("blocks") else 0) for path, depth in depths.items())


class NormalizedModel(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def test_nnx_batch_statistics_and_random_counts_return_through_aux():
    model = NormalizedModel(nnx.Rngs(0))
    graph, state = nnx.split(model)
    is_param = jax.tree.map(
        lambda v: isinstance(v, nnx.Param), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    flags = jax.tree.map(lambda v, x: v, jax.tree.leaves(is_param), jax.tree.leaves(state))

    def loss(params, batch):
        model = nnx.merge(graph, params)
        error = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        _, _, rest = nnx.split(model, nnx.Param, ...)
        counts_and_statistics = nnx.filter_state(rest, nnx.Any(nnx.BatchStat, nnx.RngCount))
        return error, {"frozen": counts_and_statistics}

    trainable = jax.tree.unflatten(jax.tree.structure(state), flags)
    engine = make_engine(4, loss_fn=loss, tx=optax.sgd(0.0), stage=2, trainable=trainable)
    after, _ = train(engine, engine.init(state), BATCHES)
    found = nnx.merge(graph, engine.params(after))
    x = BATCHES[0]["x"], BATCHES[1]["x"]
    means = [np.asarray(model.linear(b)).mean(0) for b in x]
    # each device's mean, averaged over devices: the mean of the whole batch. fp32, values of about one
    np.testing.assert_allclose(found.norm.mean[...], 0.09 * means[0] + 0.1 * means[1], atol=1e-6)
    assert int(found.dropout.rngs.count[...]) == 2
    np.testing.assert_array_equal(found.linear.kernel[...], model.linear.kernel[...])


@pytest.mark.parametrize("stage", [2, 3])
def test_nnx_batch_norm_that_names_the_axis_has_the_statistics_of_the_global_batch(stage):
    make_norm = lambda axis_name: nnx.BatchNorm(WIDTH, momentum=0.0, axis_name=axis_name, rngs=nnx.Rngs(0))
    graph, params, stats = nnx.split(make_norm("data"), nnx.Param, nnx.BatchStat)
    error = lambda norm, batch: ((norm(batch["x"]) - batch["y"]) ** 2).mean()

    def loss(variables, batch):
        norm = nnx.merge(graph, variables["params"], variables["stats"], copy=True)
        return error(norm, batch), {"frozen": {"stats": nnx.state(norm, nnx.BatchStat)}}

    trainable = lambda path, leaf: path.startswith("params/")
    engine = make_engine(4, loss_fn=loss, tx=optax.sgd(0.0), stage=stage, trainable=trainable)
    after, (metrics,) = train(engine, engine.init({"params": params, "stats": stats}), BATCHES[:1])
    one_device = make_norm(None)
    # fp32, values of about one: means over 4 x 2 rows instead of 8
    np.testing.assert_allclose(metrics["loss"], error(one_device, BATCHES[0]), rtol=2e-6)
    found = engine.params(after)["stats"]
    np.testing.assert_allclose(found["mean"][...], one_device.mean[...], atol=1e-6)
    np.testing.assert_allclose(found["var"][...], one_device.var[...], atol=1e-6)


# --- Equinox and plain containers --------------------------------------------------------------------------------


def test_equinox_modules_are_parameters_as_they_are():
    model = eqx.nn.MLP(WIDTH, WIDTH, 7, LAYERS, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        predicted = jax.vmap(eqx.combine(params, static))(batch["x"])
        return ((predicted - batch["y"]) ** 2).mean()

    trainable = jax.tree.map(lambda x: True, params)  # a module of booleans, which can be called too
    engine, state, _ = check(loss, params, stages=(2, 3), trainable=trainable)
    assert isinstance(engine.params(state), eqx.nn.MLP)


def test_lists_and_tuples_are_parameters():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [(0.5 * jax.random.normal(k, (WIDTH, WIDTH)), jnp.zeros(WIDTH)) for k in keys]

    def loss(params, batch):
        x = batch["x"]
        for w, b in params:
            x = jnp.tanh(x @ w + b[None])
        return ((x - batch["y"]) ** 2).mean()

    engine, _, _ = check(loss, params, stages=(1, 2, 3))
    assert [leaf.path for leaf in engine.layout.params.leaves][:2] == ["0/0", "0/1"]


def test_a_bare_array_is_a_parameter():
    loss = lambda w, batch: ((batch["x"] @ w - batch["y"]) ** 2).mean()
    check(loss, jnp.eye(WIDTH), stages=(3,))
