"""What the examples' command lines have in common: mesh axes, the step to resume from, the optimizer."""

from __future__ import annotations

import re

import jax.numpy as jnp
import optax

import zero2jax

DTYPES = {
    "fp32": jnp.float32,
    "fp16": jnp.float16,
    "bf16": jnp.bfloat16,
}  # by a configuration's word for compute


def parse_axes(axes: str) -> dict[str, int]:
    """`"data=4,model=2"` as `{"data": 4, "model": 2}`."""
    if not re.fullmatch(r"\w+=-?\d+(,\w+=-?\d+)*", axes):
        raise ValueError(
            f"reading --axes {axes!r}: write NAME=SIZE, separated by commas, as in data=4,model=2."
        )
    return {name: int(size) for name, size in (axis.split("=") for axis in axes.split(","))}


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW, warmed up over a tenth of the steps, then a cosine down to a twentieth of the learning rate."""
    low = learning_rate / 20
    schedule = optax.warmup_cosine_decay_schedule(low, learning_rate, steps // 10, steps, low)
    # `inject_hyperparams` keeps the current learning rate in the state, where the metrics find it.
    return optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, b2=0.95, weight_decay=0.1)


def step_to_resume(resume: str | None, checkpointer: zero2jax.Checkpointer | None) -> int | None:
    """The step to restore, or None to begin anew."""
    if resume is None:
        return
    if checkpointer is None:
        raise ValueError(
            f"reading --resume {resume}: without --checkpoints FOLDER there is nothing to resume from."
        )
    if resume != "auto" and not resume.isdecimal():
        raise ValueError(f"reading --resume {resume!r}: write auto, or the step of a checkpoint.")
    return checkpointer.latest_step() if resume == "auto" else int(resume)
