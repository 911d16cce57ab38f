"""AdamW on the host as an engine that offloads runs it, beside the same bytes moved, torch's and DeepSpeed's.

    python tests/benchmarks/host_adam.py [--elements 50_000_000] [--rounds 15]

fp32 masters and moments in place, bf16 gradients in, bf16 parameters out, on all cores. The programs take turns in one
process and each round's times are divided by that round's first; medians are printed. `torch` (fused AdamW) and
`deepspeed` (CPUAdam) run where they are installed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import zero2jax
from zero2jax.offload.host_step import Handed

OPTAX, MOVED = "optax by XLA, as the engine runs it", "the same bytes moved in place by XLA"
BYTES = 28  # of an element: master and two moments read and written, a gradient read, a copy written


def engine_update(elements: int) -> Callable[[], None]:
    """The host's half of a step with one leaf."""
    loss_fn = lambda params, batch: params["w"].astype(jnp.float32).mean() * batch.mean()
    engine = zero2jax.Engine(
        loss_fn, optax.adamw(1e-4), zero2jax.make_mesh(data=1), offload=zero2jax.OffloadSettings()
    )
    state = engine.init(lambda: {"w": jnp.ones((elements,), jnp.float32)})
    held = [state.params, state.opt_state]
    grads = [[jnp.full((elements,), 1e-3, jnp.bfloat16)]]
    handed = Handed(factor=jnp.float32(1), grad_norm=jnp.float32(1), applied=None, loss=jnp.float32(1))
    # a copy is written over its gradient, as in a step
    update = jax.jit(engine.functions._halves.update, donate_argnums=(0, 1, 2))

    def run() -> None:
        held[0], held[1], grads[0], _ = update(*held, grads[0], handed, {})
        jax.block_until_ready((held, grads))

    return run


def moved(elements: int) -> Callable[[], None]:
    """Every byte that the update reads and writes, once, with next to no arithmetic."""
    add = jax.jit(lambda arrays, g: ([x + 1 for x in arrays], g + 1), donate_argnums=0)
    held = [[jnp.zeros((elements,), jnp.float32) for _ in range(3)]]
    grads = jnp.zeros((elements,), jnp.bfloat16)

    def run() -> None:
        held[0], copies = add(held[0], grads)
        jax.block_until_ready((held, copies))

    return run


def torch_update(elements: int, of_deepspeed: bool) -> Callable[[], None]:
    """The same by a PyTorch optimizer on the CPU; ImportError if it is not installed."""
    import torch

    if of_deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

    master = torch.nn.Parameter(torch.ones(elements))
    grads = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    copies = torch.empty(elements, dtype=torch.bfloat16)
    settings = {"lr": 1e-4, "weight_decay": 1e-4}
    optimizer = (
        DeepSpeedCPUAdam([master], adamw_mode=True, **settings)
        if of_deepspeed
        else torch.optim.AdamW([master], fused=True, **settings)
    )
    master.grad = torch.empty(elements)

    def run() -> None:
        master.grad.copy_(grads)
        optimizer.step()
        copies.copy_(master.detach())

    return run


def main() -> None:
    """Print a line per program: median milliseconds, bytes per second, ratio to the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    runs = {OPTAX: engine_update(args.elements), MOVED: moved(args.elements)}
    for name, of_deepspeed in (("torch's fused AdamW", False), ("DeepSpeed's CPUAdam", True)):
        try:
            runs[name] = torch_update(args.elements, of_deepspeed)
        except ImportError as error:
            print(f"skipped: {name} ({error})")
    for run in runs.values():  # compiles, and touches the pages
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    print(f"{args.elements:,} elements, {args.rounds} rounds, jax {jax.__version__}")
    for name, taken in times.items():
        ratio = statistics.median(t / first for t, first in zip(taken, times[OPTAX], strict=True))
        seconds = statistics.median(taken)
        rate = f"{BYTES * args.elements / seconds / 1e9:5.1f} GB/s"
        print(f"{name:40} {seconds * 1e3:8.1f} ms  {rate}  {ratio:.2f} of the first's time")


if __name__ == "__main__":
    main()
