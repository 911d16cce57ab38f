"""Running a program as several real processes, through the launcher, bounded in time."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
TIMEOUT_S = 240  # of one run; an order of magnitude above what any takes on two busy cores


def environment(**variables):
    """This environment without a launcher's variables, with the package and the tests to import."""
    known = ("JAX_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "XLA_FLAGS", "ZERO2JAX_", "CUDA_VISIBLE_DEVICES")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(known) and k not in names}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), kept.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **variables}


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
