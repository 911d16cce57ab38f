"""The example as shapes, to plan it: `zero2jax plan examples.gpt.program:program --axes data=8 --target h200`.

2 sequences per device and microbatch, as in `configs/`: 8 devices * 2 = 16 sequences per step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from model import PRESETS, make_loss

import zero2jax


def program(preset: str = "6.7b", batch_size: int = 16, **changes: int | str) -> zero2jax.Program:
    """A preset of `model.py`, with fields of its `GPTConfig` replaced: `num_layers=40, hidden=5120, num_heads=40`."""
    config = dataclasses.replace(PRESETS[preset], **changes)
    init_fn, loss_fn = make_loss(config)
    return zero2jax.Program(
        loss_fn,
        params=jax.eval_shape(init_fn, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch_size, config.context + 1), jnp.int32),
        tx=optax.adamw(1e-4),
    )


def program_13b(batch_size: int = 16, **changes: int | str) -> zero2jax.Program:
    """GPT-3 13B: 40 layers of 5120, 40 heads."""
    return program("6.7b", batch_size, **{"num_layers": 40, "hidden": 5120, "num_heads": 40, **changes})


def tiny(batch_size: int = 16, **changes: int | str) -> zero2jax.Program:
    """The preset that `train.py` trains on a CPU."""
    return program("tiny", batch_size, **changes)
