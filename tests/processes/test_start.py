"""Starting in one process and in several real ones. No test here starts more than it needs."""

import subprocess
import sys

from spawn import environment, launch, results, write_program

import zero2jax
from zero2jax.launching.local import free_port


def test_a_single_process_starts_nothing(monkeypatch):
    for name in environment().keys() ^ dict(__import__("os").environ).keys():
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        assert zero2jax.init_distributed() == zero2jax.Startup("single process", 0, 1)
    zero2jax.expect_same("anything", object())


def test_one_that_never_arrives_is_named_by_a_real_process():
    code = "import zero2jax; zero2jax.init_distributed(initialization_timeout_s=1)"
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", RANK="0")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1  # and not SIGABRT, as from JAX's own time-out
    assert "StartError: starting 2 processes: process 1 did not arrive" in done.stderr


# Twice started; one value alike and one not; times of which one is long.
AGREE = """
import json, time
import jax, numpy as np, optax, zero2jax
from zero2jax.base.batches import place_batch

startup = zero2jax.init_distributed(initialization_timeout_s=120)
again = zero2jax.init_distributed()
assert (again.process_index, again.num_processes) == (startup.process_index, 3), again
zero2jax.expect_same("the seed", 7)
clock = zero2jax.StepClock()
time.sleep(0.5 if startup.process_index == 2 else 0)
clock.step_done()
times = clock.gather()
order_mesh = zero2jax.make_mesh()
order = zero2jax.BatchOrder(10, 6, order_mesh, seed=3)
try:
    place_batch(np.arange(3) + startup.process_index, order_mesh, "data")
except ValueError as error:
    other_batch = str(error)
try:
    stage = 1 if startup.process_index == 1 else 2
    zero2jax.initialize(lambda p, b: 0.0, optax.sgd(0.1), {"zero_optimization": {"stage": stage}})
except ValueError as error:
    print(json.dumps([str(error)]).replace("[", "{\\"error\\":[", 1) + "}", flush=True)
try:
    zero2jax.init_distributed(None, 5, 0)
except ValueError as error:
    refusals = {"batch": other_batch, "again": str(error)}
    found = {**refusals, "slowest": times.slowest, "own_s": times.own_s, "rows": next(order).tolist()}
    print(json.dumps(found), flush=True)
"""


def test_processes_must_agree_and_stragglers_are_named(tmp_path):
    found = results(launch(write_program(tmp_path, AGREE), processes=3))
    assert sorted(found) == [0, 1, 2]
    for refusal, rest in found.values():
        assert "the configuration and the mesh over 3 processes: process 1 (host" in refusal["error"][0]
        assert "started already, with 3" in rest["again"]
        assert "an array of shape (3,) is not the same in all 3 processes" in rest["batch"]
        assert rest["slowest"] == 2
        assert rest["own_s"][2] > 0.5 > rest["own_s"][0]
    rows = [set(found[i][1]["rows"]) for i in range(3)]
    assert len(set.union(*rows)) == 6
    assert all(len(part) == 2 for part in rows)


def test_variables_that_are_read_by_half_end_a_real_process_instead_of_making_it_a_single_one():
    code = "import zero2jax; print(zero2jax.init_distributed())"
    env = environment(MASTER_ADDR="127.0.0.1", NNODES="2")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "MASTER_ADDR without WORLD_SIZE and RANK; NNODES without NODE_RANK" in done.stderr
