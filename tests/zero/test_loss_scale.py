"""Loss scaling: the rule against a plain loop, and training steps that overflow, on every stage."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.zero.loss_scale import LossScale

PARAMS = {
    "w": np.linspace(-1, 1, 35, dtype=np.float32).reshape(7, 5),
    "v": np.linspace(1, -1, 5, dtype=np.float32),
}
BATCH = {
    "x": np.linspace(-1, 1, 48 * 7, dtype=np.float32).reshape(48, 7),
    "y": np.linspace(0, 1, 48, dtype=np.float32),
    "factor": np.ones(48, np.float32),
}


def loss(params, batch):
    """In the parameters' dtype; `factor` reaches the gradients and can make them overflow."""
    x = batch["x"].astype(params["w"].dtype)
    y = (jnp.tanh(x @ params["w"]) @ params["v"]).astype(jnp.float32)
    return jnp.mean((y - batch["y"]) ** 2 * batch["factor"])


def weighted_loss(params, batch):
    return loss(params, batch), {"weight": jnp.sum(1000 * batch["y"])}


def engine_of(stage=2, num_devices=3, loss_fn=loss, **settings):
    mesh = zero2jax.make_mesh(data=num_devices)
    return zero2jax.Engine(loss_fn, optax.adam(0.1), mesh, stage=stage, **settings)


EVERY = np.arange(48)


def with_factor(value, row):
    return {**BATCH, "factor": np.where(np.arange(48) == row, np.float32(value), np.float32(1))}


class Plain:
    """The rule as DeepSpeed's sources state it, by the numbers of iterations, in plain Python."""

    def __init__(self, settings):
        self.s, self.scale, self.iteration, self.last, self.left = settings, settings.initial, 0, -1, 0
        self.left = settings.hysteresis

    def step(self, finite):
        s, exhausted = self.s, False
        if not finite:
            if s.hysteresis == 1 or self.left == 1:
                exhausted = self.scale == s.minimum
                self.scale = max(self.scale / 2, s.minimum)
            else:
                self.left -= 1
            self.last = self.iteration
        else:
            if s.consecutive_hysteresis:
                self.left = s.hysteresis
            stable = self.iteration - self.last - 1
            if stable > 0 and stable % s.window == 0:
                self.left = s.hysteresis
                self.scale = min(2 * self.scale, s.maximum)
        self.iteration += 1
        return self.scale, self.left, exhausted


@pytest.mark.parametrize(
    "settings",
    [
        LossScale(initial=16.0, window=3),
        LossScale(initial=16.0, window=1, hysteresis=1, maximum=64.0),
        LossScale(initial=8.0, window=2, hysteresis=3, consecutive_hysteresis=True, minimum=2.0),
    ],
    ids=["window", "cap", "consecutive"],
)
def test_the_scale_goes_as_in_a_plain_loop(settings):
    rng = np.random.default_rng(0)
    runs = [
        [False] * 12,
        [True] * 12,
        *(rng.random((6, 60)) < np.array([0.2, 0.5, 0.7, 0.8, 0.9, 0.95])[:, None]),
    ]

    @jax.jit
    def run(finite):
        def step(state, ok):
            new, metrics = settings.after(state, ok)
            return new, (new, metrics)

        return jax.lax.scan(step, settings.first(), finite)[1]

    for finite in runs:
        states, metrics = run(jnp.array(finite))
        plain = Plain(settings)
        expected = np.array([plain.step(bool(ok)) for ok in finite])
        np.testing.assert_array_equal(states.scale, expected[:, 0])
        np.testing.assert_array_equal(states.hysteresis, expected[:, 1])
        np.testing.assert_array_equal(metrics["loss_scale_exhausted"], expected[:, 2])
        np.testing.assert_array_equal(metrics["num_skipped"], np.cumsum(~np.array(finite)))
        np.testing.assert_array_equal(metrics["loss_scale"], [settings.initial, *expected[:-1, 0]])


def test_numbers_of_numpy_are_numbers():
    assert LossScale.of(np.float32(128)) == LossScale(initial=128, dynamic=False)
    assert LossScale(window=np.int64(7)) == LossScale(window=7)


def test_without_end_the_scale_stays_finite():
    settings = LossScale(window=1)
    grow = lambda state, _: (settings.after(state, jnp.bool_(True))[0], None)
    state, _ = jax.lax.scan(grow, settings.first(), None, length=300)
    assert float(state.scale) == 2.0**32


def test_settings_win_over_a_state_that_others_left():
    left = LossScale(initial=2.0**20).first()
    assert float(LossScale(initial=128, dynamic=False).current(left)) == 128
    assert float(LossScale(maximum=2.0**18).current(left)) == 2.0**18
    assert (
        float(LossScale(hysteresis=1).after(left, jnp.bool_(False))[0].scale) == 2.0**19
    )  # of two that were left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": 0.0}, "initial is 0.0; it must be a number above 0"),
        ({"initial": float("inf")}, "initial is inf"),
        ({"initial": True}, "initial is True"),
        ({"dynamic": 1}, "dynamic is 1; it must be True or False"),
        ({"window": 0}, "window is 0; it must be a whole number from 1"),
        ({"hysteresis": 1.5}, "hysteresis is 1.5"),
        ({"minimum": 8.0, "initial": 4.0}, "initial is 4.0; it must be from minimum=8.0 to maximum="),
        ({"at_minimum": "stop"}, "at_minimum is 'stop'; it must be 'raise' or 'warn'"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LossScale(**settings)


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_step_that_overflows_is_skipped(stage, num_microbatches):
    scale = LossScale(initial=2.0**8, window=2, hysteresis=1)
    engine = engine_of(
        stage, precision="fp16", num_microbatches=num_microbatches, loss_scale=scale, clip_norm=1.0
    )
    state = engine.init(PARAMS)
    # (factor, its row, scale of the step): rows 0, 20 and 47 are in slices of different devices and microbatches, and
    # `EVERY` row is in all of them. A factor of 0 makes gradients of zeros, which are finite and count.
    sequence = [
        (0, EVERY, 256),
        (np.inf, 20, 256),
        (1, 0, 128),
        (-np.inf, 47, 128),
        (np.nan, 0, 64),
        (1, 0, 32),
    ]
    sequence += [(1, 0, 32), (1, 0, 32), (1, 0, 64), (0, EVERY, 64), (1, 0, 128)]
    sequence += [(np.inf, EVERY, 128), (-np.inf, EVERY, 64), (np.nan, EVERY, 32), (1, 0, 16)]
    applied = 0
    for i, (factor, row, expected) in enumerate(sequence):
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        state, metrics = engine.step(state, with_factor(factor, row))
        after = jax.tree.map(np.asarray, (state.params, state.opt_state))
        finite = bool(np.isfinite(factor))
        applied += finite
        assert (float(metrics["grad_norm"]) == 0) == (factor == 0)
        assert bool(metrics["applied"]) == finite
        assert float(metrics["loss_scale"]) == expected
        assert int(metrics["num_skipped"]) == i + 1 - applied
        assert int(state.step) == i + 1  # batches that were seen
        assert int(state.opt_state[0].count) == applied
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        assert all(same) != finite  # the optimizer's count is among them
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(("loss_fn", "num_microbatches"), [(loss, 1), (weighted_loss, 3)])
def test_scales_that_are_powers_of_two_change_no_bit_in_fp32(loss_fn, num_microbatches):
    """Nor does a step at which the scale doubles: its gradient is divided by the scale that it has."""
    scales = [LossScale(initial=2.0, window=1), LossScale(initial=2.0**10, window=1), None]
    engines = [
        engine_of(2, 4, loss_fn, precision="fp32", num_microbatches=num_microbatches, loss_scale=scale)
        for scale in scales
    ]
    states = [engine.init(PARAMS) for engine in engines]
    for _ in range(4):
        states = [engine.step(state, BATCH)[0] for engine, state in zip(engines, states, strict=True)]
    assert float(states[1].loss_scale.scale) == 2.0**13
    for a, b, plain in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, plain, rtol=1e-5, atol=1e-6)  # another program: other fusions


@pytest.mark.parametrize(
    ("stage", "loss_fn"), [(0, weighted_loss), (1, loss), (2, weighted_loss), (3, weighted_loss)]
)
def test_fp16_trains_as_fp32_does(loss_fn, stage):
    """Weights of some thousand would leave float16's range if gradients were summed with them."""
    results = {}
    for precision in ("fp32", "fp16"):
        engine = engine_of(stage, 2, loss_fn, precision=precision, num_microbatches=2, loss_scale=2.0**8)
        state = engine.init(PARAMS)
        for _ in range(3):
            state, metrics = engine.step(state, BATCH)
        assert bool(metrics["applied"])
        results[precision] = engine.params(state), metrics["loss"]
    found = engine.lower(BATCH).as_text()
    assert re.search(r"x?f16>", found)
    # Adam moves by 0.1 a step, whatever the gradient's size: a relative error of a gradient of 2**-9 moves it less
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)
    assert abs(results["fp32"][1] - results["fp16"][1]) < 5e-3


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulated_in_float16_weights_do_not_count_against_its_range(stage):
    """Weights of 1e5 in the second and third microbatch of each device, and none in the first and last."""
    weight = np.float32(1e5) * np.isin(np.arange(48) % 16 // 4, (1, 2)) * (1 + BATCH["y"])

    def heavy_loss(params, batch):
        return loss(params, batch), {"weight": jnp.mean(batch["weight"])}

    results = []
    for precision in ("fp32", zero2jax.Precision("fp16", accumulate_dtype="fp16")):
        engine = engine_of(stage, 3, heavy_loss, precision=precision, num_microbatches=4, loss_scale=2.0**8)
        _, metrics = engine.step(engine.init(PARAMS), {**BATCH, "weight": weight})
        assert bool(metrics["applied"])
        mean = np.sum(weight) / 48 * 12  # over the slices, of which there are twelve
        np.testing.assert_allclose(metrics["weight"], mean, rtol=1e-5)
        results.append((metrics["grad_norm"], metrics["loss"]))
    np.testing.assert_allclose(*results, rtol=5e-3)


SPECS = {"embed": jax.P(None, "model"), "layers": jax.P(), "empty": jax.P()}


def layered_loss(params, batch):
    """`spike` times one column of the first matrix: alone of all gradients that column's may overflow."""
    x = batch["x"].astype(params["embed"].dtype)
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["embed"], params["layers"])
    h = h + jnp.sum(params["empty"])  # of no elements
    spike = jnp.mean(params["embed"][:, -1].astype(jnp.float32)) * jnp.mean(batch["spike"])
    return jnp.mean((h.sum(1).astype(jnp.float32) - batch["y"]) ** 2) + spike


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ({"replica": 2, "data": 2}, {"shard_over_replicas": True, "stage": 2}),
        ({"replica": 2, "data": 2}, {"stage": 3}),
        (
            {"data": 2, "model": 2},
            {"param_specs": SPECS},
        ),
        ({"data": 3}, {"activations": zero2jax.ActivationSettings(policy="nothing"), "stage": 3}),
    ],
    ids=["over all groups", "groups", "model axis", "remat"],
)
def test_an_overflow_anywhere_skips_the_step_everywhere(mesh, settings):
    """Of one group's one device, of one model part, where activations are computed again."""
    params = {
        "embed": np.linspace(-1, 1, 28, dtype=np.float32).reshape(7, 4),
        "layers": np.stack([np.eye(4, dtype=np.float32)] * 2),
        "empty": np.zeros((0, 4), np.float32),
    }
    engine = zero2jax.Engine(
        layered_loss,
        optax.adam(0.01),
        zero2jax.make_mesh(**mesh),
        precision="fp16",
        num_microbatches=2,
        loss_scale=LossScale(initial=2.0**8, hysteresis=1),
        layer_dims={"embed": 0, "layers": 1, "empty": 0},
        **settings,
    )
    state = engine.init(params)
    row = np.arange(48) == 47
    for spike, applied in ((0, True), (1e6, False), (0, True)):
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        state, metrics = engine.step(state, {**BATCH, "spike": np.float32(spike) * row})
        after = jax.tree.map(np.asarray, (state.params, state.opt_state))
        assert np.isfinite(metrics["loss"])
        assert bool(metrics["applied"]) == applied
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        assert all(same) != applied
        for part in state.loss_scale:  # every device has the same verdict
            assert len({float(shard.data) for shard in part.addressable_shards}) == 1
    assert (float(state.loss_scale.scale), int(metrics["num_skipped"])) == (2.0**7, 1)


def test_gradients_are_clipped_without_the_scale_that_they_have_and_at_a_doubling_too():
    """SGD of rate 1 moves by the clipped gradient: clipped before they are unscaled, it would be a 256th of it."""
    scale = LossScale(initial=2.0**8, window=1)
    mesh = zero2jax.make_mesh(data=2)
    engine = zero2jax.Engine(loss, optax.sgd(1.0), mesh, precision="fp16", loss_scale=scale, clip_norm=0.125)
    state, before, scales = engine.init(PARAMS), PARAMS, []
    gradient = jax.jit(jax.grad(loss))
    for _ in range(3):
        grads = gradient(before, BATCH)
        norm = optax.tree.norm(grads)
        assert norm > 0.125
        state, metrics = engine.step(state, BATCH)
        after = jax.tree.map(np.asarray, engine.params(state))
        scales.append(float(metrics["loss_scale"]))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=5e-3)  # computed in float16
        for name, grad in grads.items():
            np.testing.assert_allclose(before[name] - after[name], 0.125 * grad / norm, atol=2e-3)
        before = after
    assert scales == [256, 256, 512]


def test_a_line_search_is_refused_where_its_gradients_would_be_scaled():
    engine = zero2jax.Engine(
        loss, optax.lbfgs(), zero2jax.make_mesh(data=2), precision="fp16", loss_scale=2.0**8
    )
    with pytest.raises(ValueError, match=r"gradient at other parameters .* loss scale \(static 256\)"):
        engine.init(PARAMS)


def test_gradients_travel_in_float16_and_leaves_kept_in_fp32_do_not():
    precision = zero2jax.Precision("fp16", keep_fp32=lambda path, leaf: path == "v")
    engine = engine_of(2, 3, precision=precision)
    engine.abstract_state(PARAMS)
    dtypes = re.findall(r"reduce_scatter.*?-> tensor<[\dx]*(f\d+)>", engine.lower(BATCH).as_text(), re.DOTALL)
    assert set(dtypes) == {"f16", "f32"}


def test_an_overflow_at_the_minimum_is_an_error_on_the_host(tmp_path):
    scale = LossScale(initial=2.0, minimum=1.0, hysteresis=1)
    engine = engine_of(precision="fp16", loss_scale=scale)
    state = engine.init(PARAMS)
    bad = with_factor(np.inf, 5)
    for exhausted in (False, True, True):  # the error comes two steps late
        state, metrics = engine.step(state, bad)
        assert bool(metrics["loss_scale_exhausted"]) == exhausted
    with pytest.raises(
        zero2jax.LossScaleError, match=r"minimum loss scale, 1, and 2 steps have been skipped"
    ):
        engine.step(state, bad)
    state, metrics = engine.step(state, BATCH)  # the state was not donated to the step that was refused
    assert bool(metrics["applied"])
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(4, state)
        for _ in range(2):
            state, metrics = engine.step(state, bad)
        assert bool(metrics["loss_scale_exhausted"])
        state, _ = checkpointer.restore(engine)  # another run: what overflowed before is none of its
    state, metrics = engine.step(state, BATCH)
    assert bool(metrics["applied"])

    warning = engine_of(precision="fp16", loss_scale=LossScale(initial=1.0, hysteresis=1, at_minimum="warn"))
    state = warning.init(PARAMS)
    for _ in range(2):
        state, _ = warning.step(state, bad)
    with pytest.warns(UserWarning, match="not finite at the minimum loss scale"):
        warning.step(state, bad)


def test_overflows_at_a_static_scale_are_warned_of_once():
    engine = engine_of(precision="fp16", loss_scale=2.0**40)
    state = engine.init(PARAMS)
    for _ in range(2):
        state, metrics = engine.step(state, BATCH)
    assert bool(metrics["loss_scale_exhausted"])
    with pytest.warns(UserWarning, match=r"not finite at the static loss scale, 1\.09951e\+12, and 1 steps"):
        state, _ = engine.step(state, BATCH)
    for _ in range(3):
        state, metrics = engine.step(state, BATCH)
    assert int(metrics["num_skipped"]) == 6


def test_float16_anywhere_brings_a_dynamic_scale_and_nothing_else_does():
    assert engine_of(precision="fp16").settings.loss_scale == LossScale()
    assert (
        engine_of(precision=zero2jax.Precision("bf16", reduce_dtype="fp16")).settings.loss_scale
        == LossScale()
    )
    assert engine_of(precision="bf16").settings.loss_scale is None
    assert engine_of(precision="fp16", loss_scale=128).settings.loss_scale == LossScale(
        initial=128, dynamic=False
    )
    assert engine_of(precision="bf16").init(PARAMS).loss_scale is None


def test_a_state_with_a_scale_is_refused_by_an_engine_without():
    scaled, plain = engine_of(precision="fp16"), engine_of(precision="bf16")
    states = scaled.init(PARAMS), plain.init(PARAMS)
    with pytest.raises(ValueError, match="it has a loss scale and this engine has no loss scaling"):
        plain.step(states[0], BATCH)
    with pytest.raises(ValueError, match="it has no loss scale and this engine has a loss scaling"):
        scaled.step(states[1], BATCH)


def test_a_checkpoint_holds_the_scale(tmp_path):
    scale = LossScale(initial=2.0**8, window=2, hysteresis=2)
    saving = engine_of(2, 3, precision="fp16", loss_scale=scale)
    state = saving.init(PARAMS)
    for factor in (np.inf, 1, 1):
        state, _ = saving.step(state, with_factor(factor, 5))
    kept = jax.tree.map(np.asarray, state.loss_scale)
    assert (kept.num_finite, kept.hysteresis, kept.num_skipped) == (2, 1, 1)
    with zero2jax.Checkpointer(tmp_path, saving) as checkpointer:
        checkpointer.save(3, state)
    restoring = engine_of(3, 2, precision="fp16", loss_scale=scale)
    restoring.abstract_state(PARAMS)
    with zero2jax.Checkpointer(tmp_path, restoring) as checkpointer:
        restored, _ = checkpointer.restore(restoring)
    for a, b in zip(kept, restored.loss_scale, strict=True):
        assert a == b
    _, metrics = restoring.step(restored, BATCH)
    assert float(metrics["loss_scale"]) == 2.0**8
    assert int(metrics["num_skipped"]) == 1
