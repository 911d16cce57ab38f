"""Eight simulated CPU devices, and JAX's own strictness, for every test, and for the programs that tests start."""

import os
import sys

# Nearly all the time of a test goes into XLA's code generation for a CPU. Without LLVM's optimizations it takes 0.6 of
# it, and in jax 0.10, the newest for Python 3.11, 0.3 without two more steps. The program that XLA makes is the same.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if sys.version_info < (3, 12):
    faster = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {faster}".strip()

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # before the backend starts
jax.config.update("jax_numpy_rank_promotion", "raise")


# programs that tests start as processes of their own, or that people do
collect_ignore = ["programs_run", "benchmarks"]


@pytest.fixture
def strict_promotion():
    """No implicit dtype promotion. Not for all tests: optax and Flax promote integer counters themselves."""
    with jax.numpy_dtype_promotion("strict"):
        yield
