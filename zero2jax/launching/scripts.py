"""What schedulers are given to run the same program: a Slurm script, an `mpirun` line, a Kubernetes JobSet. Text only.

Each tells `zero2jax.init_distributed` the host of process 0 by `MASTER_ADDR`; by the scheduler's variables a process
knows how many there are, and which it is.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zero2jax.processes.addresses import DEFAULT_PORT, parse_coordinator
from zero2jax.processes.signed_lines import TOKEN

# The secret of a run, for its environment and no command line.
_NEW_TOKEN = f"{TOKEN}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"


@dataclass(frozen=True)
class Job:
    """What to run, and where: `processes_per_host` on each of `num_hosts`, with `devices_per_process` each."""

    program: tuple[str, ...]
    num_hosts: int
    processes_per_host: int
    devices_per_process: int
    platform: str = "gpu"
    logs: Path | None = None
    max_restarts: int = 0
    hostfile: Path | None = None
    coordinator_host: str | None = None
    hosts: tuple[str, ...] = ()  # those of the hostfile to use, if not all
    variables: Mapping[str, str] = field(default_factory=dict)  # more of the environment of each process

    @property
    def name(self) -> str:
        """The script's name, as schedulers take names: lower-case letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", Path(self.program[0]).stem.lower()).strip("-") or "train"

    @property
    def num_processes(self) -> int:
        """On all hosts."""
        return self.num_hosts * self.processes_per_host

    @property
    def command(self) -> str:
        """The program as shell words."""
        python = ("python", "-u") if self.program[0].endswith(".py") else ()
        return shlex.join((*python, *self.program))


def slurm_script(job: Job) -> str:
    """A script for `sbatch`: one task per process."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.num_hosts}",
        f"#SBATCH --ntasks-per-node={job.processes_per_host}",
    ]
    if job.platform == "gpu":
        lines.append(f"#SBATCH --gpus-per-node={job.processes_per_host * job.devices_per_process}")
    logs = None if job.logs is None else shlex.quote(str(job.logs))
    output = "" if logs is None else f" --output={logs}/process%t.log"
    lines += [
        "",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        f"export {_NEW_TOKEN}",
        *_exports(job),
        *([] if logs is None else [f"mkdir -p {logs}"]),
        "",
        f"srun --kill-on-bad-exit=1{output} {_with_devices(job, 'SLURM_LOCALID')}",
    ]
    return "\n".join(lines) + "\n"


def mpi_command(job: Job) -> str:
    """A line for a shell on the host of process 0, with Open MPI's `mpirun`."""
    host, port = "$(hostname)", None
    if job.coordinator_host is not None:
        host, port = parse_coordinator(job.coordinator_host.rpartition("@")[2])  # user@host
    words = [_NEW_TOKEN, "mpirun", f"-np {job.num_processes}", f"--map-by ppr:{job.processes_per_host}:node"]
    if job.hosts:
        slots = job.processes_per_host * job.devices_per_process
        words.append(f"--host {','.join(f'{name}:{slots}' for name in job.hosts)}")
    elif job.hostfile is not None:
        words.append(f"--hostfile {shlex.quote(str(job.hostfile))}")
    if job.logs is not None:
        words.append(f"--output-filename {shlex.quote(str(job.logs))}")
    exports = [TOKEN, f"MASTER_ADDR={host}", f"MASTER_PORT={port or DEFAULT_PORT}"]
    exports += [line.removeprefix("export ") for line in _exports(job)]
    words += [f"-x {export}" for export in exports]
    return " ".join(words) + f" {_with_devices(job, 'OMPI_COMM_WORLD_LOCAL_RANK')}\n"


def _exports(job: Job) -> list[str]:
    variables = dict(job.variables)
    if job.platform != "gpu":
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices_per_process)}
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _with_devices(job: Job, local_index: str) -> str:
    """The program, told which devices are its own where the default of one per process is wrong."""
    each = job.devices_per_process
    if job.platform != "gpu" or each == 1 or job.processes_per_host == 1:
        return job.command
    first = f"$(({local_index} * {each}))"
    last = f"$(({local_index} * {each} + {each - 1}))"
    return f"bash -c 'export JAX_LOCAL_DEVICE_IDS=$(seq -s, {first} {last}); exec \"$@\"' bash {job.command}"


def jobset_manifest(job: Job) -> str:
    """A Kubernetes JobSet: one pod per host, `zero2jax launch` in each. `IMAGE` is yours to fill in."""
    coordinator = f"{job.name}-workers-0-0.{job.name}"
    words = [
        "exec python -m zero2jax launch",
        f"--processes {job.processes_per_host}",
        f"--devices-per-process {job.devices_per_process}",
        f"--platform {job.platform}",
        f"--coordinator {coordinator}:{DEFAULT_PORT}",
        f"--first-process $((JOB_COMPLETION_INDEX * {job.processes_per_host}))",
        f"--total-processes {job.num_processes}",
        *([] if job.logs is None else [f"--logs {shlex.quote(str(job.logs))}"]),
        shlex.join(job.program),
    ]
    manifest = f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  failurePolicy:
    maxRestarts: {job.max_restarts}
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          parallelism: {job.num_hosts}
          completions: {job.num_hosts}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              containers:
              - name: train
                image: IMAGE
                command: ["bash", "-c", {json.dumps(" ".join(words))}]
                ports:
                - containerPort: {DEFAULT_PORT}
                env:
                - name: ZERO2JAX_RESTARTS
                  valueFrom:
                    fieldRef:
                      fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
                - name: {TOKEN}
                  valueFrom:
                    secretKeyRef:
                      name: {job.name}-token
                      key: token
                      optional: true
"""
    for name, value in job.variables.items():
        manifest += f"                - name: {name}\n                  value: {json.dumps(value)}\n"
    gpus = f"""                resources:
                  limits:
                    nvidia.com/gpu: {job.processes_per_host * job.devices_per_process}
"""
    return manifest + (gpus if job.platform == "gpu" else "")
