"""`zero2jax launch`: from words on a command line to processes on this host or others, or to a scheduler's script."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zero2jax.base.names import did_you_mean
from zero2jax.cli.other_launchers import OTHER_OPTIONS
from zero2jax.cli.usage import UsageError
from zero2jax.launching.hostfile import filter_hosts, parse_hostfile
from zero2jax.launching.hosts import Hosts, divide, run_on_hosts
from zero2jax.launching.local import Launch, check_counts, find_platform, run_launch, say
from zero2jax.launching.scripts import Job, jobset_manifest, mpi_command, slurm_script
from zero2jax.memory.configure import MemorySettings, write_memory
from zero2jax.processes.addresses import is_loopback
from zero2jax.processes.launcher_variables import num_restarts

_PRINTED = {"slurm": slurm_script, "mpi": mpi_command, "k8s": jobset_manifest}

# Options that what is printed has no use for, and why.
_SCHEDULED = {
    "grace_s": "the scheduler ends the processes",
    "first_process": "the scheduler gives the indices",
    "total_processes": "there are --processes on each of --hosts",
    "end_with_stdin": "nothing is started here",
}
_BY_NAME = "the scheduler chooses the hosts: give their number, --hosts"
_UNUSED: dict[str, dict[str, str]] = {
    "slurm": {
        **_SCHEDULED,
        "coordinator": "process 0 is on the first host that Slurm gives, at a port made of the job's number",
        "include": _BY_NAME,
        "exclude": _BY_NAME,
        "max_restarts": "Slurm starts a job anew, see `sbatch --requeue`",
    },
    "mpi": {**_SCHEDULED, "max_restarts": "mpirun starts nothing anew"},
    "k8s": {
        **_SCHEDULED,
        "coordinator": "process 0 is in the first pod of the JobSet",
        "include": _BY_NAME,
        "exclude": _BY_NAME,
    },
}
_UNUSED_BY_SSH = dict.fromkeys(("first_process", "total_processes"), "the hostfile says which are where")


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What to start, on each host.

    Attributes:
        processes: Processes on each host; 1, or one per slot of a hostfile.
        devices_per_process: Simulated CPU devices, or GPUs, per process.
        platform: Simulated CPU devices or GPUs; by default GPUs if there are any.
        logs: Folder for one log file per process.
        max_restarts: After a failure start anew, so often at most, with the processes or hosts that had not failed.
        grace_s: Seconds that the processes have to end after Ctrl-C or SIGTERM.
    """

    processes: int | None = None
    devices_per_process: int | None = None
    platform: Literal["cpu", "gpu"] | None = None
    logs: Path | None = None
    max_restarts: int = 0
    grace_s: float = 30


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """On which hosts, through ssh or by a scheduler.

    Attributes:
        hostfile: Run on the hosts of this file through ssh; lines of the form `host slots=N`.
        include: Hosts and slots of the hostfile to use, HOST[:SLOT,SLOT...][@HOST...].
        exclude: Those not to use.
        print_for: Start nothing; print a Slurm script, an mpirun line or a Kubernetes JobSet.
        hosts: For --print, how many hosts there are.
    """

    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    print_for: Annotated[Literal["slurm", "mpi", "k8s"] | None, tyro.conf.arg(name="print")] = None
    hosts: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Which of all processes are here, where each host is given a launch of its own.

    Attributes:
        coordinator: HOST or HOST:PORT of process 0; the first host of a hostfile, else this one.
        first_process: Index of the first process of this host.
        total_processes: Processes on all hosts.
        end_with_stdin: End when standard input ends.
    """

    coordinator: str | None = None
    first_process: int = 0
    total_processes: int | None = None
    end_with_stdin: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How the clients of GPUs allocate memory, as in zero2jax.configure_memory.

    Attributes:
        memory_preallocate: Take the pool at the start, or let it grow.
        memory_fraction: Part of a device's memory that the pool has.
        memory_allocator: bfc, cuda_async, vmm or platform, as the installed jaxlib has them.
        memory_collective_mb: MiB of a second pool, for buffers of collectives.
    """

    memory_preallocate: Literal["yes", "no"] | None = None
    memory_fraction: float | None = None
    memory_allocator: str | None = None
    memory_collective_mb: int | None = None

    @property
    def settings(self) -> MemorySettings:
        """The same as the library has them."""
        return MemorySettings(
            preallocate=None if self.memory_preallocate is None else self.memory_preallocate == "yes",
            fraction=self.memory_fraction,
            allocator=None if self.memory_allocator is None else self.memory_allocator.lower(),
            collective_memory_mb=self.memory_collective_mb,
        )


_GROUPS = (ProcessOptions, HostOptions, PlaceOptions, MemoryOptions)


@dataclass(frozen=True)
class _Chosen:
    """The hosts of a hostfile that are used and their slots, none without a hostfile; whether a filter chose them."""

    hosts: Hosts
    filtered: bool

    @property
    def first(self) -> str | None:
        return next(iter(self.hosts), None)

    @property
    def first_slots(self) -> tuple[int, ...] | None:
        return next(iter(self.hosts.values()), None)


def launch(
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")],
    args: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ARGS")],
    processes: tyro.conf.OmitArgPrefixes[ProcessOptions],
    hosts: tyro.conf.OmitArgPrefixes[HostOptions],
    place: tyro.conf.OmitArgPrefixes[PlaceOptions],
    memory: tyro.conf.OmitArgPrefixes[MemoryOptions],
) -> int:
    """Run a script as several processes that find each other by zero2jax.init_distributed().

    Options come before SCRIPT; what follows it belongs to the script.

    Args:
        script: A Python script, or any other command.
        args: Its arguments.
        processes: What to start, on each host.
        hosts: On which hosts.
        place: Which of all processes are here.
        memory: How GPUs' clients allocate.
    """
    try:
        check_counts(
            processes=processes.processes,
            devices_per_process=processes.devices_per_process,
            hosts=hosts.hosts,
        )
        if place.total_processes is not None and processes.max_restarts:
            raise ValueError(
                f"launching with --max-restarts {processes.max_restarts} and --total-processes "
                f"{place.total_processes}: the launchers of the other hosts do not know of a restart here. Use "
                f"--hostfile, which restarts on all hosts, or let what starts the launchers restart all of them."
            )
        chosen = _chosen_hosts(hosts)
        _check_used(processes, hosts, place, chosen)
        _warn_of_misplaced(args)
        variables = write_memory(memory.settings, for_children=True)
        if hosts.print_for is not None:
            _check_printable(chosen.hosts, hosts.print_for)
            job = replace(_job((script, *args), processes, hosts, place, chosen), variables=variables)
            print(_PRINTED[hosts.print_for](job), end="")
            return 0
        here = _launch((script, *args), processes, place, chosen)
        if not chosen.hosts or _is_here(chosen.hosts):
            return run_launch(here)
        everywhere = replace(here, devices_per_process=processes.devices_per_process, total_processes=None)
        return run_on_hosts(
            everywhere, chosen.hosts, processes=processes.processes, platform=processes.platform
        )
    except OSError as error:
        raise UsageError(
            f"launching {script}: {error.filename}: {error.strerror}. Check that it is there, and that you may use it."
        ) from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_used(processes: ProcessOptions, hosts: HostOptions, place: PlaceOptions, chosen: _Chosen) -> None:
    """Refuse options that the chosen way to start has no use for: to ignore one starts something else than written."""
    if hosts.print_for is not None:
        way, unused = f"printing for {hosts.print_for}", _UNUSED[hosts.print_for]
    else:
        several = len(chosen.hosts) > 1
        way = f"launching on {len(chosen.hosts)} hosts by ssh" if several else "launching"
        unused = {"hosts": "it is for --print; hosts to start on stand in a --hostfile"}
        unused |= _UNUSED_BY_SSH if several else {}
    given = [
        f"--{field.name.replace('_', '-')} {getattr(options, field.name)} ({unused[field.name]})"
        for options in (processes, hosts, place)
        for field in fields(options)
        if field.name in unused and getattr(options, field.name) != field.default
    ]
    if given:
        raise ValueError(f"{way} with {'; '.join(given)}: it would not be used. Leave it out.")
    if hosts.hosts is not None and hosts.hosts > len(chosen.hosts) > 0:
        raise ValueError(
            f"{way} with --hosts {hosts.hosts}: the hostfile has {len(chosen.hosts)} to use. Lower it, or leave it out."
        )


def _job(
    program: tuple[str, ...],
    processes: ProcessOptions,
    hosts: HostOptions,
    place: PlaceOptions,
    chosen: _Chosen,
) -> Job:
    """What a scheduler is given; without a hostfile, a host has one slot."""
    share = divide(len(chosen.first_slots or (0,)), processes.processes, processes.devices_per_process)
    return Job(
        program,
        num_hosts=hosts.hosts or len(chosen.hosts) or 1,
        processes_per_host=share.processes,
        devices_per_process=share.devices_per_process,
        platform=processes.platform or "gpu",
        logs=processes.logs,
        max_restarts=processes.max_restarts,
        hostfile=hosts.hostfile,
        coordinator_host=place.coordinator or chosen.first,
        hosts=tuple(chosen.hosts) if chosen.filtered else (),
    )


def _launch(
    program: tuple[str, ...], processes: ProcessOptions, place: PlaceOptions, chosen: _Chosen
) -> Launch:
    """What to run on this host, or on its kind if there are several."""
    count, each = processes.processes or 1, processes.devices_per_process
    if chosen.first_slots is not None:
        share = divide(len(chosen.first_slots), processes.processes, processes.devices_per_process)
        count, each = share.processes, share.devices_per_process
    return Launch(
        program,
        num_processes=count,
        devices_per_process=each,
        platform=processes.platform or find_platform(os.environ),
        logs=processes.logs,
        max_restarts=processes.max_restarts,
        grace_s=processes.grace_s,
        coordinator=place.coordinator,
        first_process=place.first_process,
        total_processes=place.total_processes,
        end_with_stdin=place.end_with_stdin,
        num_restarts=num_restarts(os.environ),
        slots=chosen.first_slots,
    )


def _chosen_hosts(options: HostOptions) -> _Chosen:
    filtered = bool(options.include or options.exclude)
    if options.hostfile is not None:
        try:
            text = options.hostfile.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"launching with --hostfile {options.hostfile}: it cannot be read ({reason}). Give a file with a line "
                f"`host slots=N` per host."
            ) from error
        slots = parse_hostfile(text, str(options.hostfile))
        return _Chosen(filter_hosts(slots, options.include, options.exclude), filtered)
    if filtered:
        raise ValueError(
            "filtering hosts by --include or --exclude: there is no --hostfile to filter. Give one."
        )
    return _Chosen({}, filtered)


def _check_printable(hosts: Hosts, print_for: str) -> None:
    """What is printed gives every host the same number of processes, and its first slots."""
    for host, slots in hosts.items():
        if slots != tuple(range(len(next(iter(hosts.values()))))):
            raise ValueError(
                f"printing for {print_for}: host {host} has the slots {', '.join(map(str, slots))}; all hosts must "
                f"have the same number of slots, from 0 on. Filter hosts only, or launch by ssh, without --print."
            )


def _is_here(hosts: Hosts) -> bool:
    """Whether the only host is this one, which needs no ssh."""
    (host, *others) = hosts
    return not others and (is_loopback(host) or host == socket.gethostname())


def _options() -> dict[str, bool]:
    """Every option of the launcher as it is written, and whether it stands alone, without a value."""
    options = [field for group in _GROUPS for field in fields(group)]
    names = {"print_for": "print"}
    return {"--" + names.get(f.name, f.name).replace("_", "-"): f.default is False for f in options}


def _warn_of_misplaced(arguments: Sequence[str]) -> None:
    """Say which options of the launcher are among a script's arguments; `--platform` many scripts have themselves."""
    ours = _options().keys() - {"--platform"}
    misplaced = [word for word in arguments if _normal(word) in ours]
    if misplaced:
        say(
            f"{', '.join(misplaced)} came after the script and belongs to it. The launcher's options come before "
            f"the script: zero2jax launch {' '.join(misplaced)} ... SCRIPT."
        )


def split_script(arguments: Sequence[str]) -> list[str]:
    """The launcher's arguments with `--` before the first word that is no option, nor the value of one.

    Raises:
      UsageError: an option is not the launcher's; says what it is called here.
    """
    options = _options() | {"-h": True, "--help": True}
    i = 0
    while i < len(arguments) and arguments[i].startswith("-"):
        if arguments[i] == "--":
            return list(arguments)
        if _normal(arguments[i]) not in options:
            raise UsageError(_unknown(arguments[i], list(options)))
        i += 1 if options[_normal(arguments[i])] or "=" in arguments[i] else 2
    return [*arguments[:i], "--", *arguments[i:]] if i < len(arguments) else list(arguments)


def _unknown(word: str, options: Sequence[str]) -> str:
    name = _normal(word)
    here = OTHER_OPTIONS.get(name)
    hint = f"Here: {here}." if here else did_you_mean(name, options).strip()
    return (
        f"launching with {word.split('=')[0]}: unknown option. {hint} Options of the launcher come before the script, "
        f"those of the script after it: zero2jax launch --help."
    )


def _normal(word: str) -> str:
    """An option without its value, with dashes for underscores."""
    return word.split("=")[0].replace("_", "-")
