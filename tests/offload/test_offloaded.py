"""Masters and optimizer state on other devices than those that compute: these stand for the host's memory."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_trees_close,
    assert_trees_equal,
    make_batch,
    make_batches,
    make_engine,
    make_params,
    train,
)
from spawn import PROGRAMS, TIMEOUT_S, environment

import zero2jax
from zero2jax.base import memories
from zero2jax.checkpoints import orbax_handler
from zero2jax.offload import host_memory, offloaded
from zero2jax.offload.host_mesh import host_mesh

NUM = 2
SETTINGS = {
    "stage": 2,
    "clip_norm": 0.5,
    "skip_nonfinite": True,
    "trainable": lambda path, leaf: path != "norm",
    "precision": zero2jax.Precision(),
}


def host():
    return zero2jax.OffloadSettings(host_devices=tuple(jax.devices()[4 : 4 + NUM]))


def rated():
    return optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 5e-3, 4))


def test_offload_changes_no_bit_without_fused_multiply_adds():
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "offload_bits.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(
            XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX",
            JAX_NUM_CPU_DEVICES="8",
            JAX_DISABLE_MOST_OPTIMIZATIONS=os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"],
        ),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differ = json.loads(done.stdout.splitlines()[-1])
    assert len(differ) == 10
    assert {case: names for case, names in differ.items() if names} == {}


@pytest.fixture(scope="module")
def engines():
    """An engine that offloads and one that does not, otherwise alike."""
    both = tuple(make_engine(NUM, tx=rated(), offload=offload, **SETTINGS) for offload in (host(), None))
    for engine in both:  # so that a test may begin with a restore
        engine.abstract_state(make_params())
    return both


def bytes_of(devices):
    """Bytes of the buffers on some devices, each counted once."""
    gc.collect()  # of tests before
    shards = [s for x in jax.live_arrays() if not x.is_deleted() for s in x.addressable_shards]
    return sum(
        {
            (s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards if s.device in devices
        }.values()
    )


def devices_of(tree):
    return {device for x in jax.tree.leaves(tree) for device in x.sharding.device_set}


def test_between_steps_the_devices_hold_16_bit_parameters_and_scalars(engines):
    engine, _ = engines
    on, there = set(engine.mesh.devices.flat), set(host().host_devices)
    before = bytes_of(on)
    state, metrics = train(engine, engine.init(make_params()), make_batches(2))
    frozen = state.params["norm"]
    masters = [x for name, x in state.params.items() if name != "norm"]
    assert devices_of((masters, state.opt_state)) == there
    assert devices_of((frozen, state.step, state.rng, metrics)) == on
    shapes = jax.tree.leaves(masters)
    copies = sum(x.size * 2 for x in shapes if x.ndim) + NUM * 2  # the scalar is replicated
    known = jax.tree.leaves((metrics, frozen, state.step, state.rng))
    scalars = sum(s.data.nbytes for x in known for s in x.addressable_shards)
    assert bytes_of(on) - before == copies + scalars
    assert (
        sum(x.nbytes for x in shapes) + sum(x.nbytes for x in jax.tree.leaves(state.opt_state)) > 5 * copies
    )


def test_the_same_numbers_as_without(engines):
    found = []
    for engine in engines:
        state, metrics = train(engine, engine.init(make_params()), make_batches(3))
        loss = engine.evaluate(state, make_batch(seed=9))
        found.append(jax.tree.map(np.asarray, (state, metrics, engine.params(state), loss)))
    # An ulp of a moment, and what it makes of an update; the test above is exact.
    assert_trees_close(found[0], found[1], rtol=1e-6, atol=1e-8)
    assert np.isfinite(found[0][1][0]["learning_rate"])


def test_a_third_step_compiles_nothing_and_the_state_is_donated(engines, caplog):
    engine, _ = engines
    first = engine.init(make_params())
    state, _ = train(engine, first, make_batches(2))
    assert all(x.is_deleted() for x in jax.tree.leaves((first.opt_state, first.step)))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        train(engine, state, make_batches(1))
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_a_step_that_is_not_finite_leaves_the_state_as_it_is(engines):
    engine, _ = engines
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    before = jax.tree.map(np.asarray, state)
    bad = engine._placed(make_batch(), None)[0]
    state = state._replace(params=state.params | {"norm": state.params["norm"] * jnp.nan})
    state, metrics = engine.step(state, bad)
    assert not metrics["applied"]
    assert_trees_equal(jax.tree.map(np.asarray, state.opt_state), before.opt_state)
    assert_trees_equal(
        *({k: np.asarray(x) for k, x in p.items() if k == "embed"} for p in (state.params, before.params))
    )


def test_parameters_that_were_replaced_are_those_that_count(engines):
    engine, plain = engines
    state = engine.init(make_params())
    state, _ = train(engine, state, make_batches(1))
    other = engine.init(make_params(seed=5))
    swapped = state._replace(params=other.params)
    loss = engine.evaluate(swapped, make_batch())
    np.testing.assert_array_equal(loss, plain.evaluate(plain.init(make_params(seed=5)), make_batch()))
    _, metrics = engine.step(swapped, make_batch())
    assert float(metrics["loss"]) == float(loss)


def test_checkpoints_go_both_ways(engines, tmp_path, monkeypatch):
    engine, plain = engines
    state, _ = train(plain, plain.init(make_params()), make_batches(1))
    with zero2jax.Checkpointer(tmp_path, plain) as checkpointer:
        checkpointer.save(1, state)
    expected, _ = train(plain, state, make_batches(2))
    reader = zero2jax.Checkpointer(tmp_path)
    there = set(host().host_devices)
    restored, _ = reader.restore(engine)
    assert devices_of(restored.opt_state) == there
    found, _ = train(engine, restored, make_batches(2))
    as_numpy = lambda state: jax.tree.map(np.asarray, state)
    assert_trees_close(as_numpy(found), as_numpy(expected), rtol=1e-6, atol=1e-8)
    before = jax.tree.map(lambda x: np.asarray(x).copy(), found)
    own, may_write, places = orbax_handler.write_process_file, threading.Event(), []

    def write(folder, leaves):
        assert may_write.wait(60)
        places.extend(block.value.ctypes.data for _, blocks in leaves for block in blocks)
        own(folder, leaves)
        assert not any(blocks for _, blocks in leaves)

    monkeypatch.setattr(orbax_handler, "write_process_file", write)
    masters = {shard.data.unsafe_buffer_pointer() for shard in found.params["blocks"]["w"].addressable_shards}
    with zero2jax.Checkpointer(tmp_path / "back", engine) as checkpointer:
        checkpointer.save(3, found)
        later, _ = train(engine, found, make_batches(2))  # before anything is written
        may_write.set()
    assert masters.intersection(places)  # no copies, for the save
    back, _ = zero2jax.Checkpointer(tmp_path / "back").restore(plain)
    assert devices_of(back) == set(plain.mesh.devices.flat)
    assert_trees_equal(as_numpy(back), before)
    assert not np.array_equal(later.params["blocks"]["w"], before.params["blocks"]["w"])


def test_a_state_on_the_devices_is_moved_to_the_host(engines):
    engine, plain = engines
    state, _ = engine.step(plain.init(make_params()), make_batch())
    assert devices_of(state.opt_state) == set(host().host_devices)


def test_made_by_a_function_parameters_are_made_on_the_host(engines):
    engine, plain = engines
    make = lambda key: {**make_params(), "embed": jax.random.normal(key, (7, 5))}
    states = [e.init(make, jax.random.key(3)) for e in (engine, plain)]
    assert devices_of(states[0].params["embed"]) == set(host().host_devices)
    assert_trees_equal(*(jax.tree.map(np.asarray, state) for state in states))


def test_the_report_of_memory_counts_the_host_apart(engines):
    engine, plain = engines
    state = engine.init(make_params())
    report = engine.memory(state, make_batch())
    seen = engine._compiled.on_devices(state).params
    copies = {name: x for name, x in seen.items() if name != "norm"}
    assert report["parameters between steps"].measured_bytes == zero2jax.live_bytes(copies)
    on_device = plain.memory(plain.init(make_params()), make_batch())
    assert report["master"].measured_bytes < on_device["master"].measured_bytes
    assert (
        report["optimizer state, on the host"].measured_bytes == on_device["optimizer state"].measured_bytes
    )
    assert "parameters between steps" in str(report)


def test_inside_of_a_program_of_the_user_it_is_refused(engines):
    engine, _ = engines
    state = engine.init(make_params())
    with pytest.raises(ValueError, match=r"running a step inside of a program of yours .* engine offloads"):
        jax.jit(lambda batch: engine.step(state, batch))(make_batch())


@pytest.mark.parametrize(
    ("tx", "name", "settings"),
    [
        (optax.lbfgs(), "value_fn", {"ratio": "auto", "device_bytes": 10**6}),
        (optax.contrib.sophia(1e-2), "obj_fn", {"update_on": "device"}),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn", {}),
    ],
)
def test_an_optimizer_that_evaluates_the_loss_is_refused(tx, name, settings):
    engine = make_engine(NUM, tx=tx, offload=zero2jax.OffloadSettings(**settings))
    message = (
        rf"offloading to host memory \(offload=...\): the optimizer evaluates {name}, .* without offload"
    )
    with pytest.raises(ValueError, match=message):
        engine.abstract_state(make_params())


def test_copies_are_written_over_gradients_and_the_first_ones_made_chunk_by_chunk(engines, monkeypatch):
    engine, _ = engines
    state, _ = engine.step(engine.init(make_params()), make_batch())
    given, own = [], offloaded.moved

    def moved(arrays, shardings):
        arrived = own(arrays, shardings)
        given.append((arrays, arrived))
        return arrived

    monkeypatch.setattr(offloaded, "moved", moved)
    engine.step(state, make_batch())
    there = set(host().host_devices)
    down = [
        y for xs, ys in given for x, y in zip(xs, ys, strict=True) if x is not y and devices_of(y) == there
    ]
    grads = [x for x in down if x.ndim]
    assert {x.dtype for x in grads} == {jnp.dtype(jnp.bfloat16)}
    assert all(x.is_deleted() for x in grads)
    # from a master each, when a state has no copies yet
    single = make_engine(
        NUM, offload=zero2jax.OffloadSettings(host_devices=host().host_devices, chunk_bytes=1)
    )
    state = single.init(make_params())
    given.clear()
    single.functions.on_devices(state)
    assert [len(arrived) for _, arrived in given if arrived and devices_of(arrived) != there] == [1] * 5


def test_too_few_cpu_devices_are_an_error_that_says_how_many():
    settings = zero2jax.OffloadSettings(host_devices=tuple(jax.devices()[:1]))
    with pytest.raises(ValueError, match=r'has 2 devices in the mesh and 1 CPU .*"jax_num_cpu_devices", 2'):
        make_engine(2, offload=settings)
    mesh = zero2jax.make_mesh(data=4, model=2)
    assert host_mesh(mesh, zero2jax.OffloadSettings(), make_engine(1).settings) is mesh


def test_more_pinned_memory_than_xla_gives_is_refused_with_the_variable_that_gives_more(monkeypatch):
    rows, hosts = [(70 * 1024, 64 * 1024), (70 * 1024, -1)], ["a", "b"]
    host_memory.check_pinned([(64 * 1024, 64 * 1024), *rows[1:]], hosts)
    for locked, words in ((None, "uses jax. Or"), (2**20, r"uses jax \(and ulimit -l, 1.00 MiB here,")):
        monkeypatch.setattr("zero2jax.offload.host_memory.locked_limit_bytes", lambda locked=locked: locked)
        message = (
            rf"process 0 \(host a\) stores 70.00 GiB .* pins 64.00 GiB .*LIMIT_GB=78 before anything {words}"
        )
        with pytest.raises(ValueError, match=message):
            host_memory.check_pinned(rows, hosts)
    assert [memories.pinned_limit_bytes(env) for env in ({}, {memories.PINNED_LIMIT: "3"})] == [
        64 << 30,
        3 << 30,
    ]
    # an engine asks before it places anything
    engine = make_engine(NUM, stage=3, offload=zero2jax.OffloadSettings(update_on="device", params=True))
    monkeypatch.setattr("zero2jax.offload.offloaded.pinned_row", lambda *args: np.array([2, 1], np.int32))
    with pytest.raises(ValueError, match=r"offloading to pinned host memory: process 0 \(host here\)"):
        engine.init(make_params())
    engine.abstract_state(make_params())
    layout, settings = engine.layout, engine._blueprint.program(engine.layout).settings
    assert host_memory.pinned_row(layout, settings, engine.mesh).tolist() == [1, -1]


def test_a_host_without_room_is_refused_before_anything_is_placed(engines, monkeypatch, tmp_path):
    engine, plain = engines
    layout, settings = engine.layout, engine._blueprint.program(engine.layout).settings
    # Of 133 trained parameters fp32 masters and two moments, and bf16 copies in the place of gradients; padding and
    # scalars besides.
    staged = host_memory.staged_bytes(layout, settings, engine.mesh, None, host())
    assert 133 * 14 <= host_memory.needed_bytes(layout, settings, engine.mesh, staged) <= 133 * 14 * 1.3
    measured = dataclasses.replace(host(), measure=True)
    assert host_memory.staged_bytes(layout, settings, engine.mesh, None, measured) == 2 * staged
    with monkeypatch.context() as patch:
        patch.setattr("zero2jax.offload.host_memory.available_bytes", lambda: 0)
        with pytest.raises(
            ValueError, match=r"of host here: .* 1 process\(es\) take 1.00 MiB, and 0 B are available"
        ):
            engine.init(make_params())
        with zero2jax.Checkpointer(tmp_path / "saved", plain) as checkpointer:
            checkpointer.save(0, plain.init(make_params()))
            with pytest.raises(ValueError, match="0 B are available"):
                checkpointer.restore(engine)
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 6 kB\n")
    assert host_memory.available_bytes(tmp_path, tmp_path) == 6 << 10
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host_memory.available_bytes(tmp_path, tmp_path) == 3000
    (tmp_path / "memory.stat").write_text(
        "anon 100\nactive_file 300\ninactive_file 500\n"
    )  # files that were read
    assert host_memory.available_bytes(tmp_path, tmp_path) == 3800
    assert host_memory.available_bytes(tmp_path / "none", tmp_path / "none") is None
    # limits of the groups in between count, too
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/job.slice/step.scope\n")
    (tmp_path / "job.slice" / "step.scope").mkdir(parents=True)
    for group, limit in (("job.slice", "2500"), ("job.slice/step.scope", "max")):
        (tmp_path / group / "memory.max").write_text(limit)
        (tmp_path / group / "memory.current").write_text("1000")
    assert host_memory.available_bytes(tmp_path, tmp_path) == 1500
    rows, hosts = [(3, 8), (3, 8), (3, 8), (1, -1)], ["a", "a", "b", "c"]
    host_memory.check_hosts(rows, hosts)
    with pytest.raises(ValueError, match=r"memory of host a: .* 2 process\(es\) take 9.00 MiB, and 8.00 MiB"):
        host_memory.check_hosts([(6, 8), *rows[1:]], hosts)
