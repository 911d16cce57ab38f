"""Whether local disks and hosts have room for a state in files, before anything is placed. Arithmetic on shapes.

Two states are on the disk: that of the last complete step, and the one that is being written.
"""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from zero2jax.base.tables import readable_bytes
from zero2jax.offload.host_memory import (
    IN_FLIGHT,
    MIB,
    available_bytes,
    pinned_param_bytes,
    staged_bytes,
    state_bytes,
)
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.state import Layout

NUM_STATES = 2


def num_chunks(settings: OffloadSettings, master_bytes: int, moment_bytes: int) -> int:
    """How many chunks may be in host memory, by `buffer_count`: each takes a buffer for its gradients, one for its
    masters, and of the same size as many as its optimizer state fills; 4 with Adam.
    """
    per_chunk = 2 + math.ceil(moment_bytes / max(1, master_bytes))
    return max(1, settings.buffer_count // per_chunk)


def held_bytes(layout: Layout, settings: GradientSettings, mesh: Mesh, offload: OffloadSettings) -> int:
    """Host memory for one device: the buffers for chunks, the new values of the one that is updated, and gradients and
    copies."""
    masters, moments = state_bytes(layout, mesh)
    largest = max((leaf.device_bytes(mesh) for leaf in layout.trained_params.leaves), default=0)
    chunk = min(1.0, (offload.chunk_bytes + largest) / max(1, masters))
    pinned = pinned_param_bytes(layout, settings, mesh)
    held = (min(1.0, num_chunks(offload, masters, moments) * chunk) + chunk) * (masters + moments)
    staged = staged_bytes(layout, settings, mesh, None, offload)
    return math.ceil(held + min(1.0, IN_FLIGHT * chunk) * staged) + pinned


def memory_row(
    layout: Layout, settings: GradientSettings, mesh: Mesh, offload: OffloadSettings
) -> np.ndarray:
    """(MiB that the devices of this process need, MiB available to it or -1), int32, for `check_hosts`."""
    available = available_bytes()
    needed = -(-held_bytes(layout, settings, mesh, offload) * len(mesh.local_devices) // MIB)
    return np.array([needed, -1 if available is None else available // MIB], np.int32)


def disk_row(num_bytes: int, folder: Path) -> np.ndarray:
    """(MiB that the files of this process take, MiB free where they will be), int32, for `check_disks`."""
    return np.array([-(-NUM_STATES * num_bytes // MIB), shutil.disk_usage(folder).free // MIB], np.int32)


def check_disks(rows: np.ndarray, hosts: Sequence[str], root: Path) -> None:
    """Raise an error if the files of a host's processes need more than its disk has free.

    Args:
      rows: the `disk_row` of each process.
      hosts: the name of each process's host.
      root: `nvme_path`.

    Raises:
      ValueError: they do; says how much, and where.
    """
    for host in dict.fromkeys(hosts):
        here = [row for row, name in zip(rows, hosts, strict=True) if name == host]
        needed, free = sum(int(n) for n, _ in here), min(int(a) for _, a in here)
        if free < needed:
            raise ValueError(
                f"offloading to the disk of host {host}: masters and optimizer state of its {len(here)} process(es) "
                f"take {readable_bytes(needed * MIB)} there, for the last complete step and the one that is being "
                f"written, and {readable_bytes(free * MIB)} are free at {root}. Delete what earlier runs left there, "
                f"give a larger disk (nvme_path), or use more hosts."
            )
