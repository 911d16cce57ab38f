"""What a loss function may look like, and how its terms are added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_engine

from zero2jax.base import losses


class CallableLoss:
    def __call__(self, params, batch, rng):
        return params


SIGNATURES = [
    (lambda params, batch: 0, False),
    (lambda params, batch, rng: 0, True),
    (lambda params, batch, anything: 0, True),
    (lambda params, batch, rng=None: 0, True),
    (lambda params, batch, key=None: 0, True),
    (lambda params, batch, training=True: 0, False),
    (functools.partial(lambda params, batch, *, rng: 0, rng=7), False),  # set by its author
    (lambda params, batch, *rest: 0, False),
    (CallableLoss(), True),
    (jax.jit(lambda params, batch, rng: 0), True),
    (functools.partial(lambda config, params, batch: 0, None), False),
    (functools.partial(lambda config, params, batch, rng: 0, None), True),
]


@pytest.mark.parametrize(("loss_fn", "takes"), SIGNATURES)
def test_a_third_positional_argument_is_the_random_key(loss_fn, takes):
    assert losses.takes_rng(loss_fn) == takes


def test_a_tuple_of_two_is_loss_and_aux():
    assert losses.returns_aux((1.0, {}))
    assert not losses.returns_aux(1.0)
    assert not losses.returns_aux([1.0, {}])
    assert not losses.returns_aux((1.0, {}, {}))


def terms(loss, weight, aux=None, frozen=None):
    as_arrays = lambda tree: jax.tree.map(jnp.asarray, tree)
    return losses.WeightedSum.of(
        losses.LossTerms(jnp.float32(loss), jnp.float32(weight), as_arrays(aux), as_arrays(frozen))
    )


def test_means_over_microbatches_are_weighted_and_counts_are_summed():
    parts = [
        terms(
            1.0,
            1.0,
            {"m": np.float32(10), "n": np.int32(2), "b": True},
            {"s": np.float32(1), "c": np.int32(4)},
        ),
        terms(
            4.0,
            3.0,
            {"m": np.float32(2), "n": np.int32(5), "b": True},
            {"s": np.float32(3), "c": np.int32(3)},
        ),
    ]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
    found = stacked.over_microbatches().mean()
    assert float(stacked.over_microbatches().inverse_weight) == 1 / 4
    assert float(found.loss) == (1 * 1 + 3 * 4) / 4
    assert float(found.weight) == 4
    assert float(found.aux["m"]) == (1 * 10 + 3 * 2) / 4
    assert (int(found.aux["n"]), int(found.aux["b"])) == (7, 2)
    assert (float(found.frozen["s"]), int(found.frozen["c"])) == (2, 4)  # a mean and a maximum


def test_no_gradient_flows_through_the_weight_or_aux():
    def loss_fn(params, batch):
        return params**2, {"weight": params * 3, "more": params}

    key = losses.SliceContext(jax.random.key_data(jax.random.key(0)), jnp.int32(0), jnp.int32(0))
    call = losses.normalized(loss_fn)
    total = lambda p: losses.WeightedSum.of(call(p, None, key)).loss
    assert float(total(2.0)) == 4 * 6
    assert float(jax.grad(total)(2.0)) == 2 * 2 * 6  # 6 is a constant
    assert float(jax.grad(lambda p: call(p, None, key).aux["more"])(2.0)) == 0


def test_python_numbers_in_aux_are_arrays_from_then_on():
    loss_fn = lambda p, b: (p, {"weight": 2, "x": 1.5, "n": 3, "b": True, "none": None})
    found = losses.WeightedSum.of(losses.normalized(loss_fn)(jnp.float32(1), None, None))
    assert jax.tree.map(float, found.aux) == {"x": 3, "n": 3, "b": 1, "none": None}


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint8, jnp.float8_e5m2, jnp.bfloat16, jnp.complex64])
def test_aux_of_any_dtype_is_added_in_at_least_32_bits(dtype):
    found = terms(1.0, 2.0, {"x": jnp.ones(3, dtype)})
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    assert found.aux["x"].dtype.itemsize >= 4
    np.testing.assert_array_equal(found.aux["x"], np.full(3, 2 if inexact else 1))
    np.testing.assert_array_equal(found.mean().aux["x"], np.ones(3))


@pytest.mark.parametrize("weight", [np.float32(2), np.int32(2), np.float16(2)])
def test_a_weight_is_at_least_as_wide_as_the_loss(weight):
    with jax.enable_x64(True):
        found = losses.normalized(lambda p, b: (p, {"weight": weight}))(jnp.float64(1) / 3, None, None)
        found = losses.WeightedSum.of(found)
        assert found.loss.dtype == found.weight.dtype == found.inverse_weight.dtype == np.float64
        assert float(found.mean().loss) == 1 / 3


def test_low_precision_losses_are_added_in_fp32():
    found = losses.normalized(lambda p, b: (p, {"x": p}))(jnp.bfloat16(1), None, None)
    assert found.loss.dtype == found.weight.dtype == jnp.float32
    assert losses.WeightedSum.of(found).aux["x"].dtype == jnp.float32


def test_a_batch_without_any_weight_has_zero_means_and_leaves_the_parameters():
    def loss(params, batch):
        weight = batch.sum()
        return params["w"].sum() * weight / jnp.maximum(weight, 1), {
            "weight": weight,
            "ratio": weight / weight,
        }

    engine = make_engine(4, loss_fn=loss, tx=optax.sgd(1.0))
    state, metrics = engine.step(engine.init({"w": np.ones(8, np.float32)}), np.zeros(8, np.float32))
    assert float(metrics["loss"]) == float(metrics["aux"]["ratio"]) == float(metrics["weight"]) == 0
    np.testing.assert_array_equal(engine.params(state)["w"], 1)
    assert float(engine.evaluate(state, np.zeros(8, np.float32))[0]) == 0


def test_small_integers_in_aux_do_not_wrap():
    loss = lambda params, batch: (
        params["w"].sum(),
        {"n": jnp.int8(100), "u": jnp.uint8(200), "b": batch[0] > 0},
    )
    engine = make_engine(4, loss_fn=loss)
    _, metrics = engine.step(engine.init({"w": np.ones(8, np.float32)}), np.ones(8, np.float32))
    assert {name: int(x) for name, x in metrics["aux"].items()} == {"n": 400, "u": 800, "b": 4}
