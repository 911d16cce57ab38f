"""`zero2jax launch`: from words on a command line to processes on this host or others, or to a scheduler's script."""

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zero2jax.cli.usage import UsageError
from zero2jax.launching.hostfile import filter_hosts, parse_hostfile
from zero2jax.launching.hosts import Hosts, divide, run_on_hosts
from zero2jax.launching.local import Launch, check_counts, find_platform, run_launch, say
from zero2jax.launching.scripts import Job, jobset_manifest, mpi_command, slurm_script
from zero2jax.processes.addresses import is_loopback
from zero2jax.processes.cluster_env import RESTARTS

_PRINTED = {"slurm": slurm_script, "mpi": mpi_command, "k8s": jobset_manifest}


def launch(
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")],
    args: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ARGS")] = (),
    processes: int | None = None,
    devices_per_process: int | None = None,
    platform: Literal["cpu", "gpu"] | None = None,
    logs: Path | None = None,
    max_restarts: int = 0,
    grace_s: float = 30,
    hostfile: Path | None = None,
    include: str = "",
    exclude: str = "",
    print_for: Annotated[Literal["slurm", "mpi", "k8s"] | None, tyro.conf.arg(name="print")] = None,
    hosts: int | None = None,
    coordinator: str | None = None,
    first_process: int = 0,
    total_processes: int | None = None,
    end_with_stdin: bool = False,
) -> int:
    """Run a script as several processes that find each other by zero2jax.init_distributed().

    Options come before SCRIPT; what follows it belongs to the script.

    Args:
        script: A Python script, or any other command.
        args: Its arguments.
        processes: Processes on each host; 1, or one per slot of a hostfile.
        devices_per_process: Simulated CPU devices, or GPUs, per process.
        platform: Simulated CPU devices or GPUs; by default GPUs if there are any.
        logs: Folder for one log file per process.
        max_restarts: After a failure start anew, so often at most, with the processes or hosts that had not failed.
        grace_s: Seconds that the processes have to end after Ctrl-C or SIGTERM.
        hostfile: Run on the hosts of this file through ssh; lines of the form `host slots=N`.
        include: Hosts and slots of the hostfile to use, HOST[:SLOT,SLOT...][@HOST...].
        exclude: Those not to use.
        print_for: Start nothing; print a Slurm script, an mpirun line or a Kubernetes JobSet.
        hosts: For --print, how many hosts there are.
        coordinator: HOST or HOST:PORT of process 0; the first host of a hostfile, else this one.
        first_process: Index of the first process of this host, where each host is given its own launch.
        total_processes: Processes on all hosts.
        end_with_stdin: End when standard input ends.
    """
    try:
        check_counts(processes=processes, devices_per_process=devices_per_process, hosts=hosts)
        if total_processes is not None and max_restarts:
            raise ValueError(
                f"launching with --max-restarts {max_restarts} and --total-processes {total_processes}: the launchers "
                f"of the other hosts do not know of a restart here. Use --hostfile, which restarts on all hosts, or "
                f"let what starts the launchers restart all of them."
            )
        chosen = _chosen_hosts(hostfile, include, exclude)
        first_slots = next(iter(chosen.values()), None)
        count, each = processes or 1, devices_per_process
        if first_slots is not None or print_for is not None:
            count, each = divide(len(first_slots or (0,)), processes, devices_per_process)
        program = (script, *args)
        _warn_of_misplaced(args)
        if print_for is not None:
            where = (
                hosts or len(chosen) or 1,
                count,
                each or 1,
                platform or "gpu",
                logs,
                max_restarts,
                hostfile,
            )
            _check_printable(chosen, print_for)
            named = tuple(chosen) if include or exclude else ()
            job = Job(program, *where, coordinator or next(iter(chosen), None), named)
            print(_PRINTED[print_for](job), end="")
            return 0
        here = Launch(
            program,
            count,
            each,
            platform or find_platform(os.environ),
            logs,
            max_restarts,
            grace_s,
            coordinator,
            first_process,
            total_processes,
            end_with_stdin,
            int(os.environ.get(RESTARTS, 0)),
            first_slots,
        )
        if not chosen or _is_here(chosen):
            return run_launch(here)
        everywhere = replace(here, devices_per_process=devices_per_process, total_processes=None)
        return run_on_hosts(everywhere, chosen, processes=processes, platform=platform)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _chosen_hosts(hostfile: Path | None, include: str, exclude: str) -> Hosts:
    if hostfile is not None:
        return filter_hosts(parse_hostfile(hostfile.read_text(), str(hostfile)), include, exclude)
    if include or exclude:
        raise ValueError(
            "filtering hosts by --include or --exclude: there is no --hostfile to filter. Give one."
        )
    return {}


def _check_printable(chosen: Hosts, print_for: str) -> None:
    """What is printed gives every host the same number of processes, and its first slots."""
    for host, slots in chosen.items():
        if slots != tuple(range(len(next(iter(chosen.values()))))):
            raise ValueError(
                f"printing for {print_for}: host {host} has the slots {', '.join(map(str, slots))}; all hosts must "
                f"have the same number of slots, from 0 on. Filter hosts only, or launch by ssh, without --print."
            )


def _is_here(hosts: Hosts) -> bool:
    """Whether the only host is this one, which needs no ssh."""
    (host, *others) = hosts
    return not others and (is_loopback(host) or host == socket.gethostname())


def _warn_of_misplaced(arguments: Sequence[str]) -> None:
    misplaced = misplaced_options(arguments, launch)
    if misplaced:
        say(
            f"{', '.join(misplaced)} came after the script and belongs to it. If it is meant for the launcher, put it "
            f"before the script."
        )


def misplaced_options(arguments: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """Options of `command` among a script's arguments, most likely meant for the launcher."""
    names = {"--" + name.replace("_", "-") for name in inspect.signature(command).parameters}
    names = names - {"--script", "--args", "--print-for"} | {"--print"}
    return [word for word in arguments if word.split("=")[0].replace("_", "-") in names - {"--platform"}]


def split_script(arguments: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """`arguments` of a command with `--` before its first word that is no option, nor the value of one."""
    parameters = inspect.signature(command).parameters
    flags = {"--" + name.replace("_", "-") for name, p in parameters.items() if p.default is False}
    i = 0
    while i < len(arguments) and arguments[i].startswith("-"):
        if arguments[i] == "--":
            return list(arguments)
        alone = arguments[i].replace("_", "-") in flags | {"-h", "--help"} or "=" in arguments[i]
        i += 1 if alone else 2
    return [*arguments[:i], "--", *arguments[i:]] if i < len(arguments) else list(arguments)
