"""The memory report: live buffers and compiled programs, against bytes that are known by construction."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax

L, D, V, N = 4, 16, 32, 8


def loss_fn(params, tokens):
    x, _ = jax.lax.scan(
        jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), params["embed"][tokens], params["layers"]
    )
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], tokens).mean()


def make_params():
    return {
        "embed": jnp.ones((V, D)) / D,
        "layers": jnp.ones((L, D, D)) / D,
        "out": jnp.ones((D, V)),
    }


def measured(stage, mesh=None, **settings):
    engine = zero2jax.Engine(
        loss_fn,
        optax.adam(1e-2),
        mesh or zero2jax.make_mesh(data=N),
        stage=stage,
        precision=zero2jax.Precision(jnp.float32),
        layer_dims={"embed": 0, "layers": 1, "out": 0},
        **settings,
    )
    tokens = np.arange(16, dtype=np.int32) % V
    return engine.memory(engine.init(make_params()), tokens)


PARAM_BYTES = 4 * (2 * V * D + L * D * D)
SCALARS = 64  # loss, weight and the like, which come out with the gradients


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_class_is_what_the_construction_says(stage, num_microbatches):
    report = measured(stage, num_microbatches=num_microbatches)
    shards = N if stage else 1
    assert report["master"].measured_bytes == report["master"].formula_bytes == PARAM_BYTES // shards
    assert report["optimizer state"].measured_bytes == 2 * PARAM_BYTES // shards + 4
    gradients = PARAM_BYTES // (N if stage >= 2 or (stage == 1 and num_microbatches == 1) else 1)
    assert 0 <= report["gradients"].measured_bytes - gradients <= SCALARS
    assert report["gradients"].formula_bytes == gradients
    parameters = report["parameters in the step"].measured_bytes
    if stage == 0:
        assert parameters is None
    elif stage == 3:
        assert parameters == max(4 * D * D, 4 * V * D)  # one layer, or the embedding, or the output
        assert parameters == report["parameters in the step"].formula_bytes
    else:
        assert parameters == report["parameters in the step"].formula_bytes == PARAM_BYTES
    assert report.total_bytes == 3 * PARAM_BYTES // shards + 4 + report["temporary"].measured_bytes


def test_state_sharded_over_the_groups_leaves_a_copy_in_each_of_them():
    report = measured(2, zero2jax.make_mesh(replica=2, data=4), shard_over_replicas=True)
    assert report["master"].measured_bytes == report["master"].formula_bytes == PARAM_BYTES // N
    parameters = report["parameters in the step"]
    # all of them in the compute dtype, and each device's shard inside of its group of 4
    assert parameters.measured_bytes == parameters.formula_bytes == PARAM_BYTES + PARAM_BYTES // 4


def test_the_report_prints_and_becomes_json():
    report = measured(2)
    assert "optimizer state" in report.table()
    assert str(report) == report.table()
    as_dict = report.as_dict()
    assert as_dict["by_class"]["master"]["measured_bytes"] == PARAM_BYTES // N
    assert (as_dict["stage"], as_dict["num_shards"]) == (2, N)


def test_leaves_on_another_mesh_axis_count_as_their_model_shard():
    params = {"up": jnp.ones((L, D, 2 * D)) / D, "down": jnp.ones((L, 2 * D, D)) / D}
    P = jax.sharding.PartitionSpec
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}

    def loss(params, x):
        block = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None))
        return (jax.lax.scan(block, x, params)[0] ** 2).mean()

    engine = zero2jax.Engine(
        loss,
        optax.adam(1e-2),
        zero2jax.make_mesh(data=4, model=2),
        precision=zero2jax.Precision(jnp.float32),
        param_specs=specs,
        layer_dims=1,
    )
    report = engine.memory(engine.init(params), np.ones((8, D), np.float32))
    # half of each parameter belongs to this device's part of the model axis
    whole = 4 * 2 * L * D * 2 * D // 2
    assert report["master"].measured_bytes == report["master"].formula_bytes == whole // 4
    assert report["parameters in the step"].measured_bytes == whole
    assert report["parameters in the step"].formula_bytes == whole
    assert 0 <= report["gradients"].measured_bytes - whole // 4 <= SCALARS
