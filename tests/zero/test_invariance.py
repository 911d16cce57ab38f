"""What changes no bit of the parameters: stage, layers' checkpoints, when parameters are gathered, and, with sums in a
fixed order, the number of devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.zero import collectives

WIDTH = 12
RNG = np.random.default_rng(0)
PARAMS = {
    "embed": RNG.normal(size=(7, WIDTH)).astype(np.float32) / 3,
    "blocks": {
        "a": RNG.normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 3,
        "b": RNG.normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 3,
    },
    "head": RNG.normal(size=(WIDTH, 5)).astype(np.float32) / 3,
}
BATCH = {"x": RNG.normal(size=(32, 7)).astype(np.float32), "y": RNG.normal(size=(32, 5)).astype(np.float32)}


def loss(params, batch, *, checkpointed=False):
    def layer(h, w):
        return h + jnp.tanh(h @ w["a"]) @ w["b"], None

    x = batch["x"].astype(params["embed"].dtype) @ params["embed"]
    h, _ = jax.lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, params["blocks"])
    return jnp.mean(((h @ params["head"]).astype(jnp.float32) - batch["y"]) ** 2)


def engine_of(num_devices=4, *, checkpointed=False, precision="fp32", **settings):
    fun = functools.partial(loss, checkpointed=checkpointed)
    mesh = zero2jax.make_mesh(data=num_devices)
    return zero2jax.Engine(fun, optax.adam(1e-2), mesh, precision=precision, **settings)


def trained(*args, **settings):
    engine = engine_of(*args, **settings)
    state = engine.init(PARAMS)
    for _ in range(3):
        state, _ = engine.step(state, BATCH)
    return engine.params(state)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


IN_ORDER = zero2jax.Precision("bf16", fp32_sum=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", IN_ORDER], ids=["fp32", "bf16", "in_order"])
def test_stages_1_2_and_3_agree_at_one_microbatch(precision):
    expected = trained(stage=2, precision=precision)
    assert_same_bits(trained(stage=1, precision=precision), expected)
    assert_same_bits(trained(stage=3, precision=precision), expected)
    assert_same_bits(trained(stage=2, precision=precision, gather="once"), expected)
    assert_same_bits(trained(stage=3, precision=precision, checkpointed=True), expected)


def test_stages_2_and_3_agree_at_several_microbatches():
    expected = trained(stage=2, num_microbatches=4)
    assert_same_bits(trained(stage=3, num_microbatches=4), expected)
    assert_same_bits(trained(stage=2, num_microbatches=4, gather="use"), expected)
    assert_same_bits(trained(stage=2, num_microbatches=4, checkpointed=True), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_with_sums_in_order_the_number_of_devices_changes_no_bit(dtype):
    precision = zero2jax.Precision(dtype, fp32_sum=True)
    expected = trained(1, stage=2, num_microbatches=8, precision=precision)
    assert_same_bits(trained(2, stage=3, num_microbatches=4, precision=precision), expected)
    assert_same_bits(trained(4, stage=2, num_microbatches=2, precision=precision), expected)
    if jax.__version_info__ >= (0, 12):  # before, XLA for CPUs drops the barriers that stand in for a loop
        assert_same_bits(trained(8, stage=2, precision=precision), expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_in_order_are_right_on_any_number_of_devices(stage):
    """Three devices, leaves that do not divide, a frozen one, weights: beside the reduce-scatter."""

    def weighted(params, batch):
        return loss(params, batch), {"weight": jnp.sum(batch["y"] ** 2)}

    def run(fp32_sum):
        engine = zero2jax.Engine(
            weighted,
            optax.sgd(0.1),
            zero2jax.make_mesh(data=3),
            stage=stage,
            num_microbatches=2,
            precision=zero2jax.Precision("fp32", fp32_sum=fp32_sum),
            trainable=lambda path, leaf: path != "embed",
        )
        state, _ = engine.step(engine.init(PARAMS), jax.tree.map(lambda x: x[:30], BATCH))
        return engine.params(state)

    for x, y in zip(*map(jax.tree.leaves, (run(True), run(False))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_sums_in_order_over_groups_beside_a_model_axis():
    mesh = zero2jax.make_mesh(replica=2, data=2, model=2)
    specs = {"embed": jax.P(), "blocks": {"a": jax.P(None, None, "model"), "b": jax.P()}, "head": jax.P()}

    def run(**settings):
        tx = optax.sgd(0.1)
        engine = zero2jax.Engine(
            loss, tx, mesh, param_specs=specs, stage=2, shard_over_replicas=True, **settings
        )
        state, _ = engine.step(engine.init(PARAMS), BATCH)
        return engine.params(state)

    both = run(precision=zero2jax.Precision("fp32", fp32_sum=True)), run(precision="fp32")
    for x, y in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_between_groups_16_bits_travel_too():
    mesh = zero2jax.make_mesh(replica=2, data=2)
    engine = zero2jax.Engine(loss, optax.sgd(0.1), mesh, precision=IN_ORDER, shard_over_replicas=True)
    engine.abstract_state(PARAMS)
    sent = re.findall(
        r'"stablehlo\.all_to_all"[^\n]*?: \(tensor<[\dx]*x(\w+)>\)', engine.lower(BATCH).as_text()
    )
    assert len(sent) == 8  # four leaves, inside a group and between groups
    assert set(sent) == {"bf16"}


def test_bf16_addends_are_added_without_rounding_in_between():
    """Eight devices' means of bf16 numbers against float64: the error of a sum in bf16, and of the one in fp32."""
    x = jnp.asarray(RNG.normal(size=(8, 64)), jnp.bfloat16)
    exact = np.asarray(x, np.float64).sum(0)
    mesh = zero2jax.make_mesh(data=8)

    def summed(scatter):
        each = lambda x: scatter(x[0], "data", 0)
        return jax.shard_map(
            each, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )(x)

    in_order = summed(collectives.scatter_in_order)
    assert in_order.dtype == jnp.float32
    np.testing.assert_allclose(in_order, exact, rtol=1e-6, atol=1e-6)
    added = x[0]  # one after the other, as a ring does it
    for row in x[1:]:
        added = added + row
    assert np.abs(np.asarray(added, np.float64) - exact).max() > 1e-3


@pytest.mark.parametrize("stage", [2, 3])
def test_what_travels_is_bf16_and_as_many_bytes_as_in_a_reduce_scatter(stage):
    def sent(precision):
        engine = engine_of(8, stage=stage, precision=precision)
        engine.abstract_state(PARAMS)
        # a reduce-scatter has a region, over several lines, before its type
        operation = (
            r'"stablehlo\.(all_to_all|reduce_scatter)"[^\n]*?(?:\(\{.*?\}\) )?: \(tensor<([\dx]*)x(\w+)>\)'
        )
        found = re.findall(operation, engine.lower(BATCH).as_text(), re.DOTALL)
        sizes = sorted(math.prod(map(int, shape.split("x"))) for _, shape, _ in found)
        return {(kind, dtype) for kind, _, dtype in found}, sizes

    kinds, sizes = sent(IN_ORDER)
    others, as_many = sent("bf16")
    assert (kinds, others) == ({("all_to_all", "bf16")}, {("reduce_scatter", "bf16")})
    assert sizes == as_many
    assert sizes
