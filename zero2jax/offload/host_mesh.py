"""The mesh of the host: a CPU device of the same process in the place of each device. Before any program."""

import collections

import jax
import numpy as np
from jax.sharding import Mesh

from zero2jax.base.memories import HOST_MEMORY, has_host_memory, memory_kinds
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.settings import StepSettings


def host_mesh(mesh: Mesh, settings: OffloadSettings, step: StepSettings) -> Mesh:
    """A mesh of CPU devices with the axes of `mesh`, each in the process of the device in whose place it is.

    A mesh of CPU devices is its own, and so is one of devices that are only compiled for, if `settings` name no others;
    and any mesh whose devices update what lies in their pinned host memory.

    Raises:
      TypeError: the settings are none.
      ValueError: parameters are to lie on the host, and the step is not one of stage 3; a process has fewer CPU devices
        than devices in the mesh; the devices have no pinned host memory.
    """
    if not isinstance(settings, OffloadSettings):
        raise TypeError(
            f"offloading to host memory: offload is {settings!r}; it is zero2jax.OffloadSettings(), with all of its "
            f"defaults if need be, or None."
        )
    if settings.params and (step.stage != 3 or step.axes.rest_over_replicas):
        where = f"at stage {step.stage}" if step.stage != 3 else "with shard_over_replicas"
        raise ValueError(
            f"offloading parameters (OffloadSettings(params=True)) {where}: each is fetched and gathered where it is "
            f"used, which stage 3 does, and the shards of a group lie in its own devices' hosts. Use stage=3, without "
            f"shard_over_replicas, or params=False."
        )
    pinned = settings.params or settings.update_on == "device"
    if pinned and not has_host_memory(mesh):
        raise ValueError(
            f"offloading to pinned host memory: the devices have the memories {memory_kinds(mesh)} and no "
            f"{HOST_MEMORY!r}. Use a newer jax, or OffloadSettings() without update_on and params."
        )
    if settings.update_on == "device":
        return mesh
    local = mesh.local_devices or list(mesh.devices.flat)
    if settings.host_devices is None and (local[0].platform == "cpu" or not local[0].addressable_memories()):
        return mesh
    found = jax.devices("cpu") if settings.host_devices is None else settings.host_devices
    free: dict[int, list[jax.Device]] = collections.defaultdict(list)
    for device in found:
        free[device.process_index].append(device)
    wanted = collections.Counter(d.process_index for d in mesh.devices.flat)
    short = {process: n for process, n in wanted.items() if len(free[process]) < n}
    if short:
        process, n = next(iter(short.items()))
        raise ValueError(
            f"offloading to host memory: process {process} has {n} devices in the mesh and {len(free[process])} CPU "
            f"devices, and the state of each device is stored with a CPU device of its own. Call "
            f'jax.config.update("jax_num_cpu_devices", {n}) before anything else uses jax, or set '
            f"JAX_NUM_CPU_DEVICES={n}; or run a process per device."
        )
    of_process = {process: iter(devices) for process, devices in free.items()}
    twins = np.empty(mesh.devices.shape, object)
    for index, device in np.ndenumerate(mesh.devices):
        twins[index] = next(of_process[device.process_index])
    return Mesh(twins, mesh.axis_names, axis_types=mesh.axis_types)
