"""What in a process's environment will go wrong, or does not do what it looks like, and what to do about it.

For `zero2jax info`. Reads variables and limits of the system; starts nothing.
"""

import os
import resource
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zero2jax.base.tables import readable_bytes
from zero2jax.memory.configure import MemorySettings, client_options
from zero2jax.processes.addresses import grpc_proxy

_MOST_FRACTION = 0.95
_LEAST_LOCKED = 2**30
_LEAST_SHARED = 2**30


class Problem(NamedTuple):
    """What was seen, and the remedy."""

    what: str
    remedy: str


class System(NamedTuple):
    """What there is besides variables.

    Fields:
      has_gpus: whether the host has GPUs of NVIDIA.
      locked_bytes: memory that a process may lock; None for as much as it likes.
      shared_bytes: size of /dev/shm; None where there is none.
    """

    has_gpus: bool
    locked_bytes: int | None
    shared_bytes: int | None

    @classmethod
    def here(cls) -> "System":
        """Those of this host."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        try:
            shm = os.statvfs("/dev/shm")
            shared = shm.f_blocks * shm.f_frsize
        except OSError:
            shared = None
        gpus = Path("/proc/driver/nvidia/gpus").is_dir()
        return cls(gpus, None if soft == resource.RLIM_INFINITY else soft, shared)


def problems(env: Mapping[str, str], system: System) -> list[Problem]:
    """Everything that is worth a remedy, in an environment on a system."""
    return [*_memory(env), *_flags(env), *_network(env), *(_on_gpus(env, system) if system.has_gpus else ())]


def _memory(env: Mapping[str, str]) -> list[Problem]:
    try:
        settings = MemorySettings.of(env)
        if env is os.environ:
            client_options()
    except ValueError as error:
        return [
            Problem(str(error), "Correct these variables: a GPU's client refuses to start, or ignores them.")
        ]
    found = []
    if settings.fraction is not None and settings.fraction > _MOST_FRACTION:
        found.append(
            Problem(
                f"the pool is to have {settings.fraction:g} of each GPU's memory",
                "Lower it to 0.9: the CUDA context, NCCL, cuDNN and cuBLAS take theirs beside the pool, and fail late.",
            )
        )
    if env.get("TF_GPU_ALLOCATOR"):
        found.append(
            Problem(
                f"TF_GPU_ALLOCATOR={env['TF_GPU_ALLOCATOR']} is TensorFlow's, and jax does not read it",
                "Use zero2jax.configure_memory(allocator='cuda_async').",
            )
        )
    return found


def _flags(env: Mapping[str, str]) -> list[Problem]:
    """Flags of XLA that are given twice, of which the last one counts."""
    values: dict[str, list[str]] = {}
    for word in shlex.split(env.get("XLA_FLAGS", "")):
        name, _, value = word.partition("=")
        values.setdefault(name, []).append(value)
    return [
        Problem(f"XLA_FLAGS has {name} as {' and as '.join(given)}", "Keep one; the last one counts.")
        for name, given in values.items()
        if len(set(given)) > 1
    ]


def _network(env: Mapping[str, str]) -> list[Problem]:
    host = env.get("MASTER_ADDR") or socket.gethostname()
    proxy = grpc_proxy(host, env)
    if not proxy:
        return []
    return [
        Problem(
            f"a proxy stands between this process and a coordinator at {host}: {proxy}",
            f"Add {host} to no_proxy: processes would wait for each other until they give up.",
        )
    ]


def _on_gpus(env: Mapping[str, str], system: System) -> list[Problem]:
    found = []
    if env.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        found.append(Problem("JAX_PLATFORMS=cpu hides this host's GPUs", "Unset it to train on them."))
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found.append(Problem("CUDA_VISIBLE_DEVICES hides all of this host's GPUs", "Unset it, or name some."))
    if "cuda" in env.get("LD_LIBRARY_PATH", "").lower():
        found.append(
            Problem(
                "LD_LIBRARY_PATH names a CUDA of the system, which goes before the one that jax brings",
                "Unset it, unless jax was installed without CUDA (jax[cuda12-local]).",
            )
        )
    if system.locked_bytes is not None and system.locked_bytes < _LEAST_LOCKED:
        found.append(
            Problem(
                f"a process may lock {readable_bytes(system.locked_bytes)} of memory",
                "Raise it (ulimit -l unlimited, docker --ulimit memlock=-1): InfiniBand and pinned memory lock it.",
            )
        )
    if system.shared_bytes is not None and system.shared_bytes < _LEAST_SHARED:
        found.append(
            Problem(
                f"/dev/shm has {readable_bytes(system.shared_bytes)}",
                "Enlarge it (--shm-size=1g of docker): NCCL passes data of one host through it.",
            )
        )
    return found
