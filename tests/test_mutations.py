"""Lines of the step that one test input could not tell apart from another: each has the input that can.

A mutation of the line named in a test's docstring turned that test red.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, assert_trees_close, assert_trees_equal, make_engine, train

import zero2jax


@pytest.mark.parametrize(("stage", "reduce_dtype"), [(1, "float32"), (2, None), (3, None)])
def test_microbatches_in_bf16_add_up_in_fp32(stage, reduce_dtype):
    """The accumulator: a bf16 sum stays at 1, since each 2**-9 is below half of its last place, 2**-7.

    Every gradient is exact in bf16, the sum 1 + 63 * 2**-9 and its 64th part in fp32. Stage 1 reduces the sum, and so
    in fp32 here; the others reduce each gradient, in bf16.
    """
    rows = np.full((64, 1), 2.0**-9, np.float32)
    rows[0] = 1
    loss = lambda params, batch: (params["w"].astype(jnp.float32) * batch[0]).sum()
    engine = make_engine(
        1,
        loss_fn=loss,
        tx=optax.sgd(1.0),
        stage=stage,
        num_microbatches=64,
        precision=zero2jax.Precision(reduce_dtype=reduce_dtype),
    )
    state, (metrics,) = train(engine, engine.init({"w": jnp.zeros(1)}), [rows])
    mean = (1 + 63 * 2.0**-9) / 64
    np.testing.assert_array_equal(engine.params(state)["w"], -np.float32([mean]))
    np.testing.assert_array_equal(metrics["grad_norm"], np.float32(mean))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_finite_loss_with_an_infinite_gradient_is_skipped(stage):
    """`applied`: the slope of a square root at 0 is infinite, its value 0."""
    loss = lambda params, batch: jnp.sqrt(params["w"]).sum() * batch.mean()
    engine = make_engine(2, loss_fn=loss, tx=optax.sgd(0.1), stage=stage, skip_nonfinite=True)
    params = {"w": jnp.float32([0, 4])}
    state, (metrics,) = train(engine, engine.init(params), [np.ones((2, 1), np.float32)])
    assert float(metrics["loss"]) == 2
    assert np.isinf(metrics["grad_norm"])
    assert not bool(metrics["applied"])
    assert_trees_equal(engine.params(state), params)


@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 4}], ids=str)
def test_evaluate_gives_each_device_the_key_that_the_step_gives_it(axes):
    """The slice index of `local_loss`: the square of a mean is not the mean of squares, if the draws differ."""

    def loss(params, batch, rng):
        drawn = jax.random.normal(rng)
        return (batch @ params["w"]).mean() * drawn, {"drawn": drawn, "square": drawn**2}

    engine = zero2jax.Engine(loss, optax.sgd(0.1), zero2jax.make_mesh(**axes), precision=FP32)
    state, batch = engine.init({"w": jnp.ones(3)}), np.ones((8, 3), np.float32)
    value, aux = engine.evaluate(state, batch)
    _, metrics = engine.step(state, batch)  # whose keys are those of the state it is given
    key = jax.random.fold_in(jax.random.key(0), 0)
    draws = np.array([jax.random.normal(jax.random.fold_in(key, i)) for i in range(8)])
    exact = {"drawn": draws.mean(), "square": (draws**2).mean()}
    # fp32 sums of eight values of about one
    assert_trees_close(aux, {name: np.float32(x) for name, x in exact.items()}, rtol=1e-6, atol=1e-6)
    assert_trees_close(metrics["aux"], aux, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([value, metrics["loss"]], 3 * draws.mean(), rtol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_init_from_arrays_on_the_host_copies_them(num_shards):
    """`_slice`: JAX takes an aligned NumPy buffer on a CPU device as it is, and a step donates it.

    64-byte alignment is what it asks for; a copy made by hand of a large array is not always so.
    """
    buffer = np.zeros(4096 + 16, np.float32)
    start = (-buffer.ctypes.data % 64) // 4
    host = buffer[start : start + 4096].reshape(64, 64)
    assert host.ctypes.data % 64 == 0
    engine = make_engine(num_shards, loss_fn=lambda p, b: (b @ p["w"]).mean(), tx=optax.sgd(1.0))
    state = engine.init({"w": host})
    addresses = [shard.data.unsafe_buffer_pointer() for shard in state.params["w"].addressable_shards]
    first, last = host.ctypes.data, host.ctypes.data + host.nbytes
    assert not any(first <= address < last for address in addresses)
    train(engine, state, [np.ones((2, 64), np.float32)])
    assert not host.any()
