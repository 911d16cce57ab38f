"""Device bytes and collectives of the example's step at 6.7e9 parameters, compiled for 8 x H200 without a GPU.

    python tests/benchmarks/aot.py [--stages 2 3] [--microbatches 1]      # about a minute per row

Needs the CUDA compiler (`pip install -e .[example,plan]`). bf16 compute, fp32 AdamW with clipping, 2 x 2048 tokens
per device. Compiler-decided ZeRO (sharding constraints) is compiled in the same run.
"""

import argparse
import dataclasses
import math
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA compiler is asked for by name below

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.planning.targets import get_target
from zero2jax.programs.hlo import KINDS, collectives, parse
from zero2jax.programs.overlap import Rates, simulate

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
import programs  # noqa: E402

from examples.gpt.model import PRESETS, make_loss  # noqa: E402

GIB = 2**30
SMALL = 64 * 1024  # collectives of at most this many bytes are left out of the listing


def report(name: str, lowered: jax.stages.Lowered, param_bytes: int) -> None:
    """A line of memory, one of collectives in units of the parameters' bytes, one of what the schedule hides."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    m = compiled.memory_analysis()
    rest, temp = m.argument_size_in_bytes / GIB, m.temp_size_in_bytes / GIB
    total = rest + temp + (m.output_size_in_bytes - m.alias_size_in_bytes) / GIB
    print(
        f"{name:34} at rest {rest:6.2f}  temporary {temp:6.2f}  total {total:6.2f} GiB  compiled in {seconds:.0f} s"
    )
    found = collectives(compiled.as_text())
    parts = []
    for kind in KINDS:
        large = [c for c in found if c.kind == kind and c.num_bytes > SMALL]
        if large:
            share = sum(c.total_bytes for c in large) / param_bytes
            parts.append(f"{kind} {share:.2f} x parameters in {len(large)}")
    small = sum(c.num_bytes <= SMALL for c in found)
    print(f"{'':34} {'; '.join(parts)}; {small} of at most 64 KiB")
    card = get_target("h200")
    rates = Rates(card.peak_flops or math.inf, lambda c: card.bytes_per_s(c.kind, across=False) or math.inf)
    alone, more = (
        simulate(parse(compiled.as_text()), dataclasses.replace(rates, memory_bytes_per_s=bandwidth))
        for bandwidth in (None, card.memory_bytes_per_s)
    )
    print(
        f"{'':34} {alone.communication_s:.3f} s of collectives, hidden {alone.hidden_share:.1%} by products alone, "
        f"{more.hidden_share:.1%} with memory-bound work; step {alone.step_s:.3f} and {more.step_s:.3f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="6.7b")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--microbatches", type=int, default=1)
    args = parser.parse_args()

    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x8")
    mesh = zero2jax.make_mesh(devices=topology.devices, data=8)
    config = PRESETS[args.preset]
    init_fn, loss_fn = make_loss(config)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    rows = 2 * 8 * args.microbatches  # 2 sequences x 8 devices x microbatches
    batch = jax.ShapeDtypeStruct(
        (rows, config.context + 1), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    print(
        f"jax {jax.__version__}, {num_params / 1e9:.2f}e9 parameters, {rows} x {config.context} tokens, 8 x H200"
    )

    plan = zero2jax.make_shard_plan(shapes, 8, layer_dims=jax.tree.map(lambda x: int(x.ndim > 2), shapes))
    specs = plan.map(lambda leaf: leaf.spec())
    state = programs.state_shapes(shapes, tx, mesh, specs)
    step = programs.constrained_step(loss_fn, tx, jnp.bfloat16, mesh, specs)
    places = (jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P()))
    if args.microbatches == 1:
        lowered = jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, batch)
        report("compiler decides", lowered, 2 * num_params)
    for stage in args.stages:
        engine = zero2jax.Engine(loss_fn, tx, mesh, stage=stage, num_microbatches=args.microbatches)
        engine.abstract_state(shapes, batch=batch)
        report(f"zero2jax stage {stage}", engine.lower(batch), 2 * num_params)


if __name__ == "__main__":
    main()
