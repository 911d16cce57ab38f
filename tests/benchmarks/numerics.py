"""How far training in shards is from unsharded optax: the table of docs/numerics.md.

    python tests/benchmarks/numerics.py [--steps 20] [--only differences] [--dtype bf16] [--nums 2 4]

`JAX_DISABLE_MOST_OPTIMIZATIONS=1` makes it three times as fast on a CPU, without LLVM's fused multiply-adds.

Three parts: `differences` (stage x dtype x N), `invariance` (over N) and `mean` (of 64 devices). Simulated CPU devices,
the NNX GPT of the example (2 layers, width 32), AdamW. Both sides compute in the same dtype over fp32 masters. A figure
is the largest difference of a parameter over the largest entry of its leaf.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 64)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import zero2jax  # noqa: E402
from zero2jax.zero import collectives  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))

import attention as _attention  # noqa: E402, F401

from examples.gpt.model import GPTConfig, make_loss  # noqa: E402

CONFIG = GPTConfig(num_layers=2, hidden=32, num_heads=2, context=16, vocab=64)
BATCH_SIZE, SCALE = 16, 2.0**8
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
NUMS = (1, 2, 4, 8)
TX = optax.adamw(1e-3)


def batches(num_steps: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(1), num_steps)
    shape = (BATCH_SIZE, CONFIG.context + 1)
    return [jax.random.randint(key, shape, 0, CONFIG.vocab, jnp.int32) for key in keys]


def unsharded(dtype: str, num_steps: int) -> Any:
    """Plain optax on one device: fp32 masters, the loss computed in `dtype`, for fp16 with a static scale."""
    init_fn, loss_fn = make_loss(CONFIG)
    scale = SCALE if dtype == "fp16" else 1.0

    @jax.jit
    def step(params, opt_state, batch):
        scaled = lambda p: scale * loss_fn(jax.tree.map(lambda x: x.astype(DTYPES[dtype]), p), batch)
        grads = jax.tree.map(lambda g: g / scale, jax.grad(scaled)(params))
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.jit(init_fn)(jax.random.key(0))
    opt_state = TX.init(params)
    for batch in batches(num_steps):
        params, opt_state = step(params, opt_state, batch)
    return jax.tree.map(np.asarray, params)


def in_shards(
    dtype: str, num_steps: int, num: int, stage: int, *, microbatches: int = 1, ordered: bool = False
) -> Any:
    init_fn, loss_fn = make_loss(CONFIG)
    engine = zero2jax.Engine(
        loss_fn,
        TX,
        zero2jax.make_mesh(data=num),
        stage=stage,
        num_microbatches=microbatches,
        precision=zero2jax.Precision(dtype, fp32_sum=ordered),
        loss_scale=SCALE if dtype == "fp16" else None,
    )
    state = engine.init(init_fn, jax.random.key(0))
    for batch in batches(num_steps):
        state, metrics = engine.step(state, batch)
        assert metrics["applied"]
    return jax.tree.map(np.asarray, engine.params(state))


def difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def print_differences(num_steps: int, dtypes: list[str], nums: list[int]) -> None:
    """Stage x dtype x N from unsharded optax, and whether stages give the same bits."""
    print(f"largest relative difference of parameters from unsharded optax after {num_steps} steps\n")
    print("| dtype | stage | " + " | ".join(f"N = {num}" for num in nums) + " | bits of stage 2 |")
    print("|---" * (len(nums) + 3) + "|")
    for dtype in dtypes:
        expected = unsharded(dtype, num_steps)
        of_stage_2 = [in_shards(dtype, num_steps, num, 2) for num in nums]
        for stage in range(4):
            of_nums = of_stage_2 if stage == 2 else [in_shards(dtype, num_steps, num, stage) for num in nums]
            cells = [f"{difference(params, expected):.1e}" for params in of_nums]
            same = all(difference(*pair) == 0 for pair in zip(of_nums, of_stage_2, strict=True))
            print(f"| {dtype} | {stage} | {' | '.join(cells)} | {'yes' if same else 'no'} |", flush=True)


def print_invariance(num_steps: int, dtypes: list[str], nums: list[int]) -> None:
    """Devices x microbatches = 8 at stage 2, from one device with eight."""
    print("\ndevices x microbatches = 8, stage 2: largest relative difference from one device\n")
    print("| dtype | sums | " + " | ".join(f"N = {num}" for num in nums if num > 1) + " |")
    print("|---" * (sum(num > 1 for num in nums) + 2) + "|")
    for dtype in (dtype for dtype in dtypes if dtype != "fp16"):
        for ordered in (False, True):
            run = functools.partial(in_shards, dtype, num_steps, stage=2, ordered=ordered)
            first = run(1, microbatches=8)
            cells = [f"{difference(run(num, microbatches=8 // num), first):.1e}" for num in nums if num > 1]
            print(f"| {dtype} | {'fp32_sum' if ordered else 'default'} | {' | '.join(cells)} |", flush=True)


def print_sum_of_64() -> None:
    """The mean of 64 devices' bf16 numbers against float64."""
    mesh = zero2jax.make_mesh(data=64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4096)), jnp.bfloat16)
    exact = np.asarray(x, np.float64).mean(0)
    print("\nmean over 64 devices of bf16 numbers: largest error over the largest mean, against float64\n")
    for name, scatter in (
        ("reduce-scatter in bf16", collectives.psum_scatter),
        ("fp32_sum", collectives.scatter_in_order),
    ):
        each = lambda x, scatter=scatter: scatter(x[0], "data", 0)
        added = jax.shard_map(
            each, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )(x)
        error = np.abs(np.asarray(added, np.float64) / 64 - exact).max() / np.abs(exact).max()
        print(f"  {name:24} {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("differences", "invariance", "mean"))
    parser.add_argument("--dtype", choices=DTYPES, help="one of them; all by default")
    parser.add_argument("--nums", type=int, nargs="+", choices=NUMS, default=NUMS, help="numbers of devices")
    args = parser.parse_args()
    dtypes = [args.dtype] if args.dtype else list(DTYPES)
    if args.only in (None, "differences"):
        print_differences(args.steps, dtypes, args.nums)
    if args.only in (None, "invariance"):
        print_invariance(args.steps, dtypes, args.nums)
    if args.only in (None, "mean"):
        print_sum_of_64()


if __name__ == "__main__":
    main()
