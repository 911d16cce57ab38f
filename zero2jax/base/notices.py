"""Warnings that point at the user's line, however deep in this library the cause lies."""

import inspect
import os
import warnings

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning that points at the line which called this library."""
    frame, here, level = inspect.currentframe(), 1, 1
    # Others stand in between: a cached property, a function under jit. The outermost frame of ours counts.
    while frame is not None:
        here += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = here
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
