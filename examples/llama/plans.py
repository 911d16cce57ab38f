"""The table of docs/fine_tune.md: which published models can be fine-tuned on which GPUs, at which stage.

    JAX_PLATFORMS=cpu python examples/llama/plans.py
    JAX_PLATFORMS=cpu python examples/llama/plans.py --rows mistral_7b,8,0,8192,1 --target a100-80gb

A row is MODEL,DEVICES,LORA_RANK,CONTEXT,MICROBATCHES, with LORA_RANK 0 for all parameters. Needs XLA's CUDA compiler
(the extra `plan`) and no GPU; a row takes half a minute to two.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples.llama.program import program

ROWS = (
    "llama3_2_1b,8,0,2048,1",
    "llama3_2_1b,8,0,32768,1",
    "llama3_8b,8,0,2048,1",
    "llama3_8b,8,0,2048,4",
    "llama3_8b,8,0,8192,1",
    "llama3_8b,8,0,32768,1",
    "llama3_8b,8,16,2048,1",
    "llama3_8b,8,16,32768,1",
    "llama3_70b,8,16,2048,1",
    "llama3_70b,8,16,32768,1",
    "llama3_70b,64,0,2048,1",
    "llama3_70b,64,0,32768,1",
    "llama3_405b,64,16,2048,1",
    "llama3_405b,64,16,32768,1",
    "llama3_405b,512,0,2048,1",
)
HEADER = (
    "| model | GPUs | trained | context | microbatches | stage 2, GiB | s | stage 3, GiB | s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Args:
    """Print the table."""

    rows: tuple[str, ...] = ROWS
    """MODEL,DEVICES,LORA_RANK,CONTEXT,MICROBATCHES, several separated by spaces."""
    target: str = "h100-80gb"
    """GPU, as for zero2jax plan."""
    attention: str = "blocked"
    """Or cudnn, which needs its library (pip install nvidia-cudnn-cu12) and no GPU."""


def plan_row(row: str, target: str, attention: str) -> str:
    """One line of the table: at each stage the peak, in bold where it fits, and the least time of a step."""
    model, *numbers = row.split(",")
    num_devices, rank, context, num_microbatches = map(int, numbers)
    cells = []
    for stage in (2, 3):
        config = {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": num_microbatches,
            "zero_optimization": {"stage": stage},
        }
        p = program(model, num_devices * num_microbatches, context, rank, attention=attention)
        report = zero2jax.plan(
            p.loss_fn, p.params, p.batch, tx=p.tx, config=config, axes={"data": num_devices}, target=target,
            trainable=p.trainable,
        )  # fmt: skip
        gib = f"{report.total_bytes / 2**30:.1f}"
        # products, and what the schedule waits for
        seconds = report.compute_s + report.timeline.exposed_s
        cells += [f"**{gib}**" if report.fits else gib, f"{seconds:.2f}"]
    trained = f"LoRA {rank}" if rank else "all"
    return (
        f"| {' | '.join([model, str(num_devices), trained, f'{context:,}', str(num_microbatches), *cells])} |"
    )


def main(args: Args) -> None:
    print(HEADER, flush=True)
    for row in args.rows:
        print(plan_row(row, args.target, args.attention), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
