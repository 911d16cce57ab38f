"""Options of XLA's compiler. Which of them the installed one takes is asked, not looked up by version."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

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
