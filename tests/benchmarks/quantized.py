"""What quantised gathers and sums of gradients cost in loss: a table of docs/numerics.md.

    python tests/benchmarks/quantized.py [--steps 600] [--seeds 0 1 2] [--only none int8 int4]

The demo (`make demo`): its GPT, text, optimizer and batches, in fp32, at stage 3 on 8 simulated devices, or on 2 groups
of 4, whose state is sharded over both. A figure is the loss on held-out text, in nats per byte, for each
seed of parameters and batches.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.gpt.data import load_text, make_batches
from examples.gpt.model import PRESETS, make_loss
from examples.options import make_optimizer

CONFIG, BATCH_SIZE, LEARNING_RATE, NUM_HELD_OUT = PRESETS["tiny"], 16, 4e-3, 16
BITS = {
    "none": None,
    "none-groups": None,
    "int8": {"params_bits": 8, "grads_bits": 8},
    "int4": {"params_bits": 8, "grads_bits": 4},
    "int4-groups": {"params_bits": 8, "grads_bits": 4},
    "int4-groups-256": {"params_bits": 8, "grads_bits": 4, "block_size": 256},
}


def trained(name: str, num_steps: int, seed: int) -> tuple[float, float]:
    """(held-out loss, seconds per step) after so many steps."""
    init_fn, loss_fn = make_loss(CONFIG)
    groups = "groups" in name
    engine = zero2jax.Engine(
        loss_fn,
        make_optimizer(LEARNING_RATE, num_steps),
        zero2jax.make_mesh(replica=2, data=4) if groups else zero2jax.make_mesh(data=8),
        stage=3,
        clip_norm=1.0,
        precision=zero2jax.Precision(
            "fp32", quantize=None if BITS[name] is None else zero2jax.QuantizeSettings(**BITS[name])
        ),
        shard_over_replicas=groups,
    )
    text, held_out = load_text()
    batches = make_batches(text, BATCH_SIZE, CONFIG.context, seed=seed)
    state = engine.init(init_fn, jax.random.key(seed))
    started = time.perf_counter()
    for _ in range(num_steps):
        state, _ = engine.step(state, next(batches))
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - started) / num_steps
    others = make_batches(held_out, BATCH_SIZE, CONFIG.context, seed=0)
    losses = [engine.evaluate(state, next(others)) for _ in range(NUM_HELD_OUT)]
    return float(np.mean(losses)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=BITS, default=list(BITS))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"held-out loss after {args.steps} steps\n\n| bits | losses | mean | s/step |\n|---|---|---|---|")
    for name in args.only:
        losses, seconds = zip(*[trained(name, args.steps, seed) for seed in args.seeds], strict=True)
        each = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {name} | {each} | {np.mean(losses):.4f} | {np.mean(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
