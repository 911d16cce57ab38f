"""What a single value of a configuration file may be, and how one block of keys is read.

A block is a frozen dataclass. Each of its fields carries a `Rule` (type, range, wording) and the aliases
DeepSpeed knows for it; `read_block` turns a JSON object into the dataclass and notes everything wrong in
a `Report` instead of stopping at the first error. No JAX here.
"""

import dataclasses
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from zero2jax.base.names import did_you_mean

Block = TypeVar("Block")
Default = TypeVar("Default")

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

REQUIRED: Any = dataclasses.MISSING


class ConfigError(ValueError):
    """A configuration cannot be used; `errors` holds every reason, `notes` what else was noticed, a line each."""

    def __init__(self, doing: str, errors: Iterable[str], notes: Iterable[str] = ()):
        self.doing = doing
        self.errors = tuple(errors)
        self.notes = tuple(notes)
        count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
        lines = [f"  - {error}" for error in self.errors] + [f"  - noticed: {note}" for note in self.notes]
        super().__init__("\n".join([f"{doing}: {count}", *lines]))


class ConfigWarning(UserWarning):
    """A key was converted, ignored or has no effect; names the key."""


def warn(message: str) -> None:
    """Give a `ConfigWarning` that points at the line which called this library, however deep in it the cause lies."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConfigWarning, stacklevel=level)


class Refused(ValueError):
    """Raised by a rule whose value is of another kind or out of range."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be: `text` completes "must be ...", `convert` returns it or raises `Refused`."""

    text: str
    convert: Callable[[Any], Any]


@dataclasses.dataclass
class Report:
    """Findings while reading one file: key paths joined by dots, in the order met."""

    errors: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    auto: list[str] = dataclasses.field(default_factory=list)
    given: list[str] = dataclasses.field(default_factory=list)

    def error(self, path: str, value: Any, rule: str, way_out: str) -> None:
        """Add one error: key path, value found, the rule it broke, what to do."""
        self.errors.append(f"{path} = {shown(value)}: {rule}. {way_out}")

    def unknown(self, path: str, key: Any, known: Iterable[str]) -> str:
        """The sentence for an unknown key, with the nearest known one."""
        way_out = did_you_mean(str(key), known, cutoff=0.5, otherwise="Remove it.")
        return f"{joined(path, key)}: unknown key. {way_out}"


def joined(path: str, key: Any) -> str:
    """The key path of `key` inside the block at `path`, printable."""
    name = str(key) if str(key).isprintable() else ascii(key)
    return f"{path}.{name}" if path else name


def shown(value: Any) -> str:
    """A value for an error message, never long."""
    if isinstance(value, Mapping):
        return f"an object with {len(value)} keys"
    if isinstance(value, (list, tuple)) and not all(isinstance(v, (int, float, str)) for v in value):
        return f"a list of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(v) for v in value[:4]) + (", ...]" if len(value) > 4 else "]")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float, str)):
        text = repr(value)
        return text if len(text) <= 80 else text[:77] + "..."
    return f"a {type(value).__name__}"


def _number_from(value: Any) -> int | float:
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            raise Refused from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(_as_float(value)):
        raise Refused
    return value


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f" of at least {low}"


def integer(low: int | None = None, high: int | None = None) -> Rule:
    """An integer in [low, high]; 5e8 counts, 1.5 and true do not."""

    def convert(value: Any) -> int:
        number = _number_from(value)
        if (
            number != int(number)
            or (low is not None and number < low)
            or (high is not None and number > high)
        ):
            raise Refused
        return int(number)

    return Rule(f"an integer{_span(low, high)}", convert)


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Rule:
    """A finite number in [low, high], greater than `above` and less than `below`."""

    def convert(value: Any) -> float:
        x = float(_number_from(value))
        if (low is not None and x < low) or (high is not None and x > high):
            raise Refused
        if (above is not None and x <= above) or (below is not None and x >= below):
            raise Refused
        return x

    limits = [_span(low, high).strip()] if _span(low, high) else []
    limits += [] if above is None else [f"greater than {above}"]
    limits += [] if below is None else [f"less than {below}"]
    return Rule(" ".join(["a number", " and ".join(limits)]).strip(), convert)


def boolean() -> Rule:
    """`true` or `false`; 0, 1 and the words as strings are converted."""

    def convert(value: Any) -> bool:
        if isinstance(value, str):
            value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
        if isinstance(value, (bool, int)) and value in (0, 1):
            return bool(value)
        raise Refused

    return Rule("true or false", convert)


def choice(*names: str) -> Rule:
    """One of the names, in any case; returns it as spelled here."""

    def convert(value: Any) -> str:
        if isinstance(value, str):
            for name in names:
                if name.lower() == value.strip().lower():
                    return name
        raise Refused

    return Rule("one of " + ", ".join(repr(name) for name in names), convert)


def text() -> Rule:
    """Any string."""

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise Refused
        return value

    return Rule("a string", convert)


def anything() -> Rule:
    """Any single value, of a key that has no effect."""

    def convert(value: Any) -> Any:
        if isinstance(value, (Mapping, list, tuple)):
            raise Refused
        return value

    return Rule("a single value", convert)


def optional(rule: Rule) -> Rule:
    """The same, or null."""
    return Rule(f"{rule.text}, or null", lambda value: None if value is None else rule.convert(value))


def pair(rule: Rule) -> Rule:
    """A list of two such values, as a tuple."""

    def convert(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise Refused
        return tuple(rule.convert(item) for item in value)

    return Rule(f"a list of two values, each {rule.text}", convert)


def single(rule: Rule) -> Rule:
    """The value itself or a list of one: DeepSpeed takes a list with one value per parameter group."""

    def convert(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if len(value) != 1:
                raise Refused
            value = value[0]
        return rule.convert(value)

    return Rule(f"{rule.text} (there are no parameter groups here: one value)", convert)


def asked_for() -> Rule:
    """An object that is only recorded: whether it is switched on (`enabled`, or just not empty)."""

    def convert(value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        if not isinstance(value, Mapping):
            raise Refused
        enabled = value.get("enabled", bool(value))
        return False if enabled == "auto" else bool(boolean().convert(enabled))

    return Rule("an object whose 'enabled', if there, is true or false", convert)


def remat_rule() -> Rule:
    """A remat policy: a word, tensor names with actions, or several; which words there are is known to the engine."""

    def convert(value: Any) -> Any:
        several = isinstance(value, (list, tuple)) and value
        if not several and not isinstance(value, (str, Mapping)):
            raise Refused
        if several:
            return tuple(convert(item) for item in value)
        return dict(value) if isinstance(value, Mapping) else value

    return Rule(
        "a remat policy: a word, an object from tensor names to 'save', 'recompute' or 'offload', or a list of them",
        convert,
    )


def setting(
    default: Default, rule: Rule, *, aliases: tuple[str, ...] = (), old: tuple[str, ...] = ()
) -> Default:
    """A field read by a rule; `aliases` are equal names, `old` deprecated ones (noted)."""
    metadata = {"rule": rule, "aliases": aliases, "old": old}
    field: Default = dataclasses.field(default=default, metadata=metadata)  # type: ignore[assignment]
    return field


def block(cls: type, *, aliases: tuple[str, ...] = ()) -> dict[str, Any]:
    """Field metadata: a block of its own, read into `cls`."""
    return {"block": cls, "aliases": aliases, "old": ()}


def names_of(cls: Any) -> dict[str, tuple[dataclasses.Field, bool]]:
    """Every spelling a block accepts: name to (field, whether that spelling is deprecated)."""
    spellings = {}
    for field in dataclasses.fields(cls):
        if not field.metadata:
            continue
        spellings[field.name] = (field, False)
        spellings.update(dict.fromkeys(field.metadata["aliases"], (field, False)))
        spellings.update(dict.fromkeys(field.metadata["old"], (field, True)))
    return spellings


def read_block(
    cls: type[Block],
    raw: Any,
    path: str,
    report: Report,
    readers: Mapping[str, Callable[..., Any]] | None = None,
    unknown: Callable[[Any, Any, Report], None] | None = None,
) -> Block:
    """One object of the file as its dataclass; what is wrong goes to the report.

    Args:
      cls: the dataclass of the block.
      raw: the JSON value there.
      path: where, for messages; "" at the top level.
      report: collects errors, notes, keys at "auto" and keys given.
      readers: fields read by a function `(value, path, report)` of their own.
      unknown: told of keys that the block does not have, as `(key, value, report)`; by default each is an error.

    Returns:
      The block. With errors in the report its values are not to be used.
    """
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    spellings = names_of(cls)
    if not isinstance(raw, Mapping):
        way_out = "Write { ... } with the keys of this block."
        report.error(path or "the file", raw, "must be an object", way_out)
        raw = {}
    for key, value in raw.items():
        here = joined(path, key)
        if not isinstance(key, str) or key not in spellings:
            if unknown is None:
                report.errors.append(report.unknown(path, key, spellings))
            else:
                unknown(key, value, report)
            continue
        field, deprecated = spellings[key]
        name = joined(path, field.name)
        if field.name in seen:
            rule = f"the same setting is also given as '{seen[field.name]}'"
            report.error(here, value, rule, "Keep one of the two.")
            continue
        seen[field.name] = key
        if deprecated:
            report.notes.append(f"{here} is deprecated: read as {name}.")
        report.given.append(name)
        reader = (readers or {}).get(field.name)
        if reader is not None:
            values[field.name] = reader(value, here, report)
        elif "block" in field.metadata:
            if value is not None:
                values[field.name] = read_block(field.metadata["block"], value, here, report)
        elif isinstance(value, str) and value == "auto":
            report.auto.append(name)
        else:
            values[field.name] = _read_value(field, value, here, report)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is REQUIRED and field.default_factory is REQUIRED
        if required and field.name not in values:
            _note_missing(field, joined(path, field.name), report)
            values[field.name] = None
    return cls(**values)


def _note_missing(field: dataclasses.Field, path: str, report: Report) -> None:
    at_auto = path in report.auto
    way_out = "Give a value" + (", or fill it with resolve_auto(config, overrides)." if at_auto else ".")
    rule = f"must be {field.metadata['rule'].text} and has no default"
    report.error(path, "auto" if at_auto else None, rule, way_out)


def _read_value(field: dataclasses.Field, value: Any, path: str, report: Report) -> Any:
    rule: Rule = field.metadata["rule"]
    try:
        converted = rule.convert(value)
    except Refused:
        default = None if field.default is REQUIRED else field.default
        way_out = "Give such a value." if default is None else f"The default is {shown(default)}."
        report.error(path, value, f"must be {rule.text}", way_out)
        return default
    if isinstance(converted, (bool, int, float)) and isinstance(value, str):
        report.notes.append(f"{path}: the string {shown(value)} was read as {shown(converted)}.")
    if isinstance(converted, bool) and isinstance(value, int) and not isinstance(value, bool):
        report.notes.append(f"{path}: the number {value} was read as {shown(converted)}.")
    return converted
