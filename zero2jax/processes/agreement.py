"""What running processes ask each other: does every one say yes, and has every one the same value.

Outside of any jitted step. `expect_same` refuses, by name, a value that differs over the processes; the engine compares
so its settings, parameters and program before it trains. Each process computes with what it was given: where a value is
replicated, nothing else would show that two processes hold different ones, and they would train on, each with another
seed or another learning rate.
"""

import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zero2jax.base.pytrees import PyTree, path_string

_SAMPLED = 1 << 16  # elements compared of a leaf: another seed differs everywhere
_HOST_BYTES = 64  # of a host's name
# The address of a Python function that the step calls back (jax.debug.print, say): another in each process.
_ADDRESS = re.compile(r"backend_config = \"\d+\"|\b(?:ptr|index) = \d+")


def all_agree(flag: bool) -> bool:
    """Whether `flag` is true in every process: the same answer in all of them. All must call it, in the same order.

    It waits for the other processes; a single process answers at once.
    """
    return (
        flag if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.bool_(flag))))
    )


def gather_with_hosts(row: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """(row of every process, stacked; name of every process's host), by process index. All must call it.

    Args:
      row: NumPy array of one shape and dtype in all processes.
    """
    name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    host = np.frombuffer(name, np.uint8)
    rows, hosts = row[None], host[None]
    if jax.process_count() > 1:
        rows, hosts = multihost_utils.process_allgather((row, host))
    names = tuple(bytes(x).rstrip(b"\0").decode(errors="replace") for x in np.asarray(hosts))
    return np.asarray(rows), names


def gather_over(mesh: Mesh) -> Callable[[np.ndarray], tuple[np.ndarray, tuple[str, ...]]]:
    """`gather_with_hosts` if the mesh spans processes, else what a process alone answers."""
    return gather_with_hosts if spans_processes(mesh) else lambda row: (row[None], ("here",))


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of all processes, of which there are several: else there is no one to ask."""
    return 1 < len({device.process_index for device in mesh.devices.flat}) == jax.process_count()


def expect_same_start(settings: Mapping[str, Any], mesh: Mesh, values: PyTree) -> None:
    """Refuse to start unless all processes have the same settings, parameters and values to make them from.

    Args:
      settings: plain values, by name.
      mesh: device mesh.
      values: parameters, or arguments of the function that makes them. Of a leaf that a process holds by itself a
        sample of the elements is compared; leaves that are no arrays are not.

    Raises:
      ValueError: they differ; names what does, and in which processes.
    """
    if not spans_processes(mesh):
        return
    expect_all_same({**settings, "mesh": dict(mesh.shape), "values of the parameters": digest(values)})


def expect_same_step(programs: Sequence[jax.stages.Lowered]) -> None:
    """Refuse to go on unless all processes have made the same programs of loss function and optimizer.

    Raises:
      ValueError: they differ; names the processes.
    """
    text = _ADDRESS.sub("", "".join(lowered.as_text() for lowered in programs))
    name = "the step's program (loss function, optimizer, learning rate)"
    expect_all_same({name: "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]})


def digest(values: PyTree) -> str:
    """One checksum of the names and sampled elements of the leaves that this process holds by itself."""
    checksum = hashlib.sha256()
    for path, x in _own(values):
        step = max(1, x.size // _SAMPLED)
        checksum.update(f"{path}\0{x.dtype}{x.shape}\0".encode() + np.asarray(x.flat[::step]).tobytes())
    return "sha256 " + checksum.hexdigest()[:16]


def _own(values: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                continue  # one value for all
            x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        if isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            yield path_string(path), np.asarray(x)


def expect_same(name: str, value: Any) -> None:
    """Refuse to go on unless all processes have the same value. All of them must call it, in the same order.

    Args:
      name: what it is, for the message.
      value: plain Python types as in JSON, or whatever has a `repr` that says all: a configuration, a seed.

    Raises:
      ValueError: some process has another value than process 0; names those processes and their hosts, in all
        processes alike.
    """
    expect_all_same({name: value})


def expect_all_same(values: Mapping[str, Any]) -> None:
    """`expect_same` for several values, by name, at once. All processes must name the same ones, in the same order.

    Raises:
      ValueError: as `expect_same`; says which values differ, and what they are here.
    """
    if jax.process_count() == 1:
        return
    texts = {name: _text(value) for name, value in values.items()}
    digests = [hashlib.sha256(f"{name}\0{text}".encode()).digest() for name, text in texts.items()]
    row = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
    rows, hosts = gather_with_hosts(row)  # (processes, values, bytes of a digest)
    problems = []
    for k, (name, text) in enumerate(texts.items()):
        different = [
            f"{i} (host {hosts[i]})" for i in np.flatnonzero(np.any(rows[:, k] != rows[0, k], axis=1))
        ]
        if different:
            here = text if len(text) <= 300 else text[:300] + " ..."
            problems.append(
                f"comparing {name} over {len(rows)} processes: process {', '.join(different)} has another value than "
                f"process 0. All must be started alike. In this process ({jax.process_index()}): {here}"
            )
    if problems:
        raise ValueError("\n".join(problems))


def _text(value: Any) -> str:
    """A value as text that is the same for equal values, whatever the order of a mapping's keys."""
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except TypeError:  # keys of several types
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return json.dumps(sorted([repr(key), _text(item)] for key, item in items))
