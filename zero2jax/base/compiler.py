"""Options of XLA's compiler. Which of them the installed one takes is asked, not looked up by version."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

GPU_PLATFORMS = ("gpu", "cuda")


def refusal(options: Mapping[str, Any], device: jax.Device) -> str | None:
    """What the compiler for a device says against options of one program; None if it takes them. Compiles a product."""
    # as large as those for which the compiler of a GPU chooses a kernel
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x @ x, compiler_options=dict(options)).lower(matrix).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def for_automatic_axes(mesh: Mesh, manual: Collection[str]) -> dict[str, str]:
    """What the compiler of simulated devices has to be told of a program that is manual over some axes of a mesh.

    Beside an automatic axis the reducer of a sum in bf16 that a loss function makes (a `psum`, the backward pass of a
    `shard_map` of its own) holds a sharding constraint, which becomes a copy, at which XLA's pass AllReducePromotion
    ends the process. Without it a later pass, float normalization, computes that sum in fp32 just the same.
    """
    if mesh.devices.flat[0].platform != "cpu" or set(mesh.axis_names) <= set(manual):
        return {}
    return {"xla_disable_hlo_passes": "all-reduce-promotion"}
