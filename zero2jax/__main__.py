"""The command line: parse, load, call one public function, print. `zero2jax` and `python -m zero2jax`.

Exit code 2 with a message on stderr for wrong usage and for files that cannot be used.
"""

import json as json_text
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

from zero2jax.check import check_config, print_report
from zero2jax.config import ConfigError, read_config
from zero2jax.environment import environment_report, print_environment

_USAGE_ERROR = 2


def check(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    devices: int | None = None,
    json: bool = False,
    all: bool = False,
) -> None:
    """Validate a DeepSpeed JSON and print what it becomes.

    Args:
        config: Path of the file.
        devices: Size of the data axis, to finish the batch sizes.
        json: Print JSON.
        all: List the keys the file does not have, too.
    """
    if devices is not None and devices < 1:
        raise ConfigError(
            "cannot check the configuration", [f"--devices = {devices}: must be at least 1. Raise it."]
        )
    report = check_config(read_config(config), devices, every_key=all)
    if json:
        print(json_text.dumps(report.as_dict(), indent=2))
    else:
        print_report(report)


def info(json: bool = False) -> None:
    """Print versions and devices.

    Args:
        json: Print JSON.
    """
    report = environment_report()
    if json:
        print(json_text.dumps(report, indent=2))
    else:
        print_environment(report)


COMMANDS: dict[str, Callable[..., Any]] = {"check": check, "info": info}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; usage errors leave through `SystemExit(2)`."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="zero2jax",
            description="ZeRO for JAX.",
            args=args,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
