"""The optax wrapper: the same updates, state in shards, and a reduce-scatter where the compiler can make one."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batches, make_params, mean_loss

import zero2jax
from zero2jax.programs import hlo
from zero2jax.zero.shard_plan import plan_like

P = jax.sharding.PartitionSpec

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "labels": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()},
        lambda params: {name: "b" if name == "norm" else "a" for name in params},
    ),
}


def train_step(tx):
    """A user's own step around an optimizer."""

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def describe(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_updates_equal_the_unsharded_ones_and_the_state_stays_in_shards(name, stage):
    mesh = zero2jax.make_mesh(data=8)
    whole = jax.NamedSharding(mesh, P())
    clip = optax.clip_by_global_norm(0.5)
    tx = optax.chain(clip, zero2jax.shard_optimizer(OPTIMIZERS[name], mesh, stage=stage))
    plain = optax.chain(clip, OPTIMIZERS[name])
    params, expected = jax.device_put(make_params(), whole), make_params()
    state, plain_state = tx.init(params), plain.init(expected)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    placed, step = describe(state), jax.jit(train_step(tx), donate_argnums=(0, 1))
    plain_step = jax.jit(train_step(plain))
    for batch in make_batches(3):
        params, state, loss = step(params, state, jax.device_put(batch, jax.NamedSharding(mesh, P("data"))))
        expected, plain_state, expected_loss = plain_step(expected, plain_state, batch)
        assert describe(state) == placed
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # sums over 24 examples in another order, through three steps of size 1e-2: far below one step
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_fresh_from_an_init_function_need_not_be_placed(stage):
    tx = zero2jax.shard_optimizer(optax.adamw(1e-2), zero2jax.make_mesh(data=8), stage=stage)
    plain = optax.adamw(1e-2)
    params, expected = make_params(), make_params()
    state, plain_state = tx.init(params), plain.init(expected)
    step, plain_step = jax.jit(train_step(tx)), jax.jit(train_step(plain))
    for batch in make_batches(2):
        params, state, _ = step(params, state, batch)
        expected, plain_state, _ = plain_step(expected, plain_state, batch)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_update_alone_takes_fresh_arrays_eagerly_and_jitted(stage):
    tx = zero2jax.shard_optimizer(optax.adam(1e-2), zero2jax.make_mesh(data=8), stage=stage)
    params = {"w": np.ones((6, 5), np.float32), "v": np.ones((8, 3), np.float32)}
    expected, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params))
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(params, tx.init(params), params)
        for name in params:
            np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)
        assert describe(state) == describe(tx.init(params))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("stage", "rows"), [(0, 16), (1, 16), (2, 16), (3, 2)])
def test_updates_are_full_but_at_stage_3_whose_updates_stay_in_shards(stage, rows, jitted):
    mesh = zero2jax.make_mesh(data=8)
    tx = zero2jax.shard_optimizer(optax.adam(1e-2), mesh, stage=stage)
    spec = P("data") if stage == 3 else P()
    params = {"w": jax.device_put(np.ones((16, 4), np.float32), jax.NamedSharding(mesh, spec))}
    params["odd"] = jax.device_put(np.ones((3, 5), np.float32), jax.NamedSharding(mesh, P()))
    updates, _ = (jax.jit(tx.update) if jitted else tx.update)(params, tx.init(params), params)
    held = {name: {shard.data.shape for shard in x.addressable_shards} for name, x in updates.items()}
    assert held == {"w": {(rows, 4)}, "odd": {(3, 5)}}  # what does not divide is stored in full


@contextlib.contextmanager
def compilations(compiled):
    """Append to a list whenever a program is compiled."""

    def listener(name, _, **kwargs):
        if name.endswith("backend_compile_duration"):
            compiled.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_outside_jit_an_update_compiles_once_with_parameters_and_once_without():
    compiled, traced = [], []
    momentum = optax.sgd(1e-2, momentum=0.9)

    def counted(updates, state, params=None):
        traced.append(params is not None)
        return momentum.update(updates, state, params)

    inner = optax.GradientTransformation(momentum.init, counted)
    tx = zero2jax.shard_optimizer(inner, zero2jax.make_mesh(data=8))
    params = {"w": np.ones((8, 8), np.float32), "odd": np.ones((3, 5), np.float32)}
    state = tx.init(params)
    with compilations(compiled):
        for arguments in ((params,), ()):
            _, state = tx.update(params, state, *arguments)
            assert compiled  # the first of each kind
            compiled.clear()
            for _ in range(3):
                _, state = tx.update(params, state, *arguments)
            assert not compiled
    assert traced == [True, False]


@pytest.mark.parametrize("jitted", [False, True])
def test_extra_arguments_may_be_arrays_numbers_functions_and_choices(jitted):
    """As a line search takes them."""

    def scaled(updates, state, params=None, *, value, value_fn, negate, **_):
        sign = -1 if negate else 1
        return jax.tree.map(lambda g: sign * g * value * value_fn(params), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    tx = zero2jax.shard_optimizer(inner, zero2jax.make_mesh(data=8))
    params, grads = {"w": np.full((8, 3), 2, np.float32)}, {"w": np.ones((8, 3), np.float32)}
    largest = lambda p: p["w"].max()
    update = lambda value: tx.update(
        grads, tx.init(params), params, value=value, value_fn=largest, negate=True
    )
    for value in (3.0, jnp.float32(5)):
        updates, _ = (jax.jit(update) if jitted else update)(value)
        np.testing.assert_array_equal(updates["w"], -2 * value * grads["w"])


def test_state_is_sharded_from_init_on_and_its_bytes_are_the_plan_s():
    mesh = zero2jax.make_mesh(data=8)
    params = {"w": jnp.ones((16, 24)), "odd": jnp.ones((9, 5))}
    state = zero2jax.shard_optimizer(optax.adam(1e-2), mesh).init(params)
    # two moments: w 16 * 24 * 4 / 8 bytes, odd padded to (16, 5) or (9, 8), whichever pads less: 72 * 4 / 8; a count
    assert zero2jax.live_bytes(state) == 2 * (16 * 24 * 4 // 8 + 72 * 4 // 8) + 4


def test_eval_shape_and_init_under_jit_agree_with_init():
    tx = zero2jax.shard_optimizer(optax.adamw(1e-2), zero2jax.make_mesh(data=8))
    state = tx.init(make_params())
    shapes = jax.eval_shape(tx.init, make_params())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert describe(jax.jit(tx.init)(make_params())) == describe(state)


def test_multi_steps_inside_is_refused_and_outside_works():
    mesh = zero2jax.make_mesh(data=8)
    inside = optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    with pytest.raises(
        ValueError, match=r"Around zero2jax.shard_optimizer, optax.MultiSteps may go on the outside"
    ):
        zero2jax.shard_optimizer(inside, mesh).init(make_params())
    outside = optax.MultiSteps(zero2jax.shard_optimizer(optax.adam(1e-2), mesh), 2)
    state = outside.init(make_params())
    updates, _ = jax.jit(outside.update)(make_params(), state, make_params())
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))


def test_wrong_stage_and_mesh_are_errors():
    with pytest.raises(ValueError, match="stage is 4; ZeRO has the stages 0, 1, 2 and 3"):
        zero2jax.shard_optimizer(optax.adam(1e-2), zero2jax.make_mesh(data=8), stage=4)
    with pytest.raises(ValueError, match=r"looking for axis 'data' in a mesh with axes \{'model': 8\}"):
        zero2jax.shard_optimizer(optax.adam(1e-2), zero2jax.make_mesh(model=8))


def gpu_mesh():
    from pathlib import Path

    from jax.experimental import topologies

    target = (Path(__file__).parents[1] / "benchmarks" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x8")
    return zero2jax.make_mesh(devices=topology.devices, data=8)


@pytest.mark.cuda_compiler
def test_the_gpu_step_reduce_scatters_where_gradients_were_all_reduced():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the CUDA compiler (extra: plan)")
    mesh = gpu_mesh()
    shapes = {"w": (1024, 1024), "v": (1024, 1305), "odd": (1305,)}
    whole = jax.NamedSharding(mesh, P())
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for k, s in shapes.items()}
    batch = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    loss = lambda p, b: ((jnp.tanh(b @ p["w"]) @ p["v"] + p["odd"][None]) ** 2).mean()
    inner = optax.adam(1e-3)
    tx = zero2jax.shard_optimizer(inner, mesh)
    plan = zero2jax.make_shard_plan(params, 8)
    state = plan_like(jax.eval_shape(inner.init, params), plan).rest_shapes(mesh)

    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    text = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile().as_text()
    moved = dict.fromkeys(hlo.KINDS, 0)
    for c in hlo.collectives(text):
        moved[c.kind] += c.total_bytes
    assert moved["reduce-scatter"] == 4 * 1024 * (1024 + 1305)
    assert moved["all-reduce"] == 4 * 1305  # the one leaf that does not divide
