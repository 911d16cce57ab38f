"""Masters and moments in 16 bits: rounding by itself, and steps at every stage against one device that rounds alike."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.programs.memory import live_bytes
from zero2jax.zero.precision import Precision
from zero2jax.zero.rounding import rounded, rounding_key, widened, widened_state

PARAMS = {
    "frozen": np.linspace(-1, 1, 7, dtype=np.float32),
    "kept": np.linspace(1, -1, 5, dtype=np.float32),
    "w": np.linspace(-1, 1, 35, dtype=np.float32).reshape(7, 5),
}
BATCH = {
    "x": np.linspace(-1, 1, 48 * 7, dtype=np.float32).reshape(48, 7),
    "y": np.linspace(0, 1, 48, dtype=np.float32),
}
TX = optax.inject_hyperparams(optax.adamw)(3e-3, weight_decay=0.1)
# computed in fp32, so that gradients differ by fp32 rounding alone and what is rounded to bf16 seldom falls elsewhere
BF16 = Precision("fp32", keep_fp32=lambda path, leaf: path == "kept", master_dtype="bf16", state_dtype="bf16")
STORED = "master_dtype", "state_dtype"
STEPS = 4


def loss(params, batch):
    x = batch["x"] * params["frozen"][None]
    y = jnp.tanh(x @ params["w"].astype(jnp.float32)) @ params["kept"]
    return jnp.mean((y - batch["y"]) ** 2)


def engine_of(precision=BF16, mesh=None, stage=2, tx=TX, **settings):
    mesh = zero2jax.make_mesh(**(mesh or {"data": 3}))
    trainable = lambda path, leaf: path != "frozen"
    return zero2jax.Engine(loss, tx, mesh, stage=stage, precision=precision, trainable=trainable, **settings)


@functools.cache
def plain_engine():
    return engine_of()


def trained(engine, state=None, steps=STEPS):
    state = engine.init(PARAMS) if state is None else state
    for _ in range(steps):
        state, metrics = engine.step(state, BATCH)
    return state, metrics


def full(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def assert_same_rounding(found, expected):
    """Equal, but for one number in twenty that may have been rounded to its neighbour."""
    for a, b in zip(jax.tree.leaves(full(found)), jax.tree.leaves(full(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6)
        assert np.mean(np.abs(a - b) > 1e-5 * np.abs(b)) <= 0.05


def by_hand(at_random):
    """The same training on one device: a plain loop with optax."""

    @jax.jit
    def step(stored, rng, number):
        kept, w, opt_state = stored["kept"], stored["w"], stored["opt_state"]
        narrow = frozenset(i for i, x in enumerate(jax.tree.leaves(opt_state)) if x.dtype == jnp.bfloat16)
        seen = widened([kept, w]), widened_state(opt_state, narrow)
        objective = lambda p: loss({"frozen": PARAMS["frozen"], "kept": p[0], "w": p[1]}, BATCH)
        updates, new_state = TX.update(jax.grad(objective)(seen[0]), seen[1], seen[0])
        new = optax.apply_updates(seen[0], updates), new_state
        key = rounding_key(rng, number) if at_random else None
        (kept, w), opt_state = rounded(new, seen, ([kept, w], opt_state), key)
        return {"kept": kept, "w": w, "opt_state": opt_state}

    kept, w = jnp.array(PARAMS["kept"]), jnp.array(PARAMS["w"])
    first = TX.init([kept, w])
    narrow = lambda x: x.astype(jnp.bfloat16) if x.shape == w.shape else x
    stored = {"kept": kept, "w": w.astype(jnp.bfloat16), "opt_state": jax.tree.map(narrow, first)}
    for number in range(STEPS):
        stored = step(stored, jax.random.key_data(jax.random.key(0)), number)
    return stored


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_rounding_at_random_is_right_in_the_mean_and_goes_to_a_neighbour():
    x = np.float32([1 + 2**-9, -3 - 2**-10, 1e-30, 0.1, -0.1, 1.5e38])
    many = jnp.broadcast_to(x, (4096, len(x)))
    key = rounding_key(jax.random.key_data(jax.random.key(3)), jnp.int32(5))
    narrow = many.astype(jnp.bfloat16)
    found, other = jax.jit(rounded)([many, many], [many, many], [narrow, narrow], key)
    assert found.dtype == jnp.bfloat16
    assert 0.55 < np.mean(np.asarray(found == other)[:, 0]) < 0.7  # another leaf, other bits: 1/16 + 9/16
    found = np.asarray(found, np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    assert (np.abs(found - x) < unit).all()
    # the variance of one is at most 1/4: five standard deviations
    assert (np.abs(found.mean(0) - x) < 5 * unit / 2 / np.sqrt(len(many))).all()
    assert len(np.unique(found[:, 3])) == 2
    assert abs(np.corrcoef(found[:, 3], found[:, 4])[0, 1]) < 5 / np.sqrt(len(many))


def test_what_bf16_holds_stays_and_so_does_what_is_not_finite():
    x = jnp.float32([1.5, -0.0, 2**-126, np.inf, -np.inf, np.nan, jnp.finfo(jnp.bfloat16).max])
    for step in range(3):
        key = rounding_key(jax.random.key_data(jax.random.key(0)), jnp.int32(step))
        found = rounded([x], [x], [x.astype(jnp.bfloat16)], key)[0]
        np.testing.assert_array_equal(found.astype(jnp.float32), x)


def test_updates_smaller_than_half_a_unit_are_not_lost():
    """Every element goes down by 1e-3 a step from 1.0, where bf16 numbers lie 2**-8 apart, and by half of it below."""

    def moved(precision):
        mean = lambda params, batch: jnp.sum(params["w"]) * jnp.mean(batch)
        engine = zero2jax.Engine(mean, optax.sgd(1e-3), zero2jax.make_mesh(data=2), precision=precision)
        state = engine.init({"w": jnp.ones(512)})
        for _ in range(20):
            state, _ = engine.step(state, np.ones(2, np.float32))
        return np.asarray(engine.params(state)["w"], np.float64)

    at_random = moved(Precision("bf16", master_dtype="bf16"))
    assert abs(at_random.mean() - 0.98) < 5 * np.sqrt(20 / 4 / 512) * 2**-8
    assert len(np.unique(at_random)) > 3  # independent
    assert (moved(Precision("bf16", master_dtype="bf16", stochastic_rounding=False)) == 1).all()


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "stage", "settings"),
    [
        ({"data": 4}, 0, {"num_microbatches": 2}),
        ({"data": 1}, 1, {}),
        ({"replica": 2, "data": 3}, 2, {"shard_over_replicas": True}),
        ({"data": 8}, 3, {"num_microbatches": 2}),
    ],
)
def test_the_mesh_and_the_stage_change_nothing(mesh, stage, settings):
    engine = engine_of(mesh=mesh, stage=stage, **settings)
    state, _ = trained(engine)
    stored, expected = engine.params(state), by_hand(at_random=True)
    assert {name: x.dtype.name for name, x in stored.items()} == {
        "frozen": "float32",
        "kept": "float32",
        "w": "bfloat16",
    }
    assert_same_rounding([stored["kept"], stored["w"]], [expected["kept"], expected["w"]])
    dtypes = {leaf.path: leaf.dtype.name for leaf in engine.layout.opt_state.leaves}
    assert dtypes["hyperparams/learning_rate"] == dtypes["inner_state/0/mu/kept"] == "float32"
    assert dtypes["inner_state/0/mu/w"] == dtypes["inner_state/0/nu/w"] == "bfloat16"


def test_to_nearest_is_another_training():
    engine = engine_of(dataclasses.replace(BF16, stochastic_rounding=False))
    state, _ = trained(engine)
    expected = by_hand(at_random=False)["w"]
    assert_same_rounding(engine.params(state)["w"], expected)
    with pytest.raises(AssertionError):
        assert_same_rounding(by_hand(at_random=True)["w"], expected)


def test_an_offloaded_update_rounds_alike():
    host = zero2jax.OffloadSettings(host_devices=tuple(jax.devices()[4:7]))
    engine, plain = engine_of(offload=host), plain_engine()
    assert_same_rounding(engine.params(trained(engine)[0]), plain.params(trained(plain)[0]))


def test_a_restored_run_goes_on_with_the_bits_of_the_run_that_was_saved(tmp_path):
    engine = plain_engine()
    state, _ = trained(engine)
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(STEPS, state)
        restored, _ = checkpointer.restore(engine)
    expected, found = (trained(engine, at, 2)[0] for at in (state, restored))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)

    masters = engine_of(zero2jax.Precision("fp32"), mesh={"data": 2})
    masters.abstract_state(PARAMS)
    with zero2jax.Checkpointer(tmp_path, masters) as checkpointer:
        with pytest.warns(zero2jax.CheckpointWarning, match=r"'params/w' \(bfloat16 to float32\)"):
            restored, _ = checkpointer.restore(masters)
        saved = masters.params(restored)
        checkpointer.save(STEPS + 1, restored)
        with pytest.warns(zero2jax.CheckpointWarning, match=r"'params/w' \(float32 to bfloat16\)"):
            again, _ = checkpointer.restore(engine)
    for a, b in zip(jax.tree.leaves(full(engine.params(again))), jax.tree.leaves(full(saved)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_masters_and_moments_take_half_the_bytes_and_no_collective_is_added():
    found = {}
    for name in ("fp32", "bf16"):
        wide = dataclasses.replace(BF16, **dict.fromkeys(STORED, "fp32"))
        engine = plain_engine() if name == "bf16" else engine_of(wide)
        state = engine.init(PARAMS)
        text = engine.lower(BATCH).compile().as_text()
        kinds = re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
        adam = state.opt_state.inner_state[0]
        plans = engine.layout.trained_params.rest_bytes, engine.layout.opt_state.rest_bytes
        found[name] = (
            [live_bytes(x) for x in (state.params["w"], adam.mu["w"], adam.nu["w"])],
            plans,
            sorted(kinds),
        )
    assert found["bf16"][0] == [num_bytes / 2 for num_bytes in found["fp32"][0]]
    saved = 2 * 7 * 2  # bytes of this device's 7 x 2 of "w"
    assert [a - b for a, b in zip(found["fp32"][1], found["bf16"][1], strict=True)] == [saved, 2 * saved]
    assert found["fp32"][2] == found["bf16"][2]


def test_fp16_masters_train_and_keep_their_bits_where_a_step_is_skipped():
    precision = Precision("fp16", accumulate_dtype="fp16", master_dtype="fp16")
    engine = engine_of(precision, num_microbatches=2, loss_scale=2.0**8, tx=optax.adam(3e-3))
    state, metrics = trained(engine)
    assert bool(metrics["applied"])
    assert engine.params(state)["w"].dtype == jnp.float16
    plain = engine_of(Precision("fp32"), tx=optax.adam(3e-3))
    for a, b in zip(*(jax.tree.leaves(full(e.params(trained(e)[0]))) for e in (engine, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = engine.step(state, {**BATCH, "y": np.full(48, np.inf, np.float32)})
    assert not bool(metrics["applied"])
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_16_bit_moment_of_the_optimizers_own_is_left_to_it():
    tx = optax.adam(3e-3, mu_dtype=jnp.bfloat16)
    layouts = []
    for precision in (Precision("bf16"), Precision("bf16", state_dtype="bf16")):
        engine = engine_of(precision, tx=tx)
        engine.abstract_state(PARAMS)
        layouts.append(engine.layout)
    paths = lambda layout: {layout.opt_state.leaves[i].path for i in layout.narrow_state}
    assert paths(layouts[0]) == set()
    assert paths(layouts[1]) == {"0/nu/w", "0/nu/kept"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"master_dtype": "float8_e4m3fn"}, "master_dtype is 'float8_e4m3fn'"),
        ({"state_dtype": "fp16"}, "state_dtype is 'fp16'; moments are stored in fp32 or bf16"),
        ({"stochastic_rounding": True}, "stochastic_rounding is True, and nothing is stored in bfloat16"),
    ],
)
def test_what_cannot_be_stored_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Precision(**settings)


def test_what_is_stored_is_part_of_what_processes_and_checkpoints_compare():
    plain = lambda **settings: Precision("bf16", **settings).plain
    assert plain() == ["bfloat16", None, "float32"]
    assert plain(master_dtype="bf16")[3:] == ["master_dtype bfloat16"]
    assert plain(state_dtype="bf16", stochastic_rounding=False)[3:] == [
        "state_dtype bfloat16",
        "rounded to nearest",
    ]


@pytest.mark.parametrize("made", [False, True])
def test_parameters_beyond_float16_are_refused(made):
    params = {
        **PARAMS,
        "kept": PARAMS["kept"] * 1e6,
        "w": PARAMS["w"] * 65536,
        "frozen": PARAMS["frozen"] * 1e6,
    }
    engine = engine_of(dataclasses.replace(BF16, master_dtype="fp16", state_dtype="fp32"))
    with pytest.raises(ValueError, match="'w' holds 65536, and its master is to be stored in float16"):
        engine.init((lambda: params) if made else params)
    engine.init({**params, "w": PARAMS["w"] * 65504})


def test_float16_masters_stop_at_the_largest_number():
    """An update of 1e5 from 0 does not fit; what is not a number stays so."""
    new = {"w": jnp.array([1e5, -1e5, 1.5, jnp.nan], jnp.float32)}
    stored = {"w": jnp.zeros(4, jnp.float16)}
    found = rounded(new, new, stored)["w"]
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, np.array([65504, -65504, 1.5, np.nan], np.float16))
