"""What an engine tells of each step: its number, examples and times, without waiting for it."""

import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.monitors.observers import Observers

BATCH = {"tokens": np.zeros((8, 5), np.int32), "weights": np.ones((8, 4), np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch["weights"] @ params["w"]) ** 2)


@pytest.fixture(scope="module")
def engine():
    return zero2jax.Engine(loss_fn, optax.sgd(0.1), zero2jax.make_mesh(data=4), precision="fp32")


def watched(engine, num_steps, state=None, **observers):
    """(records, last state) of some steps with implicit transfers forbidden."""
    records = []
    engine.observers = Observers(after={"the test": records.append}, **observers)
    state = engine.init({"w": np.ones((4, 2), np.float32)}) if state is None else state
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(num_steps):
            state, _ = engine.step(state, BATCH)
    engine.observers.close()
    engine.observers = None
    return records, state


def test_each_step_is_told_in_order_with_its_numbers(engine):
    upcoming = []
    records, _ = watched(engine, 3, before={"the test": upcoming.append})
    assert [record.step for record in records] == [1, 2, 3] == [step.step for step in upcoming]
    assert [record.samples for record in records] == [8, 16, 24]
    assert {(record.num_examples, record.num_tokens) for record in records} == {(8, 40)}
    assert upcoming[0].batch is BATCH
    losses = [record.metrics["loss"] for record in records]
    assert losses[0] == 16.0
    assert losses == sorted(losses, reverse=True)


def test_a_state_from_elsewhere_has_the_number_that_it_says(engine):
    _, state = watched(engine, 2)
    records, _ = watched(engine, 2, state=state)
    assert [(record.step, record.samples) for record in records] == [(3, 24), (4, 32)]


def test_times_add_up_to_the_clock(engine):
    start_s = time.perf_counter()
    records, _ = watched(engine, 4)
    took_s = time.perf_counter() - start_s
    assert records[0].between_s == 0
    assert all(r.dispatch_s > 0 and r.device_s > 0 and r.idle_s >= 0 for r in records)
    assert 0 < sum(r.total_s for r in records) < took_s
    assert sum(r.between_s + r.dispatch_s for r in records) < took_s


def test_a_batch_is_timed_until_it_is_on_the_devices(engine, monkeypatch):
    """By a thread of its own: the loop does not wait for it, and the thread that tells of steps may be busy."""
    arrived = threading.Event()
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (arrived.wait(5), wait(x)))
    records = []
    engine.observers = Observers(after={"the test": records.append}, with_times=True)
    state, _ = engine.step(engine.init({"w": np.ones((4, 2), np.float32)}), BATCH)
    time.sleep(0.05)
    arrived.set()
    engine.observers.close()
    engine.observers = None
    (record,) = records
    assert record.transfer_s >= 0.05
    assert record.times_ms["elapsed_time_ms_transfer"] == 1e3 * record.transfer_s
    (untimed,), _ = watched(engine, 1, state=state)
    assert math.isnan(untimed.transfer_s)
    assert "elapsed_time_ms_transfer" not in untimed.times_ms


def test_an_observer_that_raises_is_switched_off_and_training_goes_on(engine):
    calls = []

    def fail(record):
        calls.append(record)
        raise ValueError("no more")

    engine.observers = Observers(after={"steps_per_print": fail})
    state = engine.init({"w": np.ones((4, 2), np.float32)})
    state, _ = engine.step(state, BATCH)
    for _ in range(1000):
        if not engine.observers._after[0]._is_open:
            break
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="steps_per_print failed .*ValueError: no more") as caught:
        state, _ = engine.step(state, BATCH)
    engine.observers.close()
    engine.observers = None
    assert (len(caught), caught[0].filename, len(calls), int(state.step)) == (1, __file__, 1, 2)


def test_a_step_inside_of_a_program_is_not_told(engine):
    records = []
    engine.observers = Observers(after={"the test": records.append})
    state = engine.init({"w": np.ones((4, 2), np.float32)})
    jax.eval_shape(engine.step, state, BATCH)
    engine.observers.close()
    engine.observers = None
    assert records == []


def test_telling_costs_the_loop_little(engine):
    """Well below a hundredth of a step of 0.1 s: on a core it is 20 microseconds."""
    observers = Observers(after={"the test": lambda record: None})
    state = engine.init({"w": np.ones((4, 2), np.float32)})
    metrics = {"loss": jnp.float32(1.0)}
    costs_s = []
    for _ in range(100):
        start_s = time.perf_counter()
        observers.begin(state, BATCH, None).done(state, metrics)
        costs_s.append(time.perf_counter() - start_s)
    observers.close()
    assert np.median(costs_s) < 1e-3
