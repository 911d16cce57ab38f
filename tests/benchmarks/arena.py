"""What an arena buys: live buffers, and the time to hand the step its arguments, by the number of leaves.

    python tests/benchmarks/arena.py [--leaves 10 100 1000 5000]        # 8 minutes, most of them at 5,000
    python tests/benchmarks/arena.py --h200 [--stages 2 3]              # bytes of the 6.7e9-parameter step
    python tests/benchmarks/arena.py --collectives [--leaves 100 600]   # how many a step has, compiled for 2 x H200

With and without take turns in one process, on one simulated device: fp32 Adam on leaves of 8 numbers and a loss that
reads one number of each, so that there is nearly nothing to compute and what is left is the handing over of buffers.
The ratios are what to look at: of the time until the call returns, and until the step is done.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
if not {"--h200", "--collectives"} & set(sys.argv):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = (
        "1"  # half the time to compile, and nothing to compute anyway
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax

sys.path[:0] = [str(Path(__file__).parents[2])]
GIB = 2**30
ROUNDS, STEPS = 5, 10


def loss_fn(params, batch):
    """Reads all leaves, and computes next to nothing."""
    return sum(x[0] for x in params.values()) * 1e-3 + batch.mean()


def timed(step, state, batch):
    """(ms until the call returns, ms until the step is done, the state after them), per step."""
    handed = 0.0
    start = time.perf_counter()
    for _ in range(STEPS):
        before = time.perf_counter()
        state = step(state, batch)
        handed += time.perf_counter() - before
        jax.block_until_ready(state)
    return 1e3 * handed / STEPS, 1e3 * (time.perf_counter() - start) / STEPS, state


def by_leaves(num_leaves):
    params = {f"p{i}": np.ones(8, np.float32) for i in range(num_leaves)}
    batch = jnp.ones((4, 8))
    runs = {}
    for arena in (False, True):
        engine = zero2jax.Engine(
            loss_fn, optax.adam(1e-2), zero2jax.make_mesh(data=1), precision="fp32", arena=arena
        )
        state = engine.init(params)
        marks = [time.process_time()]
        lowered = engine.lower(batch)
        marks.append(time.process_time())
        lowered.compile()  # which the step then runs
        marks.append(time.process_time())
        runs[arena] = [lambda s, b, engine=engine: engine.step(s, b)[0], state, np.diff(marks)]
    times = {arena: [] for arena in runs}
    for run in runs.values():
        run[1] = jax.block_until_ready(run[0](run[1], batch))
    for _ in range(ROUNDS):
        for arena, run in runs.items():
            *ms, run[1] = timed(run[0], run[1], batch)
            times[arena].append(ms)
    call, done = zip(*(np.min(times[arena], axis=0) for arena in (False, True)), strict=True)
    buffers = [len(jax.tree.leaves(runs[arena][1])) for arena in (False, True)]
    row = lambda ms: f"{ms[0]:.2f} -> {ms[1]:.2f} ms (x {ms[1] / ms[0]:.2f})"
    print(
        f"{num_leaves} leaves: {buffers[0]} -> {buffers[1]} buffers; call {row(call)}; step {row(done)}; "
        f"CPU seconds to trace and lower {runs[False][2][0]:.1f} -> {runs[True][2][0]:.1f}, to compile "
        f"{runs[False][2][1]:.1f} -> {runs[True][2][1]:.1f}",
        flush=True,
    )


def on_h200(stages):
    from examples.gpt.program import program
    from zero2jax.planning.targets import get_target, target_mesh

    case, mesh = program("6.7b"), target_mesh(get_target("h200"), {"data": 8}, 8)
    for stage in stages:
        for arena in (False, True):
            engine = zero2jax.Engine(case.loss_fn, case.tx, mesh, stage=stage, clip_norm=1.0, arena=arena)
            engine.abstract_state(case.params, batch=case.batch)
            m = engine.lower(case.batch).compile().memory_analysis()
            rest, temp = m.argument_size_in_bytes / GIB, m.temp_size_in_bytes / GIB
            total = rest + temp + (m.output_size_in_bytes - m.alias_size_in_bytes) / GIB
            print(
                f"stage {stage}, arena {arena!s:5}: at rest {rest:.2f} GiB, temporary {temp:.2f}, total {total:.2f}",
                flush=True,
            )


def squares(params, batch):
    """Every leaf has a gradient of its own: equal ones would be reduced once."""
    return sum((x * x).sum() for x in params.values()) * batch.mean()


def collectives(num_leaves):
    from zero2jax.planning.targets import get_target, target_mesh

    params = {f"p{i}": jax.ShapeDtypeStruct((8,), np.float32) for i in range(num_leaves)}
    for arena in (False, True):
        mesh = target_mesh(get_target("h200"), {"data": 2}, 2)
        engine = zero2jax.Engine(squares, optax.adam(1e-2), mesh, precision="fp32", stage=2, arena=arena)
        engine.abstract_state(params)
        compiled = engine.lower(jax.ShapeDtypeStruct((4, 8), np.float32)).compile()
        print(f"{num_leaves} leaves, arena {arena}:\n{zero2jax.audit(compiled)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--leaves", type=int, nargs="*", default=[10, 100, 1000, 5000])
    parser.add_argument("--h200", action="store_true")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores")
    if args.h200:
        on_h200(args.stages)
    for num_leaves in () if args.h200 else args.leaves:
        (collectives if args.collectives else by_leaves)(num_leaves)


if __name__ == "__main__":
    main()
