"""Where a process learns of the others: arguments, or the variables that launchers and schedulers set. Pure functions.

`find_place` reads a mapping such as `os.environ` and starts nothing; `start` does, by what it returns. The first of
these that is there counts:

1. arguments (all three);
2. `zero2jax launch`, or torchrun: they start the processes themselves, inside of whatever a scheduler started;
3. Open MPI, Slurm, MVAPICH, MPICH and Intel MPI, Flux, jsrun; PALS and PMIx with `WORLD_SIZE`;
4. `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; `WORLD_SIZE` and `RANK`, as DeepSpeed and Kubernetes operators for PyTorch
   set them;
5. an indexed Kubernetes job, whose size only the cluster's API knows;
6. `NNODES` and `NODE_RANK`: a process per host;
7. nothing: a single process.

Where some variables of a set are there and the others are not, `find_place` refuses and names both: processes that each
believe to be alone would overwrite each other's files. `WORLD_SIZE=1` says that a process is alone.

A single process starts nothing, wherever it learnt that it is alone, unless by arguments or `zero2jax launch`: then it,
too, uses the collectives of several processes, and computes the same bits as they do.

The coordinator's address is `JAX_COORDINATOR_ADDRESS`, else `MASTER_ADDR:MASTER_PORT`, else what the scheduler tells:
for Slurm the first host of the step and a port made from the job's number, as JAX makes it; under Open MPI 4 and
Kubernetes JAX finds it (`coordinator_address` is None here).
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero2jax.processes.addresses import (
    DEFAULT_PORT,
    checked_port,
    grpc_proxy,
    is_loopback,
    join_address,
    parse_coordinator,
    split_address,
)
from zero2jax.processes.launcher_variables import (
    BY_HAND,
    HOSTS,
    JAX,
    LAUNCH,
    OPEN_MPI,
    SCHEDULERS,
    SLURM,
    STARTERS,
    VARIABLES,
    Family,
    first_set,
    read_number,
)

_SINGLE = "single process"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a process knows of its place among the others before it talks to them.

    `source` says where from, for people. `num_processes` is None where only JAX can find it (Kubernetes), as is
    `coordinator_address`, "host:port". `local_device_ids` None means all devices that are visible; `num_hosts` is
    None if nothing tells.
    """

    source: str
    process_index: int = 0
    num_processes: int | None = 1
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    num_hosts: int | None = None
    distributed: bool = True


def find_place(
    env: Mapping[str, str],
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: tuple[int, ...] | None = None,
) -> Place:
    """What arguments and variables say, checked for what would otherwise hang.

    Raises:
      ValueError: some arguments are missing; variables are no numbers, contradict each other, or name an index that
        is not below the count; a loopback address with several hosts; a proxy between a process and the coordinator;
        no address.
    """
    arguments = (coordinator_address, num_processes, process_id)
    if any(x is not None for x in arguments):
        names = ("coordinator_address", "num_processes", "process_id")
        missing = [name for name, x in zip(names, arguments, strict=True) if x is None]
        if missing:
            raise ValueError(
                f"starting processes by arguments: {' and '.join(missing)} not given. Pass all of {', '.join(names)}, "
                f"or none of them to have them read from the environment."
            )
        place = Place(
            source="arguments",
            process_index=process_id or 0,
            num_processes=num_processes,
            coordinator_address=coordinator_address,
        )
    else:
        place = _from_environment(env)
    if local_device_ids is not None:
        place = replace(place, local_device_ids=local_device_ids)
    _check(place, env)
    return place


def _from_environment(env: Mapping[str, str]) -> Place:
    for family in STARTERS:
        if family.is_set(env):
            return _from_family(family, env)
    by_hand = [family for family in BY_HAND if family.is_set(env)]
    alone = any(env.get(name) == "1" for family in BY_HAND for name in family.counts)
    schedulers = [family for family in SCHEDULERS if family.is_set(env)]
    if alone or VARIABLES in by_hand:  # a number that the user gives is for where there is no RANK
        schedulers = [family for family in schedulers if family.counts != VARIABLES.counts]
    for ours in by_hand:
        for theirs in (*schedulers[:1], *by_hand[:1]):
            _check_agreement(ours, theirs, env)
    # A shell inside of a one-task step is no reason not to believe variables that say more.
    several = [family for family in (*schedulers, *by_hand) if _count(family, env) > 1]
    for family in (*several, *by_hand, *schedulers):
        return _from_family(family, env)
    if _is_kubernetes_job(env):
        return Place(
            source="Kubernetes",
            process_index=read_number(env, "JOB_COMPLETION_INDEX"),
            num_processes=None,
            coordinator_address=_address(None, env),
        )
    if alone:
        return Place(source=_SINGLE, distributed=False)
    others = {f: signs for f in (*BY_HAND, *SCHEDULERS) if (signs := f.signs_in(env))}
    if HOSTS.is_set(env) and all(signs == (f.coordinator,) for f, signs in others.items()):
        return _from_family(HOSTS, env)
    others |= {HOSTS: signs} if (signs := HOSTS.signs_in(env)) else {}
    if others:
        raise ValueError(_incomplete(others, env))
    tasks = first_set(env, SLURM.counts)
    if tasks is not None and read_number(env, tasks) > 1:
        source = f"{_SINGLE} (in a Slurm job of {env[tasks]} tasks, without srun)"
        return Place(source=source, distributed=False)
    return Place(source=_SINGLE, distributed=False)


def _incomplete(found: Mapping[Family, tuple[str, ...]], env: Mapping[str, str]) -> str:
    said = ", ".join(dict.fromkeys(f"{name}={env[name]}" for signs in found.values() for name in signs))
    missing = "; ".join(
        f"{' and '.join(signs)} without {' and '.join(family.missing(env))}"
        for family, signs in found.items()
    )
    return (
        f"reading the environment: {said} tell that this is one of several processes, and not which of how many: "
        f"{missing}. Processes that each believe to be alone overwrite each other's files. Set what is missing, and "
        f"MASTER_ADDR, for every process; or pass coordinator_address=, num_processes= and process_id=; or set "
        f"WORLD_SIZE=1 if this process is to train alone."
    )


def _count(family: Family, env: Mapping[str, str]) -> int:
    return read_number(env, first_set(env, family.counts) or family.counts[0])


def _from_family(family: Family, env: Mapping[str, str]) -> Place:
    count_name, index_name = (first_set(env, names) or names[0] for names in (family.counts, family.indices))
    count, index = read_number(env, count_name), read_number(env, index_name)
    local_count, num_hosts = (
        None if name is None else read_number(env, name)
        for name in (first_set(env, family.local_counts), first_set(env, family.num_hosts))
    )
    if num_hosts is None and local_count:
        num_hosts = -(-count // local_count)
    elif local_count is None and num_hosts:
        local_count = -(-count // num_hosts)
    if not 0 <= index < count:
        raise ValueError(
            f"reading {count_name}={env[count_name]} and {index_name}={env[index_name]}: the index of a "
            f"process counts from 0 and must be below the number of processes. Correct the variable that is wrong."
        )
    if count == 1 and family is not LAUNCH:
        return Place(source=f"{_SINGLE} ({family.source})", distributed=False)
    return Place(
        source=family.source,
        process_index=index,
        num_processes=count,
        coordinator_address=_address(family, env),
        local_device_ids=_local_device_ids(family, env, local_count),
        num_hosts=num_hosts,
    )


def _check_agreement(ours: Family, theirs: Family, env: Mapping[str, str]) -> None:
    pairs = [
        (first_set(env, a) or a[0], first_set(env, b) or b[0])
        for a, b in ((ours.counts, theirs.counts), (ours.indices, theirs.indices))
    ]
    if _count(theirs, env) > 1 and any(read_number(env, a) != read_number(env, b) for a, b in pairs):
        said = " and ".join(f"{name}={env[name]}" for group in zip(*pairs, strict=True) for name in group)
        raise ValueError(
            f"reading {said}: these variables and {theirs.source}'s contradict each other, and processes that believe "
            f"different ones wait for each other forever. Unset {ours.source} to go by {theirs.source}, or pass "
            f"coordinator_address=, num_processes= and process_id=."
        )


def _address(family: Family | None, env: Mapping[str, str]) -> str | None:
    """The coordinator as "host:port", or None if JAX has to find it."""
    if "JAX_COORDINATOR_ADDRESS" in env:
        return env["JAX_COORDINATOR_ADDRESS"]
    if env.get("MASTER_ADDR"):
        host, port = parse_coordinator(env["MASTER_ADDR"])
        if port is not None:
            raise ValueError(
                f"reading MASTER_ADDR={env['MASTER_ADDR']}: it is the name or address of a host, without a port. Set "
                f"MASTER_PORT={port}."
            )
        port = read_number(env, "MASTER_PORT") if "MASTER_PORT" in env else DEFAULT_PORT
        # torchrun's own store listens on MASTER_PORT for as long as the processes run.
        taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and family is not LAUNCH
        said = f"MASTER_PORT={port}" + (", and the port after it, as torchrun uses that one" if taken else "")
        return join_address(host, checked_port(port + 1 if taken else port, said))
    if family is SLURM:
        port = 61440 + read_number(env, "SLURM_JOB_ID") % 4096
        return join_address(first_slurm_host(env["SLURM_STEP_NODELIST"]), port)
    if family is None:
        return None
    if family is OPEN_MPI and ("OMPI_MCA_orte_hnp_uri" in env or importlib.util.find_spec("mpi4py")):
        return None
    variable = (
        "JAX_COORDINATOR_ADDRESS"
        if family is JAX
        else f"MASTER_ADDR (and MASTER_PORT, default {DEFAULT_PORT})"
    )
    raise ValueError(
        f"starting {_count(family, env)} processes by {family.source}: no coordinator. Set {variable} "
        f"to the host of process 0 for all of them" + (", or install mpi4py." if family is OPEN_MPI else ".")
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm list: `node001` of `node[001-004,007],login1`.

    Raises:
      ValueError: the list names no host.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[^\s\[\]]+", host):
        raise ValueError(
            f"reading Slurm's list of hosts {nodes!r}: it names no host. Set MASTER_ADDR to process 0's."
        )
    return host


def _local_device_ids(
    family: Family, env: Mapping[str, str], local_count: int | None
) -> tuple[int, ...] | None:
    """One device per process where several share a host, unless the launcher has already divided them."""
    divided = len(env.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    if family is LAUNCH or divided or local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in env:
        return None
    name = first_set(env, family.local_indices)
    return None if name is None else (read_number(env, name),)


def _is_kubernetes_job(env: Mapping[str, str]) -> bool:
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(env) or env.get("WORLD_SIZE") == "1":
        return False
    if importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"starting as pod {env['JOB_COMPLETION_INDEX']} of an indexed Kubernetes job: JAX asks the cluster for the "
            f"others through the package `kubernetes`, which is not installed. Install jax[k8s]; or set MASTER_ADDR, "
            f"WORLD_SIZE and RANK, as the manifest of `zero2jax launch --print k8s` does; or WORLD_SIZE=1 if each pod "
            f"trains alone."
        )
    return True


def _check(place: Place, env: Mapping[str, str]) -> None:
    count = place.num_processes
    if count is not None and not 0 <= place.process_index < count:
        raise ValueError(
            f"starting process {place.process_index} of {count}: the index of a process counts from 0 and must be "
            f"below the number of processes. Correct process_id or num_processes."
        )
    if place.coordinator_address is None:
        return
    host, _ = split_address(place.coordinator_address)
    if is_loopback(host) and (place.num_hosts or 1) > 1:
        raise ValueError(
            f"starting {count} processes on {place.num_hosts} hosts: the coordinator's address "
            f"{place.coordinator_address} is a loopback address, where each host finds only itself. Give the "
            f"address of process 0's host that the others can reach (MASTER_ADDR)."
        )
    proxy = grpc_proxy(host, env)
    if proxy:
        raise ValueError(
            f"starting with coordinator {place.coordinator_address}: gRPC would go to it through the proxy of "
            f"{proxy}={env[proxy]} and fail, or hang. Run `export no_proxy=$no_proxy,{host}` first, or unset {proxy}."
        )
