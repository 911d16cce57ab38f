"""Hosts to launch on: DeepSpeed's hostfile and filters, and the ssh command for each host. Pure functions.

A hostfile has one `host slots=N` per line, a slot being a device; blank lines and lines that begin with `#` do not
count. A filter is `HOST[:SLOT,SLOT...]`, several joined by `@`; a host alone means all of its slots. As in
DeepSpeed's `launcher/runner.py`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# What every host should see as this one does. DeepSpeed forwards NCCL, PYTHON, MV2, UCX and MLFLOW.
_FORWARDED = ("FI_", "GLOO_", "JAX_", "MLFLOW", "NCCL", "OMP_", "PYTHON", "UCX", "XLA_")
_ENVIRONMENT_FILE = ".deepspeed_env"
_MOST_SLOTS = 4096


def parse_hostfile(text: str, name: str = "hostfile") -> dict[str, int]:
    """The hosts in their order, and how many slots each has.

    Raises:
      ValueError: a line of another form, a host that comes twice, no hosts.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        match = re.match(r"([^\s-]\S*)\s+slots=(\d{1,9})(?:[\s#].*)?$", words)
        if match is None or not 1 <= int(match[2]) <= _MOST_SLOTS:
            raise ValueError(
                f"reading {name}, line {number}: {words!r} is not of the form `host slots=N` with N of at least 1 and "
                f"at most {_MOST_SLOTS}, as in `worker-1 slots=8`."
            )
        if match[1] in hosts:
            raise ValueError(
                f"reading {name}, line {number}: host {match[1]!r} comes twice. Give it one line with all of its slots."
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ValueError(f"reading {name}: it names no host. Write lines of the form `host slots=N`.")
    return hosts


def filter_hosts(
    hosts: Mapping[str, int], include: str = "", exclude: str = ""
) -> dict[str, tuple[int, ...]]:
    """The slots to use of each host, in the hostfile's order.

    Raises:
      ValueError: both filters are given; a filter of another form; a host or slot that is not in the hostfile; nothing
        is left.

    Example:
      >>> filter_hosts({"a": 2, "b": 4}, include="b:0,2@a")
      {'a': (0, 1), 'b': (0, 2)}
      >>> filter_hosts({"a": 2, "b": 4}, exclude="b:0")
      {'a': (0, 1), 'b': (1, 2, 3)}
    """
    if include and exclude:
        raise ValueError(
            f"filtering hosts by --include {include} and --exclude {exclude}: the two exclude each other. Give one."
        )
    named = _parse_filter(include or exclude, hosts)
    if include:
        chosen = {host: named.get(host, set()) for host in hosts}
    else:
        chosen = {host: set(range(slots)) - named.get(host, set()) for host, slots in hosts.items()}
    used = {host: tuple(sorted(slots)) for host, slots in chosen.items() if slots}
    if not used:
        raise ValueError(f"filtering hosts by --exclude {exclude}: no slot is left. Exclude fewer.")
    return used


def _parse_filter(text: str, hosts: Mapping[str, int]) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    for part in text.split("@") if text else []:
        host, colon, slots = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", slots)):
            raise ValueError(
                f"reading the host filter {text!r}: {part!r} is not of the form HOST or HOST:SLOT,SLOT. Join several "
                f"by @, as in worker-0@worker-1:0,2."
            )
        if host not in hosts:
            raise ValueError(
                f"reading the host filter {text!r}: host {host!r} is not in the hostfile, which has {', '.join(hosts)}."
            )
        numbers = {int(slot) for slot in slots.split(",")} if colon else set(range(hosts[host]))
        wrong = sorted(slot for slot in numbers if slot >= hosts[host])
        if wrong:
            raise ValueError(
                f"reading the host filter {text!r}: host {host!r} has no slot {', '.join(map(str, wrong))}; it has 0 "
                f"to {hosts[host] - 1}."
            )
        named.setdefault(host, set()).update(numbers)
    return named


def forwarded_environment(env: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """What every host gets of this one's environment, and the `KEY=value` lines of the first `.deepspeed_env`."""
    forwarded = {name: value for name, value in env.items() if name.startswith(_FORWARDED)}
    path = next((f / _ENVIRONMENT_FILE for f in folders if (f / _ENVIRONMENT_FILE).is_file()), None)
    for line in path.read_text().splitlines() if path else []:
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            forwarded[name] = value
    return forwarded


def ssh_command(
    host: str, arguments: Sequence[str], env: Mapping[str, str], folder: Path, *, from_stdin: str = ""
) -> tuple[str, ...]:
    """Run `arguments` on a host, in the folder of the same name, by ssh without asking for passwords.

    `from_stdin` names a variable whose value is the first line of standard input: the words of a command are seen by
    everyone on both hosts.

    Example:
      >>> ssh_command("a", ["python", "x y.py"], {"B": "1 2"}, Path("/w"))[-1]
      "cd /w && exec env 'B=1 2' python 'x y.py'"
    """
    words = ["env", *(f"{name}={value}" for name, value in sorted(env.items())), *arguments]
    if from_stdin:
        words = ["sh", "-c", f'IFS= read -r {from_stdin} && export {from_stdin} && exec "$@"', "sh", *words]
    remote = f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"
    return ("ssh", "-o", "BatchMode=yes", host, remote)
