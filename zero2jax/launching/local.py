"""Processes of one program on this host: their environment, their logs, and starting them anew when one has failed.

Each process gets the variables that torchrun and DeepSpeed set (`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`,
`LOCAL_RANK`, `LOCAL_WORLD_SIZE`), its devices, `ZERO2JAX_RESTARTS`, by which `init_distributed` knows the launcher, and
`ZERO2JAX_TOKEN`, a secret of this start, without which nobody joins the roll call.
After a failure with restarts left, the program starts anew with the processes that had not failed; it is the program
that continues from its checkpoint.
"""

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zero2jax.launching.supervise import Command, Outcome, run_together
from zero2jax.processes.addresses import DEFAULT_PORT, grpc_proxy, parse_coordinator
from zero2jax.processes.launcher_variables import RESTARTS
from zero2jax.processes.signed_lines import TOKEN

_HINTS = {
    "SIGKILL": " SIGKILL comes from outside, as when memory runs out.",
    "SIGABRT": " SIGABRT is JAX's when another process has died or does not answer: those lines name its task.",
}
# Variables by which jax.distributed would believe another launcher.
_OTHER_LAUNCHERS = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS")


@dataclass(frozen=True)
class Launch:
    """What to run on this host.

    Attributes:
      program: the script and its arguments.
      num_processes: processes to start here.
      devices_per_process: simulated CPU devices, or GPUs, of each. None: one CPU device; the GPUs divided evenly, all
        of them for a single process.
      platform: "cpu" or "gpu".
      logs: folder for one file per process.
      max_restarts: how often to start anew.
      grace_s: seconds that the processes have to end after SIGINT or SIGTERM.
      coordinator: "host" or "host:port" of process 0; None means this host. Without a port a free one is taken, or
        29500 when other hosts have some of the processes.
      first_process: index of the first process here, when other hosts have some, too.
      total_processes: processes on all hosts; None means those here.
      end_with_stdin: end when standard input does, as under ssh.
      num_restarts: how often the program was started before.
      slots: GPUs of this host to use; None means those that are visible.
    """

    program: tuple[str, ...]
    num_processes: int = 1
    devices_per_process: int | None = None
    platform: str = "cpu"
    logs: Path | None = None
    max_restarts: int = 0
    grace_s: float = 30
    coordinator: str | None = None
    first_process: int = 0
    total_processes: int | None = None
    end_with_stdin: bool = False
    num_restarts: int = 0
    slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        total = self.num_processes if self.total_processes is None else self.total_processes
        check_counts(
            processes=self.num_processes, devices_per_process=self.devices_per_process, total_processes=total
        )
        if not self.grace_s >= 0:
            raise ValueError(
                f"launching with --grace-s {self.grace_s:g}: it must be 0 or more seconds. Correct it."
            )
        if self.max_restarts < 0:
            raise ValueError(f"launching with --max-restarts {self.max_restarts}: it must not be negative.")
        if self.coordinator is not None:
            parse_coordinator(self.coordinator)
        if not 0 <= self.first_process <= total - self.num_processes:
            raise ValueError(
                f"launching {self.num_processes} processes from index {self.first_process} on, of {total} in all: "
                f"there are not so many. Correct --first-process, --processes or --total-processes."
            )


def check_counts(**counts: int | None) -> None:
    """Refuse numbers below 1, by the names of their options.

    Raises:
      ValueError: there is one.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(
                f"launching with --{name.replace('_', '-')} {count}: it must be at least 1. Raise it."
            )


def find_platform(env: Mapping[str, str]) -> str:
    """ "gpu" if this host has NVIDIA devices and the environment does not hide them, else "cpu"."""
    hidden = env.get("JAX_PLATFORMS") == "cpu" or env.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "gpu" if Path("/proc/driver/nvidia/gpus").is_dir() and not hidden else "cpu"


def process_command(program: tuple[str, ...]) -> tuple[str, ...]:
    """A Python script by this interpreter; anything else as it is.

    Raises:
      ValueError: there is no such script or command.
    """
    is_script = program[0].endswith(".py")
    if not (Path(program[0]).is_file() if is_script else shutil.which(program[0])):
        kind = "script" if is_script else "command"
        raise ValueError(f"launching {program[0]}: there is no such {kind}. Options come before the script.")
    return (sys.executable, "-u", *program) if is_script else program


def process_environment(
    launch: Launch, local_index: int, address: tuple[str, int], env: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process: `env` with what the process needs to find the others and its devices."""
    host, port = address
    # gRPC would ask a proxy for the way to the coordinator.
    direct = (
        {"no_proxy": f"{env['no_proxy']},{host}" if env.get("no_proxy") else host}
        if grpc_proxy(host, env)
        else {}
    )
    total = launch.num_processes if launch.total_processes is None else launch.total_processes
    dropped = _OTHER_LAUNCHERS + (("JAX_PLATFORMS",) if launch.platform == "gpu" else ())
    return {
        **{name: value for name, value in env.items() if name not in dropped},
        **direct,
        **_devices(launch, local_index, env),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(total),
        "RANK": str(launch.first_process + local_index),
        "LOCAL_RANK": str(local_index),
        "LOCAL_WORLD_SIZE": str(launch.num_processes),
        RESTARTS: str(launch.num_restarts),
        "PYTHONUNBUFFERED": "1",
    }


def _devices(launch: Launch, local_index: int, env: Mapping[str, str]) -> dict[str, str]:
    if launch.platform == "cpu":
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(launch.devices_per_process or 1)}
    visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or _gpus()
    if launch.slots is not None:
        visible = [str(slot) for slot in launch.slots]
    each = launch.devices_per_process or max(1, len(visible) // launch.num_processes)
    needed = each * launch.num_processes
    if needed > len(visible):
        raise ValueError(
            f"launching {launch.num_processes} processes with {each} GPUs each: that needs {needed} GPUs, and "
            f"{len(visible)} are visible here. Lower --processes or --devices-per-process."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[local_index * each : (local_index + 1) * each])}


def _gpus() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []


def free_port() -> int:
    """A port of this host that nothing uses now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def _address(launch: Launch) -> tuple[str, int]:
    """Host and port of process 0. Several launchers find the same port without being told one, one finds a free one."""
    host, port = parse_coordinator(launch.coordinator or "127.0.0.1")
    if port is not None:
        return host, port
    return host, DEFAULT_PORT if _is_shared(launch) else free_port()


def _is_shared(launch: Launch) -> bool:
    """Whether other launchers start some of the processes."""
    return launch.total_processes not in (None, launch.num_processes)


def with_token(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the job's secret, a new one if it has none."""
    return {TOKEN: secrets.token_hex(16), **env}


def make_commands(launch: Launch, env: Mapping[str, str]) -> list[Command]:
    """One command per process of this host.

    Raises:
      ValueError: there are not enough GPUs, or no such script.
    """
    address = _address(launch)
    if not _is_shared(launch):  # else they have the same one from whoever started them, or none
        env = with_token(env)
    suffix = f".restart{launch.num_restarts}" if launch.num_restarts else ""
    commands = []
    for i in range(launch.num_processes):
        index = launch.first_process + i
        log = None if launch.logs is None else launch.logs / f"process{index}{suffix}.log"
        environment = process_environment(launch, i, address, env)
        commands.append(Command(str(index), process_command(launch.program), environment, log))
    return commands


def run_launch(launch: Launch, *, write: Callable[[bytes], None] | None = None) -> int:
    """Run the processes, and again after a failure while restarts are left; the exit code of the one that failed.

    Processes that end with `PREEMPTED_EXIT_CODE` have saved for another run, later: that is no failure.

    Raises:
      ValueError: there are not enough GPUs, or no such script.
    """
    while True:
        outcome = run_together(
            make_commands(launch, os.environ),
            grace_s=launch.grace_s,
            end_with_stdin=launch.end_with_stdin,
            write=write,
        )
        if not outcome.failed:
            return outcome.code
        report_failure("process", outcome)
        if launch.num_restarts >= launch.max_restarts:
            return outcome.code
        surviving = max(1, launch.num_processes - len(outcome.failed))
        launch = replace(launch, num_processes=surviving, num_restarts=launch.num_restarts + 1)
        say(f"restart {launch.num_restarts} of {launch.max_restarts} with {surviving} process(es)")


def report_failure(what: str, outcome: Outcome) -> None:
    """Say on standard error who failed, how, and what it said last."""
    name = outcome.failed[0]
    for line in outcome.last_lines:
        print(f"  {name} | {line}", file=sys.stderr)
    if outcome.num_hidden:
        say(
            f"{outcome.num_hidden} lines of the errors that followed in the others are not shown (--logs keeps all)."
        )
    if outcome.waited_for:
        say(f"before that: {outcome.waited_for}")
    others = f" (also: {', '.join(outcome.failed[1:])})" if outcome.failed[1:] else ""
    said = "its last lines are above" if outcome.last_lines else "it had printed nothing"
    hint = _HINTS.get(outcome.reason, "")
    say(f"{what} {name} failed first ({outcome.reason}){others}; {said}.{hint} All were ended.")


def say(text: str) -> None:
    """One line on standard error."""
    print(f"zero2jax launch: {text}", file=sys.stderr, flush=True)
