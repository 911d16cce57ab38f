"""Activation checkpointing of a model's layers, without changing the model: `remat_layers(loss_fn, settings, mesh)`.

The loss is traced, its layers are found, and it is evaluated again with each of them under `jax.checkpoint`. What
comes out is an ordinary loss function, as if its author had written it so: `jax.grad` and `jax.jit` take it, and so
does the evaluation at the point of use, which `Engine` applies afterwards.

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

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero2jax.activations.boundary import Boundary
from zero2jax.activations.layer_search import (
    LayerGroup,
    LayerSearch,
    checkpoint_around,
    has_mark,
    layers_inside,
    own_checkpoint,
)
from zero2jax.activations.policies import NESTED, WORDS, Policy, PolicyLike, check_tensors, remat_policy
from zero2jax.activations.remat import LAYER_MARK
from zero2jax.base import jaxprs
from zero2jax.base.mesh import DATA_AXIS, REPLICA_AXIS
from zero2jax.base.pytrees import PyTree

_NOTHING = jax.checkpoint_policies.nothing_saveable


@dataclasses.dataclass(frozen=True)
class ActivationSettings:
    """What is saved of a model's layers for backward, and where.

    Whatever is set, each segment of layers becomes a `jax.checkpoint`, if the model has not made it one.

    Attributes:
      policy: what is saved within a layer, see `remat_policy`; or `nested`. None keeps what the model's own
        `jax.checkpoint` says, and where it has none, recomputes everything (`nothing`).
      num_checkpoints: number of segments that the layers are cut into; None gives every layer one of its own.
      partition_axis: mesh axis over which the saved boundary activation is partitioned; `model` is the one that
        saves something, see `remat_boundary`.
      offload: keep the saved boundary activation in pinned host memory.
      contiguous: insist on one buffer for all saved boundary activations, which a scanned model has.
      barrier: an optimization barrier at each boundary.
      profile: `Engine.activation_profile` is asked for; see `remat_profile`.
    """

    policy: PolicyLike | None = None
    num_checkpoints: int | None = None
    partition_axis: str | None = None
    offload: bool = False
    contiguous: bool = False
    barrier: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if self.policy is not None and self.policy != NESTED:
            remat_policy(self.policy)
        number = self.num_checkpoints
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(
                f"reading activation settings: num_checkpoints is {number!r}; it is a number of segments, at least 1, "
                f"or None for one per layer."
            )


@dataclasses.dataclass(frozen=True)
class Segment:
    """What backward recomputes at once: one layer or several, as a function of flat arrays.

    Attributes:
      function: the segment, without any `jax.checkpoint`.
      inputs: shapes of its arguments, on one device if it was traced there.
      is_boundary: which of them are activations that enter it.
      policy: what it saves.
      num_layers: layers in it.
      num_runs: how often it runs in a loss.
    """

    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    is_boundary: tuple[bool, ...]
    policy: Policy
    num_layers: int
    num_runs: int


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
      >>> def loss(params, x):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0].mean()
      >>> saving = remat_layers(loss, ActivationSettings(num_checkpoints=2))
      >>> jax.grad(saving)(jnp.zeros((4, 3, 3)), jnp.ones((2, 3))).shape
      (4, 3, 3)
    """
    boundary = _boundary(settings, mesh, data_axes)
    say = _Sayer()

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
            say(_NO_LAYERS)
        results = _Rewriter(settings, boundary, on_segment, search, say).walk(jaxpr, flat, from_params)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


_NO_LAYERS = (
    "activation settings: the loss function has no layers to act on, so nothing changes. Layers are a jax.lax.scan "
    "over stacked parameters; in an unrolled model, mark each block with zero2jax.layer or wrap it with zero2jax.remat."
)


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
    if offload and not _has_pinned_host(mesh):
        _warn(
            "offloading saved activations: the devices have no memory of kind 'pinned_host', so the activations stay "
            "in device memory. The numbers are the same."
        )
        offload = False
    return Boundary(axis, num_shards, mesh, offload, settings.barrier)


def _has_pinned_host(mesh: Mesh | None) -> bool:
    """Whether there is such memory; compile-only devices of a GPU do not say, and GPUs have it."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    return "pinned_host" in kinds or (not kinds and device.platform in ("cuda", "gpu", "rocm"))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


# --- evaluating again -------------------------------------------------------------------------------------------


class _Sayer:
    """Warns, of each thing once per loss function."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class _Rewriter:
    """Evaluates jaxprs, layers as the settings say."""

    settings: ActivationSettings
    boundary: Boundary
    on_segment: Callable[[Segment], None]
    search: LayerSearch
    say: Callable[[str], None]

    def walk(self, jaxpr: Any, args: Sequence[Any], from_params: Sequence[bool]) -> list[Any]:
        """Evaluate a jaxpr in which there may be layers."""
        found = jaxprs.from_inputs(jaxpr, from_params)
        apply = functools.partial(self._apply, found)
        blocks = self.search.blocks(jaxpr, found)
        if not blocks:
            return jaxprs.evaluate(jaxpr, args, apply)
        parts = jaxprs.runs(jaxpr, self._ranges(blocks))
        readers = [v for part in parts for v in part.inputs]
        shared = {v for v in readers if readers.count(v) > 1}
        apply_run = lambda part, operands: self._unrolled(part, operands, found | shared)
        return jaxprs.evaluate_by_runs(jaxpr, args, parts, apply, apply_run)

    def _apply(self, found: set[Any], eqn: Any, operands: list[Any]) -> Sequence[Any]:
        marks = jaxprs.marks(eqn, found)
        if self.search.is_loop(eqn, marks):
            return self._scanned(eqn, jaxprs.arrays(eqn, operands))
        inside = layers_inside(eqn, marks)
        if inside is None or not self.search.has_layers(*inside):
            return jaxprs.bind(eqn, operands)
        operands = jaxprs.arrays(eqn, operands)
        body, from_params = inside
        if jaxprs.is_call(eqn):
            return self.walk(body, operands, from_params)
        if jaxprs.is_checkpoint(eqn):
            self.say(_WHOLE)
            options = jaxprs.checkpoint_options(eqn)
            return jax.checkpoint(lambda *xs: self.walk(body, xs, from_params), **options)(*operands)  # type: ignore[no-any-return]
        parts = jaxprs.scan_parts(eqn)
        step = lambda *xs: self.walk(body, xs, from_params)
        return jaxprs.rebuild_scan(step, parts.num_consts, parts.num_carry, operands, parts.options)

    def _policy(self, own: Any | None) -> tuple[Policy, bool]:
        """What a segment saves, and whether each layer in it is checkpointed again."""
        wanted = self.settings.policy
        model = None if own is None else jaxprs.checkpoint_options(own)["policy"] or _NOTHING
        if wanted is None:
            return model or _NOTHING, False
        policy = _NOTHING if wanted == NESTED else remat_policy(wanted)
        if model is not None and model != policy:
            self.say(
                f"activation settings: the jax.checkpoint around the model's layers is replaced, policy "
                f"{_policy_name(model)} by {wanted!r}."
            )
        return policy, wanted == NESTED

    def _num_segments(self, num_layers: int) -> int:
        wanted = self.settings.num_checkpoints
        if wanted is None:
            return math.ceil(math.sqrt(num_layers)) if self.settings.policy == NESTED else num_layers
        wanted = min(wanted, num_layers)  # a shorter loop beside the longest one
        if wanted == 1 < num_layers:
            self.say(_WHOLE)
        return wanted

    def _scanned(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        body, num_consts, num_carry, options = jaxprs.scan_parts(eqn)
        own = checkpoint_around(body)
        policy, nested = self._policy(own)
        consts, rest = operands[:num_consts], operands[num_consts:]
        carry, xs = tuple(rest[:num_carry]), rest[num_carry:]
        length, reverse = options["length"], options["reverse"]
        num_segments = self._num_segments(length)

        def layer(*arrays: Any) -> tuple[Any, ...]:
            return tuple(_inlined(body, arrays, own))

        def segment(*arrays: Any) -> tuple[Any, ...]:
            inner = jax.checkpoint(layer, prevent_cse=False) if nested else layer
            return tuple(
                jaxprs.rebuild_scan(inner, num_consts, num_carry, arrays, options | {"length": None})
            )

        kept = [self.boundary.applies_to(x) for x in carry]
        kept = [*[False] * num_consts, *kept, *[False] * len(xs)]

        def loop(
            run: Callable[..., Any], num_layers: int, arrays: list[Any], options: dict[str, Any]
        ) -> list[Any]:
            fixed, slices = arrays[: num_consts + num_carry], arrays[num_consts + num_carry :]
            shapes = [*map(_shape, fixed), *(_shape(x, dropped=1) for x in slices)]
            self.on_segment(Segment(run, tuple(shapes), tuple(kept), policy, num_layers, options["length"]))
            wrapped = self.boundary.wrap(run, policy, kept, prevent_cse=False)
            return jaxprs.rebuild_scan(wrapped, num_consts, num_carry, arrays, options)

        if num_segments == length:
            return loop(layer, 1, [*consts, *carry, *xs], options)
        pieces = []
        parts = _segments(length, num_segments)
        for start, count, size in reversed(parts) if reverse else parts:
            stop = start + count * size
            whole = stop - start == length
            cut = [x if whole else jax.lax.slice_in_dim(x, start, stop) for x in xs]
            cut = [x.reshape(count, size, *x.shape[1:]) for x in cut]  # (L, ...) -> (S, L/S, ...)
            out = loop(segment, size, [*consts, *carry, *cut], {"length": count, "reverse": reverse})
            carry = tuple(out[:num_carry])
            pieces.append([y.reshape(count * size, *y.shape[2:]) for y in out[num_carry:]])
        pieces = pieces[::-1] if reverse else pieces
        return [*carry, *(jnp.concatenate(ys) if len(ys) > 1 else ys[0] for ys in zip(*pieces, strict=True))]

    def _ranges(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The equations of each segment: its blocks, and what stands between them."""
        if self.settings.contiguous:
            raise ValueError(
                f"keeping saved activations in one buffer: the model's {len(blocks)} layers are unrolled, and each "
                f"saved activation is an array of its own, for the compiler to place. Scan over stacked layers with "
                f"jax.lax.scan (nnx.scan, nn.scan), whose loop saves into one buffer, or leave out `contiguous`."
            )
        sizes = [
            size
            for _, count, size in _segments(len(blocks), self._num_segments(len(blocks)))
            for _ in range(count)
        ]
        ends = list(itertools.accumulate(sizes))
        return [(blocks[end - size], blocks[end - 1] + 1) for end, size in zip(ends, sizes, strict=True)]

    def _unrolled(self, part: jaxprs.Run, operands: list[Any], other: set[Any]) -> Sequence[Any]:
        blocks = [
            eqn for eqn in part.eqns if jaxprs.call_name(eqn) == LAYER_MARK or jaxprs.is_checkpoint(eqn)
        ]
        own = next((e for e in map(own_checkpoint, blocks) if e is not None), None)
        policy, nested = self._policy(own)

        def apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            if not any(eqn is block for block in blocks):
                return jaxprs.bind(eqn, operands)
            run = lambda *xs: _inlined(jaxprs.body(eqn), xs, own_checkpoint(eqn))
            return (jax.checkpoint(run) if nested else run)(*operands)

        segment = lambda *xs: tuple(jaxprs.evaluate_run(part, xs, apply))
        kept = [
            v not in other and self.boundary.applies_to(x) for v, x in zip(part.inputs, operands, strict=True)
        ]
        self.on_segment(Segment(segment, tuple(map(_shape, operands)), tuple(kept), policy, len(blocks), 1))
        return self.boundary.wrap(segment, policy, kept, prevent_cse=True)(*operands)  # type: ignore[no-any-return]


_WHOLE = (
    "activation settings: one jax.checkpoint around all layers at once saves nothing: its backward pass recomputes the "
    "whole stack, and then holds what every layer needs, as if there were no checkpoint. Checkpoint each layer, or "
    "segments of them (num_checkpoints)."
)


def _shape(x: Any, dropped: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[dropped:], x.dtype)


def _policy_name(policy: Any) -> str:
    """The word for a policy, or what it calls itself."""
    word = next((word for word, known in WORDS.items() if known == policy), None)
    return repr(word or getattr(policy, "__name__", policy))


def _inlined(jaxpr: Any, args: Sequence[Any], own: Any | None) -> list[Any]:
    """Evaluate a layer, its own `jax.checkpoint` taken off."""
    if own is None:
        return jaxprs.evaluate(jaxpr, args, jaxprs.bind)

    def apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn is own or (jaxprs.is_call(eqn) and checkpoint_around(jaxprs.body(eqn)) is own):
            return _inlined(jaxprs.body(eqn), operands, None if eqn is own else own)
        return jaxprs.bind(eqn, operands)

    return jaxprs.evaluate(jaxpr, args, apply)


def _segments(num_layers: int, num_segments: int) -> list[tuple[int, int, int]]:
    """(first layer, number of segments, layers in each) of the longer segments, then of the shorter ones."""
    size, longer = divmod(num_layers, num_segments)
    found = [(0, longer, size + 1), (longer * (size + 1), num_segments - longer, size)]
    return [part for part in found if part[1]]
