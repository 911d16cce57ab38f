"""`python -m zero2jax`: the command line."""

import sys

from zero2jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
