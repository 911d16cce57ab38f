"""What a configuration comes from (a path, JSON text, a dict) as one plain JSON object. Nothing here knows a key.

As in DeepSpeed a string that names an existing file is that file, text is read with hjson (comments, trailing commas,
no outer braces), and base64 of such text is read, too.
"""

import base64
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hjson

from zero2jax.config.values import ConfigError, Report, joined, shown

_WAY_OUT = "Give the path of a DeepSpeed JSON file, or its text."


def raw_config(source: Any, report: Report) -> tuple[str, dict[str, Any]]:
    """(name for messages, JSON object of its own); a key that is given twice goes to the report.

    Args:
      source: a path, the text, its base64, or a dict, whose NumPy scalars become numbers.
      report: collects the errors that leave something to read.

    Raises:
      ConfigError: there is nothing to read: no such file, no JSON, an empty file.
    """
    if isinstance(source, Mapping):
        return "(dict)", plain_object(source, "(dict)")
    if not isinstance(source, (str, os.PathLike)):
        rule = "a configuration is a path, a dict, JSON text or a Config"
        raise ConfigError("cannot load the configuration", [f"{shown(source)}: {rule}. Pass one of these."])
    name, content = _content(source)
    doing = f"cannot load the configuration {shown(name) if len(name) > 200 else name}"
    try:
        pairs = hjson.loads(content, object_pairs_hook=_Pairs)
        raw = _without_duplicates(pairs, "", report)
    # An IndexError is hjson's way to say that a comment or a string has no end.
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        way_out = (
            "Write one JSON object (comments and trailing commas are allowed); its words are true, false and null, not "
            "True, None or NaN."
        )
        raise ConfigError(doing, [f"not JSON or hjson ({reason}). {way_out}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError(doing, [f"{name} = {shown(raw)}: must be one JSON object. Write {{ ... }}."])
    if not raw and "{" not in content:
        raise ConfigError(doing, [f"the file is empty: no key is set. {_WAY_OUT} {{}} stands for no key."])
    return name, raw


def plain_object(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of a dict in which mappings are dicts, NumPy scalars numbers and arrays lists.

    Raises:
      ConfigError: it is nested too deeply.
    """
    try:
        return {key: _plain(value) for key, value in source.items()}
    except RecursionError:
        way_out = "DeepSpeed's keys need four levels at most."
        raise ConfigError(
            f"cannot load the configuration {name}", [f"blocks are nested too deeply. {way_out}"]
        ) from None


def without(source: Mapping[str, Any], paths: Collection[str], path: str = "") -> dict[str, Any]:
    """A copy of an object without the keys at some paths."""
    rest = {}
    for key, value in source.items():
        here = joined(path, key)
        if here not in paths:
            rest[key] = without(value, paths, here) if isinstance(value, Mapping) else value
    return rest


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.tolist() if hasattr(value, "tolist") else value


class _Pairs(list):  # type: ignore[type-arg]
    """The (key, value) pairs of one JSON object, before duplicates are lost."""


def _content(source: str | os.PathLike[str]) -> tuple[str, str]:
    """(name for messages, text) of a path, a text or its base64."""
    # A name may look like text: what is there as a file is a file.
    if isinstance(source, os.PathLike) or os.path.exists(source):
        return os.fspath(source), _file_content(os.fspath(source))
    if _is_text(source):
        return "(text)", source
    decoded = _from_base64(source)
    return (source, _file_content(source)) if decoded is None else ("(base64)", decoded)


def _is_text(source: str) -> bool:
    return "{" in source or "\n" in source or re.match(r"\s*[\"']?\w+[\"']?\s*:(?![\\/])", source) is not None


def _from_base64(source: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(source).decode()
    except ValueError:
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _file_content(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        doing = f"cannot load the configuration {shown(name)}"
        raise ConfigError(doing, [f"the file cannot be read: {reason}. {_WAY_OUT}"]) from None


def _without_duplicates(value: Any, path: str, report: Report) -> Any:
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for key, item in value:
            here = joined(path, key)
            if key in result:
                report.error(
                    here, item if not isinstance(item, _Pairs) else {}, "the key is given twice", "Keep one."
                )
            result[key] = _without_duplicates(item, here, report)
        return result
    if isinstance(value, list):
        return [_without_duplicates(item, path, report) for item in value]
    return value
