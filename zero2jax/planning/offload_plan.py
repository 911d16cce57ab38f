"""What offloading adds to a plan: bytes in host memory by class, and what crosses the bus in a step. On shapes."""

import dataclasses
from typing import Any

from zero2jax.base.losses import normalized
from zero2jax.base.tables import readable_bytes
from zero2jax.engine import Engine
from zero2jax.offload.disk_space import NUM_STATES, held_bytes
from zero2jax.offload.host_memory import fetched_bytes, pinned_param_bytes, state_bytes, transfer_bytes
from zero2jax.offload.residents import in_host_memory_at_once
from zero2jax.planning.targets import Target
from zero2jax.programs.formulas import MASTER, OPTIMIZER, PARAMETERS
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.step import StepProgram


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What the host does for one device, padding included.

    Attributes:
      update_on: "host" or "device"; see `OffloadSettings`.
      master_bytes: fp32 masters in host memory.
      optimizer_bytes: optimizer state in host memory.
      param_bytes: parameters in the compute dtype in pinned host memory.
      staged_bytes: gradients and copies that are in host memory at a time.
      resident_bytes: optimizer state that stays on the device and is no argument of the step that is compiled.
      resident_master_bytes: masters that stay on the device, in the place of parameters.
      down_bytes: what goes to the host in a step: gradients, or, where the device updates, the state.
      up_bytes: what comes back: parameters, or the state.
      fetched_bytes: parameters that come up for the loss, at most.
      num_devices: devices of one host.
      bytes_per_s: rate of the bus, of one device in one direction; None where it is not known.
      disk_bytes: files of two states, the last one and that which is written; 0 where the state is in host memory.
      older_bytes: parameters of the step before that the device stores, with delayed updates.
      held_bytes: with files, what of the state, gradients and copies is in host memory at a time; else 0.
      seen_on_device: whether the compiler counts pinned host memory as the device's, as that for CPUs does.
    """

    update_on: str
    master_bytes: int
    optimizer_bytes: int
    param_bytes: int
    staged_bytes: int
    resident_bytes: int
    resident_master_bytes: int
    down_bytes: int
    up_bytes: int
    fetched_bytes: int
    num_devices: int
    bytes_per_s: float | None
    seen_on_device: bool
    disk_bytes: int = 0
    older_bytes: int = 0
    held_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Host memory for one device: the state, parameters, and what is there at a time of gradients and copies."""
        if self.disk_bytes:
            return self.held_bytes
        return self.master_bytes + self.optimizer_bytes + self.param_bytes + self.staged_bytes

    @property
    def pinned_bytes(self) -> int:
        """What of it the compiled step takes as arguments in host memory."""
        state = self.master_bytes + self.optimizer_bytes
        return self.param_bytes + (state if self.update_on == "device" else 0)

    @property
    def moved_bytes(self) -> int:
        """What crosses the bus in a step, in both directions."""
        return self.down_bytes + self.up_bytes + self.fetched_bytes

    @property
    def transfer_s(self) -> float | None:
        """Seconds of the transfers of a step, one after the other."""
        return None if self.bytes_per_s is None else self.moved_bytes / self.bytes_per_s

    def moved_between_classes(self, name: str) -> int:
        """What a class of the devices has beyond what the compiled step shows of it, or what it has not of that."""
        masters = self.resident_master_bytes
        more = {MASTER: masters, PARAMETERS: self.older_bytes - masters, OPTIMIZER: self.resident_bytes}
        if self.seen_on_device:
            more[PARAMETERS] -= self.param_bytes
            if self.update_on == "device":
                more[MASTER] -= self.master_bytes
                more[OPTIMIZER] -= self.optimizer_bytes
        return more.get(name, 0)

    @property
    def unseen_bytes(self) -> int:
        """All of that together."""
        return self.resident_bytes + self.older_bytes - (self.pinned_bytes if self.seen_on_device else 0)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        sums = {"host_bytes": self.host_bytes, "moved_bytes": self.moved_bytes, "transfer_s": self.transfer_s}
        return dataclasses.asdict(self) | sums

    def lines(self) -> list[str]:
        """The figures as text."""
        text = readable_bytes
        held = [f"{text(self.master_bytes)} masters", f"{text(self.optimizer_bytes)} optimizer state"]
        held += [f"{text(self.param_bytes)} parameters"] if self.param_bytes else []
        held += [f"{text(self.staged_bytes)} gradients and copies"] if self.staged_bytes else []
        fetched = f", {text(self.fetched_bytes)} parameters for the loss" if self.fetched_bytes else ""
        where = "; the update by the host's CPU comes on top" if self.update_on == "host" else ""
        rate = (
            ""
            if self.transfer_s is None
            else f": {self.transfer_s:.3g} s at {(self.bytes_per_s or 0) / 1e9:.0f} GB/s"
        )
        bus = (
            f"over the bus per device and step: {text(self.down_bytes)} down, {text(self.up_bytes)} up"
            f"{fetched}{rate}{where}"
        )
        if self.disk_bytes:
            disk, host = (text(size * self.num_devices) for size in (self.disk_bytes, self.host_bytes))
            return [
                f"on the disk per device: {text(self.disk_bytes)} (twice {' and '.join(held[:2])}), {disk} "
                f"on a host of {self.num_devices}",
                f"in host memory per device: {text(self.host_bytes)} (chunks of them), {host} on a host of "
                f"{self.num_devices}",
                f"{bus}, like reading and writing",
            ]
        return [
            f"on the host per device: {text(self.host_bytes)} ({', '.join(held)}), "
            f"{text(self.host_bytes * self.num_devices)} on a host of {self.num_devices}",
            bus,
        ]


def offload_plan(
    engine: Engine, settings: GradientSettings, target: Target, devices_per_host: int
) -> OffloadPlan | None:
    """What an engine offloads, None if nothing."""
    if engine.offload is None:
        return None
    masters, optimizer = state_bytes(engine.layout, engine.mesh)
    args = engine.layout, settings, engine.mesh
    program = StepProgram(
        loss=normalized(engine.loss_fn),
        tx=engine.tx,
        mesh=engine.mesh,
        layout=engine.layout,
        settings=settings,
    )
    resident_masters, resident = state_bytes(engine.layout, engine.mesh, resident=True)
    files = engine.offload.nvme_path is not None
    if engine.layout.pinned_state:  # arguments like all others
        resident_masters = resident = 0
    down, up = transfer_bytes(*args)
    return OffloadPlan(
        update_on=engine.offload.update_on,
        master_bytes=masters,
        optimizer_bytes=optimizer,
        param_bytes=pinned_param_bytes(*args),
        staged_bytes=in_host_memory_at_once(program, engine.offload),
        resident_bytes=resident,
        resident_master_bytes=resident_masters,
        down_bytes=down,
        up_bytes=up,
        fetched_bytes=fetched_bytes(*args),
        num_devices=min(devices_per_host, engine.mesh.size),
        bytes_per_s=target.host_bytes_per_s,
        disk_bytes=NUM_STATES * (masters + optimizer) if files else 0,
        older_bytes=0 if engine.offload.delay_after is None else up,
        held_bytes=held_bytes(engine.layout, settings, engine.mesh, engine.offload) if files else 0,
        seen_on_device=engine.mesh.devices.flat[0].platform == "cpu",
    )
