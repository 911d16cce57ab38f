"""Starting several processes as one program. Before any use of a JAX backend.

`init_distributed` reads how many processes there are (`cluster_env`), calls the roll (`roll_call`), and starts
`jax.distributed`; in a single process it starts nothing. Heartbeats are JAX's: when a process dies, its coordination
service ends the others. What the processes must agree on once they run is compared by `agreement`.
"""

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import jax

from zero2jax.processes.addresses import is_loopback, split_address
from zero2jax.processes.cluster_env import Place, find_place
from zero2jax.processes.launcher_variables import STARTERS, first_set, num_restarts, read_number
from zero2jax.processes.progress import Progress
from zero2jax.processes.roll_call import Entry, Roll, StartError, call_roll, code_versions
from zero2jax.processes.signed_lines import job_token

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Startup:
    """How this process was started: by whom, as which of how many, with which coordinator ("host:port").

    `num_restarts` counts how often `zero2jax launch` has started the processes anew.
    """

    source: str
    process_index: int
    num_processes: int
    coordinator_address: str | None = None
    num_restarts: int = 0


def init_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout_s: float = 300,
    heartbeat_timeout_s: float = 100,
    shutdown_timeout_s: float = 300,
) -> Startup:
    """Make this process one of several that run the same program; harmless if it is alone, or if called twice.

    Call it before anything uses a device. Without arguments the environment tells (see `cluster_env`):
    `zero2jax launch`, torchrun, Open MPI, Slurm, MPICH, `MASTER_ADDR` with `WORLD_SIZE` and `RANK`, Kubernetes. Process
    0 prints one line that says which. An incomplete set of variables is an error, never a single process.

    From then on an exception that nobody catches ends its process without waiting for the others, so that the others
    learn of it; `sys.exit` with an error code still waits for them, up to `shutdown_timeout_s`. Process 0 says which
    process the others wait for (see `progress`).

    Args:
      coordinator_address: "host:port" of process 0; with it go the next two.
      num_processes: how many processes there are.
      process_id: which of them this is, from 0.
      local_device_ids: devices of this host that belong to this process; by default one per process if several
        share the host and their launcher has not divided the devices, else all.
      initialization_timeout_s: how long to wait for the others, in seconds.
      heartbeat_timeout_s: after so many seconds without a sign of life, a process counts as dead and all end.
      shutdown_timeout_s: how long a process that has ended waits for the others before JAX ends it with an error.

    Raises:
      ValueError: arguments or variables contradict each other, are incomplete, or would make the start hang (a loopback
        address with several hosts, an index that is not below the count, a proxy on the way to the coordinator).
      StartError: processes did not arrive (named), have the same index, or run other code (named).
      RuntimeError: a device has been used before.
    """
    ids = None if local_device_ids is None else tuple(local_device_ids)
    if jax.distributed.is_initialized():
        return _again(num_processes, process_id)
    place = find_place(os.environ, coordinator_address, num_processes, process_id, ids)
    restarts = num_restarts(os.environ)
    if not place.distributed:
        if place != Place(source="single process", distributed=False):
            print(f"zero2jax: {place.source}", file=sys.stderr, flush=True)
        return Startup(place.source, 0, 1, num_restarts=restarts)
    roll: Roll | None = None
    if place.coordinator_address is not None and place.num_processes is not None:
        me = Entry(place.process_index, place.num_processes, code=code_versions())
        roll = call_roll(me, place.coordinator_address, initialization_timeout_s)
    _start(
        place,
        initialization_timeout=round(initialization_timeout_s),
        heartbeat_timeout_seconds=round(heartbeat_timeout_s),
        shutdown_timeout_seconds=round(shutdown_timeout_s),
    )
    if roll is not None and len(roll.entries) > 1:
        Progress(roll, place.process_index, job_token()).start()
    _end_on_error()
    if place.num_processes is None:  # only JAX knew
        place = replace(place, num_processes=jax.process_count())
    startup = Startup(
        source=place.source,
        process_index=place.process_index,
        num_processes=place.num_processes or 1,
        coordinator_address=place.coordinator_address,
        num_restarts=restarts,
    )
    _say(startup)
    return startup


def expect_joined() -> None:
    """Refuse to train alone what a launcher has started as one of several processes.

    Launchers that start the processes themselves, since a scheduler may well run programs that are none of each other's
    business.

    Raises:
      StartError: the launcher's variables tell of several processes, and `jax.distributed` has not been started.
    """
    if jax.distributed.is_initialized():
        return
    for family in STARTERS:
        name = first_set(os.environ, family.counts)
        if family.is_set(os.environ) and name is not None and read_number(os.environ, name) > 1:
            raise StartError(
                f"building the engine: {family.source} has started this process as one of {os.environ[name]}, and it "
                f"has not joined the others: each would train by itself. Call zero2jax.init_distributed() before "
                f"anything uses a device; or start a single process."
            )


def _start(place: Place, **timeouts: int) -> None:
    if jax.config.jax_cpu_collectives_implementation in (None, "none"):  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = place.coordinator_address
    local = address is not None and is_loopback(split_address(address)[0])
    # What is None here, JAX finds by the scheduler's variables.
    jax.distributed.initialize(
        address,
        place.num_processes,
        place.process_index,
        place.local_device_ids,
        cluster_detection_method=None if address is None else "deactivate",
        coordinator_bind_address=address if local else None,
        **timeouts,
    )


def _end_on_error() -> None:
    """Let an exception that nobody catches end this process when Python ends.

    JAX's own end waits for all processes, for minutes, and those may be waiting for this one in a collective.
    """
    codes: list[int] = []
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        codes.append(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end() -> None:
        if codes:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[-1])

    sys.excepthook = hook
    atexit.register(
        end
    )  # after those of JAX and `progress`, which wait for the others, so it runs before them


def _again(num_processes: int | None, process_id: int | None) -> Startup:
    """What a second call returns; it starts the backend, which alone knows."""
    here = (jax.process_count(), jax.process_index())
    for name, asked, actual in zip(
        ("num_processes", "process_id"), (num_processes, process_id), here, strict=True
    ):
        if asked is not None and asked != actual:
            raise ValueError(
                f"starting with {name}={asked}: the processes have been started already, with {actual}. A program can "
                f"be started once: leave out the second call, or its arguments."
            )
    return Startup("started before", here[1], here[0], num_restarts=num_restarts(os.environ))


def _say(startup: Startup) -> None:
    where = f", coordinator {startup.coordinator_address}" if startup.coordinator_address else ""
    line = (
        f"zero2jax: process {startup.process_index} of {startup.num_processes}, found by {startup.source}{where}"
        + (f", restart {startup.num_restarts}" if startup.num_restarts else "")
    )
    _logger.info(line)
    if startup.process_index == 0:
        print(line, file=sys.stderr, flush=True)
