"""A process that stops stepping while others go on is named, by the others' standing and by real processes."""

import subprocess
import sys
import threading
import time

import pytest
from spawn import environment, launch_arguments, write_program

from zero2jax.launching.local import free_port
from zero2jax.processes.progress import STILL_S, Board, Standing, user_line
from zero2jax.processes.roll_call import Entry

MOMENT = STILL_S / 10


def board(*standings):
    """A board on which all processes have stood since time 0."""
    found = Board([Entry(i, len(standings), host=f"host{i}", pid=i) for i in range(len(standings))])
    for i, standing in enumerate(standings):
        found.put(i, standing, 0.0)
    return found


@pytest.mark.parametrize(
    ("standings", "behind"),
    [
        ((Standing(4), Standing(3, ended=True)), [1]),  # fewer batches
        ((Standing(4), Standing(3), Standing(4)), [1]),  # hangs in its own code
        ((Standing(0), Standing(0, ended=True)), [1]),  # without an engine
        ((Standing(6), Standing(6, ended=True)), [0]),  # has work after the last step
        ((Standing(6), Standing(5), Standing(6, ended=True)), [1]),
        ((Standing(6, ended=True), Standing(6, ended=True)), []),  # the end of all
        ((Standing(6, ended=True), Standing(5, ended=True)), [1]),  # whose last step still runs
        ((Standing(4), Standing(4)), []),  # a checkpoint, a compilation
    ],
)
def test_those_behind_are_named_once_all_stand_still(standings, behind):
    found = board(*standings)
    assert found.behind(STILL_S - MOMENT) == (behind if found.all_ended else [])
    assert found.behind(STILL_S + MOMENT) == behind
    found.put(0, Standing(standings[0].steps + 1), STILL_S)
    assert found.behind(STILL_S + MOMENT) == []  # one has moved


def test_what_is_said_names_host_steps_and_line_and_is_said_once():
    found = board(Standing(4, at="train.py:7"), Standing(3, ended=True))
    said = found.news(STILL_S + MOMENT)
    assert said.startswith(
        "zero2jax: waiting for process 1, for 30 s: process 1 (host host1, pid 1) has ended its "
    )
    assert (
        "program after 3 steps; process 0 (host host0, pid 0) has begun 4 steps and stands at train.py:7."
        in said
    )
    assert "In a step, and at their end, all wait for each other: give all of them the same number" in said
    assert found.news(2 * STILL_S) == ""
    found.put(0, Standing(5), 2 * STILL_S)
    assert found.news(2 * STILL_S + MOMENT) == ""
    assert "has begun 5 steps" in found.news(4 * STILL_S)


def test_the_line_is_the_users_not_a_librarys():
    event = threading.Event()
    waits = lambda: event.wait(20)
    thread = threading.Thread(target=waits)
    thread.start()
    line = waits.__code__.co_firstlineno
    deadline_s = time.monotonic() + 10
    while user_line(sys._current_frames()[thread.ident]) == "" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert user_line(sys._current_frames()[thread.ident]) == f"{__file__}:{line}"
    event.set()
    thread.join()
    assert user_line(None) == ""


UNEVEN = """
import sys, time
import jax, numpy as np, optax, zero2jax
import zero2jax.processes.progress as progress

progress.STILL_S, progress._EVERY_S = 3.0, 0.5
me = zero2jax.init_distributed(initialization_timeout_s=120).process_index
mesh = zero2jax.make_mesh()
engine = zero2jax.Engine(lambda p, b: (b["x"] @ p["w"]).mean(), optax.sgd(0.1), mesh)
state = engine.init({"w": np.ones((8, 8), np.float32)})
for i in range(3 if sys.argv[1] in (f"{me} ends", f"{me} unread") else 6):
    if sys.argv[1] == f"{me} hangs" and i == 2:
        time.sleep(300)
    state, metrics = engine.step(state, zero2jax.global_batch({"x": np.ones((4, 8), np.float32)}, mesh))
    if sys.argv[1] != "1 unread":
        float(metrics["loss"])
"""


@pytest.mark.parametrize(
    ("how", "behind", "waits"),
    [
        ("1 ends", "has ended its program after 3 steps", "has begun 4 steps"),
        ("0 ends", "has ended its program after 3 steps", "has begun 4 steps"),
        ("1 unread", "has ended its program after 3 steps", "has ended its program after 6 steps"),
        ("1 hangs", "has begun 2 steps and stands at {program}:{line}", "has begun 3 steps"),
    ],
)
def test_a_process_that_stops_stepping_is_named_by_real_processes(tmp_path, how, behind, waits):
    program = write_program(tmp_path, UNEVEN)
    running = subprocess.Popen(
        launch_arguments(program, how, options=("--grace-s", "1")),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(120, running.kill)
    timer.start()
    said = next((line for line in running.stdout if "waiting for process" in line), "")
    running.terminate()
    out, error = running.communicate(timeout=60)
    timer.cancel()
    index = how[0]
    since = "" if how == "1 unread" else ", for 3 s"
    begins = f"[0] zero2jax: waiting for process {index}{since}: process {index} (host "
    assert said.startswith(begins), said + out + error
    first, second = said.split("; ", 1)
    line = 1 + UNEVEN.splitlines().index("        time.sleep(300)")
    assert behind.format(program=program, line=line) in first
    assert waits in second
    assert "ended" in second or f"stands at {program}:1" in second
    assert "give all of them the same number of batches" in said


FAILS = """
import zero2jax

zero2jax.init_distributed(initialization_timeout_s=120)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("start")
if zero2jax.init_distributed().process_index == 0:
    raise KeyError("mine")
multihost_utils.sync_global_devices("never")
"""


def test_an_error_of_process_0_ends_it_without_waiting_for_what_the_others_say(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, str(write_program(tmp_path, FAILS))]
    running = [
        subprocess.Popen(command, env=environment(**address, RANK=str(i)), stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        said = next(line for line in running[0].stderr if line.startswith("KeyError"))
        start_s = time.monotonic()
        running[0].communicate(timeout=60)
        assert time.monotonic() - start_s < 15  # STILL_S is 30
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert (said, running[0].returncode) == ("KeyError: 'mine'\n", 1)
