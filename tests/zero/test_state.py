"""How the state comes to rest: from any kind of array, straight into shards, with the caller's arrays untouched."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, make_engine, make_params

import zero2jax
from zero2jax.programs.hlo import collectives
from zero2jax.zero.state import pad, unpad

KEY = jax.random.key(3)


def assert_same_tree(expected, found):
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


SOURCES = {
    "numpy": lambda x: np.array(x),
    "float64": lambda x: np.array(x, np.float64),
    "jax": lambda x: jnp.array(x),
    "another device": lambda x: jax.device_put(x, jax.devices()[5]),
    "replicated": lambda x: jax.device_put(
        x, jax.NamedSharding(zero2jax.make_mesh(data=8), jax.sharding.PartitionSpec())
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_init_takes_arrays_from_anywhere_and_leaves_them_alone(source):
    given = jax.tree.map(SOURCES[source], make_params())
    engine = make_engine(8)
    state = engine.init(given)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert_same_tree(make_params(), engine.params(state))
    for _ in range(2):
        state, _ = engine.step(state, {k: np.zeros(8, np.int32) for k in ("x", "y")})
    assert_same_tree(make_params(), given)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_init_function_and_its_result_give_the_same_state(stage, num_shards):
    make = lambda key: jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), make_params())
    engine = make_engine(num_shards, stage=stage)
    made, given = engine.init(make, KEY), engine.init(jax.jit(make)(KEY))
    assert_same_tree(given, made)
    same_place = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), made, given)
    assert all(jax.tree.leaves(same_place))


def test_an_init_function_never_makes_a_whole_copy():
    """1 MiB of parameters over 8 devices: temporaries stay below half of it."""
    whole_bytes = 2**20
    make = lambda key: {"w": jax.random.normal(key, (4, 256, 256))}
    engine = zero2jax.Engine(
        lambda p, b: p["w"].sum() + b.sum(), optax.adam(1e-3), zero2jax.make_mesh(data=8), precision=FP32
    )
    state = engine.init(make, KEY)
    plan = engine.layout.params
    place = lambda: pad(make(KEY), plan, engine.mesh)
    compiled = jax.jit(place, out_shardings=plan.shardings(engine.mesh)).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == whole_bytes // 8
    assert memory.temp_size_in_bytes < 4 * whole_bytes // 8  # random bits of this device's shard
    assert zero2jax.live_bytes(state.params) == whole_bytes // 8
    assert zero2jax.live_bytes(state.opt_state) == 2 * whole_bytes // 8 + 4


def test_abstract_state_is_what_init_returns():
    engine = make_engine(8, tx=optax.adafactor(1e-2))
    abstract = engine.abstract_state(jax.eval_shape(make_params))
    state = engine.init(make_params())
    describe = lambda x: (x.shape, x.dtype, x.sharding.spec)
    assert jax.tree.map(describe, abstract) == jax.tree.map(describe, state)


def test_frozen_leaves_rest_in_the_dtype_they_came_in():
    params = {
        "w": jnp.ones((8, 8), jnp.bfloat16),
        "base": jnp.ones((8, 8), jnp.bfloat16),
        "count": jnp.arange(8),
    }
    loss = lambda p, b: ((b @ p["w"]) @ p["base"]).astype(jnp.float32).mean() + p["count"].sum()
    engine = zero2jax.Engine(
        loss, optax.adam(1e-2), zero2jax.make_mesh(data=8), trainable=lambda path, leaf: path == "w"
    )
    state = engine.init(params)
    dtypes = {name: x.dtype for name, x in state.params.items()}
    assert dtypes == {"w": jnp.float32, "base": jnp.bfloat16, "count": jnp.int32}
    state, _ = engine.step(state, np.ones((8, 8), np.float32))
    whole = engine.params(state)
    np.testing.assert_array_equal(np.asarray(whole["base"], np.float32), 1)
    np.testing.assert_array_equal(whole["count"], np.arange(8))
    assert float(abs(np.asarray(whole["w"]) - 1).min()) > 0


def test_a_batch_tells_the_layer_dims_that_the_tree_hides():
    """One lone stack with a leading size that would be sharded first: only the loss shows that it is a stack."""
    params = {"w": jnp.ones((8, 8, 8)) / 8}
    loss = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0].mean()
    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    engine = zero2jax.Engine(loss, optax.sgd(0.1), zero2jax.make_mesh(data=8), precision=FP32)
    engine.abstract_state(params)
    assert engine.layout.params.leaves[0].dim == 0
    engine.abstract_state(params, batch=batch)
    assert engine.layout.params.leaves[0].dim == 1
    engine.init(params)
    with pytest.warns(UserWarning, match="'w' is scanned over, and its shards do not hold whole layers"):
        engine.lower(batch)


def test_a_wrong_layer_dim_warns_and_changes_no_number():
    params = {"w": jnp.ones((4, 5, 5)) / 7}
    loss = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0].mean()
    batch = np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5)
    engines = [
        zero2jax.Engine(
            loss, optax.sgd(0.1), zero2jax.make_mesh(data=4), precision=FP32, layer_dims=layer_dims
        )
        for layer_dims in (1, 0)
    ]
    states = [engine.init(params) for engine in engines]
    _, right = engines[0].step(states[0], batch)
    with pytest.warns(UserWarning, match="the whole stack is gathered before the loop"):
        _, wrong = engines[1].step(states[1], batch)
    # the same sums, in another order over 4 devices: a few units in the last place of fp32
    np.testing.assert_allclose(right["grad_norm"], wrong["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(right["loss"], wrong["loss"], rtol=1e-6)


def test_results_without_an_update_are_waited_for_on_simulated_devices():
    """Independent programs in flight at once can starve each other's collectives there."""
    engine = make_engine(8)
    state = engine.init(make_params())
    batch = {k: np.zeros(8, np.int32) for k in ("x", "y")}
    losses = [engine.evaluate(state, batch) for _ in range(3)]
    assert all(loss.is_ready() for loss in losses)
    assert all(x.is_ready() for x in jax.tree.leaves(engine.params(state)))


def test_init_again_with_the_same_shapes_keeps_the_compiled_step():
    engine = make_engine(2)
    batch = {k: np.zeros(8, np.int32) for k in ("x", "y")}
    engine.step(engine.init(make_params()), batch)
    step = engine._compiled.step
    engine.step(engine.init(make_params()), batch)
    assert engine._compiled.step is step
    assert step._cache_size() == 1


def test_a_new_layout_gets_compiled_functions_of_its_own():
    """The same shapes, once sharded on the layers and, when a batch has shown them, on the next dim."""
    params = {"w": jnp.ones((8, 8, 8)) / 8}
    loss = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0].mean()
    batch = np.ones((16, 8), np.float32)
    engine = make_engine(8, loss_fn=loss, tx=optax.sgd(0.1), stage=1, num_microbatches=2)
    before, _ = engine.step(engine.init(params), batch)
    first = engine._compiled
    after, _ = engine.step(engine.init(params, batch=batch), batch)
    assert engine._compiled is not first
    dim_of = lambda state: tuple(state.params["w"].sharding.spec).index("data")
    assert (dim_of(before), dim_of(after)) == (0, 1)
    assert after.params["w"].sharding.spec == engine.layout.params.leaves[0].spec()
    # the same sums, of one layer or of all at once
    np.testing.assert_allclose(engine.params(after)["w"], np.asarray(before.params["w"]), rtol=1e-6)


@pytest.mark.parametrize("axis_name", ["data", "dp"])
def test_without_a_mesh_all_devices_lie_on_the_data_axis(axis_name):
    engine = zero2jax.Engine(lambda p, b: p.sum(), optax.sgd(0.1), None, axis_name=axis_name)
    assert dict(engine.mesh.shape) == {axis_name: 8}
    assert engine.num_shards == 8


def test_evaluate_takes_unhashable_and_equal_losses():
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        def __eq__(self, other):  # equal, unhashable, and not the same
            return isinstance(other, Scaled)

        def __call__(self, params, batch):
            return self.scale * params["scale"] * batch["x"].astype(jnp.float32).mean()

    engine = make_engine(2)
    state = engine.init(make_params())
    batch = {k: np.ones(8, np.int32) for k in ("x", "y")}
    first, second = (float(engine.evaluate(state, batch, loss_fn=Scaled(s))) for s in (1.0, 2.0))
    assert second == pytest.approx(2 * first)
    for scale in range(20):
        engine.evaluate(state, batch, loss_fn=Scaled(float(scale)))
    assert len(engine._compiled.evaluations) <= 8


def test_a_step_runs_under_debug_nans():
    engine = make_engine(2)
    state = engine.init(make_params())
    with jax.debug_nans(True):
        _, metrics = engine.step(state, {k: np.ones(8, np.int32) for k in ("x", "y")})
    assert np.isnan(metrics["learning_rate"])


# --- padding -----------------------------------------------------------------------------------------------------

PARAMS = {
    "even": jnp.arange(16.0).reshape(8, 2),
    "odd": jnp.arange(1.0, 16.0).reshape(5, 3),
    "scalar": jnp.float32(2),
    "stack": jnp.arange(1.0, 43.0).reshape(2, 3, 7),
}
PLAN = zero2jax.make_shard_plan(PARAMS, 4, layer_dims={"even": 0, "odd": 0, "scalar": 0, "stack": 1})


def test_pad_then_unpad_is_the_identity_and_padding_is_zero():
    mesh = zero2jax.make_mesh(data=4)
    rest = jax.jit(lambda p: pad(p, PLAN, mesh))(PARAMS)
    assert jax.tree.map(jnp.shape, rest) == {"even": (8, 2), "odd": (5, 4), "scalar": (), "stack": (2, 3, 8)}
    for leaf, x in zip(PLAN.leaves, jax.tree.leaves(rest), strict=True):
        assert x.sharding.spec == leaf.spec()
    assert not np.asarray(rest["odd"])[:, 3:].any()
    assert not np.asarray(rest["stack"])[..., 7:].any()
    back = jax.jit(lambda r: unpad(r, PLAN, mesh))(rest)
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)


def test_elementwise_work_on_unpadded_leaves_communicates_nothing():
    mesh = zero2jax.make_mesh(data=4)
    rest = PLAN.rest_shapes(mesh)
    work = lambda r: pad(jax.tree.map(lambda x: jnp.tanh(x) * 2, unpad(r, PLAN, mesh)), PLAN, mesh)
    compiled = jax.jit(work, out_shardings=PLAN.shardings(mesh)).lower(rest).compile()
    assert not collectives(compiled.as_text())
