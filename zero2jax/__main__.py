"""`zero2jax` and `python -m zero2jax`: the command line, or what to install for it."""

import importlib.util
import sys


def main() -> int:
    """Run the command line and return its exit code; 2 where the extra `cli` is not installed."""
    missing = [name for name in ("rich", "tyro") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"zero2jax's command line needs {' and '.join(missing)}: pip install 'zero2jax[cli]'.",
            file=sys.stderr,
        )
        return 2
    from zero2jax.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
