"""Padding at rest is cut off without moving anything, and comes back as zeros."""

import jax
import jax.numpy as jnp
import numpy as np

import zero2jax
from zero2jax.programs.hlo import collectives
from zero2jax.zero import padding

PARAMS = {
    "even": jnp.arange(16.0).reshape(8, 2),
    "odd": jnp.arange(1.0, 16.0).reshape(5, 3),
    "scalar": jnp.float32(2),
    "stack": jnp.arange(1.0, 43.0).reshape(2, 3, 7),
}
PLAN = zero2jax.make_shard_plan(PARAMS, 4, layer_dims={"even": 0, "odd": 0, "scalar": 0, "stack": 1})


def test_pad_then_cut_is_the_identity_and_padding_is_zero():
    mesh = zero2jax.make_mesh(data=4)
    rest = jax.jit(lambda p: padding.pad(p, PLAN, mesh))(PARAMS)
    assert jax.tree.map(jnp.shape, rest) == {"even": (8, 2), "odd": (5, 4), "scalar": (), "stack": (2, 3, 8)}
    for leaf, x in zip(PLAN.leaves, jax.tree.leaves(rest), strict=True):
        assert x.sharding.spec == leaf.spec()
    assert not np.asarray(rest["odd"])[:, 3:].any()
    assert not np.asarray(rest["stack"])[..., 7:].any()
    back = jax.jit(lambda r: padding.cut(r, PLAN, mesh))(rest)
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)


def test_elementwise_work_on_cut_leaves_communicates_nothing():
    mesh = zero2jax.make_mesh(data=4)
    rest = PLAN.rest_shapes(mesh)
    work = lambda r: padding.pad(
        jax.tree.map(lambda x: jnp.tanh(x) * 2, padding.cut(r, PLAN, mesh)), PLAN, mesh
    )
    compiled = jax.jit(work, out_shardings=PLAN.shardings(mesh)).lower(rest).compile()
    assert not collectives(compiled.as_text())
