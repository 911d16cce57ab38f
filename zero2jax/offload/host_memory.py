"""Whether the memory of a host suffices, before anything is placed there. Arithmetic on shapes, and what Linux says."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from zero2jax.base.memories import PINNED_LIMIT, locked_limit_bytes, pinned_limit_bytes
from zero2jax.base.tables import readable_bytes
from zero2jax.offload.parts import Split
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.shard_plan import ShardPlan
from zero2jax.zero.state import Layout

MIB = 2**20
IN_FLIGHT = 2
"""Chunks whose gradients and copies are in host memory at a time."""


def state_bytes(layout: Layout, mesh: Mesh, *, resident: bool = False) -> tuple[int, int]:
    """(masters, optimizer state) that the host, or the device itself, stores for one device, padding included."""

    def stored(plan: ShardPlan, on_device: frozenset[int]) -> int:
        sizes = [leaf.device_bytes(mesh) for leaf in plan.leaves]
        return sum(size for i, size in enumerate(sizes) if (i in on_device) == resident)

    params = stored(layout.trained_params, layout.resident_params)
    return params, stored(layout.opt_state, layout.resident_state)


def param_bytes(layout: Layout, mesh: Mesh) -> list[int]:
    """Masters of each trainable parameter on one device."""
    return [leaf.device_bytes(mesh) for leaf in layout.trained_params.leaves]


def transfer_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh) -> tuple[int, int]:
    """(what goes down, what comes up) per device and step, padding included.

    Gradients and parameters; or, where the devices update, the state both ways. Parameters that the loss fetches
    itself are counted by `fetched_bytes`.
    """
    exchanged = _exchanged(layout, settings, mesh).values()
    down, up = (sum(sizes) for sizes in zip(*exchanged, strict=True)) if exchanged else (0, 0)
    if layout.pinned_state:
        state = sum(state_bytes(layout, mesh))
        return state + (up if layout.pinned_params else 0), state
    return down, 0 if layout.pinned_params else up


def _exchanged(layout: Layout, settings: GradientSettings, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """(gradient, copy) in bytes per device of each trainable parameter whose master is on the host, by index."""
    sizes = {}
    for k, i in enumerate(settings.trained):
        leaf = settings.plan.leaves[i]
        elements = leaf.device_bytes(mesh) // int(leaf.dtype.itemsize)
        dtypes = settings.sum_dtype(i), settings.compute_dtype(i)
        if k not in layout.resident_params:
            sizes[k] = (elements * int(dtypes[0].itemsize), elements * int(dtypes[1].itemsize))
    return sizes


def pinned_param_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh) -> int:
    """Parameters in the computed dtype that lie in pinned host memory, per device."""
    copies = sum(up for _, up in _exchanged(layout, settings, mesh).values())
    return copies if layout.pinned_params else 0


def fetched_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh) -> int:
    """Parameters that come up for the loss in a step, per device, at most: for forward and again for backward."""
    return 2 * settings.step.num_microbatches * pinned_param_bytes(layout, settings, mesh)


def staged_bytes(
    layout: Layout, settings: GradientSettings, mesh: Mesh, split: Split | None, offload: OffloadSettings
) -> int:
    """Gradients and copies that are in host memory at a time, per device: those of two neighbouring chunks.

    A copy is written over its gradient if they have one dtype and nobody measures when the gradient is there.

    Args:
      layout: of the state.
      settings: of the step.
      mesh: of the devices.
      split: the parts of the update; None where they are not known: then all of them.
      offload: the settings.
    """
    if layout.pinned_state:
        return 0
    reused = lambda i: not offload.measure and settings.sum_dtype(i) == settings.compute_dtype(i)
    exchanged = _exchanged(layout, settings, mesh)
    sizes = {k: max(both) if reused(settings.trained[k]) else sum(both) for k, both in exchanged.items()}
    if split is None:
        return sum(sizes.values())
    chunks = split.only(frozenset(sizes)).joined(param_bytes(layout, mesh), offload.chunk_bytes).parts
    held = [sum(sizes[k] for k in chunk.params) for chunk in chunks]
    return max((sum(held[i : i + IN_FLIGHT]) for i in range(len(held))), default=0)


def needed_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh, staged: int) -> int:
    """What the devices of this process need on their host.

    The state, pinned parameters, and what is `staged` of a step's gradients and copies.
    """
    stored = sum(state_bytes(layout, mesh)) + pinned_param_bytes(layout, settings, mesh)
    return (stored + staged) * len(mesh.local_devices)


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


def memory_row(layout: Layout, settings: GradientSettings, mesh: Mesh, staged: int) -> np.ndarray:
    """(MiB that this process needs, MiB available to it or -1), int32, for `check_hosts`."""
    available = available_bytes()
    needed = -(-needed_bytes(layout, settings, mesh, staged) // MIB)
    return np.array([needed, -1 if available is None else available // MIB], np.int32)


def pinned_row(layout: Layout, settings: GradientSettings, mesh: Mesh) -> np.ndarray:
    """(MiB of pinned memory for this process's devices, MiB that XLA gives it or -1), int32, for `check_pinned`."""
    state = sum(state_bytes(layout, mesh)) if layout.pinned_state else 0
    needed = (state + pinned_param_bytes(layout, settings, mesh)) * len(mesh.local_devices)
    on_gpu = mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")
    limit = pinned_limit_bytes() if on_gpu else None
    return np.array([-(-needed // MIB), -1 if limit is None else limit // MIB], np.int32)


def check_pinned(rows: np.ndarray, hosts: Sequence[str]) -> None:
    """Raise an error if a process needs more pinned memory than XLA gives it.

    Args:
      rows: the `pinned_row` of each process.
      hosts: the name of each process's host.

    Raises:
      ValueError: it does; says how much, and what allows more.
    """
    for process, (row, host) in enumerate(zip(rows, hosts, strict=True)):
        needed, limit = (int(n) for n in row)
        if 0 <= limit < needed:
            locked = locked_limit_bytes()
            also = "" if locked is None else f" (and ulimit -l, {readable_bytes(locked)} here, above that)"
            raise ValueError(
                f"offloading to pinned host memory: process {process} (host {host}) stores "
                f"{readable_bytes(needed * MIB)} there, and XLA pins {readable_bytes(limit * MIB)} for it at most. Set "
                f"{PINNED_LIMIT}={-(-needed // 1024) + 8} before anything uses jax{also}. Or leave update_on and "
                f"params out of the OffloadSettings: what the CPU updates is not pinned."
            )


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
