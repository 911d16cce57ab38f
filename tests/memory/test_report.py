"""What devices hold, by class, from live buffers and from an allocator's statistics; and the lines of DeepSpeed."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch, make_engine, make_params

import zero2jax
from zero2jax.memory.breakdown import StepMemory
from zero2jax.memory.report import NO_ARRAY, NO_STATISTICS, OTHER_ARRAYS, DeviceMemory

STATS = {
    "bytes_in_use": 700,
    "peak_bytes_in_use": 900,
    "bytes_limit": 1000,
    "pool_bytes": 900,
    "peak_pool_bytes": 950,
    "largest_free_block_bytes": 50,
}


def shard_bytes(tree, i):
    return sum(x.addressable_shards[i].data.nbytes for x in jax.tree.leaves(tree))


def test_live_buffers_are_counted_once_and_by_class():
    engine = make_engine(2, tx=optax.adam(1e-2))
    state = engine.init(make_params())
    before = zero2jax.memory_report(state)
    extra = jax.device_put(np.ones(1000, np.float32), jax.local_devices()[1])
    again = state.params["norm"].addressable_shards[0].data  # the same buffer as another array
    report = zero2jax.memory_report(state)
    for i, device in enumerate(report.devices[:2]):
        assert device.by_class["master"] == shard_bytes(state.params, i)
        assert device.by_class["optimizer state"] == shard_bytes(state.opt_state, i)
        assert device.in_use_bytes == sum(device.by_class.values())
        more = device.by_class[OTHER_ARRAYS] - before.devices[i].by_class[OTHER_ARRAYS]
        assert more == (4000 if i else 0)
    assert report.fullest.by_class["master"] == zero2jax.live_bytes(state.params)
    assert not report.has_statistics
    assert NO_STATISTICS in str(report)
    assert report.as_dict()["devices"][1]["by_class"]["master"] == report.devices[1].by_class["master"]
    assert 0 < report.process_bytes < report.host_used_bytes < report.host_total_bytes
    del extra, again
    engine.step(state, make_batch())
    with pytest.raises(ValueError, match=r"was donated: pass the one that engine\.step returned last"):
        zero2jax.memory_report(state)


def test_statistics_give_what_no_array_holds_and_the_fragmentation():
    memory = DeviceMemory.of("gpu:0", {"master": 300, OTHER_ARRAYS: 100}, STATS)
    assert memory.by_class[NO_ARRAY] == 300
    assert (memory.free_bytes, memory.fragmentation) == (200, 0.75)
    assert (memory.peak_bytes, memory.limit_bytes, memory.peak_pool_bytes) == (900, 1000, 950)
    assert DeviceMemory.of("", {}, STATS | {"pool_bytes": 0}).free_bytes == 300  # up to the limit
    full = {**STATS, "bytes_in_use": 900, "largest_free_block_bytes": 0}
    assert DeviceMemory.of("", {}, full).fragmentation is None  # the allocator names no free block
    assert DeviceMemory.of("", {"master": 3}, None).fragmentation is None
    report = zero2jax.MemoryUse(
        devices=(memory,),
        host_by_class={"master": 2**20},
        process_bytes=1,
        host_used_bytes=2,
        host_total_bytes=3,
        has_statistics=True,
    )
    assert "fragmentation 75.0% of 200 B free" in str(report)
    assert "1.00 MiB" in str(report)


def test_the_lines_that_deepspeed_users_know(capsys):
    zero2jax.see_memory_usage("after step 3", force=False)
    assert capsys.readouterr().out == ""
    zero2jax.see_memory_usage("after step 3")
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first == "after step 3"
    assert [word for word in second.split() if word[0].isalpha()][::3] == [
        "MA",
        "Max_MA",
        "CA",
        "Max_CA",
    ] or second.startswith("MA ")
    assert third.startswith("CPU Virtual Memory:  used = ")
    assert third.endswith("%")
    assert NO_STATISTICS in fourth


def test_memory_in_the_metrics_or_one_warning():
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0, "memory_breakdown": True}
    engine = zero2jax.initialize(loss, optax.sgd(0.1), config, zero2jax.make_mesh(data=2))
    state = engine.init({"w": np.ones((2, 2), np.float32)})
    batch = np.ones((2, 2), np.float32)
    with pytest.warns(UserWarning, match="memory_breakdown: this backend keeps no statistics"):
        state, metrics = engine.step(state, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, metrics = engine.step(state, batch)
    assert not [name for name in metrics if name.startswith("memory")]
    memory = StepMemory()
    assert memory.of([STATS, STATS | {"bytes_in_use": 800}]) == {
        "memory_in_use_bytes": 800,
        "memory_peak_bytes": 900,
        "memory_peak_growth_bytes": 900,
    }
    assert memory.of([STATS | {"peak_bytes_in_use": 960}])["memory_peak_growth_bytes"] == 60
    assert memory.of([STATS])["memory_peak_growth_bytes"] == 0
