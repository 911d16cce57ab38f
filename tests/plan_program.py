"""A tiny program to plan whose bytes are known by construction, and the marks of tests that need a compiler."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.base.versions import installed_version
from zero2jax.planning.targets import CUDA_PACKAGES, TARGETS

GPUS = [name for name, target in TARGETS.items() if target.gpu]
HAS_COMPILER = None not in map(installed_version, CUDA_PACKAGES)
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="the CUDA compiler packages (extra: plan) are missing"
)
N, LAYERS, WIDTH = 8, 3, 16
P = 4 * LAYERS * WIDTH * WIDTH  # bytes of the parameters, and of their gradients, in fp32
FP32 = {"zero_optimization": {"stage": 2}}


def loss_fn(params, batch):
    """A stack of layers, each recomputed in backward: nothing but gathers and scatters of `w` communicates."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)


def program(num_examples=16):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return zero2jax.Program(
        loss_fn, {"w": shape(LAYERS, WIDTH, WIDTH)}, shape(num_examples, WIDTH), optax.adam(1e-2)
    )


def products_of(dtype="bfloat16", batch=16):
    """A stack of unrolled layers that compute in the dtype of their input, whatever the parameters are cast to."""

    def loss(params, batch):
        x = batch.astype(dtype)
        for w in params:
            x = jnp.tanh(x @ w)
        return x.astype(jnp.float32).mean()

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return zero2jax.Program(loss, [shape(WIDTH, WIDTH)] * LAYERS, shape(batch, WIDTH), optax.adam(1e-2))


def not_a_program():
    return 3
