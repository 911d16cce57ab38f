"""The step against the same optax transformation, unsharded, on one device.

Tolerances. Sharding changes the order of fp32 sums over at most 24 examples and 7 devices: a relative error of
about log2(24) * 2**-24 = 3e-7 of the addends. Losses and norms are sums of such and agree to RTOL = 5e-6 with room
for three steps. An optimizer that normalizes (Adam, LAMB, Muon) divides the error of a gradient by its size: a
gradient 100 times smaller than its addends is off by 3e-5 of itself, and so is its update, which is about the
learning rate 1e-2 times one. So parameters after three steps agree to 3 * 3e-5 * 1e-2 = 1e-6; ATOL = 5e-6, while one
step moves them by 1e-2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FP32,
    LAYERS,
    OPTIMIZERS,
    WIDTH,
    assert_trees_close,
    assert_trees_equal,
    losses_per_example,
    make_batch,
    make_batches,
    make_engine,
    make_params,
    mean_loss,
    oracle,
    train,
    weighted_loss,
)

import zero2jax

RTOL, ATOL = 5e-6, 5e-6


@functools.cache
def expected(optimizer, num_steps=3):
    return oracle(mean_loss, OPTIMIZERS[optimizer](), make_params(), make_batches(num_steps))


NUM_SHARDS = [1, 2, 3, 8]
# AdamW at every stage on every number of devices; each other optimizer with each stage and with each number once.
ADAMW = [(stage, num, "clip_adamw") for stage in range(4) for num in NUM_SHARDS]
OTHERS = [
    (stage, NUM_SHARDS[(stage + i) % 4], name)
    for i, name in enumerate(OPTIMIZERS)
    for stage in range(4)
    if name != "clip_adamw"
]


@pytest.mark.parametrize(("stage", "num_shards", "optimizer"), ADAMW + OTHERS)
def test_three_steps_match_the_unsharded_optimizer(stage, num_shards, optimizer):
    engine = make_engine(num_shards, tx=OPTIMIZERS[optimizer](), stage=stage)
    state, metrics = train(engine, engine.init(make_params()), make_batches(3))
    params, losses, norms = expected(optimizer)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    assert int(state.step) == 3
    assert all(bool(m["applied"]) for m in metrics)


def test_no_sign_that_lion_takes_is_within_rounding():
    """Makes the comparison above fair: a sign may only differ where the interpolated gradient is rounding error."""
    params, tx = make_params(), OPTIMIZERS["lion"]()
    opt_state, grad = tx.init(params), jax.jit(jax.grad(mean_loss))
    for batch in make_batches(3):
        grads = grad(params, batch)
        signed = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt_state[0].mu, grads)
        # 3e-7 of the addends, which are at most about 1
        assert min(float(jnp.abs(x).min()) for x in jax.tree.leaves(signed)) > 3e-7
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("num_microbatches", [2, 3])
@pytest.mark.parametrize(
    ("stage", "gather"), [(0, "auto"), (1, "auto"), (2, "use"), (2, "once"), (3, "auto")]
)
def test_microbatches_give_the_exact_weighted_mean(stage, gather, num_microbatches):
    tx = optax.adam(1e-2)
    batches = make_batches(2, 36)  # 3 devices * 2 or 3 microbatches * 6 or 4 examples
    engine = make_engine(
        3, tx=tx, loss_fn=weighted_loss, stage=stage, gather=gather, num_microbatches=num_microbatches
    )
    state, metrics = train(engine, engine.init(make_params()), batches)
    params, losses, norms = oracle(weighted_loss, tx, make_params(), batches)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    aux, weight = metrics[0]["aux"], metrics[0]["weight"]
    np.testing.assert_allclose(aux["weighted_mean"], losses[0], rtol=RTOL)  # floats: weighted means
    np.testing.assert_allclose(weight, batches[0]["weight"].sum(), rtol=RTOL)
    assert int(aux["examples"]) == 36  # integers: sums
    assert set(aux) == {"weighted_mean", "examples"}


def test_clipping_by_the_engine_is_clipping_by_optax_and_reports_both_norms():
    batches = make_batches(2)
    engine = make_engine(8, tx=optax.adamw(1e-2), clip_norm=0.5)
    state, metrics = train(engine, engine.init(make_params()), batches)
    chained = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params, _, norms = oracle(mean_loss, chained, make_params(), batches)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=RTOL)
    assert [float(m["grad_norm_clipped"]) for m in metrics] == [0.5, 0.5]


def test_a_norm_below_the_limit_is_not_clipped():
    engine = make_engine(2, clip_norm=1e6)
    _, (metrics,) = train(engine, engine.init(make_params()), make_batches(1))
    assert float(metrics["grad_norm_clipped"]) == float(metrics["grad_norm"]) < 1e6


def _groups(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "decay" if "w" in jax.tree_util.keystr(path) else "plain", params
    )


def _is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


TRANSFORMATIONS = {
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)),
    "mask": lambda: optax.adamw(1e-2, weight_decay=0.3, mask=_is_matrix),
    "masked": lambda: optax.masked(optax.sgd(1e-2, momentum=0.9), _is_matrix),
    "multi_transform": lambda: optax.multi_transform(
        {"decay": optax.adamw(1e-2), "plain": optax.sgd(1e-1, momentum=0.5)}, _groups
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 5e-3, 4)
    ),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=2),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-2)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_any_optax_transformation_gives_the_unsharded_result(name):
    tx, batches = TRANSFORMATIONS[name](), make_batches(4)
    engine = make_engine(8, tx=tx)
    before = engine.init(make_params())
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), before)
    state, metrics = train(engine, before, batches)
    params, losses, _ = oracle(mean_loss, tx, make_params(), batches)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == kinds
    rates = [float(m["learning_rate"]) for m in metrics]
    if name == "inject_hyperparams":
        np.testing.assert_allclose(rates, [1e-2, 8.75e-3, 7.5e-3, 6.25e-3], rtol=1e-6)
    else:
        assert np.isnan(rates).all()


def test_extra_arguments_reach_the_transformation():
    def update(updates, state, params=None, *, factor, value, **extra_args):
        return jax.tree.map(lambda g: -factor * value * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    batches, factor = make_batches(2), jnp.float32(1e-2)
    engine = make_engine(2, tx=tx)
    state, _ = train(engine, engine.init(make_params()), batches, factor=factor)
    params, _, _ = oracle(mean_loss, tx, make_params(), batches, factor=factor)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("by", ["tree", "predicate"])
def test_frozen_leaves_have_no_optimizer_state_and_never_change(by, stage):
    frozen = ("blocks/w", "norm")
    params = make_params() | {"table": jnp.arange(11)}  # integers may only be frozen
    predicate = lambda path, leaf: path not in (*frozen, "table")
    flags = jax.tree_util.tree_map_with_path(
        lambda path, x: predicate(jax.tree_util.keystr(path, simple=True, separator="/"), x), params
    )
    tx, batches = optax.adam(1e-2), make_batches(2)
    engine = make_engine(8, tx=tx, stage=stage, trainable=flags if by == "tree" else predicate)
    state = engine.init(params)
    moments = jax.tree.leaves(state.opt_state[0].mu)
    assert len(moments) == 3  # blocks/b, embed, scale
    assert not any(f in leaf.path for leaf in engine.layout.opt_state.leaves for f in (*frozen, "table"))

    state, metrics = train(engine, state, batches)
    after = engine.params(state)
    assert_trees_equal(after["norm"], params["norm"])
    assert_trees_equal(after["blocks"]["w"], params["blocks"]["w"])
    assert_trees_equal(after["table"], params["table"])

    def partial_loss(trained, batch):
        full = make_params() | {k: trained[k] for k in ("embed", "scale")}
        return mean_loss(full | {"blocks": {"b": trained["b"], "w": params["blocks"]["w"]}}, batch)

    start = {"b": params["blocks"]["b"], "embed": params["embed"], "scale": params["scale"]}
    trained, losses, norms = oracle(partial_loss, tx, start, batches)
    found = {"b": after["blocks"]["b"], "embed": after["embed"], "scale": after["scale"]}
    assert_trees_close(found, trained, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=RTOL)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)


def test_a_frozen_leaf_rests_in_the_dtype_it_was_given():
    params = make_params()
    params["blocks"]["w"] = params["blocks"]["w"].astype(jnp.float16)
    engine = make_engine(2, trainable=lambda path, leaf: path != "blocks/w")
    state = engine.init(params)
    assert state.params["blocks"]["w"].dtype == jnp.float16
    assert state.params["embed"].dtype == jnp.float32


def _device_and_microbatch_draws(stage, seed, num_steps=1):
    """The first draw of every device and microbatch: the loss stores each in its own place of a frozen leaf."""

    def loss(params, batch, rng):
        draw = jax.random.normal(rng)
        places = (batch["place"][0] == jnp.arange(6)) * draw
        return params["w"].sum() * draw, {"frozen": {"draws": places}}

    params = {"w": jnp.ones(4), "draws": jnp.zeros(6)}
    engine = make_engine(
        2, loss_fn=loss, stage=stage, num_microbatches=3, trainable=lambda path, _: path == "w", seed=seed
    )
    state = engine.init(params)
    found = []
    for _ in range(num_steps):
        state, _ = engine.step(state, {"place": np.arange(6)})  # 2 devices * 3 microbatches * 1 example
        found.append(np.asarray(state.params["draws"]).ravel()[:6] * 6)  # stored as a mean over six
    return np.stack(found)


def test_keys_differ_by_device_microbatch_and_step_and_only_by_the_seed_otherwise():
    draws = _device_and_microbatch_draws(stage=2, seed=0, num_steps=2)
    assert len(np.unique(draws)) == 12
    assert (draws != 0).all()
    for stage in (0, 1, 3):
        np.testing.assert_array_equal(_device_and_microbatch_draws(stage, seed=0), draws[:1])
    assert not np.isin(_device_and_microbatch_draws(stage=2, seed=1), draws).any()


def test_bf16_compute_matches_a_bf16_loss_on_fp32_masters():
    """The oracle casts the fp32 masters as the engine does; so both round at the same places.

    What differs is that gradients are rounded to bf16 per device and summed over 8 devices in bf16: each of the
    3 levels of that sum is off by at most 2**-9 relative to its addends, the leaf's largest gradient on one device.
    """
    params, batch = make_params(), make_batch()
    keep = lambda path, leaf: path in ("norm", "scale")

    def as_computed(params):
        cast = lambda path, x: (
            x if keep(jax.tree_util.keystr(path, simple=True, separator="/"), x) else x.astype(jnp.bfloat16)
        )
        return jax.tree_util.tree_map_with_path(cast, params)

    def loss(params, batch):
        assert params["norm"].dtype == params["scale"].dtype == jnp.float32
        assert params["embed"].dtype == params["blocks"]["w"].dtype == jnp.bfloat16
        return mean_loss(params, batch)

    parts = jax.tree.map(lambda x: x.reshape(8, 3), batch)  # a row per device
    per_device = jax.vmap(jax.value_and_grad(lambda p, b: loss(as_computed(p), b)), in_axes=(None, 0))
    values, each = jax.jit(per_device)(params, parts)
    value, grads = values.mean(), jax.tree.map(lambda g: g.mean(0), each)
    for stage in (1, 2, 3):
        precision = zero2jax.Precision(keep_fp32=keep)
        engine = make_engine(8, loss_fn=loss, tx=optax.sgd(1.0), stage=stage, precision=precision)
        state, (metrics,) = train(engine, engine.init(params), [batch])
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        # the loss itself: bf16 activations of the same values, in another order of three examples at most
        np.testing.assert_allclose(metrics["loss"], value, rtol=2**-8)
        moved = jax.tree.map(lambda a, b: a - b, params, engine.params(state))
        for found, exact, addends in zip(*map(jax.tree.leaves, (moved, grads, each)), strict=True):
            atol = (3 + 2) * 2**-9 * float(jnp.abs(addends).max())  # + 2: each device's own last roundings
            np.testing.assert_allclose(found, exact, rtol=0, atol=atol)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_evaluate_gives_the_loss_of_the_current_parameters(stage):
    params, batch = make_params(), make_batch()
    engine = make_engine(3, loss_fn=weighted_loss, stage=stage, num_microbatches=2)
    state = engine.init(params)
    exact, aux = jax.jit(weighted_loss)(params, batch)
    loss, found = engine.evaluate(state, batch)
    np.testing.assert_allclose(loss, exact, rtol=RTOL)
    np.testing.assert_allclose(found["weighted_mean"], aux["weighted_mean"], rtol=RTOL)
    assert int(found["examples"]) == 24
    other = engine.evaluate(state, batch, loss_fn=lambda p, b: 2 * mean_loss(p, b))
    np.testing.assert_allclose(other, 2 * jax.jit(mean_loss)(params, batch), rtol=RTOL)
    assert_trees_equal(engine.params(state), params)  # the state was neither changed nor donated


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_params_returns_what_init_was_given_bit_for_bit(num_shards):
    params = make_params()
    engine = make_engine(num_shards)
    assert_trees_equal(engine.params(engine.init(params)), params)
    assert_trees_equal(engine.params(engine.init(jax.tree.map(np.asarray, params))), params)
    # made by a compiled function: fused multiply-adds may round once less, 2**-24 of values below 4
    assert_trees_close(engine.params(engine.init(make_params, 0)), params, atol=2**-22)


def test_init_leaves_the_callers_parameters_alive_after_a_donating_step():
    params = make_params()
    engine = make_engine(1)
    train(engine, engine.init(params), make_batches(1))
    assert_trees_equal(params, make_params())


def test_padding_stays_zero():
    engine = make_engine(8, tx=optax.adamw(1e-2, weight_decay=0.1))
    state, _ = train(engine, engine.init(make_params()), make_batches(2))
    padded = state.params["blocks"]["w"]
    assert padded.shape == (LAYERS, 8, WIDTH)
    assert not np.asarray(padded[:, WIDTH:]).any()
    assert not np.asarray(state.opt_state[0].nu["blocks"]["w"][:, WIDTH:]).any()


def _batch_norm_loss(params, batch):
    x = params["embed"][batch["x"]]
    mean = x.mean(0)
    new = {
        "stats": {"mean": 0.9 * params["stats"]["mean"] + 0.1 * mean, "count": params["stats"]["count"] + 1}
    }
    scaled = (x - params["stats"]["mean"][None]) @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(scaled, batch["y"])
    return losses.mean(), {"frozen": new, "largest": losses.max()}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_frozen_in_aux_becomes_the_new_value_of_frozen_leaves(num_microbatches):
    embed = make_params()["embed"]
    params = {"embed": embed, "stats": {"mean": jnp.zeros(WIDTH), "count": jnp.int32(0)}}
    batch = make_batch(16)
    engine = make_engine(
        2,
        loss_fn=_batch_norm_loss,
        tx=optax.sgd(0.0),
        num_microbatches=num_microbatches,
        trainable=lambda path, leaf: not path.startswith("stats"),
    )
    state, metrics = train(engine, engine.init(params), [batch, batch])
    stats = engine.params(state)["stats"]
    mean = np.asarray(embed)[batch["x"]].mean(0)  # of equal parts: the mean of their means
    np.testing.assert_allclose(stats["mean"], 0.1 * mean + 0.09 * mean, rtol=1e-5, atol=1e-6)
    assert int(stats["count"]) == 2  # integers: the largest, not the sum
    assert set(metrics[0]["aux"]) == {"largest"}


SLASHES = {"w": jnp.ones(3), "a/b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}  # two leaves that print as 'a/b'


def test_a_new_value_goes_to_the_frozen_leaf_and_not_to_one_that_prints_alike():
    def loss(params, batch):
        trained = (batch @ params["w"]).mean() + 0 * params["a/b"].sum()
        return trained, {"frozen": {"a": {"b": params["a"]["b"] + 5}}}

    trainable = {"w": True, "a/b": True, "a": {"b": False}}
    engine = make_engine(2, loss_fn=loss, tx=optax.sgd(0.1), trainable=trainable)
    state, _ = train(engine, engine.init(SLASHES), [np.ones((4, 3), np.float32)] * 2)
    found = engine.params(state)
    np.testing.assert_array_equal(found["a/b"], 0)  # trainable, of gradient 0
    np.testing.assert_array_equal(found["a"]["b"], 10)

    def both(params, batch):
        new = {"a/b": jnp.full(2, 1.0), "a": {"b": jnp.full(2, 2.0)}}
        return loss(params, batch)[0], {"frozen": new}

    trainable = {"w": True, "a/b": False, "a": {"b": False}}
    engine = make_engine(2, loss_fn=both, trainable=trainable)
    state, _ = train(engine, engine.init(SLASHES), [np.ones((4, 3), np.float32)])
    found = engine.params(state)
    np.testing.assert_array_equal(found["a/b"], 1)
    np.testing.assert_array_equal(found["a"]["b"], 2)


def test_a_batch_without_weight_changes_nothing_and_makes_no_nan():
    batch = make_batch() | {"weight": np.zeros(24, np.float32)}

    def loss(params, batch):
        losses = losses_per_example(params, batch)
        weight = batch["weight"].sum()
        return (losses * batch["weight"]).sum() / jnp.maximum(weight, 1e-9), {"weight": weight}

    engine = make_engine(2, loss_fn=loss, tx=optax.sgd(1.0))
    state, _ = train(engine, engine.init(make_params()), [batch])
    assert_trees_equal(engine.params(state), make_params())


def test_zero_size_unused_and_scalar_leaves_train_like_any_other():
    params = make_params() | {
        "empty": jnp.zeros((0, 3)),
        "unused": jnp.ones((9, 2)),
        "none": None,
        "nothing": {},
    }
    tx = optax.adamw(1e-2, weight_decay=0.1)
    expected, _, _ = oracle(mean_loss, tx, params, make_batches(2))
    for stage in (1, 2, 3):
        engine = make_engine(8, tx=tx, stage=stage)
        state, _ = train(engine, engine.init(params), make_batches(2))
        assert_trees_close(engine.params(state), expected, rtol=RTOL, atol=ATOL)


def test_stage_2_and_3_losses_equal_stage_1_to_the_last_bits():
    losses = {}
    for stage in (1, 2, 3):
        engine = make_engine(8, stage=stage, precision=FP32)
        _, metrics = train(engine, engine.init(make_params()), make_batches(2))
        losses[stage] = [float(m["loss"]) for m in metrics]
    assert losses[1][0] == losses[2][0] == losses[3][0]
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-6)
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_leaves_of_every_kind_may_be_returned(stage, num_shards):
    """Floating and complex: the mean over slices. Integers: the largest. Keys: those of the first slice."""

    def loss(params, batch):
        place = batch["place"][0]
        new = {
            "key": jax.random.fold_in(params["key"], place),
            "keys": params["keys"],
            "complex": params["complex"] + 1j * place,
            "count": params["count"] + place.astype(jnp.int8),
            "fp8": params["fp8"] + 1,
            "flag": place > 0,
        }
        return params["w"].sum() * batch["weight"].mean(), {"frozen": new}

    params = {
        "w": jnp.ones(5),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
        "complex": jnp.ones(4, jnp.complex64),
        "count": jnp.ones(2, jnp.int8),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "flag": jnp.bool_(False),
    }
    engine = make_engine(
        num_shards, loss_fn=loss, stage=stage, num_microbatches=2, trainable=lambda path, _: path == "w"
    )
    state = engine.init(params)
    batch = make_batch(6) | {"place": np.arange(6, dtype=np.int32)}
    before = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    state, _ = engine.step(state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == before
    found = engine.params(state)
    firsts = np.arange(0, 6, 3 // num_shards)  # the first example of each slice
    expected_key = jax.random.fold_in(params["key"], 0)
    assert_trees_equal(jax.random.key_data(found["key"]), jax.random.key_data(expected_key))
    assert_trees_equal(jax.random.key_data(found["keys"]), jax.random.key_data(params["keys"]))
    np.testing.assert_allclose(found["complex"], 1 + 1j * firsts.mean(), rtol=1e-6)
    np.testing.assert_array_equal(found["count"], 1 + firsts.max())
    np.testing.assert_array_equal(found["fp8"].astype(np.float32), 2)
    assert bool(found["flag"])


@pytest.mark.parametrize("from_function", [False, True])
def test_random_keys_may_be_frozen_leaves(from_function):
    def loss(params, batch):
        noise = jax.random.normal(params["key"]) + jax.random.normal(params["keys"][2])
        return (params["w"].sum() + noise) * batch["weight"].mean()

    make = lambda: {
        "w": jnp.ones(5),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
    }
    engine = make_engine(2, loss_fn=loss, stage=3, trainable=lambda path, _: path == "w")
    state = engine.init(make if from_function else make())
    after, (metrics,) = train(engine, state, [make_batch()])
    np.testing.assert_allclose(metrics["loss"], loss(make(), make_batch()), rtol=RTOL)
    found = engine.params(after)
    for name in ("key", "keys"):
        assert_trees_equal(jax.random.key_data(found[name]), jax.random.key_data(make()[name]))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_whose_gradient_is_not_finite_is_skipped_where_asked(stage):
    def loss(params, batch):
        scale = batch["weight"].mean()
        return mean_loss(params, batch) * scale, {"frozen": {"seen": params["seen"] + scale}}

    params = make_params() | {"seen": jnp.float32(0), "key": jax.random.key(0)}
    engine = make_engine(
        2,
        loss_fn=loss,
        stage=stage,
        skip_nonfinite=True,
        trainable=lambda path, _: path not in ("seen", "key"),
    )
    good, bad = make_batch(), make_batch() | {"weight": np.full(24, np.inf, np.float32)}
    state, _ = engine.step(engine.init(params), good)
    before = jax.tree.map(np.asarray, (engine.params(state)["seen"], state.opt_state, state.params["embed"]))
    state, metrics = engine.step(state, bad)
    assert not bool(metrics["applied"])
    assert not np.isfinite(metrics["grad_norm"])
    after = (engine.params(state)["seen"], state.opt_state, state.params["embed"])
    assert_trees_equal(jax.tree.map(np.asarray, after), before)
    state, metrics = engine.step(state, good)
    assert bool(metrics["applied"])
    assert int(state.step) == 3  # counted, so that its random keys are not used again


@pytest.mark.parametrize("stage", [1, 3])
def test_summing_over_devices_multiplies_the_mean_gradient_by_their_number(stage):
    batches = make_batches(1)
    engine = make_engine(8, tx=optax.sgd(1e-3), stage=stage, reduction="sum")
    state, (metrics,) = train(engine, engine.init(make_params()), batches)
    params, _, norms = oracle(mean_loss, optax.sgd(8e-3), make_params(), batches)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(metrics["grad_norm"], 8 * norms[0], rtol=RTOL)
