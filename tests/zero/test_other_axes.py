"""Axes over which the loss maps by itself: a pipeline over `pipe`, attention over `seq`; each equals one device."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, assert_trees_close, oracle, train

import zero2jax
from zero2jax.programs.hlo import collectives

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pipeline
import sequence

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))
RNG = np.random.default_rng(0)
BF16 = zero2jax.Precision()


def token_batches(vocab, *shape):
    make = lambda: RNG.integers(0, vocab, shape).astype(np.int32)
    return [{"x": make(), "y": make()} for _ in range(10)]


def check(engine, params, batches, plain, dtype):
    """Ten steps equal those of `plain` on one device."""
    cast = lambda p: jax.tree.map(lambda x: x.astype(dtype), p)
    expected, losses, norms = oracle(lambda p, b: plain(cast(p), b), TX, params, batches)
    state, metrics = train(engine, engine.init(params), batches)
    # ten steps; fp32 sums in another order, and in bf16 products of values of about one, each rounded by 2**-9
    rtol = 2e-5 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=rtol)
    np.testing.assert_allclose([float(m["grad_norm"]) for m in metrics], norms, rtol=rtol)
    assert_trees_close(engine.params(state), expected, rtol=rtol, atol=rtol)
    return engine.init(params)


@pytest.mark.parametrize(("stage", "precision"), [(2, FP32), (3, BF16)])
def test_a_pipeline_with_tensor_parallel_stages_equals_one_device(stage, precision):
    engine = zero2jax.Engine(
        pipeline.loss_fn,
        TX,
        zero2jax.make_mesh(data=2, pipe=2, model=2),
        stage=stage,
        precision=precision,
        param_specs=pipeline.SPECS,
        layer_dims={"embed": 0, "up": 2, "down": 2},
    )
    params = pipeline.init_fn(jax.random.key(0))
    batches = token_batches(pipeline.VOCAB, 16)
    plain = functools.partial(pipeline.loss_fn, layers=pipeline.one_after_the_other)
    state = check(engine, params, batches, plain, precision.compute_dtype)
    if (
        precision is BF16
    ):  # in a program of the user's, whose compiler the engine tells nothing, a sum in bf16, too
        inside, outside = jax.jit(engine.step)(state, batches[0])[1], engine.evaluate(state, batches[0])
        np.testing.assert_array_equal(inside["loss"], outside)
    for tree in (state.params, state.opt_state[1][0].trace):
        assert tree["up"].sharding.spec == jax.P("pipe", None, "data", "model")
        assert tree["down"].sharding.spec == jax.P("pipe", None, "model", "data")
    found = collectives(engine.lower(batches[0]).compile().as_text())
    handed_on = [c for c in found if c.kind == "collective-permute"]
    # one in the forward loop over ticks, one in the backward loop
    assert sorted(c.trips for c in handed_on) == [pipeline.MICROBATCHES + 1] * 2
    assert not [c for c in found if c.kind == "all-to-all"]


@pytest.mark.parametrize(("stage", "precision"), [(3, FP32), (2, BF16)])
def test_sequence_parallel_attention_equals_one_device(stage, precision):
    engine = zero2jax.Engine(
        sequence.loss_fn, TX, zero2jax.make_mesh(data=4, seq=2), stage=stage, precision=precision
    )
    batches = token_batches(sequence.VOCAB, 8, sequence.LENGTH)
    plain = functools.partial(sequence.loss_fn, logits=sequence.network)
    check(engine, sequence.init_fn(jax.random.key(0)), batches, plain, precision.compute_dtype)
    found = collectives(engine.lower(batches[0]).compile().as_text())
    kinds = {c.kind for c in found}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce", "collective-permute"}
    assert {c.trips for c in found if c.kind == "collective-permute"} == {2}


@pytest.mark.parametrize("own_mesh", [False, True])
def test_a_loss_that_maps_over_a_data_axis_is_refused_by_name(own_mesh):
    mesh = zero2jax.make_mesh(data=4, model=2)

    def loss(p, x):
        inner = mesh if own_mesh else jax.sharding.get_abstract_mesh()
        specs = {"in_specs": jax.P("data"), "out_specs": jax.P("data")}
        return jax.shard_map(lambda x: x, mesh=inner, axis_names={"data"}, **specs)(x @ p["w"]).mean()

    engine = zero2jax.Engine(loss, optax.sgd(0.1), mesh)
    with pytest.raises(ValueError) as error:
        engine.step(engine.init({"w": jnp.ones((4, 4))}), jnp.ones((8, 4)))
    assert "runs under a shard_map over ['data']" in "".join(error.value.__notes__)
