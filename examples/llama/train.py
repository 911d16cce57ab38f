"""Fine-tune a published model of the Llama family with ZeRO, all of it or adapters (LoRA), and write it back.

    python examples/llama/train.py --model FOLDER --data FILE --steps 100 --out OUT --export FOLDER2
    python examples/llama/train.py --model FOLDER --data FILE --lora_rank 16 --deepspeed_config examples/llama/lora.json

FOLDER is a model folder as hubs hold it (config.json, safetensors, tokenizer.json); FILE text, or JSON lines with
`text` or with `prompt` and `completion`. FOLDER2 is such a folder again. `--devices 8` simulates eight devices on a
CPU: `make demo-llama` does all of it with a tiny model that it makes itself.

    ... --checkpoints OUT/checkpoints --save_every 100 --resume auto

saves as it goes, and continues from the latest checkpoint if there is one, on any number of devices. On SIGTERM it
finishes the step, saves and exits with code 75. The lines that ZeRO adds to a plain loop are marked `# zero2jax`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tokenizers
import tyro
from rich.console import Console
from rich.markup import escape

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples import attention
from examples.llama import weights
from examples.llama.config import LlamaConfig
from examples.llama.data import Batches, Rows, end_token, load_rows, load_tokenizer
from examples.llama.losses import make_loss
from examples.llama.model import tensor_parallel_specs
from examples.llama.sampling import make_sampler
from examples.options import DTYPES, make_optimizer, parse_axes, step_to_resume
from examples.report import Log, Trace, bytes_by_stage, memory_table, read_history, save_figure

# A run without --deepspeed_config does this, on a CPU in fp32. A file may also hold `optimizer`, `scheduler` and more.
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}
HELD_OUT = 20  # one row in 20 is never trained on, where there is no --eval_data
NUM_EVALUATIONS, NUM_HELD_OUT_BATCHES = 10, 8


@dataclass(frozen=True)
class Args:
    """Fine-tune a model of the Llama family with ZeRO."""

    model: Path
    """Model folder: config.json, safetensors, tokenizer.json."""
    data: Path
    """Text, or .jsonl with `text`, or with `prompt` and `completion`; or a folder of such files."""
    steps: int = 100
    """Optimizer updates."""
    eval_data: Path | None = None
    """What the loss is evaluated on; one row in 20 of the data if absent."""
    context: int | None = None
    """Tokens of a row; the model's own, but at most 2048, if absent."""
    deepspeed_config: Path | None = None
    """DeepSpeed JSON file; without one, ZeRO stage 2, a row per device, in bf16 on GPUs."""
    learning_rate: float | None = None
    """Largest one, where the file has no optimizer; 1e-5, or 2e-4 for adapters, if absent."""
    lora_rank: int = 0
    """Rank of adapters; the base is then frozen, in bf16. 0 trains all parameters."""
    lora_alpha: float = 16.0
    """Adapters are multiplied by lora_alpha / lora_rank."""
    axes: str = "data=-1"
    """Mesh axes, data=8 or data=4,model=2; -1 takes the devices that the others leave."""
    devices: int | None = None
    """Devices to simulate on a machine that has only CPUs."""
    out: Path = Path("out/llama")
    """Folder for metrics.jsonl, report.json and report.png."""
    export: Path | None = None
    """Folder to write the model to, adapters merged; none is written if absent."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the exported tensors."""
    prompt: str = ""
    """Beginning of the sample that is written at the end."""
    num_sample_tokens: int = 48
    """Length of the sample; 0 for none."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at once, per device."""
    seed: int = 0
    """Seed of adapters, batches and sample."""
    checkpoints: Path | None = None
    """Folder for checkpoints; none are saved if absent."""
    save_every: int = 100
    """Steps between checkpoints."""
    resume: str | None = None
    """Continue from the latest checkpoint if there is one (auto), or from that of a step (its number)."""
    profile: Path | None = None
    """Folder for a jax.profiler trace of three steps, after the first five; none without, or if over by then."""
    report: bool = True
    """At the end, count the bytes of every stage and draw report.png."""


MakeBatches = Callable[[Rows, int, jax.sharding.Mesh, int], Iterator[dict[str, np.ndarray]]]
"""As `data.Batches`: (rows, batch size, mesh, seed) -> this process's part of each batch; `state` can be set."""


@dataclass(frozen=True)
class Run:
    """What `set_up` makes, for the loop and the report."""

    args: Args
    console: Console  # prints in the first process only
    is_first: bool
    model: LlamaConfig
    tokenizer: tokenizers.Tokenizer
    config: zero2jax.Config
    tx: optax.GradientTransformation | None
    specs: Any  # tensor-parallel PartitionSpecs, or None
    trainable: Any  # predicate of the adapters, or None for all
    shapes: Any  # of the parameters
    engine: zero2jax.Engine
    checkpointer: zero2jax.Checkpointer | None
    batches: Iterator[dict[str, np.ndarray]]
    batch_size: int
    held_out: list[dict[str, np.ndarray]]

    def place(self, batch: dict[str, np.ndarray]) -> Any:
        """A global batch on the mesh, from this process's part of it."""
        return zero2jax.global_batch(batch, self.engine.mesh)  # zero2jax

    def evaluate(self, state: zero2jax.TrainState) -> float:
        """Loss on rows that are never trained on, nats per token that counts."""
        total, num_tokens = 0.0, 0
        for batch in self.held_out:
            loss, aux = self.engine.evaluate(state, self.place(batch))  # zero2jax
            total += float(loss) * int(aux["num_tokens"])
            num_tokens += int(aux["num_tokens"])
        return total / max(num_tokens, 1)

    def is_evaluated(self, step: int) -> bool:
        return step == self.args.steps or step % max(1, self.args.steps // NUM_EVALUATIONS) == 0


def held_out_batches(rows: Rows, batch_size: int, mesh: jax.sharding.Mesh) -> list[dict[str, np.ndarray]]:
    """This process's part of the first batches of rows, the last one filled up with rows that do not count."""
    batches = []
    for start in range(0, min(len(rows), NUM_HELD_OUT_BATCHES * batch_size), batch_size):
        batch = rows[start : start + batch_size]
        missing = batch_size - len(batch["tokens"])
        batch = {name: np.pad(x, ((0, missing), (0, 0))) for name, x in batch.items()}
        batches.append({name: x[zero2jax.local_rows(batch_size, mesh)] for name, x in batch.items()})
    return batches


def load_config(args: Args) -> zero2jax.Config:
    on_cpu = jax.default_backend() == "cpu"
    return zero2jax.load_config(
        args.deepspeed_config or {**CONFIG, "bf16": {"enabled": not on_cpu}}
    )  # zero2jax


def open_model(args: Args) -> tuple[LlamaConfig, Any, Any]:
    """(configuration, parameters of which no tensor is read yet, predicate of what is trained or None for all)."""
    model, params = weights.open_folder(args.model)
    if not args.lora_rank:
        return model, params, None
    model = dataclasses.replace(model, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha)
    return model, weights.add_adapters(model, params, args.seed), weights.is_adapter


def choose_attention(model: LlamaConfig, compute_dtype: str) -> tuple[LlamaConfig, str]:
    """The model with cuDNN's attention where the GPUs here have it, else in blocks; and in words, which and why."""
    windows = set(model.windows)
    if len(windows) > 1:
        return model, "in blocks, not cuDNN's: layers differ in their windows"
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim)
    name, words = attention.choose(DTYPES[compute_dtype], *sizes, packed=True, window=windows.pop())
    return dataclasses.replace(model, attention=name), words


def set_up(args: Args, make_batches: MakeBatches = Batches) -> tuple[Run, zero2jax.TrainState]:
    """Engine, data and the state to start from: the folder's, or restored from a checkpoint."""
    if args.devices:  # before the backend starts; GPUs do not care
        jax.config.update("jax_num_cpu_devices", args.devices)
    startup = zero2jax.init_distributed()  # zero2jax: one of several processes, if a launcher says so
    is_first = startup.process_index == 0
    console = Console(highlight=False, quiet=not is_first)
    if is_first:
        args.out.mkdir(parents=True, exist_ok=True)

    model, params, trainable = open_model(args)
    config = load_config(args)
    model, how = choose_attention(model, config.compute_dtype)
    learning_rate = args.learning_rate or (2e-4 if args.lora_rank else 1e-5)
    tx = None if config.optimizer else make_optimizer(learning_rate, args.steps)
    mesh = zero2jax.make_mesh(**parse_axes(args.axes))  # zero2jax
    specs = tensor_parallel_specs(params) if "model" in mesh.shape else None
    loss_fn = make_loss(model, args.chunk_tokens)
    engine = zero2jax.initialize(
        loss_fn, tx, config, mesh, param_specs=specs, trainable=trainable
    )  # zero2jax
    checkpointer = None
    if args.checkpoints:
        every = args.save_every
        checkpointer = zero2jax.Checkpointer(args.checkpoints, engine, save_interval_steps=every)  # zero2jax

    # With CONFIG: 8 devices * 1 microbatch * 1 accumulation = 8 rows of `context` tokens per step.
    batch_size = engine.batch_size or engine.num_batch_shards * engine.num_microbatches
    context = args.context or min(model.max_positions, 2048)
    rows = load_rows(args.model, args.data, context)
    if args.eval_data:
        held_out = load_rows(args.model, args.eval_data, context)
    else:
        rows, held_out = rows.split(HELD_OUT)
    batches = make_batches(rows, batch_size, mesh, args.seed)

    example = {name: jax.ShapeDtypeStruct((batch_size, context), x.dtype) for name, x in rows.arrays.items()}
    resume_step = step_to_resume(args.resume, checkpointer)
    if checkpointer and resume_step is not None:
        engine.abstract_state(params, batch=example)  # zero2jax: how each leaf is sharded, no memory yet
        state, extra = checkpointer.restore(step=resume_step)  # zero2jax
        batches.state = extra["batches"]
    else:
        state = engine.init(params, batch=example)  # zero2jax: each device's part of each tensor is read
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    count = lambda leaves: sum(x.size for x in leaves)
    num_params = count(jax.tree.leaves(shapes))
    trained = count(
        leaf for path, leaf in weights.named_leaves(shapes) if not trainable or trainable(path, leaf)
    )
    console.print(
        f"{num_params:,} parameters, {trained:,} of them trained, ZeRO stage {engine.stage} over {dict(mesh.shape)} "
        f"{jax.default_backend()} devices, {batch_size * context:,} tokens per step of {len(rows)} rows; "
        f"attention {how}"
    )
    run = Run(
        args=args,
        console=console,
        is_first=is_first,
        model=model,
        tokenizer=load_tokenizer(args.model),
        config=config,
        tx=tx,
        specs=specs,
        trainable=trainable,
        shapes=shapes,
        engine=engine,
        checkpointer=checkpointer,
        batches=batches,
        batch_size=batch_size,
        held_out=held_out_batches(held_out, engine.num_batch_shards, mesh),
    )
    return run, state


def train(run: Run, state: zero2jax.TrainState, log: Log) -> tuple[zero2jax.TrainState, Any, bool]:
    """The loop. Returns the state, the last batch, and whether the run was asked to stop."""
    engine, checkpointer, steps = run.engine, run.checkpointer, run.args.steps
    signals = [signal.SIGTERM] if checkpointer else []
    previous: dict[str, Any] = {}
    traced = Trace(run.args.profile if run.is_first else None, int(state.step) + 6)
    with traced as trace, zero2jax.Preemption(signals, check_every=10) as preemption:  # zero2jax
        for step in range(int(state.step) + 1, steps + 1):
            batch = run.place(next(run.batches))
            trace.before(step)
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
                extra = {"batches": run.batches.state}
                checkpointer.save(step, state, extra, force=stop or step == steps)  # zero2jax
            if stop:
                break
        log.record(step, previous)
        if checkpointer:  # while signals are still noted
            checkpointer.close()  # zero2jax: waits for the save in progress
    return state, batch, stop


def write_sample(run: Run, state: zero2jax.TrainState) -> str:
    """The prompt continued, printed and returned; of an empty prompt, what the tokenizer puts before a text."""
    args = run.args
    end = end_token(args.model)
    prompt = run.tokenizer.encode(args.prompt).ids or [end or 0]
    sample = make_sampler(run.engine, run.model)(
        state, prompt, args.num_sample_tokens, end=end, seed=args.seed
    )
    text = run.tokenizer.decode(sample)
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    run.console.print(f"[dim]{escape(args.prompt)}[/dim]{escape(text)}")
    return text


def export(run: Run, state: zero2jax.TrainState) -> None:
    """Write the model folder; every process takes part, the first one writes."""
    args = run.args
    weights.save_folder(args.export, run.model, weights.stored_params(run.model, state), args.export_dtype)
    if run.is_first:
        weights.copy_tokenizer(args.model, args.export)
    run.console.print(f"wrote the model to {args.export}, in {args.export_dtype}")


def report(run: Run, state: zero2jax.TrainState, batch: Any, summary: dict[str, Any], log: Log) -> None:
    """Count the bytes of every stage, draw `report.png` and sum up in `report.json`."""
    engine, out = run.engine, run.args.out
    run.console.print("compiling the step of every stage, to count its bytes")
    memory = engine.memory(state, batch)  # zero2jax
    by_stage = bytes_by_stage(engine, run.tx, run.config, run.specs, run.shapes, batch, run.trainable)
    run.console.print(memory_table(memory, by_stage))
    if not run.is_first:
        return
    save_figure(out / "report.png", log.history, by_stage, engine.stage, "nats per token")
    summary |= {"memory": memory.as_dict(), "bytes_by_stage": by_stage}
    (out / "report.json").write_text(json.dumps(summary, indent=2) + "\n")


def main(args: Args, make_batches: MakeBatches = Batches) -> None:
    run, state = set_up(args, make_batches)
    held_out_loss = run.evaluate(state)
    first_step = int(state.step) + 1
    run.console.print(f"before step {first_step}: held out {held_out_loss:.3f} nats per token")
    if first_step > args.steps:
        run.console.print(f"nothing to do: {args.steps} steps are done; ask for more with --steps")
        return
    path = args.out / "metrics.jsonl" if run.is_first else Path(os.devnull)
    with Log(path, read_history(path, first_step), args.steps, run.console) as log:
        state, batch, stopped = train(run, state, log)
    if stopped:
        run.console.print(f"stopped on request after step {int(state.step)}; go on with --resume auto")
        sys.exit(zero2jax.PREEMPTED_EXIT_CODE)  # zero2jax
    summary = {
        "model": str(args.model),
        "mesh": dict(run.engine.mesh.shape),
        "stage": run.engine.stage,
        "lora_rank": args.lora_rank,
        "steps": args.steps,
        "batch_size": run.batch_size,
        "held_out_loss_before": held_out_loss,
        "held_out_loss": log.history[-1]["held_out_loss"],
        "sample": write_sample(run, state) if args.num_sample_tokens else None,
    }
    run.console.print(f"held-out loss {held_out_loss:.3f} -> {summary['held_out_loss']:.3f} nats per token")
    if args.export:
        export(run, state)
    if args.report:
        report(run, state, batch, summary, log)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
