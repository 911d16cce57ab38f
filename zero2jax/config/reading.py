"""A DeepSpeed JSON becomes a `Config`: blocks, old spellings, "auto" values; all errors of a file at once.

What is read is in `source`; the supported keys and what they become are in `keys`, types and defaults in `schema`.
The library below takes the dataclasses and never sees a dict of settings.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zero2jax.config.auto import fill, spellings
from zero2jax.config.blocks import names_of, read_block
from zero2jax.config.params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from zero2jax.config.rules import check_rules
from zero2jax.config.schema import Config, OptimizerBlock, SchedulerBlock
from zero2jax.config.source import plain_object, raw_config
from zero2jax.config.suggestions import suggestion
from zero2jax.config.values import ConfigError, ConfigWarning, Report, joined, shown, warn

__all__ = [
    "DEFAULT_CONFIG",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "add_config_arguments",
    "load_config",
    "read_config",
    "resolve_auto",
    "spellings",
]

DEFAULT_CONFIG: Mapping[str, Any] = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
"""What no configuration means: stage 2 with bf16 compute."""

_NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})

Source = str | os.PathLike[str] | Mapping[str, Any] | Config


def load_config(source: Source) -> Config:
    """The configuration in a file, a dict or JSON text; a `Config` comes back as it is.

    Every note on a converted or ignored key becomes one `ConfigWarning`.

    Args:
      source: path of a JSON or hjson file, the text itself, or the dict.

    Raises:
      ConfigError: the source cannot be read or breaks a rule; holds all errors.

    >>> load_config('{"train_batch_size": 32, "zero_optimization": {"stage": 2}}').zero_optimization.stage
    2
    """
    if isinstance(source, Config):
        return source
    config = read_config(source)
    for note in config.notes:
        warn(f"{config.name}: {note}")
    return config


def read_config(source: Source) -> Config:
    """As `load_config`, but silent: the notes are in `Config.notes` only."""
    if isinstance(source, Config):
        return source
    return _accepted(*read(source))


def read(source: Source, overrides: Mapping[str, Any] = _NO_OVERRIDES) -> tuple[Config, Report]:
    """A configuration as far as it can be read, and the report; where that has problems, it is not to be used.

    Args:
      source: as `load_config` takes it.
      overrides: as for `resolve_auto`.

    Raises:
      ConfigError: there is nothing to read.
    """
    report = Report(suggest=suggestion)
    if isinstance(source, Config):
        name, raw = source.name, plain_object(source.source, source.name)
    else:
        name, raw = raw_config(source, report)
    unused = fill(raw, overrides, report)
    original, raw = raw, dict(raw)
    _convert_old_zero(raw, report)
    readers = {"optimizer": _read_optimizer, "scheduler": _read_scheduler}
    config = read_block(Config, raw, "", report, readers, _unknown_at_the_top)
    zero = config.zero_optimization
    if zero is not None and _overlap_is_open(raw):
        zero = dataclasses.replace(zero, overlap_comm=zero.stage == 3)
    config = dataclasses.replace(
        config,
        zero_optimization=zero,
        given=tuple(report.given),
        auto=tuple(report.auto),
        source=original,
        name=name,
    )
    check_rules(config, report)
    return dataclasses.replace(config, notes=tuple(report.notes), unused=tuple(unused)), report


def resolve_auto(source: Source, overrides: Mapping[str, Any]) -> Config:
    """The configuration with its "auto" values filled in.

    Args:
      source: as `load_config` takes it, or a loaded `Config`.
      overrides: values by key path (`{"optimizer.params.lr": 3e-4}`) or as nested dicts. They fill keys the
        file leaves at "auto"; a key the file does not have stays absent.

    Raises:
      ConfigError: an override contradicts a value in the file or names no key, or the result breaks a rule;
        a key without default that is still at "auto" is named.

    >>> resolve_auto({"train_batch_size": "auto"}, {"train_batch_size": 64}).train_batch_size
    64
    """
    config = _accepted(*read(source, overrides))
    for note in config.notes:
        warn(f"{config.name}: {note}")
    return config


def _accepted(config: Config, report: Report) -> Config:
    if report.problems:
        raise ConfigError(f"cannot load the configuration {config.name}", report.problems, report.notes)
    return config


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with `--deepspeed_config PATH` and the `--deepspeed` flag that scripts pass with it."""
    group = parser.add_argument_group("zero2jax", "configuration in DeepSpeed's format")
    group.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's command lines")
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="DeepSpeed JSON file")
    return parser


def _overlap_is_open(raw: Mapping[str, Any]) -> bool:
    zero = raw.get("zero_optimization")
    return not isinstance(zero, Mapping) or zero.get("overlap_comm") in (None, "auto")


def _convert_old_zero(raw: dict[str, Any], report: Report) -> None:
    """Replace the true/false form and the cpu_offload keys of `zero_optimization` by what they mean today."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        converted: dict[str, Any] = {"stage": int(zero)}
        if "allgather_size" in raw:
            converted["allgather_bucket_size"] = raw.pop("allgather_size")
            report.notes.append(
                "allgather_size is deprecated: read as zero_optimization.allgather_bucket_size."
            )
        raw["zero_optimization"] = converted
        report.notes.append(f"zero_optimization = {shown(zero)} is deprecated: read as stage {int(zero)}.")
        return
    if zero is None:
        raw.pop("zero_optimization", None)
        return
    if not isinstance(zero, Mapping):
        return
    zero = raw["zero_optimization"] = dict(zero)
    if zero.pop("cpu_offload_use_pin_memory", None) is not None:
        report.notes.append("zero_optimization.cpu_offload_use_pin_memory is deprecated and has no effect.")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero:
            continue
        value = zero.pop(old)
        path = f"zero_optimization.{old}"
        if value not in (True, False, "true", "false", "True", "False"):
            report.error(path, value, "must be true or false", f"Use zero_optimization.{new} instead.")
        elif new in zero:
            report.error(
                path, value, f"its replacement zero_optimization.{new} is also given", "Keep the new one."
            )
        elif value in (True, "true", "True"):
            zero[new] = {"device": "cpu"}
            report.notes.append(f'{path} is deprecated: read as zero_optimization.{new} {{"device": "cpu"}}.')


def _unknown_at_the_top(key: Any, value: Any, report: Report) -> None:
    """Refuse a key that must mean a known one, which to ignore would train otherwise than written; note the others."""
    name = str(key)
    if name.startswith(("_", "comment")):
        return
    if name in spellings():
        *blocks, last = name.split(".")
        written = "".join(f'{{"{block}": ' for block in blocks) + f'{{"{last}": ...}}' + "}" * len(blocks)
        report.errors.append(
            f"{name}: a key path, where JSON has blocks, so nothing reads it. Write {written}."
        )
        report.broken.append(name)
        return
    meant = report.suggest("", name, names_of(Config))
    if not meant and isinstance(value, Mapping) and "stage" in value:
        meant = "zero_optimization"
    sentence, question = f"{joined('', key)}: unknown key.", f" Did you mean {meant!r}?" if meant else ""
    # A plain word (`ratio`, `profile`) is a key of somebody's own as likely as one of another block.
    block = meant.rpartition(".")[0]
    own = block.startswith(("optimizer", "scheduler")) or (
        block not in ("", "zero_optimization") and "_" not in name
    )
    if meant and not own:
        way_out = "If it is a key of your own, begin its name with an underscore."
        report.errors.append(f"{sentence}{question} {way_out}")
        report.broken.append(meant)
    else:
        report.notes.append(f"{sentence} It is ignored.{question}")


def _read_typed(
    value: Any, path: str, report: Report, types: Mapping[str, type], refused: Mapping[str, str]
) -> tuple[str, Any, Mapping[str, Any]] | None:
    """(lower-case type, params, other keys) of an optimizer or scheduler block; None with an error."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        report.error(path, value, 'must be an object with "type" and "params"', "Write { ... }.")
        return None
    kind = value.get("type")
    lower = kind.lower() if isinstance(kind, str) else ""
    report.given.append(f"{path}.type")
    names = sorted(
        {cls.__name__.removesuffix("Params") for cls in types.values()}
        | ({"AdamW"} if "adamw" in types else set())
    )
    if lower in refused:
        report.refuse(
            f"{path}.type", kind, f"not supported: {refused[lower]}", f"Use one of {', '.join(names)}."
        )
        return None
    if lower not in types:
        way_out = f"Use one of {', '.join(names)}" + (
            ", or pass an optax tx." if path == "optimizer" else "."
        )
        tell = report.refuse if isinstance(kind, str) else report.error
        rule = "has no counterpart here" if "type" in value else f"the {path} block must say which one"
        tell(f"{path}.type", kind, rule, way_out)
        return None
    raw_params = value.get("params")
    others = {key: item for key, item in value.items() if key not in ("type", "params")}
    raw_params = {} if raw_params is None else raw_params
    if path == "optimizer" and isinstance(raw_params, Mapping) and "max_grad_norm" in raw_params:
        norm, rule = raw_params["max_grad_norm"], "clipping is no optimizer parameter"
        report.error(f"{path}.params.max_grad_norm", norm, rule, "Use gradient_clipping.")
        raw_params = {key: item for key, item in raw_params.items() if key != "max_grad_norm"}
    params: Any = read_block(types[lower], raw_params, f"{path}.params", report)
    return lower, params, others


def _read_optimizer(value: Any, path: str, report: Report) -> OptimizerBlock | None:
    read = _read_typed(value, path, report, OPTIMIZERS, REFUSED_OPTIMIZERS)
    if read is None:
        return None
    kind, params, others = read
    fusion = others.get("legacy_fusion", False)
    if not isinstance(fusion, bool):
        report.error(f"{path}.legacy_fusion", fusion, "must be true or false", "Remove it.")
    if "legacy_fusion" in others:
        report.given.append(f"{path}.legacy_fusion")
    for key in others:
        if key != "legacy_fusion":
            report.errors.append(report.unknown(path, key, ("type", "params", "legacy_fusion")))
    return OptimizerBlock(kind, params, fusion is True)


def _read_scheduler(value: Any, path: str, report: Report) -> SchedulerBlock | None:
    read = _read_typed(value, path, report, SCHEDULERS, {})
    if read is None:
        return None
    kind, params, others = read
    for key in others:
        report.errors.append(report.unknown(path, key, ("type", "params")))
    return SchedulerBlock(kind, params)
