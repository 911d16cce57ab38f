"""Train a byte-level GPT with ZeRO on the sources of Python's standard library, or on your own text.

    python examples/gpt/train.py --devices 8
    zero2jax launch --processes 2 --devices-per-process 4 examples/gpt/train.py

Needs neither a GPU nor a download: `--devices 8` simulates eight devices on a CPU. On GPUs leave it out. Seen on 2
CPU cores that other programs kept busy too, jax 0.12.0.1: 600 steps in 116 s, 139 s in all; the loss on held-out
text falls from 5.56 to 1.89 nats per byte, and is below 2.5 after 180 steps. (A table of byte pairs gets 2.43.)
The second form runs the same steps in two processes; the first of them prints and writes files.

    python examples/gpt/train.py --devices 8 --checkpoints out/checkpoints --save_every 100 --resume auto

saves as it goes, and continues from the latest checkpoint if there is one, on any number of devices. On SIGTERM it
finishes the step, saves and exits with code 75.
The lines that ZeRO adds to a plain training loop are marked `# zero2jax`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from data import Batches, load_text, make_batches
from model import PRESETS, GPTConfig, generate, make_apply, make_loss, tensor_parallel_specs
from rich.console import Console
from rich.markup import escape

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples.attention import choose
from examples.options import DTYPES, make_optimizer, parse_axes, step_to_resume
from examples.report import Log, Trace, bytes_by_stage, memory_table, read_history, save_figure

# A run without --deepspeed_config does this. A file in the same format may also hold `optimizer`, `scheduler` and
# `bf16`; without `bf16` the model computes in fp32, which suits a CPU.
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}
LEARNING_RATES = {"tiny": 4e-3, "small": 6e-4, "6.7b": 1.2e-4}
NUM_EVALUATIONS, NUM_HELD_OUT_BATCHES = 10, 16
NUM_SAMPLE_BYTES = 400


@dataclass(frozen=True)
class Args:
    """Train a byte-level GPT with ZeRO."""

    model: Literal["tiny", "small", "6.7b"] = "tiny"
    """Preset of model.py."""
    steps: int = 600
    """Optimizer updates."""
    deepspeed_config: Path | None = None
    """DeepSpeed JSON file; without one, ZeRO stage 2 and 2 sequences per device."""
    axes: str = "data=-1"
    """Mesh axes, data=8 or data=4,model=2; -1 takes the devices that the others leave."""
    devices: int | None = None
    """Devices to simulate on a machine that has only CPUs."""
    text: Path | None = None
    """File or folder to train on; the sources of Python's standard library if absent."""
    out: Path = Path("out/gpt")
    """Folder for metrics.jsonl, report.json and report.png."""
    seed: int = 0
    """Seed of parameters, batches and sample."""
    checkpoints: Path | None = None
    """Folder for checkpoints; none are saved if absent."""
    save_every: int = 100
    """Steps between checkpoints."""
    resume: str | None = None
    """Continue from the latest checkpoint if there is one (auto), or from that of a step (its number)."""
    profile: Path | None = None
    """Folder for a jax.profiler trace of three steps, after the first five; none without, or if over by then."""
    report: bool = True
    """At the end, count the bytes of every stage, write a sample and draw report.png."""


def as_text(tokens: jax.Array | np.ndarray) -> str:
    """Bytes as text, with no control characters for the terminal to obey."""
    text = bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


@dataclass(frozen=True)
class Run:
    """What `set_up` makes, for the loop and the report."""

    args: Args
    console: Console  # prints in the first process only
    is_first: bool
    num_params: int
    config: zero2jax.Config
    tx: optax.GradientTransformation | None
    specs: Any  # tensor-parallel PartitionSpecs, or None
    shapes: Any  # of the parameters
    engine: zero2jax.Engine
    checkpointer: zero2jax.Checkpointer | None
    batches: Batches
    batch_size: int
    held_out_batches: list[np.ndarray]

    @property
    def model(self) -> GPTConfig:
        return PRESETS[self.args.model]

    def place(self, batch: np.ndarray) -> jax.Array:
        """A global batch on the mesh, from each process the rows of its devices: all, if it is alone."""
        mesh = self.engine.mesh
        return zero2jax.global_batch(batch[zero2jax.local_rows(len(batch), mesh)], mesh)  # zero2jax

    def evaluate(self, state: zero2jax.TrainState) -> float:
        """Loss on text that is never trained on, nats per byte."""
        losses = [
            self.engine.evaluate(state, self.place(batch)) for batch in self.held_out_batches
        ]  # zero2jax
        return sum(map(float, losses)) / NUM_HELD_OUT_BATCHES

    def is_evaluated(self, step: int) -> bool:
        return step == self.args.steps or step % max(1, self.args.steps // NUM_EVALUATIONS) == 0


def set_up(args: Args) -> tuple[Run, zero2jax.TrainState]:
    """Engine, data and the state to start from: new, or restored from a checkpoint."""
    if args.devices:  # before the backend starts; GPUs do not care
        jax.config.update("jax_num_cpu_devices", args.devices)
    startup = zero2jax.init_distributed()  # zero2jax: one of several processes, if a launcher says so
    is_first = startup.process_index == 0
    console = Console(highlight=False, quiet=not is_first)
    if is_first:
        args.out.mkdir(parents=True, exist_ok=True)

    config = zero2jax.load_config(args.deepspeed_config or CONFIG)  # zero2jax
    model, key = PRESETS[args.model], jax.random.key(args.seed)
    heads, head_dim = model.num_heads, model.hidden // model.num_heads
    attention, how = choose(DTYPES[config.compute_dtype], heads, heads, head_dim)
    mesh = zero2jax.make_mesh(**parse_axes(args.axes))  # zero2jax
    axis = "model" if "model" in mesh.shape else None
    model = dataclasses.replace(model, attention=attention, sequence_axis=axis)
    init_fn, loss_fn = make_loss(model)
    shapes = jax.eval_shape(init_fn, key)

    tx = None if config.optimizer else make_optimizer(LEARNING_RATES[args.model], args.steps)
    specs = tensor_parallel_specs(model) if axis else None
    engine = zero2jax.initialize(loss_fn, tx, config, mesh, param_specs=specs)  # zero2jax
    checkpointer = None
    if args.checkpoints:
        every = args.save_every
        checkpointer = zero2jax.Checkpointer(args.checkpoints, engine, save_interval_steps=every)  # zero2jax

    # With CONFIG: 8 devices * 2 microbatch * 1 accumulation = 16 sequences; 16 * 128 bytes = 2048 tokens per step.
    batch_size = engine.batch_size or 2 * engine.num_batch_shards * engine.num_microbatches
    train_text, held_out_text = load_text(args.text)
    batches = make_batches(train_text, batch_size, model.context, seed=args.seed)
    resume_step = step_to_resume(args.resume, checkpointer)
    if checkpointer and resume_step is not None:
        engine.abstract_state(shapes)  # zero2jax: how each leaf is sharded, no memory yet
        state, extra = checkpointer.restore(step=resume_step)  # zero2jax
        batches.position = extra["batches"]
    else:
        # Without ZeRO: params = init_fn(key); opt_state = tx.init(params)
        state = engine.init(init_fn, key)  # zero2jax
    # Always the same: 16 batches * 8 devices * 2 sequences * 128 bytes = 32768 predictions, never trained on.
    held_out = make_batches(
        held_out_text, batch_size // engine.num_microbatches, model.context, seed=args.seed
    )

    num_params = sum(x.size for x in jax.tree.leaves(shapes))
    console.print(
        f"{num_params:,} parameters, ZeRO stage {engine.stage} over {dict(mesh.shape)} {jax.default_backend()} "
        f"devices, {batch_size * model.context:,} tokens per step of {len(train_text):,} bytes of text; "
        f"attention {how}"
    )
    run = Run(
        args=args,
        console=console,
        is_first=is_first,
        num_params=num_params,
        config=config,
        tx=tx,
        specs=specs,
        shapes=shapes,
        engine=engine,
        checkpointer=checkpointer,
        batches=batches,
        batch_size=batch_size,
        held_out_batches=[next(held_out) for _ in range(NUM_HELD_OUT_BATCHES)],
    )
    return run, state


def train(run: Run, state: zero2jax.TrainState, log: Log) -> tuple[zero2jax.TrainState, jax.Array, bool]:
    """The loop. Returns the state, the last batch, and whether the run was asked to stop."""
    engine, checkpointer, steps = run.engine, run.checkpointer, run.args.steps
    signals = [signal.SIGTERM] if checkpointer else []
    previous: dict[str, Any] = {}
    traced = Trace(run.args.profile if run.is_first else None, int(state.step) + 6)
    with traced as trace, zero2jax.Preemption(signals, check_every=10) as preemption:  # zero2jax
        for step in range(int(state.step) + 1, steps + 1):
            batch = run.place(next(run.batches))
            trace.before(step)
            # Without ZeRO, jitted: loss, grads = value_and_grad(loss_fn)(params, batch); updates, opt_state =
            # tx.update(grads, opt_state, params); params = optax.apply_updates(params, updates)
            state, metrics = engine.step(state, batch)  # zero2jax
            trace.after(step, metrics)
            if run.is_evaluated(step):
                with log.waiting():
                    metrics["held_out_loss"] = run.evaluate(state)
            # Reading metrics waits for their step: read those of the step before while the devices do this one.
            if previous:
                log.record(step - 1, previous)
            previous = metrics
            stop = preemption.should_stop(step)  # zero2jax
            if checkpointer:
                extra = {"batches": run.batches.position}
                checkpointer.save(step, state, extra, force=stop or step == steps)  # zero2jax
            if stop:
                break
        log.record(step, previous)
        if checkpointer:  # while signals are still noted
            checkpointer.close()  # zero2jax: waits for the save in progress
    return state, batch, stop


def report(
    run: Run,
    state: zero2jax.TrainState,
    batch: jax.Array,
    held_out_loss: float,
    history: list[dict[str, Any]],
) -> None:
    """Count the bytes of every stage, write a sample, draw `report.png` and sum up in `report.json`."""
    args, console, engine, model = run.args, run.console, run.engine, run.model
    console.print("compiling the step of every stage, to count its bytes, and writing a sample")
    memory = engine.memory(state, batch)  # zero2jax
    # full parameters on every device; one of the copies is enough here
    params = engine.params(state)  # zero2jax
    params = jax.tree.map(lambda x: x.addressable_data(0), params)
    plainest = np.argmin((run.held_out_batches[0] > 126).sum(1))  # ASCII, where there is a choice
    prompt = run.held_out_batches[0][plainest, : model.context]
    write = jax.jit(generate, static_argnums=(0, 3))
    sample = write(make_apply(model)[1], params, prompt, NUM_SAMPLE_BYTES, jax.random.key(args.seed))
    prompt, sample = as_text(prompt), as_text(sample)
    console.print(f"[dim]{escape(prompt)}[/dim]{escape(sample)}")
    by_stage = bytes_by_stage(engine, run.tx, run.config, run.specs, run.shapes, batch)
    console.print(memory_table(memory, by_stage))
    if not run.is_first:
        return
    save_figure(args.out / "report.png", history, by_stage, engine.stage, "nats per byte")
    summary = {
        "model": {"preset": args.model, **asdict(model), "num_params": run.num_params},
        "platform": jax.default_backend(),
        "jax_version": jax.__version__,
        "mesh": dict(engine.mesh.shape),
        "stage": engine.stage,
        "config": dict(run.config.source),
        "seed": args.seed,
        "steps": args.steps,
        "batch_size": run.batch_size,
        "tokens_per_step": run.batch_size * model.context,
        "train_s": history[-1]["elapsed_s"],
        "held_out_loss_before": held_out_loss,
        "held_out_loss": history[-1]["held_out_loss"],
        "loss": history[-1]["loss"],
        "memory": memory.as_dict(),
        "bytes_by_stage": by_stage,
        "prompt": prompt,
        "sample": sample,
    }
    (args.out / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(
        f"held-out loss {held_out_loss:.3f} -> {summary['held_out_loss']:.3f} nats per byte in "
        f"{summary['train_s']:.0f} s of training; wrote metrics.jsonl, report.json and report.png to {args.out}"
    )


def main(args: Args) -> None:
    run, state = set_up(args)
    held_out_loss = run.evaluate(state)
    first_step = int(state.step) + 1
    run.console.print(f"before step {first_step}: held out {held_out_loss:.3f} nats per byte")
    if first_step > args.steps:
        run.console.print(f"nothing to do: {args.steps} steps are done; ask for more with --steps")
        return
    path = args.out / "metrics.jsonl" if run.is_first else Path(os.devnull)
    with Log(path, read_history(path, first_step), args.steps, run.console) as log:
        state, batch, stopped = train(run, state, log)
    if stopped:
        run.console.print(f"stopped on request after step {int(state.step)}; go on with --resume auto")
        sys.exit(zero2jax.PREEMPTED_EXIT_CODE)  # zero2jax
    if args.report:
        report(run, state, batch, held_out_loss, log.history)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
