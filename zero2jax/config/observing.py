"""Who is told of each step, by the keys of a configuration that only observe: `initialize` hands them to the engine."""

import functools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from zero2jax.base import losses
from zero2jax.base.peaks import peak_flops
from zero2jax.config.schema import CometMonitor, Config, FileMonitor, FlopsProfiler
from zero2jax.config.values import warn
from zero2jax.engine import Engine
from zero2jax.monitors.monitors import Monitors
from zero2jax.monitors.observers import Observers, StepRecord, Upcoming
from zero2jax.monitors.profiler import Profiler, model_lines
from zero2jax.monitors.progress import BREAKDOWN_EVERY, Progress, Utilization
from zero2jax.monitors.reports import Report
from zero2jax.monitors.writers import why_missing
from zero2jax.programs.audit import Audit, audit
from zero2jax.programs.flops import loss_flops


def observers_of(config: Config, engine: Engine) -> Observers | None:
    """What the configuration asks for; None if that is nothing."""
    before: dict[str, Callable[[Upcoming], None]] = {}
    after: dict[str, Callable[[StepRecord], None]] = {}
    if config.steps_per_print or config.wall_clock_breakdown:
        utilization = _utilization(engine) if config.timers.throughput.enabled else None
        if utilization is not None:
            before["utilization"] = utilization.note
        after["steps_per_print"] = Progress(
            config.steps_per_print or BREAKDOWN_EVERY,
            metrics=bool(config.steps_per_print),
            throughput=config.timers.throughput.enabled,
            breakdown=config.wall_clock_breakdown,
            utilization=utilization,
        )
    if config.dump_state:
        before["dump_state"] = Report(functools.partial(_state, engine))
    if config.comms_logger:
        before["comms_logger"] = Report(functools.partial(_collectives, engine))
    if config.flops_profiler.enabled:
        profiler = _profiler(config.flops_profiler, engine)
        before["flops_profiler"], after["flops_profiler"] = profiler.before, profiler.after
    monitors = _monitors(config)
    if monitors is None and not (before or after):
        return None
    return Observers(before=before, after=after, monitors=monitors, with_times=config.wall_clock_breakdown)


def _state(engine: Engine, upcoming: Upcoming) -> str:
    """The configuration, the settings it came to, and how each parameter is stored."""
    return "\n".join(
        [
            f"state before step {upcoming.step}, of the configuration {json.dumps(engine.config)}",
            *[f"  {name} = {value}" for name, value in engine.settings.plain.items()],
            f"  mesh = {dict(engine.mesh.shape)}",
            str(engine.layout.params),
        ]
    )


def _audit(engine: Engine, upcoming: Upcoming) -> Audit:
    """The reading of the program of a step, which the step then runs: nothing is compiled twice."""
    return audit(engine.lower(upcoming.batch, loss_args=upcoming.loss_args).compile())


def _collectives(engine: Engine, upcoming: Upcoming) -> str:
    """Counts and bytes of the collectives of a step."""
    return f"collectives of a step, per device:\n{_audit(engine, upcoming)}"


def _profiler(block: FlopsProfiler, engine: Engine) -> Profiler:
    """A profiler of the step after `profile_step` steps, as DeepSpeed counts."""

    def describe() -> list[str]:
        plan = engine.layout.params
        num_params = sum(math.prod(leaf.shape) for leaf in plan.leaves)
        return model_lines(num_params, plan.rest_bytes, dict(engine.mesh.shape))

    device = engine.mesh.devices.flat[0]
    return Profiler(
        block.profile_step + 1,
        functools.partial(_audit, engine),
        describe,
        module_depth=block.module_depth,
        top_modules=block.top_modules,
        detailed=block.detailed,
        output=block.output_file,
        peak_flops=peak_flops(device.device_kind),
        as_before_conversion=device.platform == "cpu",
    )


def _utilization(engine: Engine) -> Utilization | None:
    """Of the peak of the mesh's devices, where that is known: of 16-bit products."""
    devices = engine.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind)
    if peak is None or jnp.dtype(engine.precision.compute_dtype).itemsize != 2:
        return None
    return Utilization(functools.partial(_forward_flops, engine), peak * devices.size)


def _forward_flops(engine: Engine, upcoming: Upcoming) -> float:
    """Operations of the loss's matrix products for a global batch, forward."""
    trace = functools.partial(engine.trace_with, upcoming.batch, upcoming.loss_args)
    flops = loss_flops(losses.normalized(engine.loss_fn), trace)
    return flops * engine.num_batch_shards * engine.num_microbatches


def _monitors(config: Config) -> Callable[[], Monitors] | None:
    """Makes the monitors that are switched on, where DeepSpeed has theirs; names those whose package is missing."""
    asked: dict[str, Any] = {}
    for name, block in (("tensorboard", config.tensorboard), ("csv", config.csv_monitor)):
        if block.enabled:
            asked[name] = _folder(block)
    if config.wandb.enabled:
        run = config.wandb
        asked["wandb"] = {"project": run.project, "group": run.group, "entity": run.team}
    if config.comet.enabled:
        asked["comet"] = _comet(config.comet)
    for name in list(asked):
        if missing := why_missing(name):
            warn(f"{config.name}: {name} is switched on, and {missing}. The run goes on without it.")
            del asked[name]
    return functools.partial(Monitors, **asked) if asked else None


def _folder(block: FileMonitor) -> str:
    return os.path.join(block.output_path, block.job_name)


def _comet(block: CometMonitor) -> dict[str, Any]:
    """What is given of the block: an absent value is one that the library takes from its own settings."""
    names = ("project", "workspace", "api_key", "experiment_key", "online", "mode", "experiment_name")
    values = {"project_name" if name == "project" else name: getattr(block, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return {**given, "samples_log_interval": block.samples_log_interval}
