"""The formulas against the tables of the ZeRO paper, and DeepSpeed's estimator against its documented figures."""

import math

import pytest

import zero2jax
from zero2jax.planning.estimate import BytesPerParam, largest_model

# GB per device with P_os, P_os+g and P_os+g+p; arXiv:1910.02054, Table 1
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
# the largest model of 32 GB devices by (tensor parallel, devices): baseline, P_os, P_os+g, P_os+g+p in 1e9; Table 2
TABLE_2 = {
    (1, 64): (2, 7.6, 14.4, 128),
    (2, 128): (4, 15.2, 28.8, 256),
    (4, 256): (8, 30.4, 57.6, 512),
    (8, 512): (16, 60.8, 115.2, 1024),
    (16, 1024): (32, 121.6, 230.4, 2048),
}
GB = 1e9


@pytest.mark.parametrize("num_params", TABLE_1)
def test_table_1_of_the_paper(num_params):
    for num_shards, row in TABLE_1[num_params].items():
        found = zero2jax.estimate(num_params, num_shards)
        for stage, printed in zip((1, 2, 3), row, strict=True):
            exact = found[stage].total_bytes / GB
            decimals = len(str(printed).partition(".")[2])
            # the 7.5e9 column is rounded, half up, the others are cut
            shown = math.floor(exact * 10**decimals + (0.5 if num_params == 7.5e9 else 0)) / 10**decimals
            assert shown == pytest.approx(printed, abs=1e-9), (num_shards, stage)


@pytest.mark.parametrize(("model_shards", "num_devices"), TABLE_2)
def test_theoretical_columns_of_table_2_of_the_paper(model_shards, num_devices):
    for stage, printed in enumerate(TABLE_2[model_shards, num_devices]):
        found = largest_model(32 * GB, num_devices // model_shards, stage, model_shards=model_shards) / 1e9
        # the first row is rounded, the others are multiples of it
        assert round(found / model_shards, 1) * model_shards == pytest.approx(printed)


def test_terms_are_named_and_rest_is_master_and_optimizer_state_at_every_stage():
    for stage, sharded in ((0, ""), (1, "mo"), (2, "gmo"), (3, "pgmo")):
        found = zero2jax.estimate(800, 8)[stage]
        part = {letter: 100 if letter in sharded else 800 for letter in "pgmo"}
        assert found.params_bytes == 2 * part["p"]
        assert found.grads_bytes == 2 * part["g"]
        assert found.master_bytes == 4 * part["m"]
        assert found.optimizer_bytes == 8 * part["o"]
        assert found.rest_bytes == 12 * part["m"]


def test_communication_is_that_of_plain_data_parallelism_up_to_stage_2_and_half_more_at_stage_3():
    volumes = [zero2jax.estimate(100, 8)[stage].communication_bytes / 2 / 100 for stage in range(4)]
    assert volumes == [2, 2, 2, 3]  # in parameters; section 7 of the paper


def test_offloading_moves_states_to_the_host():
    kept = zero2jax.estimate(800, 8)
    moved = zero2jax.estimate(800, 8, offload_optimizer=True, offload_params=True)
    for stage, host in ((0, 0), (1, 12), (2, 12), (3, 14)):
        assert moved[stage].host_bytes == 100 * host
        assert moved[stage].total_bytes == kept[stage].total_bytes - 100 * host


def test_bytes_per_parameter_are_those_given():
    found = zero2jax.estimate(800, 8, param_bytes=4, grad_bytes=3, master_bytes=0, optimizer_bytes=1)[3]
    assert (found.params_bytes, found.grads_bytes) == (400, 300)
    assert (found.master_bytes, found.optimizer_bytes) == (0, 100)
    sgd = BytesPerParam(params=4, grads=4, master=0, optimizer=0)
    assert largest_model(800, 8, 0, sgd) == 100


def test_deepspeed_estimators_as_documented():
    found = zero2jax.estimate(2851e6, 8)
    assert found[0].deepspeed_bytes is None
    assert found[2].deepspeed_bytes == 2 * 2851e6 + 18 * 2851e6 / 8
    assert found[3].deepspeed_bytes == 18 * 2851e6 / 8
    moved = zero2jax.estimate(2851e6, 8, offload_optimizer=True)
    assert moved[2].deepspeed_bytes / 2**30 == pytest.approx(5.31, abs=0.005)
    assert moved[2].deepspeed_host_bytes / 2**30 == pytest.approx(127.48, rel=1e-3)


def test_impossible_counts_are_refused():
    for arguments in ((0, 8), (1e9, 0)):
        with pytest.raises(ValueError, match="counts must be positive and bytes not negative"):
            zero2jax.estimate(*arguments)
    with pytest.raises(ValueError, match=r"BytesPerParam.*master=-4"):
        zero2jax.estimate(1e9, 8, master_bytes=-4)
    for count, size in ((math.nan, 2), (math.inf, 2), (1e9, math.nan)):
        with pytest.raises(ValueError, match="and all of them finite"):
            zero2jax.estimate(count, 8, param_bytes=size)
    for memory, each in ((math.nan, 2), (0, 2), (32e9, 0)):
        with pytest.raises(ValueError, match=r"looking for the largest model of .* both must be positive"):
            largest_model(memory, 8, 2, BytesPerParam(params=each, grads=each, master=each, optimizer=each))


def test_table_names_the_terms():
    text = zero2jax.estimate(7.5e9, 64).table()
    assert "16.64" in text
    assert "DeepSpeed's" in text
