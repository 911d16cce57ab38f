"""The command line: parse, load, call one public function, print. `zero2jax` and `python -m zero2jax`.

Exit code 2 with a message on stderr for wrong usage and for files that cannot be used; `check` and `plan` have exit
code 1 for a file that is right and does not train here, or does not fit.
"""

import json as json_text
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zero2jax.activations.policies import known_words
from zero2jax.base.names import did_you_mean
from zero2jax.checkpoints.export import export_checkpoint, parse_bytes
from zero2jax.checkpoints.format import CheckpointError
from zero2jax.cli.check import print_report, problems, why_not
from zero2jax.cli.info import environment_report, print_environment
from zero2jax.cli.launch import launch, split_script
from zero2jax.cli.plan import (
    Chosen,
    LinkOptions,
    TargetOptions,
    check_devices,
    load_function,
    parse_set,
    parse_vary,
    plan_settings,
    run_activations,
    run_plan,
    run_search,
    set_up_jax,
)
from zero2jax.cli.usage import UsageError
from zero2jax.config.check import examine
from zero2jax.config.reading import ConfigError
from zero2jax.offload.disk_files import OffloadFileError
from zero2jax.planning.estimate import STAGES, BytesPerParam, ModelStates, largest_model
from zero2jax.planning.targets import DEVICES_PER_HOST

_DOES_NOT_TRAIN = 1
_USAGE_ERROR = 2


def check(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    devices: int | None = None,
    json: bool = False,
    all: bool = False,
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
) -> int:
    """Validate a DeepSpeed JSON and print what it becomes. Exit code 0: it trains; 1: it does not; 2: it is wrong.

    Args:
        config: Path of the file.
        devices: Devices that the batch is sharded over, to finish the batch sizes.
        json: Print JSON.
        all: List the keys the file does not have, too.
        set: KEY=VALUE for a key that the file leaves at "auto", with its path: optimizer.params.lr=3e-4.
    """
    if devices is not None and devices < 1:
        raise ConfigError(
            "cannot check the configuration", [f"--devices = {devices}: must be at least 1. Raise it."]
        )
    report = examine(Path(config), devices, every_key=all, overrides=_overrides(set))
    if json:
        print(json_text.dumps(report.as_dict(), indent=2))
    elif report.errors:
        print(problems(report), file=sys.stderr)
    else:
        print_report(report)
    return _USAGE_ERROR if report.errors else 0 if report.trains else _DOES_NOT_TRAIN


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Each KEY=VALUE with a JSON value, or else a string."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--set {word}: write KEY=VALUE, as in optimizer.params.lr=3e-4.")
        if key in values:
            raise UsageError(f"--set {word}: {key} is given twice. Give one value.")
        try:
            values[key] = json_text.loads(value)
        except ValueError:
            values[key] = value
    return values


def info(json: bool = False, measure: bool = False, nvme_path: str | None = None) -> None:
    """Print versions and devices.

    Args:
        json: Print JSON.
        measure: Measure the bandwidth between the first device and the host.
        nvme_path: And that of a file in this folder.
    """
    try:
        report = environment_report(measure=measure, nvme_path=nvme_path)
    except OffloadFileError as error:
        raise UsageError(str(error)) from error
    if json:
        print(json_text.dumps(report, indent=2))
    else:
        print_environment(report)


def plan(
    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")],
    target: tyro.conf.OmitArgPrefixes[TargetOptions],
    links: tyro.conf.OmitArgPrefixes[LinkOptions],
    config: str | None = None,
    json: bool = False,
    png: str | None = None,
    search: bool = False,
    write: str | None = None,
    vary: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = (),
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = (),
) -> int:
    """Compile the step for GPUs that need not be here: does it fit, what does it communicate, what is hidden?

    Exit code 0: it fits; 1: it does not, or does not train; 2: the command line, the file or the program is wrong.

    Args:
        program: A function that returns a zero2jax.Program, as in examples.gpt.program:program.
        target: What to compile for.
        links: How fast the links are.
        config: DeepSpeed JSON; without one, stage 2 with bf16. Its optimizer goes before the program's.
        json: Print JSON.
        png: Write a picture of memory over the schedule there.
        search: Compile every stage and number of microbatches, and whatever --vary says; print the frontier.
        write: For --search, a file for the configuration of the cheapest setting that fits.
        vary: For --search, KEY=VALUE,VALUE with key paths of the configuration or program.NAME for arguments.
        set: KEY=VALUE, the same with one value, program.batch=32 for instance; with or without --search.
    """
    if vary and not search:
        raise UsageError("--vary is for --search: add --search, or give one value with --set.")
    if write is not None and not search:
        raise UsageError(
            "--write is for --search: it writes the setting that a search chooses. Add --search."
        )
    if png is not None and search:
        raise UsageError("--png draws one plan: leave out --search, and draw the setting that you choose.")
    varied = parse_vary([item for items in vary for item in items])
    settings = plan_settings(target, links)
    set_up_jax(target.target, settings.axes)
    chosen_program = Chosen(
        load_function(program), _path(config), parse_set([item for items in set for item in items])
    )
    check_devices(settings)
    if config is not None and (reasons := why_not(examine(Path(config)))):
        print(reasons, file=sys.stderr)
        return _DOES_NOT_TRAIN
    if search:
        fits = run_search(chosen_program, settings, varied, as_json=json, write=write)
    else:
        fits = run_plan(chosen_program, settings, as_json=json, png=png)
    return 0 if fits else _DOES_NOT_TRAIN


def activations(
    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")],
    target: tyro.conf.OmitArgPrefixes[TargetOptions],
    config: str | None = None,
    policies: tuple[str, ...] = (),
    json: bool = False,
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = (),
) -> None:
    """Compile the step under each remat policy: what it keeps in memory, and what it recomputes.

    Args:
        program: A function that returns a zero2jax.Program, as in examples.gpt.program:program.
        target: What to compile for.
        config: DeepSpeed JSON; without one, stage 2 with bf16.
        policies: Words of zero2jax.remat_policy, or nested; all that need no names of your own, if absent.
        json: Print JSON.
        set: KEY=VALUE with a key path of the configuration, or program.NAME for an argument of the function.
    """
    unknown = [policy for policy in policies if policy not in known_words()]
    if unknown:
        hint = did_you_mean(unknown[0], known_words())
        raise UsageError(f"reading --policies {unknown[0]}: there is no such policy. {hint}")
    settings = plan_settings(target)
    set_up_jax(target.target, settings.axes)
    chosen = Chosen(
        load_function(program), _path(config), parse_set([item for items in set for item in items])
    )
    check_devices(settings)
    run_activations(chosen, settings, policies, as_json=json)


def _path(config: str | None) -> Path | None:
    """A file, whatever its name looks like: what is no file is no text either, on a command line."""
    return None if config is None else Path(config)


def estimate(
    params: Annotated[float, tyro.conf.Positional, tyro.conf.arg(metavar="PARAMS")],
    shards: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    master_bytes: float = 4,
    optimizer_bytes: float = 8,
    model_shards: int = 1,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    devices_per_host: int = DEVICES_PER_HOST,
    memory_gb: float | None = None,
    json: bool = False,
) -> None:
    """Print what the formulas of the ZeRO paper give for stages 0 to 3, and DeepSpeed's beside them.

    Args:
        params: Number of parameters, 7.5e9.
        shards: Devices of the data axis.
        param_bytes: Bytes per parameter as the loss sees it.
        grad_bytes: Bytes per gradient element.
        master_bytes: Bytes per master parameter.
        optimizer_bytes: Bytes of optimizer state per parameter; 8 for Adam.
        model_shards: Devices of tensor parallelism.
        offload_optimizer: Masters and optimizer state live on the host.
        offload_params: Parameters live on the host, at stage 3.
        devices_per_host: For DeepSpeed's figure of a host's memory.
        memory_gb: Print the largest model whose states fill this much, in 1e9 bytes per device, too.
        json: Print JSON.
    """
    per_param = BytesPerParam(
        params=param_bytes, grads=grad_bytes, master=master_bytes, optimizer=optimizer_bytes
    )
    try:
        states = ModelStates(
            num_params=params,
            num_shards=shards,
            per_param=per_param,
            model_shards=model_shards,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            devices_per_host=devices_per_host,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    found, largest = states.estimate(), []
    if memory_gb is not None:
        size = 1e9 * memory_gb
        try:
            largest = [largest_model(size, shards, s, per_param, model_shards=model_shards) for s in STAGES]
        except ValueError as error:
            raise UsageError(str(error)) from error
    if json:
        print(json_text.dumps(found.as_dict() | ({"largest_model": largest} if largest else {}), indent=2))
    else:
        print(found)
        for stage, num_params in enumerate(largest):
            print(f"states of {num_params / 1e9:.4g}e9 parameters fill {memory_gb:g} GB at stage {stage}")


def export(
    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.safetensors")],
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str | None = None,
    alias: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    json: bool = False,
) -> None:
    """Write the parameters of a checkpoint as safetensors. Needs neither the training script nor its devices.

    Args:
        checkpoint: Directory that a zero2jax.Checkpointer saved to, or the folder of one step in it.
        out: What to write, model.safetensors; above --max-shard-size several files beside it and an index.
        step: Which checkpoint; the latest if absent.
        dtype: Convert floating parameters; as saved (fp32) if absent.
        max_shard_size: Bytes per file, 5GB.
        alias: ALIAS=NAME, a second name of a tied parameter, which is written once.
        json: Print JSON.
    """
    wrong = [item for item in alias if item.count("=") != 1]
    if wrong:
        raise UsageError(f"--alias {wrong[0]}: write ALIAS=NAME, as in head/kernel=embed.")
    try:
        limit = None if max_shard_size is None else parse_bytes(max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from error
    paths = export_checkpoint(
        checkpoint,
        out,
        step=step,
        dtype=dtype,
        max_file_bytes=limit,
        aliases=dict(item.split("=") for item in alias),
    )
    files = [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
    if json:
        print(json_text.dumps({"files": files}, indent=2))
    else:
        for file in files:
            print(f"{file['bytes']:>16,} bytes  {file['path']}")


COMMANDS: dict[str, Callable[..., Any]] = {
    "activations": activations,
    "check": check,
    "estimate": estimate,
    "export": export,
    "info": info,
    "launch": launch,
    "plan": plan,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; usage errors leave through `SystemExit(2)`."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        if words[:1] == ["launch"]:
            words[1:] = split_script(words[1:])
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="zero2jax",
            description="ZeRO for JAX.",
            args=words,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ConfigError, CheckpointError, UsageError) as error:
        print(error, file=sys.stderr)
        return _USAGE_ERROR
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
