"""What is measured of transfers: by arrays that take a known time, and in the metrics of a step."""

import concurrent.futures
import dataclasses
import time

import jax
import numpy as np
import optax
import pytest
from helpers import make_batch, make_engine, make_params

import zero2jax
from zero2jax.offload.rates import Rates, _Times


@dataclasses.dataclass(eq=False)
class Slow:
    """Stands for an array of 300 bytes that is there after so many seconds of waiting."""

    wait_s: float
    data = np.zeros(300, np.int8)

    def block_until_ready(self):
        time.sleep(self.wait_s)
        return self

    @property
    def addressable_shards(self):
        return [self]


def over(rates):
    """Wait for what the threads wait for."""
    for thread in rates._threads.values():
        thread.submit(lambda: None).result()


def test_rates_count_from_when_a_transfer_could_begin():
    rates = Rates()
    rates.begin(Slow(0.2))  # the gradients
    for _ in range(2):
        rates.moving("down", [object(), same := object()], [Slow(0.1), same])
    rates._threads["down"].submit(lambda: None).result()
    rates.moving("up", [object()], [Slow(0.2)])
    rates.end()
    over(rates)
    known = rates.metrics()
    assert known["offload_down_bytes_per_s"] == pytest.approx(3000, rel=0.3)
    assert known["offload_up_bytes_per_s"] == pytest.approx(1500, rel=0.3)
    # 0.2 s down and 0.2 s up, after 0.2 s for gradients
    assert known["offload_share"] == pytest.approx(2 / 3, rel=0.2)


def test_where_nothing_moves_the_share_is_that_of_the_update_and_never_below_zero():
    rates = Rates()
    rates.begin(Slow(0.1))  # the gradients
    there = [Slow(0.3)]
    rates.moving("up", there, there)
    rates.end()
    over(rates)
    known = rates.metrics()
    assert known["offload_share"] == pytest.approx(2 / 3, rel=0.2)
    assert np.isnan(known["offload_up_bytes_per_s"])
    at = rates._last_up
    assert share(rates, begun=at + 1, reduced=at + 3, up=at + 2) == 0


def share(rates, beside=False, **times):
    """What a step adds, by the times of its events."""
    noted = concurrent.futures.Future()
    noted.set_result(None)
    rates._end(_Times(**times), beside, noted)
    return float(rates.metrics()["offload_share"])


def test_what_a_delayed_update_adds_is_what_the_next_step_waits_for():
    rates = Rates()
    # the next step begins with the parameters of this one
    assert share(rates, begun=0, reduced=1, up=4) == 0.75
    # the next begins at once, with the parameters of the first; the update of this one is over at 9
    assert share(rates, beside=True, begun=0, reduced=5, up=9) == 0
    # the next waits for them from 6 to 9, and this one began at 5
    assert share(rates, beside=True, begun=0, reduced=6, up=13) == 0.75
    # gradients that are noted before the parameters that they were made with
    assert share(rates, beside=True, begun=0, reduced=8, up=14) == 1


def test_a_step_says_what_the_one_before_moved(tmp_path):
    host = zero2jax.OffloadSettings(host_devices=tuple(jax.devices()[4:6]), nvme_path=tmp_path, measure=True)
    engine = make_engine(2, tx=optax.sgd(1e-2), offload=host)
    state, first = engine.step(engine.init(make_params()), make_batch())
    assert first["offload_write_bytes_per_s"] > 0
    over(engine.functions.step.rates)
    state, second = engine.step(state, make_batch())
    assert 0 < second["offload_share"] < 1
    assert second["offload_down_bytes_per_s"] > 0
    assert second["offload_up_bytes_per_s"] > 0
