"""A signal ends training after the step, in one process and in several."""

import os
import signal
import subprocess
import threading

import pytest
from helpers import make_batches, make_engine, make_params
from spawn import TIMEOUT_S, environment, launch_arguments, run_processes, write_program

import zero2jax


def test_a_signal_is_noted_between_with_and_its_end_and_not_after():
    before = signal.getsignal(signal.SIGTERM)
    with zero2jax.Preemption() as preemption:
        assert not preemption.should_stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop(1)
        assert preemption.should_stop(2)
        assert preemption.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert not zero2jax.Preemption().should_stop(1)


def test_other_signals_can_be_asked_for_and_none_at_all():
    with zero2jax.Preemption([signal.SIGUSR1, signal.SIGUSR2]) as preemption:
        signal.raise_signal(signal.SIGUSR2)
        assert preemption.should_stop(1)
    before = signal.getsignal(signal.SIGTERM)
    with zero2jax.Preemption([]):
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_handler_is_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), zero2jax.Preemption():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_loop_finishes_its_step_saves_and_goes_on_elsewhere(tmp_path):
    engine = make_engine(2)
    state = engine.init(make_params())
    with (
        zero2jax.Preemption() as preemption,
        zero2jax.Checkpointer(tmp_path, engine, save_interval_steps=100) as c,
    ):
        for step, batch in enumerate(make_batches(20), 1):
            if step == 3:
                threading.Timer(0, os.kill, (os.getpid(), signal.SIGTERM)).start()
                threading.Event().wait(0.2)
            state, _ = engine.step(state, batch)
            stop = preemption.should_stop(step)
            c.save(step, state, force=stop)
            if stop:
                break
    assert step == 3
    assert int(zero2jax.Checkpointer(tmp_path).restore(engine)[0].step) == 3


def test_processes_agree_to_stop_at_the_same_step():
    found = run_processes(
        """
        import signal
        with zero2jax.Preemption(check_every=2) as preemption:
            for step in range(1, 20):
                if step == 5 and index == 1:  # one process alone is told
                    os.kill(os.getpid(), signal.SIGTERM)
                if preemption.should_stop(step):
                    break
        print(json.dumps([step, preemption.received]))
        """,
        2,
    )
    assert found == [[6, None], [6, int(signal.SIGTERM)]]


TRAINS = """
import sys, time
import jax, numpy as np
import helpers, zero2jax

zero2jax.init_distributed(initialization_timeout_s=120)
engine = helpers.make_engine(2)
state = engine.init(jax.tree.map(np.asarray, helpers.make_params()))
batch = helpers.make_batch()
with (
    zero2jax.Preemption() as preemption,
    zero2jax.Checkpointer(sys.argv[1], engine, save_interval_steps=10_000) as checkpointer,
):
    for step in range(1, 10_000):
        state, _ = engine.step(state, batch)
        if step == 1:
            print("begun", flush=True)
        stop = preemption.should_stop(step)
        checkpointer.save(step, state, force=stop)
        if stop:
            break
        time.sleep(0.01)
print("stopped after", step, flush=True)
sys.exit(zero2jax.PREEMPTED_EXIT_CODE)
"""


def test_a_signal_to_the_launcher_saves_one_checkpoint_and_ends_with_75(tmp_path):
    program = write_program(tmp_path, TRAINS)
    running = subprocess.Popen(
        launch_arguments(program, tmp_path / "saved", options=["--grace-s", "100", "--max-restarts", "1"]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = 0
    for line in running.stdout:
        begun += "begun" in line
        if begun == 2:
            break
    running.send_signal(signal.SIGTERM)
    out, error = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == zero2jax.PREEMPTED_EXIT_CODE, error
    stopped = [line.split()[-1] for line in out.splitlines() if "stopped after" in line]
    assert len(stopped) == 2
    assert stopped[0] == stopped[1]
    assert zero2jax.Checkpointer(tmp_path / "saved").latest_step() == int(stopped[0])
    assert "restart" not in error
