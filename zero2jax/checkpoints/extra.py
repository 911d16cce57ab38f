"""What a user saves beside the state, as JSON and arrays: dicts, lists, tuples, numbers, strings, bytes and arrays.

`encode` takes the arrays out and leaves `{"array": i}` in their place; `decode` puts them back. Nothing is pickled:
other classes are refused by path.
"""

import base64
import json
import math
from typing import Any

import jax
import numpy as np

from zero2jax.base.pytrees import PyTree
from zero2jax.checkpoints.safetensors_file import FileError, dtype_from_name

Json = Any


def encode(extra: PyTree) -> tuple[Json, list[np.ndarray]]:
    """(JSON, arrays) of a tree; arrays are copied.

    Raises:
      TypeError: a value that is neither a container, a number, a string, bytes nor an array (names its path), or
        containers nested too deeply.
    """
    try:
        encoded, arrays = _encode(extra)
        text = json.dumps(encoded, allow_nan=False)
        again, _ = _encode(decode(json.loads(text), arrays), copy=False)
        assert json.dumps(again) == text, extra
    except RecursionError as error:
        raise TypeError(
            "saving extra: its containers are nested too deeply for JSON. Save a flatter tree, such as a list of nodes."
        ) from error
    return encoded, arrays


def _encode(extra: PyTree, *, copy: bool = True) -> tuple[Json, list[np.ndarray]]:
    arrays: list[np.ndarray] = []

    def encode_value(x: Any, path: str) -> Json:
        if x is None or isinstance(x, bool | str):
            return x
        if type(x) is int:
            # Python limits the decimal digits that it reads, not the hexadecimal ones.
            return x if abs(x) < 2**63 else {"int": hex(x)}
        if type(x) is float:
            return x if math.isfinite(x) else {"float": repr(x)}
        if type(x) is bytes:
            return {"bytes": base64.b64encode(x).decode()}
        if type(x) is dict:
            items = [[key(k, f"{path} (a key)"), encode_value(v, f"{path}[{k!r}]")] for k, v in x.items()]
            return {"dict": items}
        if type(x) in (list, tuple):
            items = [encode_value(v, f"{path}[{i}]") for i, v in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if isinstance(x, np.ndarray | np.generic | jax.Array) and _is_plain(x):
            native = np.asarray(x)
            native = native.astype(native.dtype.newbyteorder("="), copy=False)
            arrays.append(np.array(native) if copy else native)
            return {"array": len(arrays) - 1}
        raise TypeError(
            f"saving {path}: found {_describe(x)}. `extra` is saved as JSON and arrays, so it may hold dicts, lists, "
            f"tuples, numbers, strings, bytes, None and arrays that this process holds in full. Convert it first."
        )

    def key(x: Any, path: str) -> Json:
        if isinstance(x, np.bool_ | np.integer | np.floating):
            x = x.item()  # equal, and hashes alike; an array could not be a key
        if type(x) is tuple:
            return {"tuple": [key(v, path) for v in x]}
        if isinstance(x, np.generic):
            raise TypeError(f"saving {path}: found {_describe(x)}. Convert it to a number or a string first.")
        return encode_value(x, path)

    return encode_value(extra, "extra"), arrays


def decode(encoded: Json, arrays: list[np.ndarray]) -> PyTree:
    """The tree that `encode` took apart. Arrays, jax's among them, come back as NumPy arrays."""
    if isinstance(encoded, list):
        return [decode(x, arrays) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, value),) = encoded.items()
    if kind == "dict":
        return {decode(k, arrays): decode(v, arrays) for k, v in value}
    if kind == "tuple":
        return tuple(decode(x, arrays) for x in value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "int":
        return int(value, 16)
    return float(value) if kind == "float" else arrays[value]


def _is_plain(x: Any) -> bool:
    """Whether it is an array that the files have a dtype for, and nothing besides (no mask, no fields)."""
    if isinstance(x, jax.Array):
        return x.is_fully_addressable and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    if isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap):
        return False
    try:
        return x.dtype.kind not in "OSUMm" and dtype_from_name(x.dtype.name) == x.dtype.newbyteorder("=")
    except FileError:
        return False


def _describe(x: Any) -> str:
    if type(x) in (np.ndarray, np.memmap) or isinstance(x, jax.Array):
        return f"an array of {x.dtype}{list(x.shape)}"
    return f"a {type(x).__module__}.{type(x).__qualname__}"
