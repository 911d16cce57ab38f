"""Activation checkpointing of a model's layers, without changing the model: `remat_layers(loss_fn, settings, mesh)`.

The loss is traced, its layers are looked up (`layer_search`), and it is evaluated again with each of them under
`jax.checkpoint` (`rewriter`). The result is an ordinary loss function, as if its author had written it so: `jax.grad`
and `jax.jit` take it, and so does the evaluation at the point of use, which `Engine` applies afterwards.

What counts as the layers:

  scanned     the outermost `scan` that carries an activation and scans over arrays that come from parameters alone
              (cast, reshaped, ...). A `jax.checkpoint` around its body is replaced.
  unrolled    functions marked with `zero2jax.layer`; without any, the `jax.checkpoint`s that stand side by side.

They are looked for inside of `jit`, `jax.checkpoint` and outer loops, not inside of `cond`, `while` and custom
derivatives. L layers become S segments, of which backward recomputes one after the other:

  saved at once   S boundary activations + what L/S layers need for backward (policy `nothing`)

The first L mod S segments have one layer more than the others. The residuals of a scan are stacked by the compiled
loop itself: one buffer of S boundary activations, allocated once.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from zero2jax.activations.boundary import Boundary
from zero2jax.activations.layer_search import LayerGroup, LayerSearch, has_mark
from zero2jax.activations.policies import NESTED, check_tensors, remat_policy
from zero2jax.activations.rewriter import Rewriter, Segment, WarnOnce
from zero2jax.activations.settings import ActivationSettings
from zero2jax.base import jaxprs
from zero2jax.base.memories import has_host_memory
from zero2jax.base.mesh import DATA_AXIS, REPLICA_AXIS, make_mesh
from zero2jax.base.pytrees import PyTree

_NO_LAYERS = (
    "activation settings: the loss function has no layers to act on, so nothing changes. Layers are a jax.lax.scan "
    "over stacked parameters; in an unrolled model, mark each block with zero2jax.layer or wrap it with zero2jax.remat."
)


def remat_layers(
    loss_fn: Callable[..., PyTree],
    settings: ActivationSettings,
    mesh: Mesh | None = None,
    *,
    data_axes: Sequence[str] = (DATA_AXIS, REPLICA_AXIS),
    on_segment: Callable[[Segment], None] = lambda segment: None,
) -> Callable[..., PyTree]:
    """A function that computes what `loss_fn` does, and saves for backward what the settings say.

    Args:
      loss_fn: any function whose first argument is the tree of parameters; all arguments are trees of arrays.
      settings: see `ActivationSettings`.
      mesh: needed to partition.
      data_axes: mesh axes whose shards hold different examples.
      on_segment: called with each `Segment` when the function is traced.

    Raises:
      ValueError: an axis that the mesh does not have. When the function is traced: more segments than layers; a policy
        that names a tensor which no layer has; `contiguous` for an unrolled model.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss(params, x):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0].mean()
      >>> saving = remat_layers(loss, ActivationSettings(num_checkpoints=2))
      >>> jax.grad(saving)(jnp.zeros((4, 3, 3)), jnp.ones((2, 3))).shape
      (4, 3, 3)
    """
    boundary = _boundary(settings, mesh, data_axes)
    warn = WarnOnce()

    @functools.wraps(loss_fn)
    def wrapped(params: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        jaxpr, out = jaxprs.trace(lambda p, a, k: loss_fn(p, *a, **k), params, args, kwargs)
        flat = jax.tree.leaves((params, args, kwargs))
        num_params = len(jax.tree.leaves(params))
        from_params = [i < num_params for i in range(len(flat))]
        search = LayerSearch(has_mark(jaxpr))
        groups = list(search.groups(jaxpr, from_params))
        if groups:
            _check_against(settings, groups)
        else:
            warn(_NO_LAYERS)
        results = Rewriter(settings, boundary, on_segment, search, warn).walk(jaxpr, flat, from_params)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


def _check_against(settings: ActivationSettings, groups: Sequence[LayerGroup]) -> None:
    """Raise an error for tensor names that no layer has, and for more segments than the longest loop has layers."""
    names = {name for group in groups for body in group.bodies for name in jaxprs.tensor_names(body)}
    if settings.policy is not None and settings.policy != NESTED:
        check_tensors(remat_policy(settings.policy), names, "the model's layers")
    most, wanted = max(group.num_layers for group in groups), settings.num_checkpoints
    if wanted is not None and wanted > most:
        raise ValueError(
            f"cutting layers into segments: num_checkpoints is {wanted} and the model has {most} layers. Use at most "
            f"{most}."
        )


def _boundary(settings: ActivationSettings, mesh: Mesh | None, data_axes: Sequence[str]) -> Boundary:
    axis, num_shards = settings.partition_axis, 1
    if axis is not None:
        axes = {} if mesh is None else dict(mesh.shape)
        if axis not in axes:
            raise ValueError(
                f"partitioning saved activations over axis {axis!r}: the mesh has the axes {axes}. Pass a mesh that "
                f"has it, as zero2jax.make_mesh(data=4, model=2) does, or partition_axis=None."
            )
        num_shards = axes[axis]
        if axis in data_axes or num_shards == 1:
            why = (
                "each of its shards works on other examples, there is no second copy of an activation to drop"
                if num_shards > 1
                else "it has size 1"
            )
            _warn(
                f"partitioning saved activations over axis {axis!r} saves nothing: {why}. They are kept as they are; "
                f"partition over the axis of tensor parallelism."
            )
            axis, num_shards = None, 1
    offload = settings.offload
    if offload and not has_host_memory(mesh or make_mesh()):
        _warn(
            "offloading saved activations: the devices have no memory of kind 'pinned_host', so the activations stay "
            "in device memory. The numbers are the same."
        )
        offload = False
    return Boundary(axis, num_shards, mesh, offload, settings.barrier)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
