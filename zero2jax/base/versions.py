"""Versions of installed packages, for reports, manifests and comparisons between processes."""

import importlib.metadata


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None if there is none of that name.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
