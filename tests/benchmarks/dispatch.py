"""What `engine.step` costs the thread that calls it, beside a plain jitted step of the same state, in turn.

    python tests/benchmarks/dispatch.py [--leaves 10 100 1000] [--rounds 7]

Small parameters on one CPU device, SGD with momentum. Processor time of the calling thread alone: what the devices do
goes on beside it. Each round has 30 steps of each; medians of a round, then over rounds, with the least and the most.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax

STEPS = 30


def programs(num_leaves: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """One step of the engine, one of a plain jitted program: each a function that returns what to wait for."""
    params = {f"p{i}": np.ones((8,), np.float32) for i in range(num_leaves)}
    x = jnp.ones((8,))
    tx = optax.sgd(1e-3, momentum=0.9)

    def loss(params: dict, x: jax.Array) -> jax.Array:
        return sum(jnp.sum(p) for p in params.values()) * jnp.mean(x)

    def plain(state: tuple, x: jax.Array) -> tuple:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    engine = zero2jax.Engine(loss, tx, zero2jax.make_mesh(data=1), precision="fp32")
    step = jax.jit(plain, donate_argnums=0)
    states = [engine.init(params), (jax.device_put(params), tx.init(params))]

    def run_engine() -> object:
        states[0], _ = engine.step(states[0], x)
        return states[0]

    def run_plain() -> object:
        states[1], _ = step(states[1], x)
        return states[1]

    return run_engine, run_plain


def thread_seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    running = run()
    seconds = time.thread_time() - start
    jax.block_until_ready(running)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--leaves", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(
        f"jax {jax.__version__}, thread time of a step\nleaves   engine ms    plain ms    ratio (least, most)"
    )
    for num_leaves in args.leaves:
        both = programs(num_leaves)
        for run in both:
            jax.block_until_ready(run())
        rounds = []
        for _ in range(args.rounds):
            times = [[thread_seconds(run) for run in both] for _ in range(STEPS)]
            rounds.append([1e3 * statistics.median(column) for column in zip(*times, strict=True)])
        ratios = [engine / plain for engine, plain in rounds]
        engine, plain = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{num_leaves:6} {engine:11.2f} {plain:11.2f} {statistics.median(ratios):8.2f} "
            f"({min(ratios):.2f}, {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
