"""The models of the ZeRO paper and of the blog of ZeRO-2 on their numbers of GPUs: do they fit, by the plan?

    JAX_PLATFORMS=cpu python tests/benchmarks/blog.py
    JAX_PLATFORMS=cpu python tests/benchmarks/blog.py --rows "blog_170b;data=25,model=16;v100-32gb;2,3"

A row is FUNCTION;AXES;TARGET;STAGES, a function of `examples/gpt/program.py`. Needs XLA's CUDA compiler (the extra
`plan`) and no GPU; half a minute per stage. Prints the table of `docs/benchmarks.md`.
"""

import argparse
import sys
from pathlib import Path

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples.gpt import program

# "Trains": at stage 2 with 16-bit Adam. 1.5B to 170B on 400 GPUs: the paper's figure 2 (arXiv:1910.02054); 13B on 128,
# and 1.4B for plain data parallelism: its figure 4; Turing-NLG: the blog of February 2020, with stage 1 alone.
AUTHORS = {
    "blog_1_5b": "trains",
    "blog_8b": "trains",
    "blog_13b": "trains; 1.4e9 without ZeRO",
    "blog_17b": "trained, at stage 1",
    "blog_40b": "trains",
    "blog_60b": "trains",
    "blog_100b": "trains",
    "blog_170b": "trains, activations in host memory",
}
ROWS = (
    "blog_1_5b;data=400;v100-32gb;2",
    "blog_8b;data=100,model=4;v100-32gb;2",
    "blog_13b;data=128;v100-32gb;2,3",
    "blog_17b;data=64,model=4;v100-32gb;2",
    "blog_40b;data=100,model=4;v100-32gb;2",
    "blog_60b;data=25,model=16;v100-32gb;2",
    "blog_100b;data=25,model=16;v100-32gb;2,3",
    "blog_170b;data=25,model=16;v100-32gb;2,3",
)
HEADER = (
    "| parameters | GPUs | mesh | sequences per step | authors | stage | at rest, GiB | peak, GiB | moved, GiB | "
    "compiled in, s |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def plan_row(row: str) -> None:
    """Print the lines of one model, a stage each; a peak in bold fits."""
    name, axes_text, target, stages = row.split(";")
    axes = {name: int(size) for name, size in (axis.split("=") for axis in axes_text.split(","))}
    for stage in map(int, stages.split(",")):
        p = getattr(program, name)()
        precision = "bf16" if zero2jax.get_target(target).has_bf16 else "fp16"
        config = {
            precision: {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "xla_preset": "once",
        }
        report = zero2jax.plan(
            p.loss_fn, p.params, p.batch, tx=p.tx, config=config, axes=axes, target=target, param_specs=p.param_specs
        )  # fmt: skip
        gib = lambda num_bytes: f"{num_bytes / 2**30:.2f}"
        peak = gib(report.total_bytes)
        mesh = " x ".join(f"{name} {size}" for name, size in axes.items())
        num_devices = axes.get("data", 1) * axes.get("model", 1)
        cells = [
            f"{report.num_params / 1e9:.1f}e9",
            f"{num_devices} {target}",
            mesh,
            str(report.batch_size),
            AUTHORS.get(name, ""),
            "1, 2" if stage == 2 else str(stage),  # of one microbatch, stage 1 is stage 2's program
            gib(report.rest_bytes),
            f"**{peak}**" if report.fits else peak,
            gib(report.communication_bytes),
            f"{report.compile_s:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="FUNCTION;AXES;TARGET;STAGES")
    print(HEADER, flush=True)
    for row in parser.parse_args().rows:
        plan_row(row)


if __name__ == "__main__":
    main()
