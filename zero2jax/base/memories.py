"""The memories of a device: its own, and the pinned memory of its host. Global arrays, or per-device code.

An array in the host's memory is computed with by nobody: it is sliced there, and brought to the device. XLA plans these
transfers like other work.
"""

import os
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding

HOST_MEMORY = "pinned_host"
"""The memory kind of what waits on the host: on a GPU, and on simulated CPU devices."""


PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""What XLA's client of the GPUs reads when it starts: GiB of pinned host memory of the process; 64 by default."""


def pinned_limit_bytes(env: Mapping[str, str] = os.environ) -> int | None:
    """Pinned host memory that XLA gives this process on GPUs; None if the variable says no number."""
    text = env.get(PINNED_LIMIT, "64").strip()
    return int(text) << 30 if text.isdecimal() else None


def locked_limit_bytes() -> int | None:
    """What the system lets this process lock (`ulimit -l`); None for as much as it likes."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def to_device(x: jax.Array) -> jax.Array:
    """`x` in the memory of the device that computes; inside of a program."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: jax.Array) -> jax.Array:
    """`x` in the pinned memory of its device's host; inside of a program."""
    return jax.device_put(x, jax.memory.Space.Host)


def memory_kinds(mesh: Mesh) -> list[str]:
    """The kinds of memory that the devices of this process have; none for devices that are only compiled for."""
    devices = mesh.local_devices or list(mesh.devices.flat)
    return sorted({memory.kind for device in devices for memory in device.addressable_memories()})


def has_host_memory(mesh: Mesh) -> bool:
    """Whether there is pinned host memory; devices that are only compiled for do not say, and GPUs have it."""
    kinds = memory_kinds(mesh)
    return HOST_MEMORY in kinds or (not kinds and mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm"))


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in pinned host memory.

    Devices that are only compiled for know no memories, and jax drops a kind that they lack: their abstract mesh, which
    is as good for shapes, keeps it.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and not memory_kinds(mesh):
        return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=HOST_MEMORY)
    return sharding.with_memory_kind(HOST_MEMORY)
