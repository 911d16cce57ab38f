"""Device meshes with Auto axes, and the checks every other module makes of a mesh.

`jax.make_mesh` makes Explicit axes by default; sharding constraints, on which the optimizer step relies, need
Auto ones. The axis that state is sharded over is called `data` everywhere; further axes (`model`, ...) stay
automatic and belong to the user.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA_AXIS = "data"
MODEL_AXIS = "model"


def make_mesh(*, devices: Sequence[jax.Device] | None = None, **axes: int) -> Mesh:
    """A mesh with the named axes, all of type Auto: `make_mesh(data=8)`, `make_mesh(data=4, model=2)`.

    Without axes, all devices lie on `data`. One axis may be -1: it takes the devices that the others leave.
    Fewer devices than there are is allowed (the first ones are taken), unless an axis is -1.

    Raises:
      ValueError: an axis size is not positive, or the axes need more devices than there are.
    """
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
      ValueError: the mesh has no such axis, or an axis of it is not of type Auto.
    """
    if axis_name not in mesh.shape:
        raise ValueError(
            f"looking for axis {axis_name!r} in a mesh with axes {dict(mesh.shape)}: state is sharded over that axis, "
            f"so the mesh must have it. Make one with zero2jax.make_mesh({axis_name}={mesh.size})."
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
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, P())
