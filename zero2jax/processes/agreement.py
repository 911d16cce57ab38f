"""What the processes of one engine have to agree on, compared before it trains: settings, parameters, the step itself.

Each process computes with what it was given. Where a value is replicated, nothing else would show that two processes
hold different ones: they would train on, each with another seed or another learning rate.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zero2jax.base.pytrees import PyTree, path_string
from zero2jax.processes.start import expect_all_same
from zero2jax.zero.precision import Precision
from zero2jax.zero.state import Layout

_SAMPLED = 1 << 16  # elements compared of a leaf: another seed differs everywhere
# The address of a Python function that the step calls back (jax.debug.print, say): another in each process.
_ADDRESS = re.compile(r"backend_config = \"\d+\"|\b(?:ptr|index) = \d+")


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of all processes, of which there are several: else there is nobody to ask."""
    return 1 < len({device.process_index for device in mesh.devices.flat}) == jax.process_count()


def expect_same_start(
    settings: dict[str, Any], precision: Precision, layout: Layout, mesh: Mesh, values: PyTree
) -> None:
    """Refuse to start unless all processes have the same settings, parameters and values to make them from.

    Args:
      settings: plain values, by name.
      precision: dtypes; its predicate shows in the step.
      layout: where the state rests.
      mesh: device mesh.
      values: parameters, or arguments of the function that makes them. Of a leaf that a process holds by itself a
        sample of the elements is compared; leaves that are no arrays are not.

    Raises:
      ValueError: they differ; names what does, and in which processes.
    """
    if not spans_processes(mesh):
        return
    dtypes = (precision.compute_dtype, precision.reduce_dtype, precision.accumulate_dtype)
    leaves = zip(layout.params.leaves, layout.trainable, strict=True)
    expect_all_same(
        {
            **settings,
            "mesh": dict(mesh.shape),
            "precision": [None if dtype is None else jnp.dtype(dtype).name for dtype in dtypes],
            "names, shapes, dtypes and trainable of the parameters": [
                [leaf.path, list(leaf.shape), jnp.dtype(leaf.dtype).name, trainable]
                for leaf, trainable in leaves
            ],
            "values of the parameters": digest(values),
        }
    )


def expect_same_step(lowered: jax.stages.Lowered) -> None:
    """Refuse to go on unless all processes have made the same program of loss function and optimizer.

    Raises:
      ValueError: they differ; names the processes.
    """
    text = _ADDRESS.sub("", lowered.as_text())
    name = "the step's program (loss function, optimizer, learning rate)"
    expect_all_same({name: "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]})


def digest(values: PyTree) -> str:
    """One checksum of the names and sampled elements of the leaves that this process holds by itself."""
    found = hashlib.sha256()
    for path, x in _own(values):
        step = max(1, x.size // _SAMPLED)
        found.update(f"{path}\0{x.dtype}{x.shape}\0".encode() + np.asarray(x.flat[::step]).tobytes())
    return "sha256 " + found.hexdigest()[:16]


def _own(values: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                continue  # one value for all
            x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        if isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            yield path_string(path), np.asarray(x)
