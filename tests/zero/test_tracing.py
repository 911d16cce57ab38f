"""Losses that look at the types of their arrays, or at the mesh in context: as on one device, at every stage."""

import functools
import warnings

import diffrax
import equinox as eqx
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import FP32

import zero2jax

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
STAGES = [0, 1, 2, 3]
RTOL = 1e-6  # sums of at most 64 fp32 terms in another order


def batch_norm_with_state(mode):
    """Equinox keeps batch statistics in a state whose new values must have the types of the old ones."""
    module, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode=mode)
    arrays, static = eqx.partition(module, eqx.is_inexact_array)

    def loss(p, x):
        apply = jax.vmap(
            eqx.combine(p["module"], static), axis_name="b", in_axes=(0, None), out_axes=(0, None)
        )
        y, state = apply(x, p["state"])
        return jnp.mean((y - 1) ** 2), {"frozen": {"state": state}}

    return loss, {"module": arrays, "state": state}


def checkpointed_loop():
    """What Diffrax's solvers are made of: the loop's backward pass calls a function that was converted in the forward
    pass, and checks the types that it is called with.
    """

    def loss(p, x):
        body = lambda y: jnp.tanh(y @ p["w"])
        y = eqx.internal.while_loop(lambda y: True, body, x, max_steps=3, kind="checkpointed", checkpoints=3)
        return jnp.mean(y**2)

    return loss, {"w": jnp.eye(4)}


def boxed(*names, layer=nn.Dense):
    """Flax lays a sharding constraint on a boxed parameter wherever there is a mesh in context; DenseGeneral looks at
    the kernel's shape besides, by initialising it once more.
    """
    model = layer(8, kernel_init=nn.with_partitioning(nn.initializers.ones, names))
    params = model.init(jax.random.key(0), X)["params"]
    return lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), params


CASES = {
    "equinox state, batch": lambda: batch_norm_with_state("batch"),
    "equinox state, ema": lambda: batch_norm_with_state("ema"),
    "differentiated loop": checkpointed_loop,
    "boxed by the data axis": lambda: boxed(None, "data"),
    "boxed by an axis that is not there": lambda: boxed("model", "data"),
    "boxed DenseGeneral": lambda: boxed(None, "data", layer=nn.DenseGeneral),
}
ON_TWO_AXES = list(CASES)[:3]


def of_slices(loss, params, num_slices):
    """Mean of the loss over slices of the batch, on one device."""
    found = [loss(params, jnp.asarray(part)) for part in np.split(X, num_slices)]
    return np.mean([out[0] if isinstance(out, tuple) else out for out in found])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, {"data": 8}) for name in CASES] + [(name, {"data": 4, "model": 2}) for name in ON_TWO_AXES],
)
def test_step_and_evaluate_give_the_loss_of_one_device(name, axes, stage):
    loss, params = CASES[name]()
    mesh = zero2jax.make_mesh(**axes)
    engine = zero2jax.Engine(
        loss,
        optax.sgd(0.1),
        mesh,
        stage=stage,
        precision=FP32,
        trainable=lambda path, _: "state" not in path,
    )
    expected = of_slices(loss, params, axes["data"])
    state = engine.init(params)
    evaluated = engine.evaluate(state, X)
    np.testing.assert_allclose(
        evaluated[0] if isinstance(evaluated, tuple) else evaluated, expected, rtol=RTOL
    )
    _, metrics = engine.step(state, X)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=RTOL)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_ode_solver_steps_as_on_one_device(stage):
    """With data axes only: Diffrax checks its results in callbacks, which JAX has not beside an automatic axis."""

    def loss(p, x):
        field = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
        return jnp.mean(
            diffrax.diffeqsolve(field, diffrax.Euler(), 0.0, 1.0, 0.5, x, args=p["w"]).ys[-1] ** 2
        )

    params = {"w": jnp.eye(4)}
    value, grads = jax.value_and_grad(loss)(params, X)
    engine = zero2jax.Engine(loss, optax.sgd(1.0), zero2jax.make_mesh(data=4), stage=stage, precision=FP32)
    state, metrics = engine.step(engine.init(params), X)
    np.testing.assert_allclose(metrics["loss"], value, rtol=RTOL)
    # a gradient of about one, a mean over 64 elements
    np.testing.assert_allclose(engine.params(state)["w"], params["w"] - grads["w"], rtol=0, atol=2e-6)


def on_a_mesh(x):
    return jax.device_put(x, jax.NamedSharding(zero2jax.make_mesh(data=2), jax.P("data")))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_may_close_over_arrays_and_keys_that_lie_on_a_mesh(stage):
    """A teacher's parameters, say, sharded over devices that are fewer than the step's."""
    key, teacher = jax.random.key(1), np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    placed_key, placed = jax.random.split(key), on_a_mesh(teacher)
    placed_key = on_a_mesh(placed_key)

    def loss(p, x, teacher=placed, keys=placed_key):
        bias = jax.random.normal(jax.random.fold_in(keys[0], 0), (1, 4))
        body = lambda y, _: (jax.jit(lambda y: jnp.tanh(y @ p["w"] @ teacher))(y), None)
        y, _ = jax.lax.scan(body, x + bias, length=2)
        return jnp.mean((y - x @ teacher) ** 2)

    params = {"w": jnp.eye(4)}
    engine = zero2jax.Engine(loss, optax.sgd(1.0), zero2jax.make_mesh(data=4), stage=stage, precision=FP32)
    state = engine.init(params)
    plain = functools.partial(loss, teacher=teacher, keys=jax.random.split(key))
    value, grads = jax.value_and_grad(plain)(params, X)
    np.testing.assert_allclose(engine.evaluate(state, X), value, rtol=RTOL)
    state, metrics = engine.step(state, X)
    np.testing.assert_allclose(metrics["loss"], value, rtol=RTOL)
    # a gradient of about one, a mean over 64 elements
    np.testing.assert_allclose(engine.params(state)["w"], params["w"] - grads["w"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_other_axes_stay_in_context_and_collectives_over_data_work(stage):
    seen = []

    def loss(p, x):
        mesh = jax.sharding.get_abstract_mesh()
        seen.append(dict(mesh.shape))
        h = x @ p["w"]
        if "model" in mesh.axis_names:
            h = jax.lax.with_sharding_constraint(h, jax.NamedSharding(mesh, jax.P(None, "model")))
        rows = jax.lax.all_gather(h, "data")
        return jnp.mean(h**2) + jnp.mean(rows) ** 2

    params = {"w": jnp.full((4, 8), 0.1)}
    h = X @ np.asarray(params["w"])
    for axes in ({"data": 4}, {"data": 4, "model": 2}):
        seen.clear()
        engine = zero2jax.Engine(
            loss, optax.sgd(0.1), zero2jax.make_mesh(**axes), stage=stage, precision=FP32
        )
        _, metrics = engine.step(engine.init(params), X)
        np.testing.assert_allclose(metrics["loss"], np.mean(h**2) + np.mean(h) ** 2, rtol=RTOL)
        assert ["model" in shape for shape in seen] == ["model" in axes] * len(seen)


def constrained(constraints):
    """A model written for FSDP. Its constraints name the data axis, alone or with others, or one that is not there."""

    def loss(p, x):
        x = jax.lax.with_sharding_constraint(x, constraints["batch"])
        body = lambda y, w: (jax.lax.with_sharding_constraint(jnp.tanh(y @ w), constraints["hidden"]), None)
        y, _ = jax.lax.scan(jax.checkpoint(body), x, p["w"])
        y, _ = jax.lax.with_sharding_constraint((y, p["w"]), (constraints["batch"], jax.P()))
        return jnp.mean(y**2)

    return loss, {"w": np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 4, 4)}


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_constraints_lose_the_data_axes_by_name_and_keep_the_others(axes):
    mesh = zero2jax.make_mesh(**axes)
    given = jax.lax.with_sharding_constraint
    both = {"batch": jax.P("data", None), "hidden": jax.P(("data", "fsdp"), "model")}
    if "model" in axes:
        both["batch"] = jax.NamedSharding(mesh, both["batch"])  # of a mesh all of whose axes are automatic
    loss, params = constrained(both)
    engine = zero2jax.Engine(loss, optax.sgd(0.1), mesh, precision=FP32)
    engine.abstract_state(params)
    kept = "" if "model" in axes else r".*'model' \(not an axis of the mesh"
    with pytest.warns(UserWarning, match=rf"'data' \(a data axis.*'fsdp' \(not an axis of the mesh{kept}"):
        lowered = engine.lower(X)
    assert jax.lax.with_sharding_constraint is given
    assert '[{}, {"model"}]' in lowered.as_text() or "model" not in axes
    _, metrics = engine.step(engine.init(params), X)
    plain, _ = constrained({"batch": jax.P(), "hidden": jax.P()})
    with jax.set_mesh(zero2jax.make_mesh(data=1)):
        np.testing.assert_allclose(metrics["loss"], jax.jit(plain)(params, X), rtol=RTOL)


@pytest.mark.parametrize("stage", [1, 3])
def test_products_that_are_wider_than_the_compute_dtype_are_said_with_the_line(stage):
    """2 * 1024**3 operations in the wide product, half of that in the narrow one; nothing is compiled."""
    dtype = jnp.float32

    def loss(p, x):
        narrow = x[:512].astype(jnp.bfloat16) @ p["w"]
        return jnp.mean(x.astype(dtype) @ p["w"]) + jnp.mean(narrow).astype(jnp.float32)

    def lower(precision, rows=2048):
        engine = zero2jax.Engine(
            loss, optax.sgd(0.1), zero2jax.make_mesh(data=2), stage=stage, precision=precision
        )
        engine.abstract_state({"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)})
        engine.lower(jax.ShapeDtypeStruct((rows, 1024), jnp.float32))

    with pytest.warns(UserWarning, match=r"67 % .* in float32, .* is bfloat16.*at .*test_tracing.py:\d+"):
        lower(zero2jax.Precision())
    lower(FP32)
    lower(zero2jax.Precision(), rows=512)  # too few to matter
    dtype = jnp.bfloat16
    lower(zero2jax.Precision())


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 2), (2, 1), (3, 2)])
def test_wide_products_are_said_once_though_init_evaluate_and_steps_all_trace_the_loss(
    stage, num_microbatches
):
    """2 * 1024**3 operations in each slice's product."""
    loss = lambda p, x: jnp.mean(x @ p["w"])
    engine = zero2jax.Engine(
        loss, optax.sgd(0.1), zero2jax.make_mesh(data=1), stage=stage, num_microbatches=num_microbatches
    )
    x = np.ones((1024 * num_microbatches, 1024), np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = engine.init({"w": np.ones((1024, 1024), np.float32)}, batch=x)
        engine.evaluate(state, x)
        for _ in range(2):
            state, _ = engine.step(state, x)
    assert ["in float32" in str(warning.message) for warning in said].count(True) == 1
