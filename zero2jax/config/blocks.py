"""How one block of keys is read: a JSON object becomes a frozen dataclass.

Each field of the dataclass carries a `Rule` and the other names DeepSpeed knows for it. `read_block` goes on after an
error: everything wrong goes to the report.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from zero2jax.config.values import Refused, Report, Rule, joined, shown

Block = TypeVar("Block")
Default = TypeVar("Default")

REQUIRED: Any = dataclasses.MISSING

_ONLY_DOCUMENTED = "stands in DeepSpeed's documentation, and its code ignores it"
# With more the file is another one; to look for what each may mean would take minutes.
_MOST_UNKNOWN_KEYS = 1000


def setting(
    default: Default,
    rule: Rule,
    *,
    aliases: tuple[str, ...] = (),
    old: tuple[str, ...] = (),
    documented: tuple[str, ...] = (),
) -> Default:
    """A field read by a rule; `aliases` are equal names. Noted are `old` ones, which are deprecated, and `documented`
    ones, which DeepSpeed's documentation has and its code ignores.
    """
    metadata = {"rule": rule, "aliases": aliases, "old": old, "documented": documented}
    field: Default = dataclasses.field(default=default, metadata=metadata)  # type: ignore[assignment]
    return field


def block(cls: type, *, aliases: tuple[str, ...] = ()) -> dict[str, Any]:
    """Field metadata: a block of its own, read into `cls`."""
    return {"block": cls, "aliases": aliases, "old": (), "documented": ()}


def names_of(cls: Any) -> dict[str, tuple[dataclasses.Field, str]]:
    """Every spelling a block accepts: name to (field, what to note of that spelling, "" for nothing)."""
    spellings = {}
    for field in dataclasses.fields(cls):
        if not field.metadata:
            continue
        spellings[field.name] = (field, "")
        spellings.update(dict.fromkeys(field.metadata["aliases"], (field, "")))
        spellings.update(dict.fromkeys(field.metadata["old"], (field, "is deprecated")))
        spellings.update(dict.fromkeys(field.metadata["documented"], (field, _ONLY_DOCUMENTED)))
    return spellings


def read_block(
    cls: type[Block],
    raw: Any,
    path: str,
    report: Report,
    readers: Mapping[str, Callable[..., Any]] | None = None,
    unknown: Callable[[Any, Any, Report], None] | None = None,
    *,
    name: str | None = None,
) -> Block:
    """One object of the file as its dataclass; what is wrong goes to the report.

    Args:
      cls: the dataclass of the block.
      raw: the JSON value there.
      path: where, for messages, as the file spells it; "" at the top level.
      report: collects errors, notes, keys at "auto" and keys given.
      readers: fields read by a function `(value, path, report)` of their own.
      unknown: told of keys that the block does not have, as `(key, value, report)`; by default each is an error.
      name: where, as the fields are called; `path` if absent.

    Returns:
      The block. With errors in the report its values are not to be used.
    """
    name = path if name is None else name
    values: dict[str, Any] = {}
    if not isinstance(raw, Mapping):
        report.error(
            path or "the file", raw, "must be an object", "Write { ... } with the keys of this block."
        )
        raw = {}
    for key, value, field in _known_keys(cls, raw, path, name, report, unknown):
        here, means = joined(path, key), joined(name, field.name)
        report.given.append(means)
        reader = (readers or {}).get(field.name)
        if reader is not None:
            values[field.name] = reader(value, here, report)
        elif "block" in field.metadata:
            if value is not None:
                values[field.name] = read_block(field.metadata["block"], value, here, report, name=means)
        elif isinstance(value, str) and value == "auto":
            report.auto.append(means)
        else:
            values[field.name] = _read_value(field, value, here, means, report)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is REQUIRED and field.default_factory is REQUIRED
        if required and field.name not in values:
            _note_missing(field, joined(name, field.name), report)
            values[field.name] = None
    return cls(**values)


def _known_keys(
    cls: Any,
    raw: Mapping[Any, Any],
    path: str,
    name: str,
    report: Report,
    unknown: Callable[[Any, Any, Report], None] | None,
) -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(key, value, field) of the keys that a block has, once each; the others go to the report."""
    seen: dict[str, str] = {}
    spellings = names_of(cls)
    num_unknown = 0
    for key, value in raw.items():
        here = joined(path, key)
        if not isinstance(key, str) or key not in spellings:
            num_unknown += 1
            if num_unknown > _MOST_UNKNOWN_KEYS:
                continue
            if unknown is None:
                report.errors.append(report.unknown(path, key, spellings, name=name))
            else:
                unknown(key, value, report)
            continue
        field, remark = spellings[key]
        if field.name in seen:
            rule = f"the same setting is also given as '{seen[field.name]}'"
            report.error(here, value, rule, "Keep one of the two.", name=joined(name, field.name))
            continue
        seen[field.name] = key
        if remark:
            report.notes.append(f"{here} {remark}: read as {joined(name, field.name)}.")
        yield key, value, field
    if num_unknown > _MOST_UNKNOWN_KEYS:
        more = num_unknown - _MOST_UNKNOWN_KEYS
        report.errors.append(f"{path or 'the file'}: {more} more unknown keys. Give a DeepSpeed JSON.")


def _note_missing(field: dataclasses.Field, path: str, report: Report) -> None:
    rule = f"must be {field.metadata['rule'].text} and has no default"
    if path in report.auto:
        way_out = "Give a value, or fill it with resolve_auto(config, overrides)."
        report.open.append(f"{path} = 'auto': {rule}. {way_out}")
    elif report.sound(path):
        report.error(path, None, rule, "Give a value.")


def _read_value(field: dataclasses.Field, value: Any, path: str, name: str, report: Report) -> Any:
    rule: Rule = field.metadata["rule"]
    try:
        converted = rule.convert(value)
    except Refused as refused:
        default = None if field.default is REQUIRED else field.default
        way_out = "Give such a value." if default is None else f"The default is {shown(default)}."
        report.error(path, value, f"must be {str(refused) or rule.text}", way_out, name=name)
        return default
    if isinstance(converted, (bool, int, float)) and isinstance(value, str):
        report.notes.append(f"{path}: the string {shown(value)} was read as {shown(converted)}.")
    if isinstance(converted, bool) and isinstance(value, int) and not isinstance(value, bool):
        report.notes.append(f"{path}: the number {value} was read as {shown(converted)}.")
    return converted
