"""The variables by which launchers and schedulers tell a process its place, as tables. Data, and what reads it.

Where a launcher has several names for one thing, the first that is set counts. Sources: the manuals of Slurm's `srun`,
Open MPI's and MVAPICH's `mpirun`, Hydra (MPICH, Intel MPI), HPE's PALS, Flux, IBM's `jsrun`, torchrun.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

RESTARTS = "ZERO2JAX_RESTARTS"  # set by `zero2jax launch`: how often it has started the processes anew
COORDINATORS = ("JAX_COORDINATOR_ADDRESS", "MASTER_ADDR")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The variables of one launcher: number of processes, this process's index, and both on this host alone.

    `coordinator` is the variable of process 0's address that belongs to the family, `needs` what must be set, too.
    `signs` are those that no process has unless it was started as one of several.
    """

    source: str
    counts: tuple[str, ...]
    indices: tuple[str, ...]
    local_indices: tuple[str, ...] = ()
    local_counts: tuple[str, ...] = ()
    num_hosts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    coordinator: str | None = None
    signs: tuple[str, ...] | None = None

    def is_set(self, env: Mapping[str, str]) -> bool:
        """Whether nothing is missing."""
        return not self.missing(env)

    def missing(self, env: Mapping[str, str]) -> tuple[str, ...]:
        """What is not set of number, index and the variables needed besides, by its first name."""
        groups = (self.counts, self.indices, *((name,) for name in self.needs))
        return tuple(names[0] for names in groups if first_set(env, names) is None)

    def signs_in(self, env: Mapping[str, str]) -> tuple[str, ...]:
        """Which variables tell that this is one of several processes; a number of 1 does not."""
        own = (
            *self.counts,
            *self.indices,
            *self.local_indices,
            *((self.coordinator,) if self.coordinator else ()),
        )
        names = own if self.signs is None else self.signs
        return tuple(name for name in names if name in env and not (name in self.counts and env[name] == "1"))


def first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The first of the names that the environment has."""
    return next((name for name in names if name in env), None)


def read_number(env: Mapping[str, str], name: str) -> int:
    """The whole number that a variable holds.

    Raises:
      ValueError: it holds something else.
    """
    if not re.fullmatch(r"\s*\d{1,18}\s*", env[name]):
        raise ValueError(
            f"reading {name}={env[name]!r}: it must be a whole number, of 18 digits at most. Correct or unset it."
        )
    return int(env[name])


def num_restarts(env: Mapping[str, str]) -> int:
    """How often the processes were started anew; 0 where nothing tells, or Kubernetes has not said it yet.

    Raises:
      ValueError: the variable holds no number.
    """
    return read_number(env, RESTARTS) if env.get(RESTARTS) else 0


VARIABLES = Family(
    source="WORLD_SIZE and RANK",
    counts=("WORLD_SIZE",),
    indices=("RANK",),
    local_indices=("LOCAL_RANK",),
    local_counts=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    coordinator="MASTER_ADDR",
)
LAUNCH = replace(VARIABLES, source="zero2jax launch", local_counts=("LOCAL_WORLD_SIZE",), needs=(RESTARTS,))
TORCHRUN = replace(
    VARIABLES, source="torchrun", local_counts=("LOCAL_WORLD_SIZE",), needs=("TORCHELASTIC_RUN_ID",)
)
JAX = Family(
    source="JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    counts=("JAX_NUM_PROCESSES",),
    indices=("JAX_PROCESS_ID",),
    coordinator="JAX_COORDINATOR_ADDRESS",
)
# What scripts hand to torchrun; without it, a process per host.
HOSTS = Family(
    source="NNODES and NODE_RANK", counts=("NNODES",), indices=("NODE_RANK",), num_hosts=("NNODES",)
)
OPEN_MPI = Family(
    source="Open MPI",
    counts=("OMPI_COMM_WORLD_SIZE",),
    indices=("OMPI_COMM_WORLD_RANK",),
    local_indices=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_counts=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
SLURM = Family(
    source="Slurm",
    counts=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    indices=("SLURM_PROCID",),
    local_indices=("SLURM_LOCALID",),
    num_hosts=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    needs=("SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    signs=("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),  # an allocation has the others, too
)
MVAPICH = Family(
    source="MVAPICH",
    counts=("MV2_COMM_WORLD_SIZE",),
    indices=("MV2_COMM_WORLD_RANK",),
    local_indices=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_counts=("MV2_COMM_WORLD_LOCAL_SIZE",),
)
PMI = Family(
    source="MPI",
    counts=("PMI_SIZE",),
    indices=("PMI_RANK",),
    local_indices=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    local_counts=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)
FLUX = Family(
    source="Flux",
    counts=("FLUX_JOB_SIZE",),
    indices=("FLUX_TASK_RANK",),
    local_indices=("FLUX_TASK_LOCAL_ID",),
    num_hosts=("FLUX_JOB_NNODES",),
)
JSRUN = Family(
    source="jsrun",
    counts=("JSM_NAMESPACE_SIZE",),
    indices=("JSM_NAMESPACE_RANK",),
    local_indices=("JSM_NAMESPACE_LOCAL_RANK",),
    local_counts=("JSM_NAMESPACE_LOCAL_SIZE",),
)
# These two tell an index and no number, which the user gives.
PALS = Family(
    source="PALS",
    counts=("WORLD_SIZE",),
    indices=("PALS_RANKID",),
    local_indices=("PALS_LOCAL_RANKID",),
    local_counts=("PALS_LOCAL_SIZE",),
    signs=("PALS_RANKID", "PALS_LOCAL_RANKID"),
)
PMIX = Family(
    source="PMIx",
    counts=("WORLD_SIZE",),
    indices=("PMIX_RANK",),
    local_indices=("PMIX_LOCAL_RANK",),
    signs=("PMIX_RANK", "PMIX_LOCAL_RANK"),
)

STARTERS = (LAUNCH, TORCHRUN)  # they start the processes themselves, inside of whatever a scheduler started
BY_HAND = (JAX, VARIABLES)
SCHEDULERS = (OPEN_MPI, SLURM, MVAPICH, PMI, FLUX, JSRUN, PALS, PMIX)
