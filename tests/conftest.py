"""Eight simulated CPU devices, and JAX's own strictness, for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # before the backend starts
jax.config.update("jax_numpy_rank_promotion", "raise")


collect_ignore = ["programs_run"]  # programs that tests start as processes of their own


@pytest.fixture
def strict_promotion():
    """No implicit dtype promotion. Not for all tests: optax and Flax promote integer counters themselves."""
    with jax.numpy_dtype_promotion("strict"):
        yield
