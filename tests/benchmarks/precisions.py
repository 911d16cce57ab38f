"""How far training of the example comes in each precision: the second table of docs/numerics.md.

    python tests/benchmarks/precisions.py [--steps 400] [--only fp16 bf16]

The example's GPT (two layers of width 64, context 32) on its text, 16 x 32 bytes per step, on one device at stage 2:
what is rounded how does not depend on their number. AdamW with a cosine down to zero. A figure is the loss on held-out
text, in nats per byte.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))

import attention as _attention  # noqa: F401

from examples.gpt.data import load_text, make_batches
from examples.gpt.model import PRESETS, make_loss

CONFIG = dataclasses.replace(PRESETS["tiny"], hidden=64, num_heads=2, context=32)
BATCH_SIZE, LEARNING_RATE, NUM_HELD_OUT = 16, 4e-3, 16
BF16 = {"compute_dtype": "bf16", "master_dtype": "bf16"}
SETTINGS = {
    "fp32": {"compute_dtype": "fp32"},
    "fp16": {"compute_dtype": "fp16"},
    "bf16": {"compute_dtype": "bf16"},
    "masters": BF16,
    "masters-nearest": {**BF16, "stochastic_rounding": False},
    "moments": {**BF16, "state_dtype": "bf16"},
    "moments-nearest": {**BF16, "state_dtype": "bf16", "stochastic_rounding": False},
}
WORDS = {
    "fp32": "fp32",
    "fp16": "fp16, dynamic loss scale",
    "bf16": "bf16",
    "masters": "bf16, bf16 masters",
    "masters-nearest": "bf16, bf16 masters, to nearest",
    "moments": "bf16, bf16 masters and moments",
    "moments-nearest": "bf16, bf16 masters and moments, to nearest",
}


def trained(name: str, num_steps: int) -> tuple[float, int, float]:
    """(held-out loss, skipped steps, seconds per step) after so many steps."""
    init_fn, loss_fn = make_loss(CONFIG)
    rate = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, num_steps // 10, num_steps)
    precision = zero2jax.Precision(**SETTINGS[name])
    mesh = zero2jax.make_mesh(data=1)
    engine = zero2jax.Engine(loss_fn, optax.adamw(rate), mesh, precision=precision, clip_norm=1.0)
    text, held_out = load_text()
    batches = make_batches(text, BATCH_SIZE, CONFIG.context, seed=0)
    state = engine.init(init_fn, jax.random.key(0))
    started = time.perf_counter()
    for _ in range(num_steps):
        state, metrics = engine.step(state, next(batches))
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - started) / num_steps
    others = make_batches(held_out, 64, CONFIG.context, seed=1)
    losses = [engine.evaluate(state, next(others)) for _ in range(NUM_HELD_OUT)]
    return float(np.mean(losses)), int(metrics.get("num_skipped", 0)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    print(
        f"held-out loss after {args.steps} steps\n\n| precision | loss | skipped | s/step |\n|---|---|---|---|"
    )
    for name in args.only:
        loss, skipped, seconds = trained(name, args.steps)
        print(f"| {WORDS[name]} | {loss:.3f} | {skipped} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
