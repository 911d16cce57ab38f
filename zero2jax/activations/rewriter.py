"""A traced loss function, evaluated again with its layers under `jax.checkpoint`: loops and runs of blocks in segments.

Used by `remat_layers` alone, inside of whatever traces the loss. `LayerSearch` says where layers are, `Boundary` what
is saved where a segment begins; here L layers become S segments:

  scanned     a loop over L layers becomes a loop over S segments of an inner loop over L/S layers; if S does not divide
              L, two such loops, one after the other
  unrolled    the equations from the first block of a segment to its last become one function of flat arrays
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

from zero2jax.activations.boundary import Boundary
from zero2jax.activations.layer_search import LayerSearch, checkpoint_around, layers_inside, own_checkpoint
from zero2jax.activations.policies import NESTED, WORDS, Policy, remat_policy
from zero2jax.activations.remat import LAYER_MARK
from zero2jax.activations.settings import ActivationSettings
from zero2jax.base import jaxprs

_NOTHING = jax.checkpoint_policies.nothing_saveable
_ONE_CHECKPOINT = (
    "activation settings: one jax.checkpoint around all layers at once saves nothing: its backward pass recomputes the "
    "full stack, and then holds what every layer needs, as if there were no checkpoint. Checkpoint each layer, or "
    "segments of them (num_checkpoints)."
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


class WarnOnce:
    """Warns of each thing once per loss function."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless this was said before."""
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class Rewriter:
    """Evaluates jaxprs, layers as the settings say."""

    settings: ActivationSettings
    boundary: Boundary
    on_segment: Callable[[Segment], None]
    search: LayerSearch
    warn: Callable[[str], None]

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
            self.warn(_ONE_CHECKPOINT)
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
            self.warn(
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
            self.warn(_ONE_CHECKPOINT)
        return wanted

    def _scanned(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """A loop over layers as loops over segments."""
        body, num_consts, num_carry, options = jaxprs.scan_parts(eqn)
        own = checkpoint_around(body)
        policy, nested = self._policy(own)
        consts, carried = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs = operands[num_consts + num_carry :]
        length, reverse = options["length"], options["reverse"]
        num_segments = self._num_segments(length)

        def rebuild(step: Callable[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> list[Any]:
            return jaxprs.rebuild_scan(step, num_consts, num_carry, arrays, options)

        def layer(*arrays: Any) -> tuple[Any, ...]:
            return tuple(_inlined(body, arrays, own))

        def segment(*arrays: Any) -> tuple[Any, ...]:
            inner = jax.checkpoint(layer, prevent_cse=False) if nested else layer
            return tuple(rebuild(inner, arrays, options | {"length": None}))

        kept = [self.boundary.applies_to(x) for x in carried]
        kept = [*[False] * num_consts, *kept, *[False] * len(xs)]

        def loop(
            run: Callable[..., Any], num_layers: int, arrays: list[Any], options: dict[str, Any]
        ) -> list[Any]:
            fixed, slices = arrays[: num_consts + num_carry], arrays[num_consts + num_carry :]
            shapes = [*map(_shape, fixed), *(_shape(x, dropped=1) for x in slices)]
            self.on_segment(
                Segment(
                    function=run,
                    inputs=tuple(shapes),
                    is_boundary=tuple(kept),
                    policy=policy,
                    num_layers=num_layers,
                    num_runs=options["length"],
                )
            )
            return rebuild(self.boundary.wrap(run, policy, kept, prevent_cse=False), arrays, options)

        if num_segments == length:
            return loop(layer, 1, [*consts, *carried, *xs], options)
        pieces = []
        parts = _segments(length, num_segments)
        for start, count, size in reversed(parts) if reverse else parts:
            stop = start + count * size
            rows = xs if stop - start == length else [jax.lax.slice_in_dim(x, start, stop) for x in xs]
            rows = [x.reshape(count, size, *x.shape[1:]) for x in rows]  # (L, ...) -> (S, L/S, ...)
            out = loop(segment, size, [*consts, *carried, *rows], {"length": count, "reverse": reverse})
            carried = out[:num_carry]
            pieces.append([y.reshape(count * size, *y.shape[2:]) for y in out[num_carry:]])
        pieces = pieces[::-1] if reverse else pieces
        return [
            *carried,
            *(jnp.concatenate(ys) if len(ys) > 1 else ys[0] for ys in zip(*pieces, strict=True)),
        ]

    def _ranges(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The equations of each segment of an unrolled model: its blocks, and what stands between them."""
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
        """One segment of an unrolled model; `other` are inputs that are no boundary activations."""
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
        self.on_segment(
            Segment(
                function=segment,
                inputs=tuple(map(_shape, operands)),
                is_boundary=tuple(kept),
                policy=policy,
                num_layers=len(blocks),
                num_runs=1,
            )
        )
        return self.boundary.wrap(segment, policy, kept, prevent_cse=True)(*operands)  # type: ignore[no-any-return]


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
