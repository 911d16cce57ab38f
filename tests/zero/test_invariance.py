"""What changes no bit of the parameters: stage, layers' checkpoints, when parameters are gathered, and, with sums in a
fixed order, the number of devices."""

import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import spawn

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


@pytest.mark.parametrize("stage", [1, 3])
def test_the_wrapper_in_a_step_of_ones_own_differs_by_rounding(stage):
    """There the compiler reduces gradients as it likes: three steps of 1e-2, each a few last places of 1."""
    mesh = zero2jax.make_mesh(data=4)
    tx = zero2jax.shard_optimizer(optax.adam(1e-2), mesh, stage=stage)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    opt_state, batch = tx.init(params), jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
    for _ in range(3):
        params, opt_state = step(params, opt_state, batch)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(trained(stage=stage)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3 * 4 * 2.0**-24)


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


# --- the mean of a gradient, beside NumPy ---

ROWS = 32
UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
LINEAR = {"w": np.zeros((6, 5), np.float32)}


def linear_batch(draw):
    return {"x": draw((ROWS, 6)).astype(np.float32), "y": draw((ROWS, 5)).astype(np.float32)}


def linear(params, batch):
    """Its gradient is the mean over rows of `x` times `y`."""
    w = params["w"]
    product = batch["x"].astype(w.dtype) @ w
    return jnp.sum(product.astype(jnp.float32) * batch["y"]) / len(batch["y"])


def assert_mean_gradient(engine, batch, unit):
    """SGD of rate 1 from 0: within one rounding per operation, ROWS products and sums and a few divisions."""
    state, _ = engine.step(engine.init(LINEAR), batch)
    each = np.einsum("bi,bj->bij", *(batch[name].astype(np.float64) for name in "xy"))
    bound = (ROWS + 8) * unit * np.abs(each).mean(0)
    error = np.abs(np.asarray(engine.params(state)["w"], np.float64) + each.mean(0))
    assert (error <= bound).all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("stage", "num_microbatches"), [(2, 1), (1, 2), (3, 4), (0, 8)])
def test_accumulated_gradients_are_those_of_one_batch(stage, num_microbatches, dtype):
    engine = zero2jax.Engine(
        linear,
        optax.sgd(1.0),
        zero2jax.make_mesh(data=4),
        stage=stage,
        num_microbatches=num_microbatches,
        precision=dtype,
        loss_scale=2.0**4 if dtype == "fp16" else None,
    )
    assert_mean_gradient(engine, linear_batch(lambda shape: RNG.normal(size=shape)), UNITS[dtype])
    # sums of small whole numbers are exact, whatever their order, but for means over three parts of a batch
    exact = dtype == "fp32" or num_microbatches <= 2
    whole = linear_batch(lambda shape: RNG.integers(-3, 4, shape))
    assert_mean_gradient(engine, whole, 0.0 if exact else UNITS[dtype])


@pytest.mark.parametrize("predivide", [None, 1, 2, 4])
def test_a_divisor_before_the_sum_moves_the_range_of_what_travels(predivide):
    """Four devices' equal gradients in float16 as in NumPy: large ones overflow in the sum, small ones before it."""
    precision = zero2jax.Precision("fp32", reduce_dtype="fp16", predivide=predivide)
    mesh = zero2jax.make_mesh(data=4)
    engine = zero2jax.Engine(linear, optax.sgd(1.0), mesh, precision=precision, loss_scale=1.0)
    factor = np.float16(predivide or 4)  # with a loss scale all of the division comes first
    for value, comes_through in ((1.0, {None, 1, 2, 4}), (200.0, {None, 4}), (2.0**-12, {1})):
        batch = linear_batch(lambda shape, value=value: np.full(shape, value))
        state, metrics = engine.step(engine.init(LINEAR), batch)
        with np.errstate(over="ignore"):
            total = np.sum([np.float16(value**2) / factor] * 4, dtype=np.float16)
        assert bool(metrics["applied"]) == np.isfinite(total)
        expected = np.float32(total) * (factor / 4) if np.isfinite(total) else 0.0
        np.testing.assert_array_equal(engine.params(state)["w"], np.full((6, 5), -expected, np.float32))
        assert (expected == value**2) == (predivide in comes_through)


def test_a_divisor_without_a_loss_scale_leaves_the_mean_as_it_is():
    precision = zero2jax.Precision("fp32", reduce_dtype="bf16", predivide=3.0)
    engine = zero2jax.Engine(linear, optax.sgd(1.0), zero2jax.make_mesh(data=4), precision=precision)
    assert_mean_gradient(engine, linear_batch(lambda shape: RNG.normal(size=shape)), UNITS["bf16"])
    with pytest.raises(ValueError, match="predivide is 0; it must be a number above 0"):
        zero2jax.Precision(predivide=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_are_added_in_the_accumulation_dtype(stage):
    """What loops carry: full gradients below stage 2, else shards, beside what they close over."""
    shape = "6x5" if stage < 2 else "2x5"
    counts = {}
    for dtype in ("bf16", "fp32"):
        engine = zero2jax.Engine(
            linear,
            optax.sgd(1.0),
            zero2jax.make_mesh(data=3),
            stage=stage,
            num_microbatches=2,
            precision=zero2jax.Precision("bf16", accumulate_dtype=dtype),
        )
        engine.abstract_state(LINEAR)
        batch = jax.tree.map(lambda x: x[:30], linear_batch(lambda shape: np.zeros(shape)))
        carried = " ".join(re.findall(r"stablehlo\.while\(.*?\) : (.*)", engine.lower(batch).as_text()))
        counts[dtype] = [carried.count(f"tensor<{shape}x{kind}>") for kind in ("bf16", "f32")]
    narrow, wide = counts["bf16"], counts["fp32"]
    assert narrow[0] == wide[0] + 1
    assert narrow[1] == wide[1] - 1


def test_the_mean_of_64_devices_in_bf16_beside_float64():
    """In order, a tree of six levels in fp32; in bf16, a rounding per addition. What the page on numbers prints."""
    program = Path(__file__).parents[1] / "benchmarks" / "numerics.py"
    done = subprocess.run(
        [sys.executable, str(program), "--only", "mean"],
        env=spawn.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^  (reduce-scatter|fp32_sum).* (\S+)$", done.stdout, re.MULTILINE))
    assert float(found["fp32_sum"]) < 6 * 2**-24
    assert float(found["reduce-scatter"]) > 1e-3


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
