"""What an engine is told about offloading. No arrays."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Masters and optimizer state of an engine are stored in host memory, and updated there.

    Attributes:
      host_devices: CPU devices that hold them, of each process as many as it has devices in the mesh; None takes those
        of JAX's CPU backend. Which they are decides no number.

    Example:
      >>> import jax.numpy as jnp, optax, zero2jax
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> settings = zero2jax.OffloadSettings()
      >>> engine = zero2jax.Engine(loss, optax.adam(1e-2), zero2jax.make_mesh(data=1), offload=settings)
      >>> state, metrics = engine.step(engine.init({"w": jnp.ones((4, 2))}), jnp.ones((8, 4)))
      >>> float(metrics["loss"])
      16.0
    """

    host_devices: tuple[jax.Device, ...] | None = None
