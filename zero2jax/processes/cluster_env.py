"""Where a process learns of the others: arguments, or the variables that launchers and schedulers set. Pure functions.

`find_place` reads a mapping such as `os.environ` and starts nothing; `start` does, by what it returns. The first of
these that is there counts:

1. arguments (all three);
2. `zero2jax launch`, or torchrun: they start the processes themselves, inside of whatever a scheduler started;
3. Open MPI, Slurm, MPICH and Intel MPI;
4. `WORLD_SIZE` and `RANK`, as DeepSpeed and Kubernetes operators for PyTorch set them;
5. an indexed Kubernetes job, whose size only the cluster's API knows;
6. nothing: a single process.

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

from zero2jax.processes.addresses import DEFAULT_PORT, grpc_proxy, is_loopback, join_address, split_address

RESTARTS = "ZERO2JAX_RESTARTS"  # set by `zero2jax launch`: how often it has started the processes anew
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


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The variables of one launcher: number of processes, this process's index, and both on this host alone."""

    source: str
    count: str
    index: str
    local_index: str
    local_counts: tuple[str, ...] = ()
    num_hosts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def is_set(self, env: Mapping[str, str]) -> bool:
        return all(name in env for name in (self.count, self.index, *self.needs))


_VARIABLES = _Family(
    source="WORLD_SIZE and RANK",
    count="WORLD_SIZE",
    index="RANK",
    local_index="LOCAL_RANK",
    local_counts=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
)
_LAUNCH = replace(_VARIABLES, source="zero2jax launch", local_counts=("LOCAL_WORLD_SIZE",), needs=(RESTARTS,))
_TORCHRUN = replace(
    _VARIABLES, source="torchrun", local_counts=("LOCAL_WORLD_SIZE",), needs=("TORCHELASTIC_RUN_ID",)
)
_OPEN_MPI = _Family(
    source="Open MPI",
    count="OMPI_COMM_WORLD_SIZE",
    index="OMPI_COMM_WORLD_RANK",
    local_index="OMPI_COMM_WORLD_LOCAL_RANK",
    local_counts=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
_SLURM = _Family(
    source="Slurm",
    count="SLURM_NTASKS",
    index="SLURM_PROCID",
    local_index="SLURM_LOCALID",
    num_hosts=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    needs=("SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
)
_PMI = _Family(
    source="MPI",
    count="PMI_SIZE",
    index="PMI_RANK",
    local_index="MPI_LOCALRANKID",
    local_counts=("MPI_LOCALNRANKS",),
)
_SCHEDULERS = (_OPEN_MPI, _SLURM, _PMI)


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
    for family in (_LAUNCH, _TORCHRUN):
        if family.is_set(env):
            return _from_family(family, env)
    schedulers = [family for family in _SCHEDULERS if family.is_set(env)]
    if schedulers and _VARIABLES.is_set(env):
        _check_agreement(schedulers[0], env)
    # A shell inside of a one-task step is no reason not to believe variables that say more.
    family = next(
        (f for f in schedulers if _number(env, f.count) > 1 or not _VARIABLES.is_set(env)), _VARIABLES
    )
    if family.is_set(env):
        return _from_family(family, env)
    if _is_kubernetes_job(env):
        index = _number(env, "JOB_COMPLETION_INDEX")
        address = _address(None, env)
        return Place(
            source="Kubernetes", process_index=index, num_processes=None, coordinator_address=address
        )
    return Place(source=_SINGLE, distributed=False)


def _from_family(family: _Family, env: Mapping[str, str]) -> Place:
    count, index = _number(env, family.count), _number(env, family.index)
    local_count = next((_number(env, name) for name in family.local_counts if name in env), None)
    num_hosts = next((_number(env, name) for name in family.num_hosts if name in env), None)
    if num_hosts is None and local_count:
        num_hosts = -(-count // local_count)
    elif local_count is None and num_hosts:
        local_count = -(-count // num_hosts)
    if not 0 <= index < count:
        raise ValueError(
            f"reading {family.count}={env[family.count]} and {family.index}={env[family.index]}: the index of a "
            f"process counts from 0 and must be below the number of processes. Correct the variable that is wrong."
        )
    if count == 1 and family is not _LAUNCH:
        return Place(source=f"{_SINGLE} ({family.source})", distributed=False)
    return Place(
        source=family.source,
        process_index=index,
        num_processes=count,
        coordinator_address=_address(family, env),
        local_device_ids=_local_device_ids(family, env, local_count),
        num_hosts=num_hosts,
    )


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", env[name]):
        raise ValueError(f"reading {name}={env[name]!r}: it must be a whole number. Correct or unset it.")
    return int(env[name])


def _check_agreement(family: _Family, env: Mapping[str, str]) -> None:
    pairs = ((_VARIABLES.count, family.count), (_VARIABLES.index, family.index))
    values = [(_number(env, ours), _number(env, theirs)) for ours, theirs in pairs]
    if values[0][1] > 1 and any(ours != theirs for ours, theirs in values):
        said = " and ".join(
            f"{name}={env[name]}" for name in (_VARIABLES.count, _VARIABLES.index, family.count, family.index)
        )
        raise ValueError(
            f"reading {said}: these variables and {family.source}'s contradict each other, and processes that believe "
            f"different ones wait for each other forever. Unset WORLD_SIZE and RANK to go by {family.source}, or pass "
            f"coordinator_address=, num_processes= and process_id=."
        )


def _address(family: _Family | None, env: Mapping[str, str]) -> str | None:
    """The coordinator as "host:port", or None if JAX has to find it."""
    if "JAX_COORDINATOR_ADDRESS" in env:
        return env["JAX_COORDINATOR_ADDRESS"]
    if env.get("MASTER_ADDR"):
        port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else DEFAULT_PORT
        # torchrun's own store listens on MASTER_PORT for as long as the processes run.
        taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and family is not _LAUNCH
        return join_address(env["MASTER_ADDR"], port + 1 if taken else port)
    if family is _SLURM:
        port = 61440 + _number(env, "SLURM_JOB_ID") % 4096
        return join_address(first_slurm_host(env["SLURM_STEP_NODELIST"]), port)
    if family is None:
        return None
    if family is _OPEN_MPI and ("OMPI_MCA_orte_hnp_uri" in env or importlib.util.find_spec("mpi4py")):
        return None
    raise ValueError(
        f"starting {env[family.count]} processes by {family.source}: no coordinator. Set MASTER_ADDR (and MASTER_PORT, "
        f"default {DEFAULT_PORT}) to the host of process 0 for all of them"
        + (", or install mpi4py." if family is _OPEN_MPI else ".")
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm list: `node001` of `node[001-004,007],login1`."""
    prefix, number, suffix = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes).groups(  # type: ignore[union-attr]
        default=""
    )
    return f"{prefix}{number}{suffix}"


def _local_device_ids(
    family: _Family, env: Mapping[str, str], local_count: int | None
) -> tuple[int, ...] | None:
    """One device per process where several share a host, unless the launcher has already divided them."""
    divided = len(env.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    if family is _LAUNCH or divided or local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in env:
        return None
    return (_number(env, family.local_index),) if family.local_index in env else None


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
