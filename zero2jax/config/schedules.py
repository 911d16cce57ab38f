"""The `scheduler` block as optax schedules: the learning rate, and OneCycle's momentum, by step count.

Legend: `count` applied steps before this one (what optax counts, from 0); `it` = count - 1, DeepSpeed's
`last_batch_iteration`. DeepSpeed moves its scheduler after each applied step, so the first step runs at the
initial value (it = -1) and the second at the formula's it = 0. A skipped step advances neither. All values
are float32, exact up to 2**24 steps. Formulas: DeepSpeed `runtime/lr_schedules.py`, behaviour only.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from zero2jax.config.params import (
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from zero2jax.config.schema import SchedulerBlock

_Formula = Callable[[jax.Array], jax.Array]


def make_schedule(scheduler: SchedulerBlock | None, lr: float) -> optax.Schedule | float:
    """The learning rate as a function of the count of applied steps, or `lr` itself without a scheduler.

    Args:
      scheduler: the block of the configuration.
      lr: the optimizer's own learning rate; WarmupCosineLR scales it, WarmupLR ends at it by default.

    >>> from zero2jax.config.params import WarmupLRParams
    >>> block = SchedulerBlock("warmuplr", WarmupLRParams(warmup_num_steps=4, warmup_type="linear"))
    >>> schedule = make_schedule(block, lr=1.0)
    >>> [float(schedule(count)) for count in range(6)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if scheduler is None:
        return lr
    formula = _lr_formula(scheduler, lr)
    return lambda count: formula(_iteration(count))


def make_momentum_schedule(scheduler: SchedulerBlock | None) -> optax.Schedule | None:
    """OneCycle's momentum by count of applied steps, None where the momentum is constant.

    The triangle of the learning rate upside down. DeepSpeed runs its very first step at `cycle_min_mom`;
    here that step has the triangle's `cycle_max_mom` like its neighbours.
    """
    params = None if scheduler is None else scheduler.params
    if not isinstance(params, OneCycleParams) or not params.cycle_momentum:
        return None
    cycle = params
    return lambda count: _one_cycle_momentum(cycle, _iteration(count))


def _iteration(count: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(count).astype(jnp.float32) - 1.0


def _lr_formula(scheduler: SchedulerBlock, lr: float) -> _Formula:
    params = scheduler.params
    if isinstance(params, LRRangeTestParams):
        return lambda it: _lr_range_test(params, it)
    if isinstance(params, OneCycleParams):
        return lambda it: _one_cycle_lr(params, it)
    if isinstance(params, WarmupCosineLRParams):
        return lambda it: lr * _warmup_cosine_ratio(params, it)
    top = params.warmup_max_lr if params.warmup_max_lr is not None else lr
    low = params.warmup_min_lr
    return lambda it: low + (top - low) * _warmup_share(params, it)


def _lr_range_test(params: LRRangeTestParams, it: jax.Array) -> jax.Array:
    units = (it + 1.0) / params.lr_range_test_step_size
    if params.lr_range_test_staircase:
        units = jnp.floor(units)
    return params.lr_range_test_min_lr * (1.0 + params.lr_range_test_step_rate * units)


def _rise(kind: str, num_steps: int, it: jax.Array) -> jax.Array:
    """0 before and at it = 0, towards 1 at it = num_steps."""
    it = jnp.maximum(it, 0.0)
    return jnp.log(it + 1.0) / math.log(num_steps) if kind == "log" else it / num_steps


def _warmup_share(params: WarmupLRParams | WarmupDecayLRParams, it: jax.Array) -> jax.Array:
    warmup = max(2, params.warmup_num_steps)
    after: jax.Array | float = 1.0
    if isinstance(params, WarmupDecayLRParams):
        total = params.total_num_steps
        after = jnp.maximum(0.0, (total - it) / max(1, total - warmup))
    return jnp.where(it < warmup, _rise(params.warmup_type, warmup, it), after)


def _warmup_cosine_ratio(params: WarmupCosineLRParams, it: jax.Array) -> jax.Array:
    warmup, low, end = max(2, params.warmup_num_steps), params.warmup_min_ratio, params.cos_min_ratio
    rising = low + (1.0 - low) * _rise(params.warmup_type, warmup, it)
    progress = jnp.minimum(1.0, (it - warmup + 1.0) / max(1, params.total_num_steps - warmup))
    falling = jnp.maximum(0.0, end + (1.0 - end) * (1.0 + jnp.cos(jnp.pi * progress)) / 2.0)
    return jnp.where(it < 0, 0.0, jnp.where(it < warmup, rising, falling))


def _cycle_sizes(params: OneCycleParams) -> tuple[int, int]:
    second = params.cycle_second_step_size
    return params.cycle_first_step_size, params.cycle_first_step_size if second is None else second


def _triangle(params: OneCycleParams, it: jax.Array) -> jax.Array:
    """Height from 0 to 1 and back within one cycle, in stairs where asked."""
    first, second = _cycle_sizes(params)
    stairs_up = params.cycle_first_stair_count
    stairs_down = params.cycle_second_stair_count
    stairs_down = stairs_up if stairs_down is None else stairs_down
    position = jnp.mod(it + 1.0, first + second)

    def height(steps: jax.Array, size: int, stairs: int) -> jax.Array:
        return jnp.floor(steps * stairs / size) / stairs if stairs else steps / size

    up = height(position, first, stairs_up)
    down = height(first + second - position, max(1, second), stairs_down)
    return jnp.where(position <= first, up, down)


def _decay_units(params: OneCycleParams, it: jax.Array) -> jax.Array:
    return (it - sum(_cycle_sizes(params)) + 1.0) / params.decay_step_size


def _one_cycle_lr(params: OneCycleParams, it: jax.Array) -> jax.Array:
    low = params.cycle_min_lr
    cycle = low + (params.cycle_max_lr - low) * _triangle(params, it)
    after: jax.Array | float = low
    if params.decay_step_size:
        after = low / (1.0 + params.decay_lr_rate * _decay_units(params, it))
    return jnp.where(it < sum(_cycle_sizes(params)), cycle, after)


def _one_cycle_momentum(params: OneCycleParams, it: jax.Array) -> jax.Array:
    top = params.cycle_max_mom
    cycle = top - (top - params.cycle_min_mom) * _triangle(params, it)
    after: jax.Array | float = top
    if params.decay_step_size:
        after = top * (1.0 + params.decay_mom_rate * _decay_units(params, it))
    return jnp.where(it < sum(_cycle_sizes(params)), cycle, after)
