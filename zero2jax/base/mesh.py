"""Device meshes with Auto axes, and the checks every other module makes of a mesh.

`jax.make_mesh` makes Explicit axes by default; sharding constraints, on which the optimizer step relies, need
Auto ones. The axis that state is sharded over is called `data` everywhere. An axis `replica` makes groups of devices
(hosts, say) that each hold the state; `DataAxes` says how. Further axes (`model`, ...) stay automatic and belong to the
user.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Never

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.checks import is_whole, type_name

DATA_AXIS = "data"
REPLICA_AXIS = "replica"
MODEL_AXIS = "model"

AxisName = str | tuple[str, ...]
"""One mesh axis, or several as an entry of a PartitionSpec joins them, the first outermost."""


@dataclasses.dataclass(frozen=True)
class DataAxes:
    """The mesh axes that the batch is sharded over, and those that the state at rest is sharded over.

    Without a replica axis both are the data axis. With one, parameters are still gathered and gradients scattered over
    the data axis only, inside a group; what crosses groups is a shard of the gradients, once per step.

      state over each group       12 P / N bytes at rest (MiCS, arXiv:2205.00119; hybrid sharding in PyTorch's FSDP)
      state over all devices      12 P / (N R) at rest, and P / N parameters in the compute dtype during the step,
                                  gathered over the groups once (like the secondary partition of ZeRO++,
                                  arXiv:2306.10209, section 4.1)

    Attributes:
      shard: the data axis, of size N.
      replica: the axis of the groups, of size R, or None.
      rest_over_replicas: the state at rest is sharded over the groups too.
    """

    shard: str = DATA_AXIS
    replica: str | None = None
    rest_over_replicas: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the groups first."""
        return (self.shard,) if self.replica is None else (self.replica, self.shard)

    @property
    def batch(self) -> AxisName:
        """What the leading dim of a batch is sharded over."""
        return self.shard if self.replica is None else self.names

    @property
    def rest(self) -> AxisName:
        """What the sharded dim of a leaf at rest is sharded over: inside a group first, then over the groups."""
        if self.rest_over_replicas and self.replica is not None:
            return (self.shard, self.replica)
        return self.shard


def data_axes(mesh: Mesh, axis_name: str = DATA_AXIS, *, rest_over_replicas: bool = False) -> DataAxes:
    """The data axes of a mesh, after `check_mesh`; an axis called `replica` makes groups.

    Raises:
      ValueError: the mesh cannot be used, or has no replica axis to shard the state over.
    """
    check_mesh(mesh, axis_name)
    replica = REPLICA_AXIS if REPLICA_AXIS in mesh.shape and axis_name != REPLICA_AXIS else None
    if rest_over_replicas and replica is None:
        raise ValueError(
            f"sharding the state over groups of devices: the mesh has the axes {dict(mesh.shape)} and none called "
            f"{REPLICA_AXIS!r}. Make one with zero2jax.make_mesh({REPLICA_AXIS}=..., {axis_name}=...)."
        )
    return DataAxes(axis_name, replica, rest_over_replicas)


def axis_size(mesh: Mesh, axes: AxisName) -> int:
    """The number of devices along one axis, or along several together."""
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))


def make_mesh(*unnamed: Never, devices: Sequence[jax.Device] | None = None, **axes: int) -> Mesh:
    """A mesh with the named axes, all of type Auto: `make_mesh(data=8)`, `make_mesh(data=4, model=2)`.

    Without axes, all devices lie on `data`. One axis may be -1: it takes the devices that the others leave.
    Fewer devices than there are is allowed (the first ones are taken), unless an axis is -1.

    Raises:
      ValueError: an axis size is not positive, or the axes need more devices than there are.
      TypeError: an axis without a name, or a size that is no whole number.
    """
    sizes_given = [*unnamed, *axes.values()]
    if unnamed or not all(is_whole(size) for size in sizes_given):
        raise TypeError(
            f"making a mesh of {', '.join(map(repr, sizes_given))}: every axis has a name, and its size is a whole "
            f"number. Write zero2jax.make_mesh(data=4), or zero2jax.make_mesh() for all devices."
        )
    available = list(jax.devices()) if devices is None else list(devices)
    axes = axes or {DATA_AXIS: -1}
    if sum(size == -1 for size in axes.values()) > 1 or any(
        size < 1 and size != -1 for size in axes.values()
    ):
        raise ValueError(
            f"making a mesh with axes {axes}: every axis size must be a positive number, and at most one may be -1 "
            f"(it takes the devices that the others leave)."
        )
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: len(available) // known if size == -1 else size for name, size in axes.items()}
    total = math.prod(sizes.values())
    if total > len(available) or total == 0 or (-1 in axes.values() and total != len(available)):
        product = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise ValueError(
            f"making a mesh of {product}: it needs {max(total, known)} devices, or a multiple of them, and there "
            f"are {len(available)}. Choose axes whose product fits; to simulate devices on a CPU, call "
            f'jax.config.update("jax_num_cpu_devices", {max(total, known)}) before anything else uses jax.'
        )
    grid = available[:total]
    if devices is None and total == len(available):
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    array = np.array(grid).reshape(tuple(sizes.values()))
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_mesh(mesh: Mesh, axis_name: str = DATA_AXIS) -> int:
    """The number of shards along `axis_name`, after checking that the mesh can be used here.

    Raises:
      TypeError: it is no mesh.
      ValueError: the mesh has no such axis, or an axis of it is not of type Auto.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"reading the mesh: found {type_name(mesh)}, expected a jax.sharding.Mesh. Make one with "
            f"zero2jax.make_mesh({axis_name}=...)."
        )
    if axis_name not in mesh.shape:
        others = [name for name in mesh.axis_names if name not in (REPLICA_AXIS, MODEL_AXIS)]
        meant = f"Pass axis_name={others[0]!r} if that is the one, or make" if others else "Make"
        raise ValueError(
            f"looking for axis {axis_name!r} in a mesh with axes {dict(mesh.shape)}: state is sharded over that axis, "
            f"so the mesh must have it. {meant} a mesh with zero2jax.make_mesh({axis_name}={mesh.size})."
        )
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"checking a mesh with axes {dict(mesh.shape)}: the axes {explicit} are not of type Auto, which the "
            f"sharding constraints of the optimizer step need. Make the mesh with zero2jax.make_mesh, or pass "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh."
        )
    return int(mesh.shape[axis_name])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds in full."""
    return NamedSharding(mesh, P())


def moved(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Global arrays on the devices of another mesh, shard by shard: what device i holds goes to device i of the other.

    All of them in one transfer, without a full copy of any; an array that lies there already is returned as it is, and
    one that is sharded in another way is sharded anew where it is, first.

    Args:
      arrays: each with a `NamedSharding`, or on one device.
      shardings: for each array, one over a mesh of the same shape.
    """
    arrays = [_sharded_like(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]
    shards: list[Any] = []
    targets: list[Any] = []
    for x, sharding in zip(arrays, shardings, strict=True):
        if not _lies(x, sharding):
            there = dict(zip(_devices(x), sharding.mesh.devices.flat, strict=True))  # type: ignore[union-attr]
            for shard in x.addressable_shards:
                shards.append(shard.data)
                targets.append(SingleDeviceSharding(there[shard.device], memory_kind=sharding.memory_kind))
    arrived = iter(jax.device_put(shards, targets) if shards else ())

    def rebuilt(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = [next(arrived) for _ in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    pairs = zip(arrays, shardings, strict=True)
    return [x if _lies(x, sharding) else rebuilt(x, sharding) for x, sharding in pairs]


def _lies(x: jax.Array, sharding: NamedSharding) -> bool:
    return x.sharding.is_equivalent_to(sharding, x.ndim)


def _devices(x: jax.Array) -> list[jax.Device]:
    own = x.sharding
    return list(own.mesh.devices.flat if isinstance(own, NamedSharding) else own.device_set)  # type: ignore[union-attr]


def _sharded_like(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array on its own devices, in its own memory, with the spec of a sharding."""
    own = x.sharding
    if not isinstance(own, NamedSharding) or own.spec == sharding.spec:
        return x
    wanted = NamedSharding(own.mesh, sharding.spec, memory_kind=own.memory_kind)
    return x if own.is_equivalent_to(wanted, x.ndim) else jax.device_put(x, wanted)


def padded_size(size: int, num_shards: int) -> int:
    """The smallest multiple of `num_shards` that is at least `size`."""
    return -(-size // num_shards) * num_shards
