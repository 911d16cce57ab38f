"""What a user saves beside the state, as JSON and arrays: dicts, lists, tuples, numbers, strings, bytes and arrays.

`encode` takes the arrays out and leaves `{"array": i}` in their place; `decode` puts them back. Nothing is pickled:
other classes are refused by path.
"""

import base64
import math
from typing import Any

import jax
import numpy as np

from zero2jax.pytrees import PyTree

Json = Any


def encode(extra: PyTree) -> tuple[Json, list[np.ndarray]]:
    """(JSON, arrays) of a tree; arrays are copied.

    Raises:
      TypeError: a value that is neither a container, a number, a string, bytes nor an array (names its path).
    """
    arrays: list[np.ndarray] = []

    def one(x: Any, path: str) -> Json:
        if x is None or isinstance(x, bool | str) or type(x) is int:
            return x
        if type(x) is float:
            return x if math.isfinite(x) else {"float": repr(x)}
        if type(x) is bytes:
            return {"bytes": base64.b64encode(x).decode()}
        if type(x) is dict:
            return {"dict": [[one(k, f"{path} (a key)"), one(v, f"{path}[{k!r}]")] for k, v in x.items()]}
        if type(x) in (list, tuple):
            items = [one(v, f"{path}[{i}]") for i, v in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if isinstance(x, np.ndarray | np.generic | jax.Array) and _is_plain(x):
            arrays.append(np.array(x))
            return {"array": len(arrays) - 1}
        raise TypeError(
            f"saving {path}: found {_describe(x)}. `extra` is saved as JSON and arrays, so it may hold dicts, lists, "
            f"tuples, numbers, strings, bytes, None and arrays that this process holds whole. Convert it first."
        )

    return one(extra, "extra"), arrays


def decode(json: Json, arrays: list[np.ndarray]) -> PyTree:
    """The tree that `encode` took apart. Arrays, jax's among them, come back as NumPy arrays."""
    if isinstance(json, list):
        return [decode(x, arrays) for x in json]
    if not isinstance(json, dict):
        return json
    ((kind, value),) = json.items()
    if kind == "dict":
        return {decode(k, arrays): decode(v, arrays) for k, v in value}
    if kind == "tuple":
        return tuple(decode(x, arrays) for x in value)
    if kind == "bytes":
        return base64.b64decode(value)
    return float(value) if kind == "float" else arrays[value]


def _is_plain(x: Any) -> bool:
    if isinstance(x, jax.Array):
        return x.is_fully_addressable and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    return x.dtype.kind not in "OSUMm"


def _describe(x: Any) -> str:
    if isinstance(x, np.ndarray | jax.Array):
        return f"an array of {x.dtype}{list(x.shape)}"
    return f"a {type(x).__module__}.{type(x).__qualname__}"
