"""The arithmetic of the shard plan: shapes in, dims out, no device touched."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.base.mesh import padded_size
from zero2jax.zero.shard_plan import check_model_axes, make_shard_plan, plan_like

SHARDS = [1, 2, 3, 5, 8, 25, 400]


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def leaf(dims, num_shards, **options):
    (found,) = make_shard_plan(shape(*dims), num_shards, **options).leaves
    return found


@pytest.mark.parametrize("num_shards", SHARDS)
def test_shards_hold_every_element_once_and_padding_is_less_than_a_shard_of_rows(num_shards):
    for dims in [(1305, 64), (401, 7, 3), (400,), (399, 401), (1, 1, 500), (25, 16), (8192, 3)]:
        found = leaf(dims, num_shards)
        if num_shards == 1 or math.prod(dims) < num_shards:
            assert found.dim is None
            assert found.rest_shape == dims
            continue
        rows = found.rest_shape[found.dim]
        assert rows % num_shards == 0
        assert 0 <= rows - dims[found.dim] < num_shards
        assert found.rest_shape == tuple(rows if i == found.dim else d for i, d in enumerate(dims))
        assert found.rest_bytes * num_shards == math.prod(found.rest_shape) * 4


@pytest.mark.parametrize(
    ("dims", "num_shards", "dim"),
    [
        ((1305, 64), 8, 1),  # 1305 pads to 1312, 64 to itself
        ((64, 1305), 8, 0),
        ((64, 32), 8, 0),  # a tie: the first
        ((7, 5), 8, 0),  # 8 / 7 pads less than 8 / 5
        ((5, 7), 8, 1),
        ((7, 5), 3, 1),  # 9 / 7 against 6 / 5
        ((5, 10), 5, 0),
        ((10, 399), 25, 1),  # 25 / 10 against 400 / 399
        ((1, 9), 8, 1),  # a dim of one is never sharded, however the other pads
        ((512, 3), 400, 0),  # 800 / 512 against 400 / 3
    ],
)
def test_the_dim_that_pads_least_is_sharded_and_the_first_on_a_tie(dims, num_shards, dim):
    assert leaf(dims, num_shards).dim == dim


@pytest.mark.parametrize(
    ("dims", "options", "reason"),
    [
        ((), {}, "scalar"),
        ((0, 64), {}, "no elements"),
        ((7,), {}, "7 elements, fewer than 8 shards"),
        ((64,), {"layer_dims": 1}, "one number per layer"),
        ((64, 1), {"layer_dims": 1}, "every dim is held by another mesh axis"),
        ((64, 64), {"param_specs": P("model", "other")}, "every dim is held by another mesh axis"),
        ((64, 64), {"why_replicated": "stage 0 replicates the state"}, "stage 0 replicates the state"),
    ],
)
def test_a_leaf_that_stays_whole_says_why(dims, options, reason):
    found = leaf(dims, 8, **options)
    assert (found.dim, found.reason) == (None, reason)
    assert found.rest_shape == dims
    assert found.spec() == P(*[e for e in found.model_spec if e is not None])
    assert found.manual_spec() == P()


def test_one_shard_is_whole():
    assert leaf((64, 64), 1).reason == "one shard"


def test_as_many_elements_as_shards_are_sharded():
    assert leaf((8,), 8).dim == 0
    assert leaf((400,), 400).rest_bytes == 4


def test_random_keys_stay_whole():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 9))
    (found,) = make_shard_plan(keys, 2).leaves
    assert (found.dim, found.reason) == (None, "random keys")
    assert found.rest_bytes == 9 * 8


def test_layer_dims_are_never_sharded():
    assert leaf((8, 5, 7), 8).dim == 0
    assert leaf((8, 5, 7), 8, layer_dims=1).dim == 2
    assert leaf((8, 16, 5), 8, layer_dims=2).dim == 2
    assert leaf((8, 5, 7), 8, layer_dims=1).spec() == P(None, None, "data")


def test_layer_dims_may_differ_by_leaf():
    plan = make_shard_plan({"a": shape(8, 8), "b": shape(8, 8)}, 8, layer_dims={"a": 1, "b": 0})
    assert [leaf.dim for leaf in plan.leaves] == [1, 0]


def test_dims_of_tensor_parallelism_are_left_alone():
    found = leaf((64, 66), 8, param_specs=P("model"))
    assert found.dim == 1
    assert found.spec() == P("model", "data")
    assert found.manual_spec() == P(None, "data")
    found = leaf((4, 64, 64), 8, layer_dims=1, param_specs=P(None, None, ("model", "other")))
    assert (found.dim, found.spec()) == (1, P(None, "data", ("model", "other")))
    assert leaf((64, 64), 8, param_specs=P("model"), axis_name="fsdp").spec("fsdp") == P("model", "fsdp")


def test_specs_follow_the_axis_name_of_the_plan():
    mesh = zero2jax.make_mesh(fsdp=8)
    plan = make_shard_plan({"w": shape(9, 64)}, 8, axis_name="fsdp")
    assert plan.shardings(mesh)["w"].spec == P(None, "fsdp")
    assert plan.manual_specs() == {"w": P(None, "fsdp")}
    rest = plan.rest_shapes(mesh)["w"]
    assert (rest.shape, rest.dtype, rest.sharding) == ((9, 64), jnp.float32, plan.shardings(mesh)["w"])


def test_plans_are_hashable_and_equal_by_value():
    make = lambda: make_shard_plan({"w": shape(9, 64), "b": shape()}, 8)
    assert make() == make()
    assert hash(make()) == hash(make())


def test_plan_keeps_the_structure_and_names_of_the_tree():
    tree = {"a": [shape(8), (shape(16), None)], "b": {}}
    plan = make_shard_plan(tree, 8)
    assert jax.tree.structure(plan.tree) == jax.tree.structure(tree)
    assert [leaf.path for leaf in plan.leaves] == ["a/0", "a/1/0"]
    assert plan.map(lambda leaf, x: (leaf.path, x.shape), tree)["a"][1][0] == ("a/1/0", (16,))
    assert make_shard_plan(shape(8), 8).leaves[0].path == ""
    assert make_shard_plan({}, 8).rest_bytes == 0


def test_bytes_count_the_dtype_and_the_padding():
    plan = make_shard_plan({"h": shape(9, 3, dtype=jnp.bfloat16), "n": shape(2, dtype=jnp.int32)}, 4)
    assert plan.leaves[0].rest_shape == (12, 3)  # 12 / 9 and 4 / 3 pad alike: the first
    assert plan.rest_bytes == 12 * 3 * 2 // 4 + 2 * 4


def test_the_table_shows_dims_padding_bytes_and_reasons():
    plan = make_shard_plan({"w": shape(1305, 3), "b": shape(), "s": shape(5, 64, 64)}, 8)
    assert plan.table().splitlines() == [
        "leaf  shape        dtype    sharded dim  padded to  bytes/device  why replicated",
        "b     ()           float32  -            -          4             scalar",
        "s     (5, 64, 64)  float32  1            -          10,240",
        "w     (1305, 3)    float32  0            1312       1,968",
        "3 leaves over 8 shards: 12,212 bytes per device",
    ]
    assert str(plan) == plan.table()
    assert "(root)" in make_shard_plan(shape(8), 8).table()


@pytest.mark.parametrize(
    ("size", "num_shards", "padded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (7, 1, 7)]
)
def test_padded_size_is_the_next_multiple(size, num_shards, padded):
    assert padded_size(size, num_shards) == padded


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_spec_with_too_many_entries_is_refused():
    with pytest.raises(ValueError, match=r"'w' of shape \(8,\): .* has 2 entries and the leaf has 1 dims"):
        make_shard_plan({"w": shape(8)}, 8, param_specs={"w": P(None, "model")})


def test_a_spec_that_names_the_data_axis_is_refused():
    with pytest.raises(ValueError, match="names the axis 'data', which the shard plan decides"):
        make_shard_plan({"w": shape(8)}, 8, param_specs={"w": P("data")})


def test_specs_of_another_structure_are_refused():
    with pytest.raises(ValueError, match="`param_specs` has no leaf 'b'"):
        make_shard_plan({"w": shape(8), "b": shape(8)}, 8, param_specs={"w": P()})


def test_a_spec_that_does_not_fit_the_mesh_is_refused():
    mesh = zero2jax.make_mesh(data=4, model=2)
    plan = make_shard_plan({"w": shape(8, 8)}, 4, param_specs={"w": P("tensor")})
    with pytest.raises(ValueError, match="the mesh has no axis 'tensor'"):
        check_model_axes(plan, mesh)
    plan = make_shard_plan({"w": shape(7, 8)}, 4, param_specs={"w": P("model")})
    with pytest.raises(ValueError, match="a dim of 7 does not divide into 2 parts"):
        check_model_axes(plan, mesh)
    check_model_axes(make_shard_plan({"w": shape(8, 7)}, 4, param_specs={"w": P("model")}), mesh)


# --- states of optax ---------------------------------------------------------------------------------------------

PARAMS = {
    "blocks": {"w": shape(4, 16, 9), "b": shape(4, 9)},
    "embed": shape(130, 17),
    "scale": shape(),
}
LAYER_DIMS = {"blocks": {"w": 1, "b": 1}, "embed": 0, "scale": 0}


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


STATES = {
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-3),
    "masked": optax.masked(optax.adam(1e-3), is_matrix),
    "multi_transform": optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(1e-3, momentum=0.9)}, is_matrix
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adamw(1e-3)),
}


@pytest.mark.parametrize("num_shards", [1, 3, 8, 25])
@pytest.mark.parametrize("name", STATES)
def test_copies_of_parameters_in_an_optax_state_rest_as_the_parameters_do(name, num_shards):
    params = make_shard_plan(PARAMS, num_shards, layer_dims=LAYER_DIMS)
    state = jax.eval_shape(STATES[name].init, PARAMS)
    plan = plan_like(state, params)
    assert jax.tree.structure(plan.tree) == jax.tree.structure(state)
    copies = 0
    for found, x in zip(plan.leaves, jax.tree.leaves(state), strict=True):
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        owner = [p for p in params.leaves if found.path.endswith(p.path)]
        if owner and owner[0].shape == x.shape:
            copies += 1
            assert (found.dim, found.rest_shape) == (owner[0].dim, owner[0].rest_shape)
        elif num_shards > 1 and math.prod(x.shape) >= num_shards and x.shape[1:] + x.shape[:1] != x.shape:
            assert found.dim is not None or found.reason == "one number per layer"
    assert copies >= (1 if name in ("adafactor", "muon") else 2)


def test_factored_moments_get_plans_of_their_own_and_keep_layer_dims():
    params = make_shard_plan(PARAMS, 8, layer_dims=LAYER_DIMS)
    state = jax.eval_shape(STATES["adafactor"].init, PARAMS)
    plan = {leaf.path: leaf for leaf in plan_like(state, params).leaves}
    rows = {path: leaf for path, leaf in plan.items() if path.endswith(("v_row/blocks/w", "v_col/blocks/w"))}
    assert sorted(leaf.shape for leaf in rows.values()) == [(4, 9), (4, 16)]
    assert all((leaf.dim, leaf.layer_dims) == (1, 1) for leaf in rows.values())
    embed = {path: leaf for path, leaf in plan.items() if path.endswith(("v_row/embed", "v_col/embed"))}
    assert sorted((leaf.shape, leaf.dim, leaf.layer_dims) for leaf in embed.values()) == [
        ((17,), 0, 0),
        ((130,), 0, 0),
    ]


def test_a_whole_plan_makes_whole_states():
    params = make_shard_plan(PARAMS, 8, why_replicated="stage 0 replicates the state")
    plan = plan_like(jax.eval_shape(optax.adam(1e-3).init, PARAMS), params)
    assert all(leaf.dim is None for leaf in plan.leaves)


def test_state_of_a_bare_parameter_is_matched_too():
    params = make_shard_plan(shape(9, 64), 8)
    plan = plan_like(jax.eval_shape(optax.adam(1e-3).init, shape(9, 64)), params)
    assert [(leaf.path, leaf.dim) for leaf in plan.leaves] == [("0/count", None), ("0/mu", 1), ("0/nu", 1)]


def test_leaves_that_print_alike_are_told_apart():
    params = make_shard_plan({"a/b": shape(16, 3), "a": {"b": shape(3, 16)}}, 8)
    assert [(leaf.path, leaf.names, leaf.dim) for leaf in params.leaves] == [
        ("a/b", ("a", "b"), 1),
        ("a/b", ("a/b",), 0),
    ]
    moments = {leaf.names: leaf for leaf in plan_like({"mu": params.tree}, params).leaves}
    assert moments["mu", "a/b"].dim == 0
    assert moments["mu", "a", "b"].dim == 1


def test_moments_of_another_dtype_keep_their_dtype():
    params = make_shard_plan(shape(9, 64), 8)
    plan = plan_like(jax.eval_shape(optax.adam(1e-3, mu_dtype=jnp.bfloat16).init, shape(9, 64)), params)
    assert [leaf.dtype for leaf in plan.leaves] == [np.int32, jnp.bfloat16, np.float32]
