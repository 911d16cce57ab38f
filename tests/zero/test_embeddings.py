"""Gradients of an embedding of repeated tokens, against a dense sum in NumPy, at every stage and on several meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax

VOCAB, WIDTH, LENGTH, ROWS = 7, 4, 6, 16
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32)
BATCH = {
    "tokens": RNG.choice([0, 1, 1, 1, 5], (ROWS, LENGTH)).astype(np.int32),  # most repeated, others absent
    "target": RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
}


def loss(params, batch):
    found = params["table"][batch["tokens"]].astype(jnp.float32)
    return jnp.mean(jnp.sum((found - batch["target"]) ** 2, -1))


def dense_gradient():
    """Each token adds its own difference to its row, in float64."""
    grad = np.zeros((VOCAB, WIDTH))
    tokens = BATCH["tokens"].reshape(-1)
    difference = TABLE[tokens].astype(np.float64) - BATCH["target"].reshape(-1, WIDTH)
    np.add.at(grad, tokens, 2 * difference / len(tokens))
    return grad


@pytest.mark.parametrize(
    ("stage", "mesh", "settings"),
    [
        (0, {"data": 4}, {}),
        (1, {"data": 4}, {"num_microbatches": 2}),
        (2, {"data": 8}, {"precision": zero2jax.Precision("fp32", fp32_sum=True)}),
        (2, {"replica": 2, "data": 2}, {"num_microbatches": 2, "shard_over_replicas": True}),
        (2, {"data": 2, "model": 2}, {"param_specs": {"table": jax.P("model")}}),
        (3, {"data": 4}, {"num_microbatches": 2}),
        (3, {"replica": 2, "data": 2}, {}),
    ],
)
def test_a_token_that_occurs_often_adds_up(stage, mesh, settings):
    params, expected = {"table": TABLE}, dense_gradient()
    if "model" in mesh:  # a dim over the model axis divides
        params, expected = {"table": TABLE[:6]}, expected[:6]
    settings = {"precision": "fp32"} | settings
    engine = zero2jax.Engine(loss, optax.sgd(1.0), zero2jax.make_mesh(**mesh), stage=stage, **settings)
    state, metrics = engine.step(engine.init(params), BATCH)
    found = params["table"] - np.asarray(engine.params(state)["table"], np.float64)
    # fp32: of some 60 addends, and of the difference of two numbers of size 1
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(expected), rtol=1e-6)
    assert (found[[2, 3, 4]] == 0).all()
