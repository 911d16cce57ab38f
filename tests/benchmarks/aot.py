"""Memory, communication and schedule of the table's programs at 6.66e9 parameters, compiled for 8 x H200 without a GPU.

    python tests/benchmarks/aot.py [--programs "zero2jax stage 2" ...] [--microbatches 1]   # half a minute per row
    python tests/benchmarks/aot.py --model example      # of the example's GPT, those that need nothing of the model

Needs the CUDA compiler (`pip install -e .[example,plan]`). The model of `gpt.py`, bf16 compute, fp32 AdamW with
clipping, 2 x 2048 tokens per device and microbatch. Hidden is read from each schedule at an H200's rates.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA compiler is asked for by name below

import gpt
import jax
import jax.numpy as jnp
import measure
import programs

import zero2jax
from zero2jax.planning.targets import get_target, target_mesh
from zero2jax.programs.overlap import Rates, simulate

NUM_DEVICES = 8
MODEL = gpt.Config(num_layers=32, hidden=4096, num_heads=32, context=2048, vocab=50304)  # GPT-3's 6.7e9
GIB = 2**30


def make_case(model: str = "bench", num_microbatches: int = 1) -> programs.Case:
    """The case of a model, "bench" (`gpt.py`) or "example" (`examples/gpt`), on compile-only devices.

    Raises:
      ValueError: the packages of the CUDA compiler are missing; says which.
    """
    devices = tuple(target_mesh(get_target("h200"), {"data": NUM_DEVICES}, NUM_DEVICES).devices.flat)
    case = programs.Case(
        loss=functools.partial(gpt.loss_fn, MODEL),
        shapes=gpt.shapes(MODEL),
        devices=devices,
        batch_shape=(2 * NUM_DEVICES * num_microbatches, MODEL.context + 1),
        dtype=jnp.bfloat16,
        num_microbatches=num_microbatches,
        layer_dims=gpt.layer_dims(MODEL),
        hooks=gpt.Hooks,
        logical_axes=gpt.LOGICAL_AXES,
    )
    if model == "bench":
        return case
    sys.path[:0] = [str(Path(__file__).parents[2])]
    from examples.gpt.model import PRESETS, make_loss

    init_fn, loss = make_loss(PRESETS["6.7b"])
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    depth = jax.tree.map(lambda x: int(x.ndim > 2), shapes)
    return dataclasses.replace(case, loss=loss, shapes=shapes, layer_dims=depth, hooks=None)


def compiled_rows(case: programs.Case, names: Sequence[str]) -> Iterator[tuple[str, measure.Row]]:
    """Name and reading of each program, as they are compiled; `programs.refusal` says which cannot be."""
    card = get_target("h200")
    rates = Rates(card.peak_flops or math.inf, lambda c: card.bytes_per_s(c.kind, across=False) or math.inf)
    with_memory = dataclasses.replace(rates, memory_bytes_per_s=card.memory_bytes_per_s)
    for name in names:
        lowered = programs.make(name, case).lower()
        start = time.process_time()
        compiled = lowered.compile()
        row = {"compile_s": time.process_time() - start, **measure.reading(compiled)}
        module = zero2jax.audit(compiled).module
        alone, more = simulate(module, rates), simulate(module, with_memory)
        row |= {
            "communication_s": alone.communication_s,
            "hidden_alone": alone.hidden_share,
            "hidden_with_memory": more.hidden_share,
            "at_least_s": [alone.step_s, more.step_s],
        }
        yield name, row
        jax.clear_caches()


def line(name: str, row: measure.Row) -> str:
    """A row of the table in Markdown."""
    rest, peak = row["rest_bytes"] / GIB, row["peak_bytes"] / GIB
    cells = [
        name,
        f"{rest:.2f}",
        f"{peak - rest:.2f}",
        f"{peak:.2f}",
        f"{row['sent_bytes'] / GIB:.2f}",
        f"{row['communication_s']:.3f}",
        f"{row['hidden_alone']:.1%}",
        f"{row['hidden_with_memory']:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| step | between steps, GiB | during a step, GiB | total, GiB | sent, GiB | collectives, s | "
    "hidden by products alone | with memory-bound work |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=programs.PROGRAMS, default=[*programs.PROGRAMS])
    parser.add_argument("--model", choices=("bench", "example"), default="bench")
    parser.add_argument("--microbatches", type=int, default=1)
    args = parser.parse_args()
    case = make_case(args.model, args.microbatches)
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(case.shapes))
    print(
        f"jax {jax.__version__}, {num_params / 1e9:.2f}e9 parameters, {NUM_DEVICES} x H200\n\n{HEADER}",
        flush=True,
    )
    for name, row in compiled_rows(
        case, [name for name in args.programs if not programs.refusal(name, case)]
    ):
        print(line(name, row), flush=True)


if __name__ == "__main__":
    main()
