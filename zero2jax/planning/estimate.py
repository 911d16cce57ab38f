"""What the formulas say a stage needs per device, before anything is compiled. Pure arithmetic.

    P parameters, N shards, in bytes per parameter: c parameters and g gradients of the step, m master, k optimizer

    stage   device bytes
    0       (c + g + m + k) P
    1       (c + g) P + (m + k) P / N
    2       c P + (g + m + k) P / N
    3       (c + g + m + k) P / N

ZeRO, arXiv:1910.02054, section 5: mixed-precision Adam has c = g = 2, m = 4, k = 8, and (m + k) is the paper's K = 12.
DeepSpeed's own estimators (`estimate_zero2_model_states_mem_needs`, since 0.14.3) count a second, fp32 gradient of
4 bytes that is sharded from stage 2 on, and a host buffer of 1.5 times what is kept there; they have no stages 0 and 1.
zero2jax rests at (m + k) P / N at every stage above 0: parameters and gradients exist only during a step.
"""

import dataclasses
from typing import Any

STAGES = (0, 1, 2, 3)
_DEEPSPEED_FP32_GRADIENT = 4
_DEEPSPEED_HOST_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """Bytes of the model states by the formulas, for one stage; per device, but for the host.

    Attributes:
      stage: ZeRO stage.
      params_bytes: parameters of the step.
      grads_bytes: gradients.
      master_bytes: fp32 masters on the device.
      optimizer_bytes: optimizer state on the device.
      host_bytes: what offloading moves to the host, per device.
      rest_bytes: what zero2jax keeps on a device between steps.
      communication_bytes: bytes per step and device, in the unit of section 7 of the paper: a reduce-scatter or an
        all-gather of P values counts once, an all-reduce twice.
      deepspeed_bytes: device bytes by DeepSpeed's estimator; None where it has none.
      deepspeed_host_bytes: bytes of one host by DeepSpeed's estimator; None where it has none.
    """

    stage: int
    params_bytes: float
    grads_bytes: float
    master_bytes: float
    optimizer_bytes: float
    host_bytes: float
    rest_bytes: float
    communication_bytes: float
    deepspeed_bytes: float | None
    deepspeed_host_bytes: float | None

    @property
    def total_bytes(self) -> float:
        """Device bytes of the model states, by the paper's formula."""
        return self.params_bytes + self.grads_bytes + self.master_bytes + self.optimizer_bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The formulas for stages 0 to 3: `estimate(...)[2].total_bytes`."""

    num_params: float
    num_shards: int
    stages: tuple[StageEstimate, ...]

    def __getitem__(self, stage: int) -> StageEstimate:
        return self.stages[stage]

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
        return {
            "num_params": self.num_params,
            "num_shards": self.num_shards,
            "stages": [dataclasses.asdict(s) | {"total_bytes": s.total_bytes} for s in self.stages],
        }

    def table(self) -> str:
        """The estimate as text, in GB of 1e9 bytes as in the paper."""
        number = lambda x: "-" if x is None else f"{x / 1e9:,.2f}"
        head = (
            "stage",
            "parameters",
            "gradients",
            "master",
            "optimizer",
            "total",
            "host",
            "at rest",
            "DeepSpeed's",
        )
        rows: list[tuple[str, ...]] = [head]
        for s in self.stages:
            terms = (s.params_bytes, s.grads_bytes, s.master_bytes, s.optimizer_bytes, s.total_bytes)
            rows.append((str(s.stage), *map(number, (*terms, s.host_bytes, s.rest_bytes, s.deepspeed_bytes))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        title = (
            f"GB (1e9 bytes) per device of the model states, {self.num_params / 1e9:g}e9 parameters over "
            f"{self.num_shards} devices; activations come on top"
        )
        note = (
            "total: the paper's formula; at rest: what zero2jax keeps between steps; DeepSpeed's: by its estimator, "
            "which counts a second, fp32 gradient"
        )
        return "\n".join([title, *lines, note])

    __str__ = table


def estimate(
    num_params: float,
    num_shards: int,
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    master_bytes: float = 4,
    optimizer_bytes: float = 8,
    model_shards: int = 1,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    devices_per_host: int = 8,
) -> Estimate:
    """Bytes of the model states per device at each stage, by the formulas of the ZeRO paper and by DeepSpeed's.

    Args:
      num_params: number of parameters of the whole model.
      num_shards: devices that state is sharded over (the data axis).
      param_bytes: bytes per parameter as the loss sees it: 2 for bf16.
      grad_bytes: bytes per gradient element.
      master_bytes: bytes per master parameter; 0 if there is none.
      optimizer_bytes: bytes of optimizer state per parameter: 8 for Adam in fp32, 4 for momentum or Lion.
      model_shards: devices of tensor parallelism, over which parameters are split before ZeRO.
      offload_optimizer: masters and optimizer state live on the host, from stage 1 on.
      offload_params: parameters live on the host, at stage 3.
      devices_per_host: for DeepSpeed's figure of one host's memory.

    Raises:
      ValueError: a count is not positive, or a number of bytes is negative.

    Example:
      >>> estimate(7.5e9, 64)[2].total_bytes / 1e9  # the paper's Table 1 says 16.6
      16.640625
    """
    per_param = (param_bytes, grad_bytes, master_bytes, optimizer_bytes)
    if num_params <= 0 or min(num_shards, model_shards, devices_per_host) < 1 or min(per_param) < 0:
        raise ValueError(
            f"estimating {num_params} parameters over {num_shards} x {model_shards} devices, {devices_per_host} per "
            f"host, at {per_param} bytes per parameter: counts must be positive and bytes not negative. Correct them."
        )
    P = num_params / model_shards
    states: list[StageEstimate] = []
    for stage in STAGES:
        part = lambda sharded: P / num_shards if sharded else P
        params, grads = param_bytes * part(stage == 3), grad_bytes * part(stage >= 2)
        master, optimizer = master_bytes * part(stage >= 1), optimizer_bytes * part(stage >= 1)
        host = (master + optimizer) * (offload_optimizer and stage >= 1) + params * (
            offload_params and stage == 3
        )
        on_device = not (offload_optimizer and stage >= 1)
        master, optimizer = master * on_device, optimizer * on_device
        gathers, reductions = (0, 1, 1, 2)[stage], (2, 1, 1, 1)[stage]
        states.append(
            StageEstimate(
                stage,
                params * (not (offload_params and stage == 3)),
                grads,
                master,
                optimizer,
                host,
                master + optimizer,
                (gathers * param_bytes + reductions * grad_bytes) * P,
                *_deepspeed(
                    stage,
                    P,
                    num_shards,
                    per_param,
                    offload_optimizer,
                    offload_params,
                    devices_per_host,
                    model_shards,
                ),
            )
        )
    return Estimate(num_params, num_shards, tuple(states))


def largest_model(
    memory_bytes: float,
    num_shards: int,
    stage: int,
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    master_bytes: float = 4,
    optimizer_bytes: float = 8,
    model_shards: int = 1,
) -> float:
    """The number of parameters whose model states fill `memory_bytes` of each device, by the paper's formula.

    Example:
      >>> round(largest_model(32e9, 64, 2) / 1e9, 1)  # as in the paper's Table 2
      14.4
    """
    one = estimate(
        1,
        num_shards,
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
        master_bytes=master_bytes,
        optimizer_bytes=optimizer_bytes,
        model_shards=model_shards,
    )
    return memory_bytes / one[stage].total_bytes


def _deepspeed(
    stage: int,
    P: float,
    N: int,
    per_param: tuple[float, float, float, float],
    offload_optimizer: bool,
    offload_params: bool,
    devices_per_host: int,
    model_shards: int,
) -> tuple[float | None, float | None]:
    """(device bytes, bytes of one host) by DeepSpeed's estimators; a largest layer of stage 3 is left out."""
    if stage < 2:
        return None, None
    param_bytes, grad_bytes, master_bytes, optimizer_bytes = per_param
    state_bytes = grad_bytes + _DEEPSPEED_FP32_GRADIENT + master_bytes + optimizer_bytes
    devices = N * model_shards
    per_host, hosts = min(devices_per_host, devices), max(devices // devices_per_host, 1)
    whole = P * model_shards
    if stage == 2:
        if offload_optimizer:
            return param_bytes * P, whole * max(4 * devices, 16) * _DEEPSPEED_HOST_FACTOR
        return param_bytes * P + state_bytes * P / N, whole * 4 * per_host * _DEEPSPEED_HOST_FACTOR
    if offload_optimizer:
        on_host = state_bytes - grad_bytes + (param_bytes if offload_params else 0)
        host = whole * max(4 * per_host, on_host / hosts) * _DEEPSPEED_HOST_FACTOR
        return (0.0 if offload_params else param_bytes * P / N), host
    # its stage 3 keeps one 16-bit copy of parameters and gradients between them
    return (param_bytes + state_bytes - grad_bytes) * P / N, whole * 4 * per_host * _DEEPSPEED_HOST_FACTOR
