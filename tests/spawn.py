"""Running a program as several real processes, through the launcher, bounded in time."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "programs_run"
TIMEOUT_S = 240  # of one run; an order of magnitude above what any takes on two busy cores


def environment(**variables):
    """This environment without a launcher's variables, with the package and the tests to import."""
    launchers = ("FLUX_", "JSM_", "MASTER_", "MV2_", "OMPI_", "PALS_", "PMI_", "PMIX_", "SLURM_", "ZERO2JAX_")
    known = (*launchers, "JAX_", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(known) and k not in names}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), kept.get("PYTHONPATH", "")])
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as `conftest.py` has it
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **quick, **variables}


def write_program(folder, text):
    path = folder / "program.py"
    path.write_text(text)
    return path


def launch_arguments(program, *arguments, processes=2, devices=1, options=()):
    counts = ["--processes", str(processes), "--devices-per-process", str(devices)]
    launcher = [sys.executable, "-m", "zero2jax", "launch", "--platform", "cpu"]
    return [*launcher, *counts, *options, str(program), *map(str, arguments)]


def launch(program, *arguments, timeout_s=TIMEOUT_S, env=None, **settings):
    """Run a program under `zero2jax launch`; the finished process, its outputs as text."""
    return subprocess.run(
        launch_arguments(program, *arguments, **settings),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env or environment(),
    )


def results(done):
    """The JSON objects that the processes printed, each in a line of its own, by process index."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        prefix, _, text = line.partition("] ")
        if text.startswith("{"):
            found.setdefault(int(prefix[1:]), []).append(json.loads(text))
    return found


# Of code in a string; a program in a file imports `programs_run/worker.py`.
PRELUDE = """
import json, os, sys
sys.path[:0] = [{tests!r}, {programs!r}]
from worker import count, index, jax
import numpy as np, optax, zero2jax
from helpers import make_batches, make_engine, make_params
"""


def run_processes(code, count, tests=TESTS, timeout_s=TIMEOUT_S):
    """Run code in several processes that know each other; what each printed as JSON on its last line."""
    text = PRELUDE.format(tests=str(tests), programs=str(PROGRAMS)) + textwrap.dedent(code)
    return _run(["-c", text], (), count, timeout_s)


def run_program(name, *arguments, count=2, timeout_s=TIMEOUT_S):
    """Run a file of `programs_run/` as `run_processes` runs code, with arguments that end in `sys.argv`."""
    return _run([str(PROGRAMS / name)], tuple(map(str, arguments)), count, timeout_s)


def _run(program, arguments, count, timeout_s):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, *program, str(i), str(count), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        for i in range(count)
    ]
    try:
        done = [child.communicate(timeout=timeout_s) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    for child, (_, stderr) in zip(children, done, strict=True):
        assert child.returncode == 0, stderr[-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in done]
