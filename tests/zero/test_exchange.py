"""One leaf's way to full and back, and many leaves' at once, by numbers that can be added up by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from helpers import count_primitives
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.zero import exchange

N = 4
SHAPES = {"odd": (3, 5), "scalar": (), "stack": (2, 3, 5), "deep": (2, 3, 7, 5)}
LAYER_DIMS = {"odd": 0, "scalar": 0, "stack": 1, "deep": 2}
PLAN = zero2jax.make_shard_plan(
    {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in SHAPES.items()}, N, layer_dims=LAYER_DIMS
)
USES = [exchange.use_of_leaf(leaf, jnp.float32, jnp.float32, "data") for leaf in PLAN.leaves]
FULL = [np.arange(1.0, 1 + np.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape) for leaf in PLAN.leaves]
STORED = [exchange.pad_to(x, leaf.rest_shape) for x, leaf in zip(FULL, PLAN.leaves, strict=True)]
SPECS = [leaf.manual_spec() for leaf in PLAN.leaves]


def per_device(fun, in_specs, out_specs):
    mesh = zero2jax.make_mesh(data=N)
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def test_padding_is_zero_and_behind():
    np.testing.assert_array_equal(exchange.pad_to(jnp.ones((1, 2)), (2, 3)), [[1, 1, 0], [0, 0, 0]])
    x = jnp.ones((1, 2))
    assert exchange.pad_to(x, (1, 2)) is x


def test_all_leaves_are_gathered_and_their_gradients_summed_into_shards_layer_by_layer():
    assert [use.layer_dims for use in USES] == [2, 0, 0, 1]  # in the order of the names

    def there_and_back(shards):
        full = exchange.by_layer(exchange.gather, list(zip(USES, shards, strict=True)))
        scale = 1.0 + jax.lax.axis_index("data")  # 1 + 2 + 3 + 4 = 10 over the devices
        grads = [scale * x for x in full]
        return full, exchange.by_layer(exchange.reduce_grad, list(zip(USES, grads, strict=True)))

    run = per_device(there_and_back, (SPECS,), (P(), SPECS))
    full, grads = run(STORED)
    for use, found, grad, exact, stored in zip(USES, full, grads, FULL, STORED, strict=True):
        np.testing.assert_array_equal(found, exact, err_msg=use.path)
        np.testing.assert_array_equal(grad, 10 * stored, err_msg=use.path)
    counted = count_primitives(jax.make_jaxpr(run)(STORED))
    assert {len(shape) for shape in counted.shapes["all_gather"]} == {2}  # no stack at once
    assert counted.in_loops["all_gather"] == counted.in_loops["reduce_scatter"] == 2


def test_the_gradient_leaves_through_the_port_in_its_dtype():
    use = dataclasses.replace(USES[1], dtype=jnp.dtype(jnp.bfloat16), grad_dtype=jnp.dtype(jnp.float32))
    assert use.path == "odd"

    def gradient(shard):
        loss = lambda port: exchange.gather_and_reduce(use, shard, port).astype(jnp.float32).sum()
        return jax.grad(loss)(jnp.zeros_like(shard))

    grad = per_device(gradient, SPECS[1], SPECS[1])(STORED[1])
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, N * exchange.pad_to(np.ones((3, 5)), PLAN.leaves[1].rest_shape))
