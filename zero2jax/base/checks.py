"""What a caller passed in: its type in words, a number that is none, a function that takes other arguments."""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any


def type_name(x: Any) -> str:
    """The type of a value as messages name it, with its module unless Python has it built in.

    Example:
      >>> type_name(3), type_name(inspect.signature(len))
      ('int', 'inspect.Signature')
    """
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_whole(x: Any) -> bool:
    """Whether `x` is an integer of Python or NumPy, and no boolean."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_positive(x: Any) -> bool:
    """Whether `x` is a finite number of Python or NumPy above 0, and no boolean."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and 0 < float(x) < math.inf


def misfit(function: Callable[..., Any], *args: Any) -> tuple[str, str] | None:
    """The signature of a function and why it does not take these arguments; None if it does, or cannot tell.

    Example:
      >>> misfit(lambda path: True, "w", 0)
      ('(path)', 'too many positional arguments')
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(signature), str(error)
    return None
