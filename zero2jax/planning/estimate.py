"""What the formulas say a stage needs per device, before anything is compiled. Pure arithmetic.

The classes of `programs.formulas`, from a number of parameters alone: P parameters, N shards, and in bytes per
parameter c of the parameters and g of the gradients in the step, m of the master, k of the optimizer state.

    stage   device bytes
    0       (c + g + m + k) P
    1       (c + g) P + (m + k) P / N
    2       c P + (g + m + k) P / N
    3       (c + g + m + k) P / N

ZeRO, arXiv:1910.02054, section 5: mixed-precision Adam has c = g = 2, m = 4, k = 8, and (m + k) is the paper's K = 12.
DeepSpeed's own estimators (`estimate_zero2_model_states_mem_needs`, since 0.14.3) count a second, fp32 gradient of
4 bytes that is sharded from stage 2 on, and a host buffer of 1.5 times what is kept there; they have no stages 0 and 1.
Between steps zero2jax keeps (m + k) P / N at every stage above 0: parameters and gradients exist only in a step.
Other than `programs.formulas`, which say what a step of zero2jax has at one time, stage 3 counts c P / N here.
"""

import dataclasses
import math
from typing import Any

from zero2jax.base.tables import aligned
from zero2jax.programs.formulas import GRADIENTS, MASTER, PARAMETERS

STAGES = (0, 1, 2, 3)
_PASSES = ((0, 2), (1, 1), (1, 1), (2, 1))  # all-gathers of P parameters and passes of a reduction, by stage
_HEAD = ("stage", PARAMETERS, GRADIENTS, MASTER, "optimizer", "total", "host", "at rest", "DeepSpeed's")
_DEEPSPEED_FP32_GRADIENT = 4
_DEEPSPEED_HOST_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class BytesPerParam:
    """Bytes per parameter of each class: by default those of Adam in mixed precision.

    Attributes:
      params: of a parameter as the loss sees it.
      grads: of a gradient.
      master: of a master parameter.
      optimizer: of the optimizer state.
    """

    params: float = 2
    grads: float = 2
    master: float = 4
    optimizer: float = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        rows: list[tuple[str, ...]] = [_HEAD]
        for s in self.stages:
            terms = (s.params_bytes, s.grads_bytes, s.master_bytes, s.optimizer_bytes, s.total_bytes)
            rows.append((str(s.stage), *map(number, (*terms, s.host_bytes, s.rest_bytes, s.deepspeed_bytes))))
        title = (
            f"GB (1e9 bytes) per device of the model states, {self.num_params / 1e9:g}e9 parameters over "
            f"{self.num_shards} devices; activations come on top"
        )
        note = (
            "total: the paper's formula; at rest: what zero2jax keeps between steps; DeepSpeed's: by its estimator, "
            "which counts a second, fp32 gradient"
        )
        return "\n".join([title, *aligned(rows, right=range(len(_HEAD))), note])

    __str__ = table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStates:
    """What is estimated, and over which devices; see `estimate` for the fields.

    Raises:
      ValueError: a count is not positive, or a number of bytes is negative; one is not finite.
    """

    num_params: float
    num_shards: int
    per_param: BytesPerParam = BytesPerParam()
    model_shards: int = 1
    offload_optimizer: bool = False
    offload_params: bool = False
    devices_per_host: int = 8

    def __post_init__(self) -> None:
        counts = (self.num_shards, self.model_shards, self.devices_per_host)
        sizes = dataclasses.astuple(self.per_param)
        sound = math.isfinite(self.num_params) and all(map(math.isfinite, sizes))
        if not sound or self.num_params <= 0 or min(counts) < 1 or min(sizes) < 0:
            raise ValueError(
                f"estimating {self.num_params} parameters over {self.num_shards} x {self.model_shards} devices, "
                f"{self.devices_per_host} per host, at {self.per_param}: counts must be positive and bytes not "
                f"negative, and all of them finite. Correct them."
            )

    def estimate(self) -> Estimate:
        """The formulas at each stage."""
        stages = tuple(_estimate_stage(self, stage) for stage in STAGES)
        return Estimate(self.num_params, self.num_shards, stages)


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
      num_params: number of parameters of the full model.
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
      ValueError: a count is not positive, or a number of bytes is negative; one is not finite.

    Example:
      >>> estimate(7.5e9, 64)[2].total_bytes / 1e9  # the paper's Table 1 says 16.6
      16.640625
    """
    return ModelStates(
        num_params=num_params,
        num_shards=num_shards,
        per_param=BytesPerParam(
            params=param_bytes, grads=grad_bytes, master=master_bytes, optimizer=optimizer_bytes
        ),
        model_shards=model_shards,
        offload_optimizer=offload_optimizer,
        offload_params=offload_params,
        devices_per_host=devices_per_host,
    ).estimate()


def largest_model(
    memory_bytes: float,
    num_shards: int,
    stage: int,
    per_param: BytesPerParam = BytesPerParam(),
    *,
    model_shards: int = 1,
) -> float:
    """The number of parameters whose model states fill `memory_bytes` of each device, by the paper's formula.

    Raises:
      ValueError: the memory is no positive number, or a parameter takes none of it.

    Example:
      >>> round(largest_model(32e9, 64, 2) / 1e9, 1)  # as in the paper's Table 2
      14.4
    """
    one = ModelStates(num_params=1, num_shards=num_shards, per_param=per_param, model_shards=model_shards)
    each = one.estimate()[stage].total_bytes
    if not 0 < memory_bytes < math.inf or not each:
        raise ValueError(
            f"looking for the largest model of {memory_bytes:g} bytes per device at {each:g} bytes per parameter: both "
            f"must be positive and finite. Correct them."
        )
    return memory_bytes / each


def _estimate_stage(of: ModelStates, stage: int) -> StageEstimate:
    P, each = of.num_params / of.model_shards, of.per_param
    shard = P / of.num_shards
    params = each.params * (shard if stage == 3 else P)
    grads = each.grads * (shard if stage >= 2 else P)
    master = each.master * (shard if stage >= 1 else P)
    optimizer = each.optimizer * (shard if stage >= 1 else P)
    host = 0.0
    if of.offload_optimizer and stage >= 1:
        host, master, optimizer = host + master + optimizer, 0.0, 0.0
    if of.offload_params and stage == 3:
        host, params = host + params, 0.0
    gathers, reductions = _PASSES[stage]
    deepspeed_has_one = stage >= 2
    return StageEstimate(
        stage=stage,
        params_bytes=params,
        grads_bytes=grads,
        master_bytes=master,
        optimizer_bytes=optimizer,
        host_bytes=host,
        rest_bytes=master + optimizer,
        communication_bytes=(gathers * each.params + reductions * each.grads) * P,
        deepspeed_bytes=_deepspeed_bytes(of, stage) if deepspeed_has_one else None,
        deepspeed_host_bytes=_deepspeed_host_bytes(of, stage) if deepspeed_has_one else None,
    )


def _deepspeed_bytes(of: ModelStates, stage: int) -> float:
    """Device bytes by DeepSpeed's estimators of stages 2 and 3; a largest layer of stage 3 is left out."""
    P, N, each = of.num_params / of.model_shards, of.num_shards, of.per_param
    sharded = _DEEPSPEED_FP32_GRADIENT + each.master + each.optimizer
    if stage == 2:
        return each.params * P + (0 if of.offload_optimizer else (each.grads + sharded) * P / N)
    if not of.offload_optimizer:
        # Its stage 3 keeps one 16-bit copy of parameters and gradients between them
        return (each.params + sharded) * P / N
    return 0.0 if of.offload_params else each.params * P / N


def _deepspeed_host_bytes(of: ModelStates, stage: int) -> float:
    """Bytes of one host by DeepSpeed's estimators of stages 2 and 3."""
    devices = of.num_shards * of.model_shards
    per_host, hosts = min(of.devices_per_host, devices), max(devices // of.devices_per_host, 1)
    per_param: float
    if not of.offload_optimizer:
        per_param = 4 * per_host
    elif stage == 2:
        per_param = max(4 * devices, 16)
    else:
        offloaded = _DEEPSPEED_FP32_GRADIENT + of.per_param.master + of.per_param.optimizer
        if of.offload_params:
            offloaded += of.per_param.params
        per_param = max(4 * per_host, offloaded / hosts)
    return of.num_params * per_param * _DEEPSPEED_HOST_FACTOR
