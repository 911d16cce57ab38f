"""The example as shapes, to plan it: `zero2jax plan examples.gpt.program:program --axes data=8 --target h200`.

2 sequences per device and microbatch, as in `configs/`: 8 devices * 2 = 16 sequences per step.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from model import PRESETS, make_loss, tensor_parallel_specs

import zero2jax


def program(
    preset: str = "6.7b", batch_size: int = 16, tensor_parallel: bool = False, **changes: int | str | None
) -> zero2jax.Program:
    """A preset of `model.py`, with fields of its `GPTConfig` replaced: `num_layers=40, hidden=5120, num_heads=40`.

    With `tensor_parallel` the mesh has an axis `model`, which shards what the parameters' metadata say.
    """
    axis = "model" if tensor_parallel else None
    config = dataclasses.replace(PRESETS[preset], **{"sequence_axis": axis, **changes})
    init_fn, loss_fn = make_loss(config)
    return zero2jax.Program(
        loss_fn,
        params=jax.eval_shape(init_fn, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch_size, config.context + 1), jnp.int32),
        tx=optax.adamw(1e-4),
        param_specs=tensor_parallel_specs(config) if tensor_parallel else None,
    )


def program_13b(batch_size: int = 16, **changes: int | str) -> zero2jax.Program:
    """GPT-3 13B: 40 layers of 5120, 40 heads."""
    return program("6.7b", batch_size, **{"num_layers": 40, "hidden": 5120, "num_heads": 40, **changes})


def tiny(batch_size: int = 16, **changes: int | str) -> zero2jax.Program:
    """The preset that `train.py` trains on a CPU."""
    return program("tiny", batch_size, **changes)


# The models of the ZeRO paper and of the blog of ZeRO-2, with their batches on their numbers of GPUs.
blog_1_5b = functools.partial(program, "1.5b", 9600)  # data=400
blog_8b = functools.partial(program, "8b", 6400, True)  # data=100,model=4
blog_13b = functools.partial(program, "13b", 256)  # data=128
blog_17b = functools.partial(program, "17b", 512, True)  # data=64,model=4
blog_40b = functools.partial(program, "40b", 1200, True)  # data=100,model=4
blog_60b = functools.partial(program, "60b", 1600, True)  # data=25,model=16
blog_100b = functools.partial(program, "100b", 800, True)  # data=25,model=16
blog_170b = functools.partial(program, "170b", 300, True)  # data=25,model=16
