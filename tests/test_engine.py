"""What a user's loop hands to the engine, and where it may stand: against one device, over stages and devices.

Tolerances: fp32 sums over at most 12 examples and 3 devices, in another order than on one device: a few units of 2**-24
of the addends, which are below 10. RTOL = 2e-6 and ATOL = 2e-6 leave room for three steps.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, assert_trees_close, make_engine
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spawn import launch, results, write_program

import zero2jax

RTOL = ATOL = 2e-6
OVER_STAGES = [(stage, n) for stage in (0, 1, 2, 3) for n in (1, 3)]
PARAMS = {"w": np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2), "b": np.ones(2, np.float32)}
X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) + params["b"][None] - 0.5) ** 2)


def scaled_loss(params, batch, *, beta, target):
    return loss_fn(params, batch) + beta * jnp.mean((params["b"] - target) ** 2)


def engine_of(loss=loss_fn, n=2, stage=2, tx=None, **settings):
    return make_engine(n, loss_fn=loss, stage=stage, tx=tx or optax.sgd(0.1), **settings)


def plain_steps(loss, tx, params, batches, loss_args=None):
    """The same on one device: parameters and losses."""
    opt_state, losses = tx.init(params), []
    for i, batch in enumerate(batches):
        args = {} if loss_args is None else loss_args[i]
        value, grads = jax.value_and_grad(loss)(params, batch, **args)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


# --- arguments of the loss that are not per example --------------------------------------------------------------


@pytest.mark.parametrize(("stage", "n"), OVER_STAGES)
def test_loss_args_reach_the_loss_and_other_values_compile_nothing(stage, n):
    values = [{"beta": i / 4, "target": np.full(2, i, np.float32)} for i in range(3)]
    params, losses = plain_steps(scaled_loss, optax.sgd(0.1), PARAMS, [X] * 3, values)
    engine = engine_of(scaled_loss, n, stage, num_microbatches=2)
    state = engine.init(PARAMS, batch=X, loss_args=values[0])
    found = []
    for loss_args in values:
        with jax.transfer_guard_host_to_device("disallow"):
            state, metrics = engine.step(state, X, loss_args=loss_args)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    assert engine._compiled.step._cache_size() == 1
    evaluated = [float(engine.evaluate(state, X, loss_args=a)) for a in values]
    np.testing.assert_allclose(evaluated, [scaled_loss(params, X, **a) for a in values], rtol=RTOL)
    lowered = [engine.lower(X, loss_args=a).as_text() for a in values[:2]]
    assert lowered[0] == lowered[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_args_reach_rewritten_layers_and_every_group(stage):
    """With activation settings, whose profile is traced with them, and over groups of devices."""

    def loss(params, batch, *, beta):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) * beta, None), batch, params)
        return (x**2).mean()

    params = np.random.default_rng(1).normal(size=(4, 5, 5)).astype(np.float32)
    expected, _ = plain_steps(loss, optax.sgd(0.1), params, [X] * 2, [{"beta": 0.5}, {"beta": 2.0}])
    engine = zero2jax.Engine(
        loss,
        optax.sgd(0.1),
        zero2jax.make_mesh(replica=2, data=3),
        stage=stage,
        precision=FP32,
        activations=zero2jax.ActivationSettings(policy="dots"),
    )
    state = engine.init(params, batch=X, loss_args={"beta": 0.5})
    assert engine.activation_profile(X, loss_args={"beta": 0.5}).segments
    for beta in (0.5, 2.0):
        state, _ = engine.step(state, X, loss_args={"beta": beta})
    assert_trees_close(engine.params(state), jnp.asarray(expected), rtol=RTOL, atol=ATOL)


def test_loss_args_and_a_random_key_do_not_meet():
    def loss(params, batch, rng, *, beta):
        return loss_fn(params, batch) + 0 * jax.random.normal(rng) + beta

    def third(params, batch, beta):
        return loss_fn(params, batch) + beta

    for with_args in (loss, third):
        engine = engine_of(with_args)
        _, metrics = engine.step(engine.init(PARAMS), X, loss_args={"beta": 2.0})
        np.testing.assert_allclose(metrics["loss"], loss_fn(PARAMS, X) + 2, rtol=RTOL)


def test_loss_args_that_the_loss_does_not_take_are_named():
    engine = engine_of(scaled_loss)
    state = engine.init(PARAMS)
    with pytest.raises(
        TypeError,
        match=r"loss arguments \[\]: missing a required (keyword-only )?argument: 'beta'.*loss_args=",
    ):
        engine.step(state, X)
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'gamma'"):
        engine.step(state, X, loss_args={"beta": 0.0, "target": 0.0, "gamma": 1.0})
    with pytest.raises(TypeError, match=r"reading loss_args: found float, expected a dict"):
        engine.step(state, X, loss_args=1.0)
    with pytest.raises(TypeError, match=r"leaves that are not arrays: 'beta' \(str\)"):
        engine.step(state, X, loss_args={"beta": "large"})


@pytest.mark.parametrize(("stage", "n"), OVER_STAGES)
def test_two_engines_share_a_network_by_loss_args(stage, n):
    """A GAN: each network is trained by its own engine, and sees what the other one is at that step."""
    generated = lambda g, z: jnp.tanh(z @ g["w"])
    judged = lambda d, x: jax.nn.sigmoid(x @ d["v"]).mean()

    def loss_d(d, batch, *, g):
        return judged(d, generated(g, batch)) - judged(d, batch[:, :2])

    def loss_g(g, batch, *, d):
        return -judged(d, generated(g, batch))

    g, d = {"w": PARAMS["w"]}, {"v": np.ones((2, 1), np.float32)}
    engine_d, engine_g = engine_of(loss_d, n, stage), engine_of(loss_g, n, stage)
    state_d, state_g = engine_d.init(d), engine_g.init(g)
    for _ in range(3):
        state_d, _ = engine_d.step(state_d, X, loss_args={"g": engine_g.params(state_g)})
        state_g, _ = engine_g.step(state_g, X, loss_args={"d": engine_d.params(state_d)})
        d = jax.tree.map(lambda p, x: p - 0.1 * x, d, jax.grad(loss_d)(d, X, g=g))
        g = jax.tree.map(lambda p, x: p - 0.1 * x, g, jax.grad(loss_g)(g, X, d=d))
    assert_trees_close(engine_d.params(state_d), d, rtol=RTOL, atol=ATOL)
    assert_trees_close(engine_g.params(state_g), g, rtol=RTOL, atol=ATOL)


# --- the batch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_a_buffer_may_be_filled_again_while_the_step_runs(n):
    """Shapes at which a CPU device would otherwise read the caller's memory."""
    for shape, dtype in (((8, 4096), np.float32), ((64, 1024), np.int32)):
        engine = engine_of(lambda p, b: p["w"].sum() * 0 + b.astype(jnp.float32).mean(), n)
        state, buffer = engine.init(PARAMS), np.ones(shape, dtype)
        for _ in range(5):
            buffer[:] = 1
            joined = zero2jax.global_batch(buffer, engine.mesh)
            state, metrics = engine.step(state, buffer)
            buffer[:] = 9
            assert float(metrics["loss"]) == 1
            np.testing.assert_array_equal(joined, 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_batch_may_lie_on_another_mesh(stage, explicit):
    axis_type = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    user = jax.make_mesh((3,), ("batch",), devices=jax.devices()[:3], axis_types=(axis_type,))
    engine = engine_of(n=3, stage=stage)
    state, metrics = engine.step(engine.init(PARAMS), jax.device_put(X, NamedSharding(user, P("batch"))))
    np.testing.assert_allclose(metrics["loss"], loss_fn(PARAMS, X), rtol=RTOL)
    np.testing.assert_allclose(
        engine.evaluate(state, jax.device_put(X, NamedSharding(user, P()))),
        loss_fn(plain_steps(loss_fn, optax.sgd(0.1), PARAMS, [X])[0], X),
        rtol=RTOL,
    )


# --- a step inside of other programs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "n"), OVER_STAGES)
def test_a_step_may_stand_in_the_users_jit_and_scan(stage, n):
    batches = np.stack([X, X + 1, X - 1])
    params, losses = plain_steps(loss_fn, optax.sgd(0.1), PARAMS, batches)
    engine = engine_of(n=n, stage=stage)

    @jax.jit
    def run(state, batches):
        state, metrics = jax.lax.scan(engine.step, state, batches)
        return state, metrics, engine.evaluate(state, batches[0]), engine.params(state)

    state, metrics, last, full = run(engine.init(PARAMS), batches)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=RTOL)
    assert_trees_close(full, params, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(last, loss_fn(params, X), rtol=RTOL)
    state, metrics = jax.jit(engine.step, donate_argnums=0)(state, X)
    np.testing.assert_allclose(metrics["loss"], last, rtol=RTOL)
    engine.step(state, X)  # and goes on by itself


def test_compiler_options_of_a_step_in_the_users_jit_are_not_lost_in_silence():
    engine = engine_of(compiler_options={"xla_cpu_enable_fast_math": False})
    state = engine.init(PARAMS)
    match = r"the compiler options \['xla_cpu_enable_fast_math'\] have no effect"
    with pytest.warns(UserWarning, match=match) as found:
        jax.jit(lambda state, batch: engine.step(state, batch))(state, X)
    assert {w.filename for w in found} == {__file__}


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_mesh_that_the_user_has_set_does_no_harm(stage, explicit):
    axis_type = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    user = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    params, losses = plain_steps(loss_fn, optax.sgd(0.1), PARAMS, [X, X])
    engine = engine_of(n=3, stage=stage)
    with jax.set_mesh(user):
        state = engine.init(jax.tree.map(jnp.asarray, PARAMS), batch=X)
        state, first = engine.step(state, jnp.asarray(X))
        engine.lower(X)
        state, second = engine.step(state, X)
        np.testing.assert_allclose([first["loss"], second["loss"]], losses, rtol=RTOL)
        np.testing.assert_allclose(engine.evaluate(state, X), loss_fn(params, X), rtol=RTOL)
        found = engine.params(state)
    assert_trees_close(found, params, rtol=RTOL, atol=ATOL)


# --- the state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_state_that_was_donated_says_so_before_anything_runs(stage, n):
    engine = engine_of(n=n, stage=stage)
    old = engine.init(PARAMS)
    kept = jax.tree.map(jnp.copy, old)
    new, _ = engine.step(old, X)
    for use in (lambda s: engine.step(s, X), lambda s: engine.evaluate(s, X), engine.params):
        with pytest.raises(
            ValueError, match=r"donates it: use the one that it returned, state, metrics = engine"
        ):
            use(old)
    np.testing.assert_allclose(engine.evaluate(kept, X), loss_fn(PARAMS, X), rtol=RTOL)
    engine.step(new, X)


def test_other_arrays_that_were_donated_are_named():
    engine = engine_of()
    state = engine.init(PARAMS)
    gone = jnp.asarray(X)
    gone.delete()
    with pytest.raises(ValueError, match=r"reading the batch: leaf 'x' is gone"):
        engine.step(state, {"x": gone})
    with pytest.raises(ValueError, match=r"reading loss_args: leaf 'a' is gone"):
        engine.step(state, X, loss_args={"a": gone})
    with pytest.raises(ValueError, match=r"reading the parameters: leaf 'w' is gone"):
        engine.init({"w": gone, "b": PARAMS["b"]})


def test_an_array_of_the_state_that_is_handed_over_once_more_is_refused():
    """On two devices the process ended by a signal."""
    engine = engine_of(n=2, stage=0, tx=optax.trace(0.9))
    state = engine.init(PARAMS)
    w, b = state.params["w"], state.params["b"]
    with pytest.raises(
        ValueError, match=r"loss_args: leaf 'a/w' is the array 'params/w' of the state.*donates"
    ):
        engine.step(state, X, loss_args={"a": {"w": w}})
    with pytest.raises(ValueError, match=r"reading the batch: leaf 'x' is the array 'params/b'"):
        engine.step(state, {"x": b})
    twice = state._replace(opt_state=state.opt_state._replace(trace=state.params))
    with pytest.raises(ValueError, match=r"the state: leaf 'opt_state/trace/b' is the array 'params/b'"):
        engine.step(twice, X)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rate", [1e-3, 1, np.float32(1e-3)])
def test_a_number_may_be_put_into_the_state(stage, rate):
    engine = engine_of(n=3, stage=stage, tx=optax.inject_hyperparams(optax.sgd)(0.1))
    state, _ = engine.step(engine.init(PARAMS), X)
    state.opt_state.hyperparams["learning_rate"] = rate
    engine.evaluate(state, X)
    with jax.transfer_guard_host_to_device("disallow"):
        state, metrics = engine.step(state, X)
    assert float(metrics["learning_rate"]) == np.float32(rate)
    first, _ = plain_steps(loss_fn, optax.sgd(0.1), PARAMS, [X])
    params, _ = plain_steps(loss_fn, optax.sgd(float(rate)), first, [X])
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)
    assert engine._compiled.step._cache_size() == 1
    with pytest.raises(ValueError, match=r"leaf 'w' is float\[\] and this engine keeps it as float32"):
        engine.step(state._replace(params={"w": 1.0, "b": state.params["b"]}), X)


# --- what is reported, and what is compiled ----------------------------------------------------------------------


def test_metrics_hold_what_there_is_to_report():
    engine = engine_of()
    _, metrics = engine.step(engine.init(PARAMS), X)
    assert set(metrics) == {"loss", "grad_norm", "learning_rate", "applied", "weight"}
    assert all(isinstance(float(x), float) for x in metrics.values())
    engine = engine_of(lambda p, b: (loss_fn(p, b), {"weight": 3, "n": 1}), clip_norm=1e-3)
    _, metrics = engine.step(engine.init(PARAMS), X)
    assert set(metrics) == {
        "loss",
        "grad_norm",
        "grad_norm_clipped",
        "learning_rate",
        "applied",
        "weight",
        "aux",
    }
    np.testing.assert_allclose(metrics["grad_norm_clipped"], 1e-3, rtol=RTOL)
    assert (float(metrics["weight"]), int(metrics["aux"]["n"])) == (6, 2)  # 2 devices


def test_a_loss_that_is_defined_anew_for_each_evaluation_is_warned_of_once():
    engine = engine_of()
    state = engine.init(PARAMS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            engine.evaluate(state, X, loss_fn=lambda p, b: 2 * loss_fn(p, b))
    assert [str(w.message) for w in caught] == [str(caught[0].message)]
    assert caught[0].filename == __file__
    assert "is the third function of the same code, and each is compiled anew" in str(caught[0].message)


def test_a_method_is_compiled_once_for_evaluation():
    class Model:
        def loss(self, params, batch):
            return loss_fn(params, batch)

    engine, model = engine_of(), Model()
    state = engine.init(PARAMS)
    for _ in range(4):
        engine.evaluate(state, X, loss_fn=model.loss)
    assert len(engine._compiled.evaluations) == 1


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_a_dtype_or_its_name_is_a_precision(name):
    assert engine_of(precision=name).precision == zero2jax.Precision(jnp.bfloat16)
    assert zero2jax.Precision("fp32") == FP32


@pytest.mark.parametrize("dtype", ["nonsense", None, 3, jnp.float8_e4m3fn, jnp.complex64, jnp.int32])
@pytest.mark.parametrize("field", ["compute_dtype", "accumulate_dtype"])
def test_a_dtype_that_is_none_for_training_is_refused(field, dtype):
    with pytest.raises(ValueError, match=f"{field} is .*; it is bfloat16, float16, float32 or float64"):
        zero2jax.Precision(**{field: dtype})


def test_float64_without_x64_is_refused():
    with pytest.raises(ValueError, match=r"float64 needs jax.config.update\('jax_enable_x64', True\)"):
        zero2jax.Precision(jnp.float64)


@pytest.mark.parametrize(("stage", "n"), OVER_STAGES)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_float64_stays_float64(stage, n, num_microbatches, weighted):
    """A gradient by NumPy's formula, to a few units of 2**-53 of addends of about 1."""
    w, x = np.array([0.1, 0.2, 0.3]), np.arange(18.0).reshape(6, 3) / 7
    weight = np.array([3.0, 1, 4, 1, 5, 9]) / 7

    def loss(params, batch):
        errors = (batch["x"] @ params) ** 2
        if not weighted:
            return errors.mean()
        return (errors * batch["weight"]).sum() / batch["weight"].sum(), {"weight": batch["weight"].sum()}

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        precision = zero2jax.Precision("float64")
        engine = engine_of(
            loss, n, stage, tx=optax.sgd(1.0), precision=precision, num_microbatches=num_microbatches
        )
        state, metrics = engine.step(engine.init(w), {"x": x, "weight": weight})
        found = w - np.asarray(engine.params(state))
        share = weight / weight.sum() if weighted else np.full(6, 1 / 6)
        np.testing.assert_allclose(found, 2 * x.T @ (share * (x @ w)), rtol=1e-14)
        assert metrics["loss"].dtype == metrics["weight"].dtype == metrics["grad_norm"].dtype == np.float64
        np.testing.assert_allclose(metrics["loss"], share @ (x @ w) ** 2, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_parameters_have_fp32_masters_where_jax_promotes_nothing(dtype):
    with jax.numpy_dtype_promotion("strict"):
        state = engine_of(n=2).abstract_state({"w": jax.ShapeDtypeStruct((5, 2), dtype)})
    assert state.params["w"].dtype == np.float32


# --- several processes -------------------------------------------------------------------------------------------

ARGUMENTS = """
import json
import jax.numpy as jnp, numpy as np, optax
import zero2jax

me = zero2jax.init_distributed(initialization_timeout_s=120).process_index
loss = lambda p, b, *, beta: jnp.mean(b @ p) * beta.sum()
engine = zero2jax.Engine(loss, optax.sgd(0.5), precision="fp32", num_microbatches=2)
state = engine.init(np.ones(3, np.float32))
found = []
for beta in (np.ones(2, np.float32), np.full(2, 2, np.float32)):
    state, metrics = engine.step(state, np.ones((8, 3), np.float32), loss_args={"beta": beta})
    found.append(float(metrics["loss"]))
try:
    engine.step(state, np.ones((8, 3), np.float32), loss_args={"beta": np.full(2, me, np.float32)})
except ValueError as error:
    found.append(str(error))
print(json.dumps({"found": found}), flush=True)
"""


def test_loss_args_are_the_same_in_all_processes(tmp_path):
    found = results(launch(write_program(tmp_path, ARGUMENTS), processes=2))
    assert sorted(found) == [0, 1]
    for (printed,) in found.values():
        numbers = printed["found"]
        # loss 3 * 1 * 2 = 6; w = 1 - 0.5 * 2 = 0; then 0
        assert numbers[:2] == [6, 0]
        assert numbers[2].startswith(
            "placing loss_args: an array of shape (2,) is not the same in all 2 processes"
        )
