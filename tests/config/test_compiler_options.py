"""Bucket sizes and overlap_comm as compiler options of the step: only on GPUs, only what the file sets."""

import pytest

from zero2jax.config.compiler_options import compiler_options
from zero2jax.config.reading import ConfigWarning, read_config

REDUCE = "xla_gpu_reduce_scatter_combine_threshold_bytes"
GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
HIDE = "xla_gpu_enable_latency_hiding_scheduler"
BIG = 1 << 60


def options(zero, platform="gpu", param_bytes=BIG, **keys):
    return compiler_options(read_config({"zero_optimization": zero, **keys}), platform, param_bytes)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_buckets_are_elements_times_bytes(platform):
    zero = {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 500}
    assert options(zero, platform) == {REDUCE: 4000, GATHER: 2000}
    bf16 = {"bf16": {"enabled": True}}
    assert options(zero, platform, **bf16) == {REDUCE: 2000, GATHER: 1000}
    assert options(zero, platform, communication_data_type="fp32", **bf16) == {REDUCE: 4000, GATHER: 1000}


def test_buckets_are_capped_by_the_model():
    assert options({"stage": 2, "reduce_bucket_size": 5e8}, param_bytes=1 << 20) == {REDUCE: 1 << 20}


def test_absent_keys_are_left_to_the_compiler():
    assert options({"stage": 2}) == {}
    assert options({"stage": 3}) == {HIDE: True}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlap_comm_decides_the_latency_hiding_scheduler(stage, overlap):
    assert options({"stage": stage, "overlap_comm": overlap}) == {HIDE: overlap}


def test_other_platforms_warn_when_the_file_asks():
    with pytest.warns(
        ConfigWarning, match="reduce_bucket_size, zero_optimization.overlap_comm: no effect on platform 'cpu'"
    ):
        assert options({"stage": 2, "reduce_bucket_size": 5, "overlap_comm": True}, "cpu") == {}
    assert options({"stage": 3}, "cpu") == {}
