"""`python -m zero2jax` and the script `zero2jax`: the command line, if what it needs is installed."""

import importlib.util
import sys

_NEEDED = ("rich", "tyro")  # the extra `cli`


def main() -> int:
    """Run the command line; its exit code, 2 without its packages."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(f"zero2jax: the command line needs {names}: pip install 'zero2jax[cli]'.", file=sys.stderr)
        return 2
    from zero2jax.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
