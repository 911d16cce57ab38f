"""The `params` of the `optimizer` and `scheduler` blocks: names, types and defaults as DeepSpeed has them.

One frozen dataclass per type; `OPTIMIZERS` and `SCHEDULERS` map the lower-case type to it. What the numbers
do is written in `optimizers` and `schedules`.
"""

from dataclasses import dataclass

from zero2jax.config.blocks import REQUIRED, setting
from zero2jax.config.values import anything, boolean, choice, integer, number, optional, pair, single, steps

_LR = number(0.0)
# At 1 the correction of the moments' start divides by zero at the first step.
_BETA = pair(number(0.0, below=1.0))


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Adam: weight decay is decoupled unless `adam_w_mode` is false."""

    lr: float = setting(1e-3, _LR)
    betas: tuple[float, float] = setting((0.9, 0.999), _BETA)
    eps: float = setting(1e-8, number(0.0))
    weight_decay: float = setting(0.0, number(0.0))
    bias_correction: bool = setting(True, boolean())
    adam_w_mode: bool = setting(True, boolean())
    amsgrad: bool = setting(False, boolean())
    torch_adam: bool | str = setting(False, anything())
    fp32_optimizer_states: bool = setting(True, boolean())
    set_grad_none: bool = setting(True, boolean())

    @property
    def decoupled(self) -> bool:
        """Weight decay stays out of the moments."""
        return self.adam_w_mode


@dataclass(frozen=True, kw_only=True)
class AdamWParams(AdamParams):
    """AdamW: weight decay is decoupled. DeepSpeed reads `adam_w_mode` for Adam only."""

    @property
    def decoupled(self) -> bool:
        """Whatever `adam_w_mode` says."""
        return True


@dataclass(frozen=True, kw_only=True)
class LambParams:
    """Lamb, with the trust ratio clamped to [min_coeff, max_coeff]."""

    lr: float = setting(1e-3, _LR)
    betas: tuple[float, float] = setting((0.9, 0.999), _BETA)
    eps: float = setting(1e-8, number(0.0))
    eps_inside_sqrt: bool = setting(False, boolean())
    weight_decay: float = setting(0.0, number(0.0))
    bias_correction: bool = setting(True, boolean())
    amsgrad: bool = setting(False, boolean())
    max_coeff: float = setting(10.0, number(0.0))
    min_coeff: float = setting(0.01, number(0.0))


@dataclass(frozen=True, kw_only=True)
class LionParams:
    """Lion, with DeepSpeed's default betas (the paper has 0.9, 0.99)."""

    lr: float = setting(1e-3, _LR)
    betas: tuple[float, float] = setting((0.9, 0.999), _BETA)
    weight_decay: float = setting(0.0, number(0.0))
    fp32_optimizer_states: bool = setting(True, boolean())
    set_grad_none: bool = setting(True, boolean())


@dataclass(frozen=True, kw_only=True)
class AdagradParams:
    """Adagrad, accumulator from zero."""

    lr: float = setting(1e-2, _LR)
    eps: float = setting(1e-10, number(0.0))
    weight_decay: float = setting(0.0, number(0.0))
    lr_decay: float = setting(0.0, number(0.0))
    initial_accumulator_value: float = setting(0.0, number(0.0))


@dataclass(frozen=True, kw_only=True)
class SGDParams:
    """SGD as torch.optim has it."""

    lr: float = setting(1e-3, _LR)
    momentum: float = setting(0.0, number(0.0))
    dampening: float = setting(0.0, number())
    weight_decay: float = setting(0.0, number(0.0))
    nesterov: bool = setting(False, boolean())


@dataclass(frozen=True, kw_only=True)
class MuonParams:
    """Muon for matrices, Adam for everything else; `lr` serves both unless one has its own."""

    lr: float | None = setting(None, optional(_LR))
    muon_lr: float | None = setting(None, optional(_LR))
    adam_lr: float | None = setting(None, optional(_LR))
    momentum: float = setting(0.95, number(0.0, 1.0))
    weight_decay: float = setting(0.0, number(0.0))
    betas: tuple[float, float] = setting((0.9, 0.95), _BETA)
    eps: float = setting(1e-10, number(0.0))
    ns_method: str = setting("gram", choice("gram", "standard"))


OptimizerParams = AdamParams | LambParams | LionParams | AdagradParams | SGDParams | MuonParams

OPTIMIZERS: dict[str, type] = {
    "adam": AdamParams,
    "adamw": AdamWParams,
    "lamb": LambParams,
    "lion": LionParams,
    "adagrad": AdagradParams,
    "sgd": SGDParams,
    "muon": MuonParams,
}

_COMPRESSED = "compressed gradients have no counterpart here; DeepSpeed refuses them with ZeRO"
_MUP = "muP needs per-layer learning rates that only the model knows; pass an optax tx"

REFUSED_OPTIMIZERS: dict[str, str] = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}

_STEPS = steps(1)
_START = integer(-1, -1)
_WARMUP_TYPE = choice("log", "linear")


@dataclass(frozen=True, kw_only=True)
class LRRangeTestParams:
    """A learning rate that grows until training breaks."""

    lr_range_test_min_lr: float = setting(1e-3, single(_LR))
    lr_range_test_step_size: int = setting(2000, _STEPS)
    lr_range_test_step_rate: float = setting(1.0, number(0.0))
    lr_range_test_staircase: bool = setting(False, boolean())
    last_batch_iteration: int = setting(-1, _START)


@dataclass(frozen=True, kw_only=True)
class OneCycleParams:
    """One triangle up and down, then decay; momentum the other way round."""

    cycle_min_lr: float = setting(REQUIRED, single(_LR))
    cycle_max_lr: float = setting(REQUIRED, single(_LR))
    decay_lr_rate: float = setting(0.0, number(0.0))
    cycle_first_step_size: int = setting(2000, _STEPS)
    cycle_second_step_size: int | None = setting(None, optional(steps(0)))
    cycle_first_stair_count: int = setting(0, steps(0))
    cycle_second_stair_count: int | None = setting(None, optional(steps(0)))
    decay_step_size: int = setting(0, steps(0))
    cycle_momentum: bool = setting(True, boolean())
    cycle_min_mom: float = setting(0.8, single(number(0.0, 1.0)))
    cycle_max_mom: float = setting(0.9, single(number(0.0, 1.0)))
    decay_mom_rate: float = setting(0.0, number(0.0))
    last_batch_iteration: int = setting(-1, _START)


@dataclass(frozen=True, kw_only=True)
class WarmupLRParams:
    """Warm-up, then constant; `warmup_max_lr` null is the optimizer's own learning rate."""

    warmup_min_lr: float = setting(0.0, single(_LR))
    warmup_max_lr: float | None = setting(None, optional(single(_LR)))
    warmup_num_steps: int = setting(1000, _STEPS)
    warmup_type: str = setting("log", _WARMUP_TYPE)
    last_batch_iteration: int = setting(-1, _START)


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLRParams:
    """Warm-up, then linear decay to zero at `total_num_steps`."""

    total_num_steps: int = setting(REQUIRED, _STEPS)
    warmup_min_lr: float = setting(0.0, single(_LR))
    warmup_max_lr: float = setting(1e-3, single(_LR))
    warmup_num_steps: int = setting(1000, _STEPS)
    warmup_type: str = setting("log", _WARMUP_TYPE)
    last_batch_iteration: int = setting(-1, _START)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLRParams:
    """Warm-up, then a cosine, as a ratio of the optimizer's own learning rate."""

    total_num_steps: int = setting(REQUIRED, _STEPS)
    warmup_min_ratio: float = setting(0.0, single(number(0.0)))
    warmup_num_steps: int = setting(1000, _STEPS)
    cos_min_ratio: float = setting(1e-4, number(0.0))
    warmup_type: str = setting("log", _WARMUP_TYPE)
    last_batch_iteration: int = setting(-1, _START)


SchedulerParams = (
    LRRangeTestParams | OneCycleParams | WarmupLRParams | WarmupDecayLRParams | WarmupCosineLRParams
)

SCHEDULERS: dict[str, type] = {
    "lrrangetest": LRRangeTestParams,
    "onecycle": OneCycleParams,
    "warmuplr": WarmupLRParams,
    "warmupdecaylr": WarmupDecayLRParams,
    "warmupcosinelr": WarmupCosineLRParams,
}
