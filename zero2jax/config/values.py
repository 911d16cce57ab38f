"""What a single value of a configuration file may be, and the words for what is wrong. No JAX here.

A `Rule` has type, range and wording; what is wrong goes to a `Report` instead of stopping at the first error.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zero2jax.base import notices

_LONGEST_NAME = 80
_FP32_MAX, _FP32_MIN = 3.4028234663852886e38, 1.1754943508222875e-38
_MOST_STEPS = (1 << 30) - 1  # two of them, a cycle's halves, fit into the counter's 32 bits


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
    """Give a `ConfigWarning` that points at the line which called this library."""
    notices.warn(message, ConfigWarning)


class Refused(ValueError):
    """Raised by a rule whose value is of another kind or out of range; completes "must be ..." if not by its text."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be: `text` completes "must be ...", `convert` returns it or raises `Refused`."""

    text: str
    convert: Callable[[Any], Any]


@dataclasses.dataclass
class Report:
    """Findings while reading one file: key paths joined by dots, in the order met.

    Attributes:
      suggest: what an unknown key may mean, by (block, key, known names); "" for nothing.
      errors: what is wrong in the file.
      refused: what DeepSpeed has, and this library refuses.
      open: keys at "auto" that have no default.
      notes: what was converted or ignored.
      auto: keys at "auto", as their fields are called, like the two below.
      given: keys that the file has.
      broken: keys whose value is wrong, and those that an unknown key may have meant; no rule is to judge by them.
    """

    suggest: Callable[[str, str, Iterable[str]], str] = lambda path, key, known: ""
    errors: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    open: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    auto: list[str] = dataclasses.field(default_factory=list)
    given: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All reasons why the file cannot be used."""
        return [*self.errors, *self.refused, *self.open]

    def error(self, path: str, value: Any, rule: str, way_out: str, *, name: str | None = None) -> None:
        """Add one error: key path, value found, the rule it broke, what to do; `name` as the field is called."""
        self.errors.append(f"{path} = {shown(value)}: {rule}. {way_out}")
        self.broken.append(name or path)

    def refuse(self, path: str, value: Any, rule: str, way_out: str) -> None:
        """Add one thing that is not wrong, but cannot be done here."""
        self.refused.append(f"{path} = {shown(value)}: {rule}. {way_out}")
        self.broken.append(path)

    def sound(self, *names: str) -> bool:
        """Whether rules may judge by these keys."""
        return not any(
            name == broken or name.startswith(f"{broken}.") for name in names for broken in self.broken
        )

    def unknown(self, path: str, key: Any, known: Iterable[str], *, name: str | None = None) -> str:
        """The sentence for an unknown key, with the one that it may mean; `name` is the field's path of the block."""
        meant = self.suggest(path, str(key), known)
        self.broken += [joined(path if name is None else name, meant), meant] if meant else []
        return f"{joined(path, key)}: unknown key. " + (f"Did you mean {meant!r}?" if meant else "Remove it.")


def joined(path: str, key: Any) -> str:
    """The key path of `key` inside the block at `path`, printable."""
    name = str(key)[:_LONGEST_NAME]
    if not name.isprintable():
        name = ascii(name)
    elif not name or name != name.strip():
        name = repr(name)
    name += "..." if len(str(key)) > _LONGEST_NAME else ""
    return f"{path}.{name}" if path else name


def shown(value: Any) -> str:
    """A value for an error message, never long."""
    if isinstance(value, Mapping):
        return f"an object with {len(value)} key{'' if len(value) == 1 else 's'}"
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


def one_of(*numbers: int) -> Rule:
    """One of a few integers."""

    def convert(value: Any) -> int:
        if (found := _number_from(value)) not in numbers:
            raise Refused
        return int(found)

    return Rule(" or ".join(map(str, numbers)), convert)


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
        if abs(x) > _FP32_MAX:
            raise Refused("within what fp32 holds, 3.4e38: the step computes with it in fp32")
        return x

    limits = [_span(low, high).strip()] if _span(low, high) else []
    limits += [] if above is None else [f"greater than {above}"]
    limits += [] if below is None else [f"less than {below}"]
    return Rule(" ".join(["a number", " and ".join(limits)]).strip(), convert)


def norm() -> Rule:
    """A norm that gradients are clipped to, or 0 for none; less than fp32's smallest normal number would be 0, too."""
    rule = number(0.0)

    def convert(value: Any) -> float:
        x: float = rule.convert(value)
        if 0 < x < _FP32_MIN:
            raise Refused(
                f"0, for no clipping, or at least {_FP32_MIN}: less is 0 in fp32, and every update would be"
            )
        return x

    return Rule(rule.text, convert)


def steps(low: int) -> Rule:
    """A number of steps of at least `low`, which the 32 bits of a step counter hold."""
    rule = integer(low)

    def convert(value: Any) -> int:
        number: int = rule.convert(value)
        if number > _MOST_STEPS:
            raise Refused(f"at most {_MOST_STEPS}: steps are counted in 32 bits")
        return number

    return Rule(rule.text, convert)


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


def interval() -> Rule:
    """A number of steps between two of a kind; 0, null and infinity, which libraries write for never, are 0."""

    def convert(value: Any) -> int:
        if value is None or (
            isinstance(value, (float, str)) and str(value).strip().lower() in ("inf", "infinity")
        ):
            return 0
        number: int = integer(0).convert(value)
        return number

    return Rule("an integer of at least 0, or null", convert)


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


def asked_for(is_on: Callable[[Mapping[str, Any]], Any] = lambda block: block.get("enabled", False)) -> Rule:
    """An object that is only recorded: whether it is switched on, by default by its `enabled`."""

    def convert(value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        if not isinstance(value, Mapping):
            raise Refused
        enabled = is_on(value)
        return False if enabled in ("auto", None) else bool(boolean().convert(enabled))

    return Rule("an object whose 'enabled', if there, is true or false", convert)


def not_empty(block: Mapping[str, Any]) -> Any:
    """For `asked_for`: a block without `enabled` that is on when it says anything."""
    return block.get("enabled", bool(block))


def any_part_enabled(block: Mapping[str, Any]) -> bool:
    """For `asked_for`: a block whose parts have the switches, at any depth."""
    return any(
        any_part_enabled(value)
        if isinstance(value, Mapping)
        else name == "enabled" and boolean().convert(value)
        for name, value in block.items()
    )


def tensor_parallel_size() -> Rule:
    """The block `tensor_parallel` as the number of devices that it divides tensors over; 0 is off."""
    size = integer(0)

    def convert(value: Any) -> int:
        if value in (None, False):
            return 0
        if not isinstance(value, Mapping):
            raise Refused
        inner = value.get("tp", value.get("tensor_parallel", {}))
        sizes = [value.get("autotp_size", 0), inner.get("tp_size", 0) if isinstance(inner, Mapping) else 0]
        return int(max(size.convert(0 if number in ("auto", None) else number) for number in sizes))

    return Rule("an object with a number as 'autotp_size'", convert)


class TensorActions(dict[str, str]):
    """What a remat policy does with tensors, by name; not to be changed, so that a `Config` can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def remat_rule() -> Rule:
    """A remat policy: a word, tensor names with actions, or several; which words there are is known to the engine."""

    def convert(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value:
            return tuple(convert(item) for item in value)
        if isinstance(value, Mapping) and all(isinstance(action, str) for action in value.values()):
            return TensorActions(value)
        if not isinstance(value, str):
            raise Refused
        return value

    return Rule(
        "a remat policy: a word, an object from tensor names to 'save', 'recompute' or 'offload', or a list of them",
        convert,
    )
