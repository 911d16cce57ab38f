"""Around the programs of an engine: the mesh they run under, errors explained, devices that share threads."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from zero2jax.base import losses
from zero2jax.base.pytrees import is_traced


@contextlib.contextmanager
def running(
    mesh: Mesh,
    axis_names: tuple[str, ...],
    explained: contextlib.AbstractContextManager[None],
    traced: bool = False,
) -> Iterator[None]:
    """Around a program of ours: under the engine's mesh, if `jax.set_mesh` has set one, and errors explained.

    Args:
      mesh: the engine's.
      axis_names: its data axes.
      explained: what else explains errors inside.
      traced: whether the program is a part of one of the user's, which brings its own mesh.
    """
    set_by_user = not (traced or jax.sharding.get_abstract_mesh().empty)
    own = jax.set_mesh(mesh) if set_by_user else contextlib.nullcontext()
    with explained, losses.noted_errors(axis_names), own:
        yield


def settled(result: Any, mesh: Mesh) -> Any:
    """`result`, waited for on simulated devices, where programs that run at the same time may each hold threads that
    the other's collectives wait for.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(result) if on_cpu and not is_traced(result) else result
