"""What an engine is told about offloading. No arrays."""

import dataclasses
import os

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
        "auto" is the smallest at which a device stores no more than `device_bytes`.
      device_bytes: for `ratio="auto"`, what each device may store between steps: 16-bit and frozen parameters, and the
        masters and optimizer state that stay. Gradients and activations come on top; `zero2jax plan` counts them.
      chunk_bytes: what moves, moves in chunks of leaves that have about this many bytes of masters per device, at least
        a leaf; where the optimizer ties all leaves together, in one. Devices that update take larger leaves apart, too,
        into blocks of their leading dim, if the optimizer is elementwise.
      nvme_path: a folder of a local disk, in whose files masters and optimizer state are stored instead; the host has
        of them what it updates. Of several processes each makes a folder of its own there.
      buffer_count: with `nvme_path`, how many buffers of the size of a chunk's masters the host has, as in DeepSpeed.
        A chunk with Adam takes 4, its gradients, masters and two moments; with 12 one is read and one is written
        while one is updated. With fewer than one chunk needs, it is one.
      delay_after: after this many steps of a state, the host updates while the devices compute the next step with the
        parameters before it: each gradient is then one update older. None for no delay. The devices have two sets of
        16-bit parameters then, and the host all gradients and copies of a step.
      measure: add measured bandwidths and the part of the step that offloading adds to the metrics, of this process and
        the step before, NaN where nothing is known: `offload_down_bytes_per_s`, `offload_up_bytes_per_s`,
        `offload_share`, with files `offload_read_bytes_per_s` and `offload_write_bytes_per_s`. Threads note when arrays
        are there; the step waits for none of it.
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
    ratio: float | str = 1.0
    device_bytes: int | None = None
    chunk_bytes: int = 2**28
    nvme_path: str | os.PathLike[str] | None = None
    buffer_count: int = 12
    delay_after: int | None = None
    measure: bool = False
    host_devices: tuple[jax.Device, ...] | None = None

    def __post_init__(self) -> None:
        if self.update_on not in ("host", "device"):
            raise ValueError(
                f"reading the offload settings: update_on is {self.update_on!r}; it is 'host', where the CPU "
                f"updates, or 'device'."
            )
        if not isinstance(self.params, bool):
            raise ValueError(f"reading the offload settings: params is {self.params!r}; it is True or False.")
        automatic = self.ratio == "auto"
        if not automatic and not (is_positive(self.ratio) and self.ratio <= 1):  # type: ignore[operator]
            raise ValueError(
                f"reading the offload settings: ratio is {self.ratio!r}; it lies above 0 and at most at 1, or is "
                f"'auto'. Without offloading, pass no settings."
            )
        if automatic != (self.device_bytes is not None):
            raise ValueError(
                f"reading the offload settings: ratio is {self.ratio!r} and device_bytes {self.device_bytes!r}; 'auto' "
                f"is chosen by device_bytes, and nothing else is. Give both or neither."
            )
        for name in ("chunk_bytes", "buffer_count", *(["device_bytes"] if automatic else [])):
            if not (is_whole(value := getattr(self, name)) and value >= 1):
                raise ValueError(
                    f"reading the offload settings: {name} is {value!r}; it is a whole number, at least 1."
                )
        delay = self.delay_after
        if delay is not None and not (is_whole(delay) and delay >= 0):
            raise ValueError(
                f"reading the offload settings: delay_after is {delay!r}; it is a number of steps, 0 or more, or None "
                f"for updates that are not delayed."
            )
        if self.update_on == "device" and not (self.nvme_path is None and delay is None and not self.measure):
            raise ValueError(
                "reading the offload settings: update_on is 'device', and nvme_path, delay_after or measure is given; "
                "those are of an update on the host. Leave them out, or update_on."
            )
        if delay is not None and self.nvme_path is not None:
            raise ValueError(
                "reading the offload settings: delay_after and nvme_path are both given; a step waits until its files "
                "are on the disk, so its update cannot run beside the next. Keep one of the two."
            )
        if self.nvme_path is not None and not os.fspath(self.nvme_path):
            raise ValueError(
                "reading the offload settings: nvme_path is empty; it is a folder of a local disk, or None."
            )
