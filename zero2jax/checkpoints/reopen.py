"""The state that a run left in the files of `nvme_path`: no checkpoint, but all there is after one ended early."""

import jax
import numpy as np

from zero2jax.base.pytrees import PyTree, is_function
from zero2jax.checkpoints.format import CheckpointError
from zero2jax.checkpoints.state_leaves import restored_state, state_leaves
from zero2jax.engine import Engine
from zero2jax.processes.agreement import gather_over
from zero2jax.zero.placement import place_params
from zero2jax.zero.state import TrainState


def reopen_state(engine: Engine, params: PyTree) -> TrainState:
    """The state after the last complete step, from the files that a run with `OffloadSettings(nvme_path=...)` left.

    For a run that was killed, or a step that could not write. Call it before `engine.init` and `restore`, which delete
    what is there. Every file is read and compared with its checksum; all processes must call it. A later step goes on
    as from any state; keep checkpoints all the same: these files are on one disk, and the next step replaces them.

    Args:
      engine: built as the engine of that run, on a mesh of as many processes.
      params: parameters, of whose leaves those that are frozen are taken, as they are given: what a loss has stored in
        them since is not in the files. For the others shapes are enough.

    Raises:
      ValueError: the engine keeps no files.
      OffloadFileError: there is no complete step; it is of another engine; a file is damaged (named).
      CheckpointError: leaves of the state are not in files, but on the devices.
    """
    if is_function(params):
        raise TypeError(
            "reopening a state: it takes parameters or their shapes, as jax.eval_shape(init_fn, key) gives."
        )
    like = engine.abstract_state(params)
    layout, mesh = engine.layout, engine.mesh
    values = engine.functions.reopened(gather_over(mesh))
    leaves = state_leaves(layout, mesh)
    lacking = [i for i, value in enumerate(values) if value is None]
    there = [i for i in lacking if leaves[i].trainable is not False]
    given = dict(enumerate(jax.tree.leaves(params), 1))  # after `step`
    there += [i for i in lacking if i not in there and isinstance(given[i], jax.ShapeDtypeStruct)]
    if there:
        raise CheckpointError(
            f"reopening a state: {', '.join(leaves[i].name for i in there[:5])} is not in its files: they hold neither "
            f"frozen leaves, which parameters give, nor what a ratio below 1 leaves on the devices. Restore a "
            f"checkpoint."
        )
    if lacking:
        zeros = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        full = jax.tree.map(lambda x: zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x, params)

        def keep(position: int, x: jax.Array) -> None:
            if position in lacking:
                values[position] = x

        place_params(full, layout, mesh, keep)
    return restored_state(like, values)
