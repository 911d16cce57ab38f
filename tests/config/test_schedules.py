"""Every schedule against a plain Python statement of its formula, over warm-up edges; `it` = count - 1."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zero2jax.config.reading import read_config
from zero2jax.config.schedules import make_momentum_schedule, make_schedule
from zero2jax.config.schema import SchedulerBlock

STEPS = 50
LR = 3e-3


def block(kind, **params) -> SchedulerBlock:
    return read_config({"scheduler": {"type": kind, "params": params}}).scheduler


def values(schedule, steps=STEPS):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps, dtype=jnp.int32)))


def assert_follows(schedule, formula, initial, steps=STEPS):
    """`formula(it)` from it = 0 on, `initial` before; a few float32 roundings order 1."""
    expected = [initial] + [formula(it) for it in range(steps - 1)]
    np.testing.assert_allclose(values(schedule, steps), expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase):
    scheduler = block(
        "LRRangeTest",
        lr_range_test_min_lr=1e-4,
        lr_range_test_step_size=7,
        lr_range_test_step_rate=5.0,
        lr_range_test_staircase=staircase,
    )

    def formula(it):
        units = (it + 1) / 7
        return 1e-4 * (1 + 5.0 * (math.floor(units) if staircase else units))

    assert_follows(make_schedule(scheduler, LR), formula, initial=1e-4)


def rise(kind, it, num_steps):
    return math.log(it + 1) / math.log(num_steps) if kind == "log" else it / num_steps


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 2, 10, 49, 60])
def test_warmup_lr(kind, warmup):
    scheduler = block(
        "WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=1e-2, warmup_num_steps=warmup, warmup_type=kind
    )
    num_steps = max(2, warmup)

    def formula(it):
        return 1e-4 + (1e-2 - 1e-4) * (rise(kind, it, num_steps) if it < num_steps else 1.0)

    assert_follows(make_schedule(scheduler, LR), formula, initial=1e-4)


def test_warmup_lr_ends_at_the_optimizers_rate_by_default():
    schedule = make_schedule(block("WarmupLR", warmup_num_steps=4), LR)
    np.testing.assert_allclose(values(schedule)[-1], LR, rtol=1e-6)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(10, 40), (1, 30), (20, 20), (30, 20)])
def test_warmup_decay_lr(kind, warmup, total):
    scheduler = block(
        "WarmupDecayLR",
        total_num_steps=total,
        warmup_min_lr=0.0,
        warmup_max_lr=1e-2,
        warmup_num_steps=warmup,
        warmup_type=kind,
    )
    num_steps = max(2, warmup)

    def formula(it):
        if it < num_steps:
            return 1e-2 * rise(kind, it, num_steps)
        return 1e-2 * max(0.0, (total - it) / max(1, total - num_steps))

    assert_follows(make_schedule(scheduler, LR), formula, initial=0.0)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(10, 40), (1, 30), (20, 20), (30, 20)])
def test_warmup_cosine_lr(kind, warmup, total):
    scheduler = block(
        "WarmupCosineLR",
        total_num_steps=total,
        warmup_min_ratio=0.1,
        warmup_num_steps=warmup,
        cos_min_ratio=0.01,
        warmup_type=kind,
    )
    num_steps = max(2, warmup)

    def formula(it):
        if it < num_steps:
            return LR * (0.1 + 0.9 * rise(kind, it, num_steps))
        progress = min(1.0, (it - num_steps + 1) / max(1, total - num_steps))
        return LR * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)

    assert_follows(make_schedule(scheduler, LR), formula, initial=0.0)


def triangle(it, first, second, stairs_up, stairs_down):
    position = (it + 1) % (first + second)
    if position <= first:
        steps, size, stairs = position, first, stairs_up
    else:
        steps, size, stairs = first + second - position, second, stairs_down
    return math.floor(steps * stairs / size) / stairs if stairs else steps / size


CYCLES = [
    {"cycle_first_step_size": 10},
    {"cycle_first_step_size": 10, "cycle_second_step_size": 15},
    {"cycle_first_step_size": 8, "cycle_second_step_size": 0},
    {"cycle_first_step_size": 9, "cycle_second_step_size": 12, "cycle_first_stair_count": 3},
    {"cycle_first_step_size": 8, "cycle_first_stair_count": 2, "cycle_second_stair_count": 4},
    {"cycle_first_step_size": 10, "decay_step_size": 5, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
]


@pytest.mark.parametrize("shape", CYCLES)
def test_one_cycle(shape):
    scheduler = block("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-2, **shape)
    first = shape["cycle_first_step_size"]
    second = shape.get("cycle_second_step_size", first)
    stairs_up = shape.get("cycle_first_stair_count", 0)
    stairs_down = shape.get("cycle_second_stair_count", stairs_up)
    unit = shape.get("decay_step_size", 0)

    def height(it):
        return triangle(it, first, second, stairs_up, stairs_down)

    def units(it):
        return (it - first - second + 1) / unit if unit else 0.0

    def lr(it):
        if it < first + second:
            return 1e-3 + 9e-3 * height(it)
        return 1e-3 / (1 + shape.get("decay_lr_rate", 0.0) * units(it))

    def momentum(it):
        if it < first + second:
            return 0.9 - 0.1 * height(it)
        return 0.9 * (1 + shape.get("decay_mom_rate", 0.0) * units(it))

    assert_follows(make_schedule(scheduler, LR), lr, initial=1e-3)
    assert_follows(make_momentum_schedule(scheduler), momentum, initial=0.9)


def test_momentum_is_constant_elsewhere():
    assert make_momentum_schedule(None) is None
    assert make_momentum_schedule(block("WarmupLR")) is None
    still = block("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_momentum=False)
    assert make_momentum_schedule(still) is None


def test_without_scheduler_the_rate_is_the_number_itself():
    assert make_schedule(None, LR) == LR


def test_schedule_composes_with_plain_optax():
    tx = optax.sgd(make_schedule(block("WarmupLR", warmup_num_steps=4, warmup_type="linear"), 1.0))
    state = tx.init({"w": jnp.ones(2)})
    moved = []
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones(2)}, state)
        moved.append(-float(updates["w"][0]))
    assert moved == [0.0, 0.0, 0.25, 0.5]
