"""What an engine is told about offloading. No arrays."""

import dataclasses

import jax

from zero2jax.base.checks import is_positive, is_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Masters and optimizer state of an engine are stored in host memory, and updated there or on the devices.

    Attributes:
      update_on: "host", whose CPU updates: gradients go down, 16-bit parameters come up; or "device": the state lies in
        pinned host memory, and comes up and goes down again a chunk at a time.
      params: at stage 3, 16-bit parameters lie in pinned host memory, too, and each is fetched where it is used.
      ratio: part of the masters' and the optimizer state's bytes that the host stores and updates, above 0 and at most
        1; leaves in the order of the parameters, as near to it as leaves allow. The devices keep and update the others.
      chunk_bytes: what moves, moves in chunks of leaves that have about this many bytes of masters per device, at least
        a leaf; where the optimizer ties all leaves together, in one. Devices that update take larger leaves apart, too,
        into blocks of their leading dim, if the optimizer is elementwise.
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

    update_on: str = "host"
    params: bool = False
    ratio: float = 1.0
    chunk_bytes: int = 2**28
    host_devices: tuple[jax.Device, ...] | None = None

    def __post_init__(self) -> None:
        if self.update_on not in ("host", "device"):
            raise ValueError(
                f"reading the offload settings: update_on is {self.update_on!r}; it is 'host', where the CPU "
                f"updates, or 'device'."
            )
        if not isinstance(self.params, bool):
            raise ValueError(f"reading the offload settings: params is {self.params!r}; it is True or False.")
        if not (is_positive(self.ratio) and self.ratio <= 1):
            raise ValueError(
                f"reading the offload settings: ratio is {self.ratio!r}; it lies above 0 and at most at 1. Without "
                f"offloading, pass no settings."
            )
        if not (is_whole(self.chunk_bytes) and self.chunk_bytes >= 1):
            raise ValueError(
                f"reading the offload settings: chunk_bytes is {self.chunk_bytes!r}; it is a whole number of bytes, at "
                f"least 1."
            )
