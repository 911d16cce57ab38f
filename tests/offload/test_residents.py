"""A part of masters and optimizer state on the host, the other leaves on the devices."""

import jax
import numpy as np
import optax
import pytest
from helpers import assert_trees_close, make_batch, make_batches, make_engine, make_params, train
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.offload import offloaded
from zero2jax.offload.host_memory import param_bytes, state_bytes, transfer_bytes

HOST = tuple(jax.devices()[4:6])


def engine_of(ratio, tx=None):
    settings = None if ratio is None else zero2jax.OffloadSettings(ratio=ratio, host_devices=HOST)
    return make_engine(2, tx=tx or optax.adam(1e-2), offload=settings, clip_norm=0.5, stage=3)


def where(tree):
    return ["host" if x.sharding.device_set <= set(HOST) else "device" for x in jax.tree.leaves(tree)]


def test_bytes_on_the_host_grow_with_the_ratio_and_come_near_it():
    shares, transferred = [], []
    for ratio in np.linspace(0.05, 1, 20):
        engine = engine_of(float(ratio))
        engine.abstract_state(make_params())
        layout, mesh = engine.layout, engine.mesh
        host, device = sum(state_bytes(layout, mesh)), sum(state_bytes(layout, mesh, resident=True))
        total = sum(leaf.rest_bytes for plan in (layout.params, layout.opt_state) for leaf in plan.leaves)
        assert host + device == total
        shares.append(host / total)
        transferred.append(sum(transfer_bytes(layout, engine._blueprint.program(layout).settings, mesh)))
    assert shares == sorted(shares)
    assert transferred == sorted(transferred)
    assert shares[-1] == 1.0
    largest = 90 / 152  # of 152 elements with padding the largest leaf has 90: half of it off at most
    assert max(abs(np.linspace(0.05, 1, 20) - shares)) <= largest / 2 + 0.05


def test_the_smallest_ratio_that_fits_a_budget_is_chosen():
    """Stage 3 on two devices, fp32: a leaf takes a copy where the host has it, else a master and two moments."""

    def engine_with(device_bytes, **settings):
        offload = zero2jax.OffloadSettings(
            ratio="auto", device_bytes=device_bytes, host_devices=HOST, **settings
        )
        engine = make_engine(2, tx=optax.adam(1e-2), offload=offload, stage=3)
        engine.abstract_state(make_params())
        return engine.layout

    sizes = [leaf.rest_bytes for leaf in engine_with(10**6).params.leaves]  # b, w, embed, norm, scale
    stored = [3 * sum(sizes) - 2 * sum(sizes[:n]) for n in range(6)]
    for n in range(1, 6):
        for budget in (stored[n], stored[n - 1] - 1):
            assert engine_with(budget).resident_params == frozenset(range(n, 5))
    with pytest.raises(ValueError, match=r"still stores .* of parameters between steps, and device_bytes is"):
        engine_with(stored[5] - 1)
    with pytest.raises(ValueError, match="device_bytes"):  # two sets of copies
        engine_with(stored[5], delay_after=1)
    for wrong in ({"ratio": "auto"}, {"device_bytes": 5}):
        with pytest.raises(ValueError, match="Give both or neither"):
            zero2jax.OffloadSettings(**wrong)


def test_half_of_the_state_on_the_host_trains_as_all_of_it_on_the_devices(tmp_path):
    half, plain = engine_of(0.5), engine_of(None)
    state, metrics = train(half, half.init(make_params()), make_batches(3))
    assert where(state.params) == ["host", "host", "device", "device", "device"]  # b, w; embed, norm, scale
    assert (
        where(state.opt_state) == ["host"] * 3 + ["device"] * 3 + ["host"] * 2 + ["device"] * 3
    )  # count, mu, nu
    expected, others = train(plain, plain.init(make_params()), make_batches(3))
    as_numpy = lambda tree: jax.tree.map(np.asarray, tree)
    # An ulp of a moment, and what it makes of an update.
    assert_trees_close(as_numpy((state, metrics)), as_numpy((expected, others)), rtol=1e-5, atol=1e-7)
    assert_trees_close(as_numpy(half.params(state)), as_numpy(plain.params(expected)), rtol=1e-5, atol=1e-7)
    losses = [e.evaluate(s, make_batches(1)[0]) for e, s in ((half, state), (plain, expected))]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    with zero2jax.Checkpointer(tmp_path, half) as checkpointer:
        checkpointer.save(3, state)
    restored, _ = zero2jax.Checkpointer(tmp_path).restore(half)
    assert where(restored) == where(state)
    report = half.memory(restored, make_batches(1)[0])
    assert report["master"].measured_bytes + report[
        "master, on the host"
    ].measured_bytes == zero2jax.live_bytes(expected.params)
    assert report["optimizer state"].measured_bytes > 0


def test_of_the_hosts_half_only_scalars_and_copies_come_up(monkeypatch):
    from zero2jax.offload import offloaded

    half = engine_of(0.5)
    state, _ = half.step(half.init(make_params()), make_batch())
    own, up = offloaded.moved, []

    def moved(arrays, shardings):
        found = own(arrays, shardings)
        up.extend(
            x for x, y in zip(found, arrays, strict=True) if x is not y and x.sharding.mesh == half.mesh
        )
        return found

    monkeypatch.setattr(offloaded, "moved", moved)
    half.step(state, make_batch())
    assert sorted(x.shape for x in up if x.ndim) == [(3, 6), (3, 6, 5)]  # b, w: padded to two devices


def test_an_optimizer_that_ties_all_leaves_together_has_no_half():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"offloading 0.5 of the state: .* Clip by clip_norm="):
        engine_of(0.5, tx).abstract_state(make_params())
    with pytest.raises(ValueError, match="ratio is 0"):
        engine_of(0)
    with pytest.raises(ValueError, match=r"ratio is '0\.5'"):
        engine_of("0.5")
    with pytest.raises(TypeError, match=r"offload is True; it is zero2jax\.OffloadSettings\(\)"):
        make_engine(2, offload=True)


def test_one_leaf_that_waits_on_the_host_is_noticed():
    """Of an engine with leaves in both places, no leaf tells of the others."""
    engine = engine_of(0.5)
    state = engine.init(make_params())
    leaves, treedef = jax.tree.flatten(state.params)
    i = where(leaves).index("device")
    leaves[i] = jax.device_put(leaves[i], leaves[i].sharding.with_memory_kind("pinned_host"))
    with pytest.raises(ValueError, match="waits in host memory"):
        engine.step(state._replace(params=treedef.unflatten(leaves)), make_batch())


def reduced_bytes(engine):
    """Bytes of the gradients that a device hands over, as the compiled half of the step makes them."""
    step, there = engine._compiled.step, engine._compiled.abstract_on_devices()
    batch = engine._abstract(make_batch(), None)[1]
    kept, copies = offloaded.apart(there, engine.layout.trainable)
    sums = jax.eval_shape(step.reduce, kept, copies, batch, {}).sums
    shards = zip(sums, engine.layout.trained_params.leaves, strict=True)
    return sum(
        x.size * x.dtype.itemsize // (1 if leaf.dim is None else leaf.num_shards) for x, leaf in shards
    )


def test_gradients_go_down_in_the_dtype_that_they_are_reduced_in():
    ratios = []
    for stage, num_microbatches, fp32_sum in ((1, 2, False), (2, 2, False), (2, 1, False), (2, 1, True)):
        settings = zero2jax.OffloadSettings(host_devices=HOST)
        precision = zero2jax.Precision(fp32_sum=fp32_sum)
        engine = make_engine(
            2, stage=stage, num_microbatches=num_microbatches, precision=precision, offload=settings
        )
        engine.abstract_state(make_params())
        down, up = transfer_bytes(
            engine.layout, engine._blueprint.program(engine.layout).settings, engine.mesh
        )
        assert down == reduced_bytes(engine)
        ratios.append(down / up)
    # Stage 2 adds microbatches in fp32, and stage 1 reduces their sum in bf16; what is added in fp32 stays so.
    assert ratios == [1, 2, 1, 2]


def test_a_chunk_counts_what_a_device_has_of_a_leaf_that_a_model_axis_shards():
    mesh, specs = zero2jax.make_mesh(data=2, model=2), {"a": P(None, "model"), "b": P()}
    engine = zero2jax.Engine(
        lambda params, batch: (batch @ params["a"]).mean() + params["b"].sum(),
        optax.adam(1e-2),
        mesh,
        param_specs=specs,
        layer_dims=0,
        offload=zero2jax.OffloadSettings(),
    )
    engine.abstract_state({name: np.zeros((4, 4), np.float32) for name in specs})
    assert param_bytes(engine.layout, mesh) == [16, 32]
