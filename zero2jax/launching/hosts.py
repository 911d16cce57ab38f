"""The launcher on several hosts: one `zero2jax launch` on each through ssh, watched from here like local processes.

The launcher of a host ends its processes when its standard input ends, and that is this host's end of the ssh
connection: so nothing stays behind on any host, however this one ends. The first line of it is the job's secret, which
is on no command line.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zero2jax.launching.hostfile import forwarded_environment, ssh_command
from zero2jax.launching.local import Launch, report_failure, say, with_token
from zero2jax.launching.supervise import Command, run_together
from zero2jax.processes.addresses import (
    DEFAULT_PORT,
    checked_port,
    is_loopback,
    join_address,
    parse_coordinator,
)
from zero2jax.processes.launcher_variables import RESTARTS
from zero2jax.processes.signed_lines import TOKEN

Hosts = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """What one host runs: processes, and devices of each."""

    processes: int
    devices_per_process: int

    @property
    def slots(self) -> int:
        """Slots that this takes."""
        return self.processes * self.devices_per_process


def divide(slots: int, processes: int | None, devices: int | None) -> Share:
    """What a host with so many slots runs; what is not given is what its slots leave room for."""
    if processes is None:
        processes = max(1, slots // (devices or 1))
    return Share(processes, devices or max(1, slots // processes))


def host_commands(
    launch: Launch,
    hosts: Hosts,
    env: Mapping[str, str],
    folder: Path,
    *,
    processes: int | None = None,
    platform: str | None = None,
) -> list[Command]:
    """One ssh command per host.

    Args:
      launch: program, devices per process, logs, grace and coordinator; its counts are not used.
      hosts: slots to use of each host, the host of process 0 first.
      env: this host's environment.
      folder: the current folder, which every host must have.
      processes: on each host; by default one per slot, or as many as `devices_per_process` leaves room for.
      platform: "cpu" or "gpu", or None: each host looks for itself.

    Raises:
      ValueError: more devices than slots on a host; a loopback address for process 0 with several hosts.
    """
    each = launch.devices_per_process
    shares = {host: divide(len(slots), processes, each) for host, slots in hosts.items()}
    for host, share in shares.items():
        if share.slots > len(hosts[host]):
            raise ValueError(
                f"launching {share.processes} processes of {share.devices_per_process} devices on host {host}: that "
                f"needs {share.slots} slots, and it has {len(hosts[host])}. Lower --processes or "
                f"--devices-per-process, or correct the hostfile."
            )
    address = _coordinator(launch, hosts)
    base = forwarded_environment(env, (folder, Path.home())) | {RESTARTS: str(launch.num_restarts)}
    token = with_token(env)[TOKEN]
    commands, first = [], 0
    for host, slots in hosts.items():
        options = {
            "processes": shares[host].processes,
            "devices-per-process": shares[host].devices_per_process,
            "platform": platform,
            "logs": launch.logs,
            "grace-s": launch.grace_s,
            "coordinator": address,
            "first-process": first,
            "total-processes": sum(share.processes for share in shares.values()),
        }
        words = [word for name, x in options.items() if x is not None for word in (f"--{name}", str(x))]
        arguments = (sys.executable, "-m", "zero2jax", "launch", *words, "--end-with-stdin", *launch.program)
        visible = base | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
        ssh = ssh_command(host, arguments, visible, folder, from_stdin=TOKEN)
        commands.append(Command(host, ssh, dict(env), keep_stdin=True, stdin=f"{token}\n".encode()))
        first += shares[host].processes
    return commands


def _coordinator(launch: Launch, hosts: Hosts) -> str:
    host, port = parse_coordinator(launch.coordinator or next(iter(hosts)))
    host = host.rpartition("@")[2]  # user@host
    if len(hosts) > 1 and is_loopback(host):
        raise ValueError(
            f"launching on {len(hosts)} hosts with process 0 at {host}: other hosts cannot reach a loopback address. "
            f"Write its real name in the hostfile, or give --coordinator."
        )
    # Another port for each restart: the last one may still be held.
    port = (port or DEFAULT_PORT) + launch.num_restarts
    return join_address(host, checked_port(port, f"--coordinator for restart {launch.num_restarts}"))


def run_on_hosts(
    launch: Launch,
    hosts: Hosts,
    *,
    processes: int | None = None,
    platform: str | None = None,
    write: Callable[[bytes], None] | None = None,
) -> int:
    """Run on all hosts, and again on those that had not failed while restarts are left; the exit code.

    Raises:
      ValueError: as `host_commands`.
    """
    while True:
        commands = host_commands(
            launch, hosts, os.environ, Path.cwd(), processes=processes, platform=platform
        )
        outcome = run_together(
            commands, grace_s=launch.grace_s, end_with_stdin=launch.end_with_stdin, write=write
        )
        if not outcome.failed:
            return outcome.code
        report_failure("host", outcome)
        if launch.num_restarts >= launch.max_restarts:
            return outcome.code
        hosts = {host: slots for host, slots in hosts.items() if host not in outcome.failed} or hosts
        launch = replace(launch, num_restarts=launch.num_restarts + 1)
        say(f"restart {launch.num_restarts} of {launch.max_restarts} on {len(hosts)} host(s)")
