"""What offloading adds to a plan: bytes in host memory by class, and what crosses the bus in a step. On shapes."""

import dataclasses
from typing import Any

from zero2jax.base.tables import readable_bytes
from zero2jax.engine import Engine
from zero2jax.offload.disk_space import NUM_STATES, held_bytes
from zero2jax.offload.host_memory import state_bytes, transfer_bytes
from zero2jax.planning.targets import Target
from zero2jax.programs.formulas import MASTER, OPTIMIZER, PARAMETERS
from zero2jax.zero.gradient_settings import GradientSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What the host does for one device, padding included.

    Attributes:
      master_bytes: fp32 masters in host memory.
      optimizer_bytes: optimizer state in host memory.
      resident_bytes: optimizer state that stays on the device and is no argument of the step that is compiled.
      resident_master_bytes: masters that stay on the device, in the place of parameters.
      down_bytes: gradients that go to the host in a step.
      up_bytes: parameters that come back.
      num_devices: devices of one host.
      bytes_per_s: rate of the bus, of one device in one direction; None where it is not known.
      disk_bytes: files of two states, the last one and that which is written; 0 where the state is in host memory.
      held_bytes: with files, what of the state, gradients and copies is in host memory at a time; else 0.
    """

    master_bytes: int
    optimizer_bytes: int
    resident_bytes: int
    resident_master_bytes: int
    down_bytes: int
    up_bytes: int
    num_devices: int
    bytes_per_s: float | None
    disk_bytes: int = 0
    held_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Host memory for one device: the state, and a step's gradients and copies; or chunks of them."""
        if self.disk_bytes:
            return self.held_bytes
        return self.master_bytes + self.optimizer_bytes + self.down_bytes + self.up_bytes

    @property
    def transfer_s(self) -> float | None:
        """Seconds of the transfers of a step, one after the other."""
        return None if self.bytes_per_s is None else (self.down_bytes + self.up_bytes) / self.bytes_per_s

    def moved_between_classes(self, name: str) -> int:
        """What a class of the devices has beyond what the compiled step shows of it."""
        masters = self.resident_master_bytes
        return {MASTER: masters, PARAMETERS: -masters, OPTIMIZER: self.resident_bytes}.get(name, 0)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return dataclasses.asdict(self) | {"host_bytes": self.host_bytes, "transfer_s": self.transfer_s}

    def lines(self) -> list[str]:
        """The figures as text."""
        text = readable_bytes
        held = f"{text(self.master_bytes)} masters, {text(self.optimizer_bytes)} optimizer state"
        moved = text(self.down_bytes + self.up_bytes)
        rate = (
            ""
            if self.transfer_s is None
            else f": {self.transfer_s:.3g} s at {(self.bytes_per_s or 0) / 1e9:.0f} GB/s"
        )
        if self.disk_bytes:
            disk, host = (text(size * self.num_devices) for size in (self.disk_bytes, self.host_bytes))
            return [
                f"on the disk per device: {text(self.disk_bytes)} (twice {held}), {disk} on a host of "
                f"{self.num_devices}",
                f"in host memory per device: {text(self.host_bytes)} (chunks of them), {host} on a host of "
                f"{self.num_devices}",
                f"over the bus per device and step: {text(self.down_bytes)} down, {text(self.up_bytes)} up{rate}; "
                f"the disk and the update by the host's CPU come on top",
            ]
        return [
            f"on the host per device: {text(self.host_bytes)} ({held}, {moved} gradients and copies), "
            f"{text(self.host_bytes * self.num_devices)} on a host of {self.num_devices}",
            f"over the bus per device and step: {text(self.down_bytes)} down, {text(self.up_bytes)} up{rate}; the "
            "update by the host's CPU comes on top",
        ]


def offload_plan(
    engine: Engine, settings: GradientSettings, target: Target, devices_per_host: int
) -> OffloadPlan | None:
    """What an engine offloads, None if nothing."""
    if engine.offload is None:
        return None
    masters, optimizer = state_bytes(engine.layout, engine.mesh)
    resident_masters, resident = state_bytes(engine.layout, engine.mesh, resident=True)
    down, up = transfer_bytes(engine.layout, settings, engine.mesh)
    files = engine.offload.nvme_path is not None
    return OffloadPlan(
        master_bytes=masters,
        optimizer_bytes=optimizer,
        resident_bytes=resident,
        resident_master_bytes=resident_masters,
        down_bytes=down,
        up_bytes=up,
        num_devices=min(devices_per_host, engine.mesh.size),
        bytes_per_s=target.host_bytes_per_s,
        disk_bytes=NUM_STATES * (masters + optimizer) if files else 0,
        held_bytes=held_bytes(engine.layout, settings, engine.mesh, engine.offload) if files else 0,
    )
