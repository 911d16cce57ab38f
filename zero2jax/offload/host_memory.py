"""Whether the memory of a host suffices, before anything is placed there. Arithmetic on shapes, and what Linux says."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from zero2jax.base.tables import readable_bytes
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.shard_plan import ShardPlan
from zero2jax.zero.state import Layout

MIB = 2**20


def state_bytes(layout: Layout, mesh: Mesh, *, resident: bool = False) -> tuple[int, int]:
    """(masters, optimizer state) that the host, or the device itself, stores for one device, padding included."""

    def stored(plan: ShardPlan, on_device: frozenset[int]) -> int:
        sizes = [leaf.rest_bytes // leaf.num_model_shards(mesh) for leaf in plan.leaves]
        return sum(size for i, size in enumerate(sizes) if (i in on_device) == resident)

    params = stored(layout.trained_params, layout.resident_params)
    return params, stored(layout.opt_state, layout.resident_state)


def transfer_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh) -> tuple[int, int]:
    """(gradients that go down, parameters that come up) per device and step, padding included."""
    down = up = 0
    for k, i in enumerate(settings.trained):
        if k in layout.resident_params:
            continue
        leaf = settings.plan.leaves[i]
        size = math.prod(leaf.rest_shape) // leaf.num_model_shards(mesh)
        size //= 1 if leaf.dim is None else leaf.num_shards
        down += size * int(settings.gradient_dtype(i).itemsize)
        up += size * int(settings.compute_dtype(i).itemsize)
    return down, up


def needed_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh) -> int:
    """What the devices of this process need on their host: the state, and a step's gradients and copies."""
    per_device = sum(state_bytes(layout, mesh)) + sum(transfer_bytes(layout, settings, mesh))
    return per_device * len(mesh.local_devices)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process can still have: the host's, or what is left of its container's; None if nobody says."""
    limits = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    for group in _groups(proc, cgroup):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text()) - _file_bytes(group)
                limits.append(int(limit) - used)
        except (OSError, ValueError):
            pass
    return min(limits, default=None)


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """The control groups that this process is in, from the root on: each may have a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        own = next(Path(line[3:].lstrip("/")) for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        own = Path()
    return [cgroup / parent for parent in reversed([own, *own.parents])]


def _file_bytes(cgroup: Path) -> int:
    """What a container counts of files that were read, and gives back where memory is wanted."""
    try:
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0


def memory_row(layout: Layout, settings: GradientSettings, mesh: Mesh) -> np.ndarray:
    """(MiB that this process needs, MiB available to it or -1), int32, for `check_hosts`."""
    available = available_bytes()
    needed = -(-needed_bytes(layout, settings, mesh) // MIB)
    return np.array([needed, -1 if available is None else available // MIB], np.int32)


def check_hosts(rows: np.ndarray, hosts: Sequence[str]) -> None:
    """Raise an error if the processes of a host need more than it has.

    Args:
      rows: the `memory_row` of each process.
      hosts: the name of each process's host.

    Raises:
      ValueError: they do; says how much, and where.
    """
    for host in dict.fromkeys(hosts):
        here = [row for row, name in zip(rows, hosts, strict=True) if name == host]
        needed, available = sum(int(n) for n, _ in here), min(int(a) for _, a in here)
        if 0 <= available < needed:
            raise ValueError(
                f"offloading to the memory of host {host}: masters, optimizer state, gradients and copies of its "
                f"{len(here)} process(es) take {readable_bytes(needed * MIB)}, and {readable_bytes(available * MIB)} "
                f"are available there. Use more hosts, a stage from 1 up (which shards the state), an optimizer with a "
                f"smaller state, or no offloading."
            )
