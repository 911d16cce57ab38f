"""Step time of zero2jax beside plain data parallelism and compiler-decided ZeRO, in one process, in turn.

    python tests/benchmarks/step.py [--rounds 15] [--preset bench]

Eight simulated CPU devices, the NNX GPT of the example in fp32, clip + AdamW. The machine's speed drifts, so the
programs take turns and each round's times are divided by that round's plain step; medians are printed. Tracing and
lowering is timed the same way.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import zero2jax  # noqa: E402

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
import programs  # noqa: E402

from examples.gpt.model import GPTConfig, make_loss  # noqa: E402

PRESETS = {
    "bench": (
        GPTConfig(num_layers=4, hidden=256, num_heads=4, context=64, vocab=256),
        8,
    ),  # a sequence per device
    "small": (GPTConfig(num_layers=2, hidden=64, num_heads=2, context=64, vocab=256), 16),
}


def build(config: GPTConfig, batch_size: int) -> tuple[dict, dict]:
    """Per program: a function that runs one step, and one that makes a function to trace and lower it afresh."""
    init_fn, loss_fn = make_loss(config)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = zero2jax.make_mesh(data=8)
    tokens = jax.random.randint(
        jax.random.key(1), (batch_size, config.context + 1), 0, config.vocab, jnp.int32
    )
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    runs, lowers = {}, {}

    def add(name: str, make_step, specs) -> None:
        shapes_of_state = programs.state_shapes(shapes, tx, mesh, specs)
        places = jax.tree.map(lambda x: x.sharding, shapes_of_state)
        make = lambda: jax.jit(
            make_step(), donate_argnums=0, out_shardings=(places, NamedSharding(mesh, P()))
        )
        state = [jax.jit(lambda k: (p := init_fn(k), tx.init(p)), out_shardings=places)(jax.random.key(0))]
        step = make()

        def run() -> None:
            state[0], loss = step(state[0], batch)
            jax.block_until_ready((state[0], loss))

        runs[name] = run
        lowers[name] = lambda: functools.partial(make().lower, shapes_of_state, batch)

    whole = jax.tree.map(lambda _: P(), shapes)
    add("plain data parallel", lambda: programs.plain_step(loss_fn, tx, jnp.float32), whole)
    plan = zero2jax.make_shard_plan(shapes, 8, layer_dims=1)
    specs = plan.map(lambda leaf: leaf.spec())
    add("compiler decides", lambda: programs.constrained_step(loss_fn, tx, jnp.float32, mesh, specs), specs)
    for stage in (1, 2, 3):
        make_engine = lambda stage=stage: zero2jax.Engine(
            loss_fn, tx, mesh, stage=stage, precision=zero2jax.Precision(jnp.float32)
        )
        engine = make_engine()
        state = [engine.init(init_fn, jax.random.key(0))]

        def run(engine=engine, state=state) -> None:
            state[0], metrics = engine.step(state[0], batch)
            jax.block_until_ready((state[0], metrics))

        def fresh_lower(make_engine=make_engine) -> Callable[[], object]:
            fresh = make_engine()
            fresh.abstract_state(shapes)
            return lambda: fresh.lower(batch)

        runs[f"zero2jax stage {stage}"], lowers[f"zero2jax stage {stage}"] = run, fresh_lower
    return runs, lowers


def medians(makers: dict, rounds: int, clock: Callable[[], float]) -> dict[str, tuple[float, float, float]]:
    """Per program: median seconds, median ratio to the first program and to the second."""
    times = {name: [] for name in makers}
    for _ in range(rounds + 1):
        for name, make in makers.items():
            function = make()
            gc.collect()  # or one program pays for the garbage of another
            start = clock()
            function()
            times[name].append(clock() - start)
    first, second, *_ = (t[1:] for t in times.values())  # the first round warms up
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(a[1:], b, strict=True))
    return {name: (statistics.median(t[1:]), ratio(t, first), ratio(t, second)) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--preset", choices=PRESETS, default="bench")
    args = parser.parse_args()
    runs, lowers = build(*PRESETS[args.preset])
    print(f"jax {jax.__version__}, {args.preset}: {PRESETS[args.preset][0]}, 8 simulated CPU devices")
    steps = {name: lambda run=run: run for name, run in runs.items()}
    # A step keeps all cores busy and is timed by the wall; tracing is one thread's work, timed by its processor.
    for title, makers, clock in (
        ("step", steps, time.perf_counter),
        ("trace and lower", lowers, time.process_time),
    ):
        print(f"\n{title:22} median s   / plain   / compiler decides")
        for name, (seconds, to_plain, to_compiler) in medians(makers, args.rounds, clock).items():
            print(f"{name:22} {seconds:8.3f} {to_plain:9.2f} {to_compiler:20.2f}")


if __name__ == "__main__":
    main()
