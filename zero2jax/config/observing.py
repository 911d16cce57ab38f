"""Who is told of each step, by the keys of a configuration that only observe: `initialize` hands them to the engine."""

import os
from typing import Any

from zero2jax.config.schema import CometMonitor, Config, FileMonitor
from zero2jax.monitors.monitors import Monitors
from zero2jax.monitors.observers import Observers


def observers_of(config: Config) -> Observers | None:
    """What the configuration asks for; None if that is nothing."""
    monitors = _monitors(config)
    return None if monitors is None else Observers(monitors=monitors)


def _monitors(config: Config) -> Monitors | None:
    """The monitors that are switched on, where DeepSpeed has theirs."""
    asked: dict[str, Any] = {}
    for name, block in (("tensorboard", config.tensorboard), ("csv", config.csv_monitor)):
        if block.enabled:
            asked[name] = _folder(block)
    if config.wandb.enabled:
        run = config.wandb
        asked["wandb"] = {"project": run.project, "group": run.group, "entity": run.team}
    if config.comet.enabled:
        asked["comet"] = _comet(config.comet)
    return Monitors(**asked) if asked else None


def _folder(block: FileMonitor) -> str:
    return os.path.join(block.output_path, block.job_name)


def _comet(block: CometMonitor) -> dict[str, Any]:
    """What is given of the block: an absent value is one that the library takes from its own settings."""
    names = ("project", "workspace", "api_key", "experiment_key", "online", "mode", "experiment_name")
    values = {"project_name" if name == "project" else name: getattr(block, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return {**given, "samples_log_interval": block.samples_log_interval}
