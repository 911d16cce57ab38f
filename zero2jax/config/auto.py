"""Values for keys that a file leaves at "auto", as the wrappers of DeepSpeed fill them in."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zero2jax.config.blocks import names_of
from zero2jax.config.params import OPTIMIZERS, SCHEDULERS
from zero2jax.config.schema import Config
from zero2jax.config.source import plain_object
from zero2jax.config.values import Refused, Report, Rule, choice, shown

_TYPED = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}


class Spelling(NamedTuple):
    """What a key path means: `name` as the fields are called, and the `rule` of its value, None for a block."""

    name: str
    rule: Rule | None


@functools.cache
def spellings(cls: Any = Config, path: str = "", name: str = "") -> Mapping[str, Spelling]:
    """Every spelling of every key path, blocks and types included."""
    paths: dict[str, Spelling] = {}
    for key, (field, _) in names_of(cls).items():
        here, means = (f"{prefix}.{word}".lstrip(".") for prefix, word in ((path, key), (name, field.name)))
        paths[here] = Spelling(means, field.metadata.get("rule"))
        if not path and key in _TYPED:
            paths[f"{here}.type"] = Spelling(f"{here}.type", choice(*_TYPED[key]))
            paths[f"{here}.params"] = Spelling(f"{here}.params", None)
            for kind in _TYPED[key].values():
                paths |= spellings(kind, f"{here}.params", f"{here}.params")
        elif "block" in field.metadata:
            paths |= spellings(field.metadata["block"], here, means)
    return paths


def fill(raw: dict[str, Any], overrides: Any, report: Report) -> list[str]:
    """Put the overrides where `raw` has "auto", in whatever spelling; the paths of those that `raw` has no key for.

    Args:
      raw: the JSON object; changed.
      overrides: values by key path or as nested dicts.
      report: gets an error for an override that is no key, or that contradicts the file.
    """
    if not isinstance(overrides, Mapping):
        report.error("overrides", overrides, "must be an object from key paths to values", "Write { ... }.")
        return []
    if not overrides:
        return []
    known, unused = spellings(), []
    for path, value in _leaves(plain_object(overrides, "(overrides)"), known):
        if path not in known:
            report.errors.append("override " + report.unknown("", path, known))
            continue
        places = {known[here].name: (block, key) for here, block, key in _places(raw, known)}
        name, rule = known[path]
        if name in places:
            _put(*places[name], f"override {path}", value, rule, report)
        elif not _is_inside_a_value(places, name, f"override {path}", value, report):
            unused.append(path)
    return unused


def _leaves(
    values: Mapping[str, Any], known: Mapping[str, Spelling], path: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, Mapping) and (here not in known or known[here].rule is None):
            yield from _leaves(value, known, here)
        else:
            yield here, value


def _places(
    raw: Mapping[Any, Any], known: Mapping[str, Spelling], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(key path as written, the JSON object that has it, its key there) of every known key of a file."""
    for key, value in raw.items():
        here = f"{path}.{key}".lstrip(".")
        if here in known:
            yield here, raw, key
            if isinstance(value, Mapping):
                yield from _places(value, known, here)


def _is_inside_a_value(places: Mapping[str, Any], name: str, doing: str, value: Any, report: Report) -> bool:
    """Whether the file has a single value where the override has a block, which is an error."""
    while "." in name:
        name = name.rpartition(".")[0]
        block, key = places.get(name, ({}, ""))
        if block.get(key) is not None and not isinstance(block[key], Mapping):
            rule = f"the file says {name} = {shown(block[key])}"
            report.error(doing, value, rule, "Write the block with its keys in the file.")
            return True
    return False


def _put(block: Any, key: Any, doing: str, value: Any, rule: Rule | None, report: Report) -> None:
    if block[key] == "auto":
        block[key] = value
    elif not _same(block[key], value, rule):
        way_out = 'Make the two agree, or write "auto" in the file.'
        report.error(doing, value, f"the file says {shown(block[key])}", way_out)


def _same(a: Any, b: Any, rule: Rule | None) -> bool:
    """Whether two values are read as the same: "8" and 8, "true" and true."""
    if rule is None or a == b:
        return bool(a == b)
    try:
        return bool(rule.convert(a) == rule.convert(b))
    except Refused:
        return isinstance(a, str) and isinstance(b, str) and a.lower() == b.lower()
