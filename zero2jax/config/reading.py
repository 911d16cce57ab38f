"""A DeepSpeed JSON becomes a `Config`: reading, old spellings, "auto" values; all errors of a file at once.

Files are read with hjson as DeepSpeed does: comments, trailing commas, no outer braces. The supported keys
and what they become are in `keys`, types and defaults in `schema`. The library below takes the
dataclasses and never sees a dict of settings.
"""

import argparse
import copy
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from zero2jax.base.names import nearest
from zero2jax.config.params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from zero2jax.config.rules import check_rules
from zero2jax.config.schema import Config, OptimizerBlock, SchedulerBlock, ZeroOptimization
from zero2jax.config.values import (
    ConfigError,
    ConfigWarning,
    Report,
    joined,
    names_of,
    read_block,
    shown,
    warn,
)

__all__ = [
    "DEFAULT_CONFIG",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "add_config_arguments",
    "load_config",
    "read_config",
    "resolve_auto",
]

DEFAULT_CONFIG: Mapping[str, Any] = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
"""What no configuration means: stage 2 with bf16 compute."""

# How near a key at the top has to come to a known one to be its misspelling. With less, `train_data` would be
# `train_batch_size`: many files have keys of their own there.
_NEAR = 0.7

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
    name, raw, report = _raw_config(source)
    doing = f"cannot load the configuration {name}"
    if report.errors:
        raise ConfigError(doing, report.errors)
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
    if not report.errors:
        check_rules(config, report)
    if report.errors:
        raise ConfigError(doing, report.errors, report.notes)
    return dataclasses.replace(config, notes=tuple(report.notes))


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
    if isinstance(source, Config):
        name, raw, report = source.name, _copied(source.name, source.source), Report()
    else:
        name, raw, report = _raw_config(source)
    for path, value in _flat(overrides).items():
        _override(raw, path, value, report)
    if report.errors:
        raise ConfigError(f'cannot fill the "auto" values of {name}', report.errors)
    config = dataclasses.replace(read_config(raw), name=name)
    for note in config.notes:
        warn(f"{name}: {note}")
    return config


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with `--deepspeed_config PATH` and the `--deepspeed` flag that scripts pass with it."""
    group = parser.add_argument_group("zero2jax", "configuration in DeepSpeed's format")
    group.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's command lines")
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="DeepSpeed JSON file")
    return parser


class _Pairs(list):  # type: ignore[type-arg]
    """The (key, value) pairs of one JSON object, before duplicates are lost."""


def _raw_config(source: Any) -> tuple[str, dict[str, Any], Report]:
    """(name for messages, JSON object with duplicate keys reported, report)."""
    report = Report()
    if isinstance(source, Mapping):
        return "(dict)", _copied("(dict)", source), report
    if not isinstance(source, (str, os.PathLike)):
        rule = "a configuration is a path, a dict, JSON text or a Config"
        raise ConfigError("cannot load the configuration", [f"{shown(source)}: {rule}. Pass one of these."])
    if isinstance(source, str) and _is_text(source):
        name, content = "(text)", source
    else:
        name = os.fspath(source)
        content = _file_content(name)
    try:
        pairs = hjson.loads(content, object_pairs_hook=_Pairs)
        raw = _without_duplicates(pairs, "", report)
    except (ValueError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        way_out = "Write one JSON object (comments and trailing commas are allowed)."
        raise ConfigError(
            f"cannot load the configuration {name}", [f"not JSON or hjson ({reason}). {way_out}"]
        ) from None
    if not isinstance(raw, dict):
        report.error(name, raw, "must be one JSON object", "Write { ... }.")
        raw = {}
    return name, raw, report


def _copied(name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(dict(source))
    except RecursionError:
        doing = f"cannot load the configuration {name}"
        raise ConfigError(
            doing, ["blocks are nested too deeply. DeepSpeed's keys need four levels at most."]
        ) from None


def _is_text(source: str) -> bool:
    return "{" in source or "\n" in source or re.match(r"\s*[\"']?\w+[\"']?\s*:(?![\\/])", source) is not None


def _file_content(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        way_out = "Give the path of a DeepSpeed JSON file, or its text."
        doing = f"cannot load the configuration {shown(name)}"
        raise ConfigError(doing, [f"the file cannot be read: {reason}. {way_out}"]) from None


def _without_duplicates(value: Any, path: str, report: Report) -> Any:
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for key, item in value:
            here = f"{path}.{key}" if path else key
            if key in result:
                report.error(
                    here, item if not isinstance(item, _Pairs) else {}, "the key is given twice", "Keep one."
                )
            result[key] = _without_duplicates(item, here, report)
        return result
    if isinstance(value, list):
        return [_without_duplicates(item, path, report) for item in value]
    return value


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
    near = nearest(str(key), names_of(Config), cutoff=_NEAR)
    if not near and key in names_of(ZeroOptimization):
        near = [f"zero_optimization.{key}"]
    if not near and isinstance(value, Mapping) and "stage" in value:
        near = ["zero_optimization"]
    sentence = f"{joined('', key)}: unknown key."
    if near and not str(key).startswith("_"):
        way_out = "If it is a key of your own, begin its name with an underscore."
        report.errors.append(f"{sentence} Did you mean {near[0]!r}? {way_out}")
    else:
        report.notes.append(f"{sentence} It is ignored.")


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
        report.error(
            f"{path}.type", kind, f"not supported: {refused[lower]}", f"Use one of {', '.join(names)}."
        )
        return None
    if lower not in types:
        way_out = f"Use one of {', '.join(names)}" + (
            ", or pass an optax tx." if path == "optimizer" else "."
        )
        report.error(f"{path}.type", kind, "has no counterpart here", way_out)
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


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        flat.update(_flat(value, here) if isinstance(value, Mapping) else {here: value})
    return flat


def _override(raw: dict[str, Any], path: str, value: Any, report: Report) -> None:
    """Put `value` where `raw` has "auto" at `path`."""
    known = _known_paths()
    if path not in known:
        report.errors.append("override " + report.unknown("", path, known))
        return
    parent: Any = raw
    *blocks, last = path.split(".")
    for name in blocks:
        parent = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or last not in parent:
        return
    if parent[last] == "auto":
        parent[last] = value
    elif parent[last] != value:
        rule = f"the file says {shown(parent[last])}"
        report.error(f"override {path}", value, rule, 'Make the two agree, or write "auto" in the file.')


def _known_paths(cls: Any = Config, path: str = "") -> list[str]:
    """Every spelling of every key, blocks and types included."""
    paths = []
    for name, (field, _) in names_of(cls).items():
        here = f"{path}.{name}" if path else name
        paths.append(here)
        if not path and name in ("optimizer", "scheduler"):
            types = OPTIMIZERS if name == "optimizer" else SCHEDULERS
            paths.append(f"{here}.type")
            params = {key for kind in types.values() for key in _known_paths(kind, f"{here}.params")}
            paths.extend(sorted(params))
        elif "block" in field.metadata:
            paths.extend(_known_paths(field.metadata["block"], here))
    return paths
