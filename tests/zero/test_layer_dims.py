"""Which leading dims are layers: read from loss functions, and guessed from trees."""

import jax
import jax.numpy as jnp
from loss_cases import CASES, WIDTH, X, over_layers

from zero2jax.base import jaxprs
from zero2jax.zero.layer_dims import guess_layer_dims, scan_depths


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_scan_depths_reads_loops_picks_and_reshapes():
    def depth(name):
        loss, params = CASES[name]
        jaxpr, _ = jaxprs.trace(loss, params, X)
        return dict(zip(sorted(params), scan_depths(jaxpr, len(params)), strict=True))

    assert depth("scan") == {"stack": 1}
    assert depth("checkpoint_of_scan") == {"stack": 1}
    assert depth("nested_scan") == {"stack": 1}
    assert depth("scan_const") == {"stack": 1, "w": 0}
    assert depth("scan_over_several") == {"stack": 1, "bias": 1}
    assert depth("cast_before_scan") == {"stack": 1}
    assert depth("python_index") == depth("python_iteration") == {"stack": 1}
    assert depth("scanned_and_whole") == {"stack": 1}
    assert depth("checkpoint") == {"w": 0, "v": 0}


def test_nested_scans_take_two_dims_off():
    loss = lambda p, x: over_layers(x, p["w"], over_layers).mean()
    jaxpr, _ = jaxprs.trace(loss, {"w": jnp.zeros((2, 3, WIDTH, WIDTH))}, X)
    assert scan_depths(jaxpr, 1) == [2]


def test_a_subtree_of_equal_leading_sizes_is_a_stack():
    tree = {
        "blocks": {"w": shape(4, 8, 8), "b": shape(4, 8), "inner": {"k": shape(4, 3, 3)}},
        "embed": shape(100, 8),
        "norm": shape(8),
    }
    assert guess_layer_dims(tree) == {"blocks": {"w": 1, "b": 1, "inner": {"k": 1}}, "embed": 0, "norm": 0}


def test_leaves_that_are_alone_or_of_one_dim_or_differ_are_no_stack():
    assert guess_layer_dims({"w": shape(4, 8)}) == {"w": 0}
    assert guess_layer_dims({"a": shape(4, 8), "b": shape(4)}) == {"a": 0, "b": 0}
    assert guess_layer_dims({"a": shape(4, 8), "b": shape(5, 8)}) == {"a": 0, "b": 0}
    assert guess_layer_dims([shape(4, 8), shape(4, 9)]) == [1, 1]
    assert guess_layer_dims(shape(4, 8)) == 0
    assert guess_layer_dims({}) == {}
