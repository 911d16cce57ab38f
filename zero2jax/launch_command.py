"""`zero2jax launch`: from words on a command line to processes on this host or others, or to a scheduler's script."""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zero2jax.launch import Launch, find_platform, run_launch
from zero2jax.plan_command import UsageError


def launch(
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")],
    args: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ARGS")] = (),
    processes: int = 1,
    devices_per_process: int | None = None,
    platform: Literal["cpu", "gpu"] | None = None,
    logs: Path | None = None,
    max_restarts: int = 0,
    grace_s: float = 30,
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
        processes: Processes on this host.
        devices_per_process: Simulated CPU devices, or GPUs, per process.
        platform: Simulated CPU devices or GPUs; by default GPUs if there are any.
        logs: Folder for one log file per process.
        max_restarts: After a failure start anew, so often at most, with the processes that had not failed.
        grace_s: Seconds that the processes have to end after Ctrl-C or SIGTERM.
        coordinator: HOST:PORT of process 0, if this host is one of several.
        first_process: Index of the first process of this host.
        total_processes: Processes on all hosts.
        end_with_stdin: End when standard input ends.
    """
    try:
        settings = Launch(
            (script, *args),
            processes,
            devices_per_process,
            platform or find_platform(os.environ),
            logs,
            max_restarts,
            grace_s,
            coordinator,
            first_process,
            total_processes,
            end_with_stdin,
        )
        return run_launch(settings)
    except ValueError as error:
        raise UsageError(str(error)) from error


def split_script(arguments: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """`arguments` of a command with `--` before its first word that is no option, nor the value of one."""
    flags = {
        "--" + name.replace("_", "-")
        for name, p in inspect.signature(command).parameters.items()
        if p.default is False
    }
    i = 0
    while i < len(arguments) and arguments[i].startswith("-"):
        if arguments[i] == "--":
            return list(arguments)
        alone = arguments[i] in flags | {"-h", "--help"} or "=" in arguments[i]
        i += 1 if alone else 2
    return [*arguments[:i], "--", *arguments[i:]] if i < len(arguments) else list(arguments)
