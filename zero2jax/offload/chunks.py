"""The host's half of a step, a chunk of leaves at a time: down, updated, up. Global arrays, outside of any program."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero2jax.base import jaxprs
from zero2jax.base.pytrees import PyTree
from zero2jax.offload.host_step import Handed, HostStep
from zero2jax.offload.parts import Part, split_update

_IN_FLIGHT = 2  # chunks whose gradients and copies are in host memory

Updated = tuple[list[jax.Array], list[jax.Array], list[jax.Array], jax.Array | None]
"""Trainable parameters, leaves of the optimizer state, copies on the devices, and the learning rate."""


class ChunkedUpdate:
    """`HostStep.update` in parts, each a program of its own.

    Args:
      halves: the step.
      args: shapes of the arguments of `HostStep.update`.
      shardings: of its results, flat, but for the learning rate's.
      scalar: sharding of a scalar on the host.
      chunk_bytes: masters of one device in a part, about.
      options: for the compiler.

    Attributes:
      num_parts: how many there are.
    """

    def __init__(
        self,
        halves: HostStep,
        args: Sequence[PyTree],
        shardings: Sequence[NamedSharding],
        scalar: NamedSharding,
        chunk_bytes: int,
        options: Mapping[str, Any],
    ):
        layout, mesh = halves.program.layout, halves.program.mesh
        jaxpr, _ = jaxprs.trace(halves.update, *args)
        self._num_params, self._num_state = (len(jax.tree.leaves(tree)) for tree in args[:2])
        leaves = layout.trained_params.leaves
        sizes = [leaf.rest_bytes // leaf.num_model_shards(mesh) for leaf in leaves]
        split = split_update(jaxpr, self._num_params, self._num_state, sizes, chunk_bytes)
        self.num_parts = len(split.parts)
        self._shardings = [*shardings, scalar]
        num_outputs = len(jaxprs.outputs(jaxpr))
        copies_at = self._num_params + self._num_state
        # What belongs to no part is made by the first: shared leaves of the state and the learning rate.
        more = [self._num_params + j for j in split.shared] + list(
            range(copies_at + self._num_params, num_outputs)
        )
        self._parts: list[tuple[Part, _Program]] = []
        for k, part in enumerate(split.parts):
            own = [*part.params, *[self._num_params + j for j in part.state]]
            which = [*own, *[copies_at + i for i in part.params], *(more if k == 0 else [])]
            self._parts.append((part, self._program(jaxpr, own, which, options)))

    def _program(
        self, jaxpr: Any, own: Sequence[int], which: Sequence[int], options: Mapping[str, Any]
    ) -> "_Program":
        function, used = jaxprs.part_of(jaxpr, which)
        donated = [i for i in used if i in set(own)]
        others = [i for i in used if i not in set(own)]

        def update(donated_values: list[Any], other_values: list[Any]) -> list[Any]:
            values = dict(zip([*donated, *others], [*donated_values, *other_values], strict=True))
            return function(*[values[i] for i in used])

        jitted = jax.jit(
            update,
            out_shardings=[self._shardings[i] for i in which],
            donate_argnums=0,
            compiler_options=dict(options) or None,
        )
        return _Program(jitted, donated, others, list(which))

    def __call__(
        self,
        home: tuple[PyTree, PyTree],
        sums: list[Any],
        handed: Handed,
        extra_args: Mapping[str, Any],
        down: Callable[[list[int], list[jax.Array]], list[jax.Array]],
        up: Callable[[list[int], list[jax.Array]], list[jax.Array]],
    ) -> Updated:
        """Update all leaves.

        Args:
          home: trainable parameters and optimizer state, on the host; donated.
          sums: gradients on the devices; emptied, so that their memory is free as soon as it can be.
          handed: scalars on the host.
          extra_args: for the transformation, on the host.
          down: gradients of some leaves, to the host.
          up: copies of some leaves, to the devices.
        """
        n, copies_at = self._num_params, self._num_params + self._num_state
        values = [*jax.tree.leaves(home), *[None] * n, *jax.tree.leaves((handed, dict(extra_args)))]
        results: dict[int, Any] = {}
        in_flight: collections.deque[list[jax.Array]] = collections.deque()
        for part, program in self._parts:
            if len(in_flight) == _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            for i, x in zip(
                part.params, down(list(part.params), [sums[i] for i in part.params]), strict=True
            ):
                values[copies_at + i], sums[i] = x, None
            made = program(values)
            for i in part.params:
                values[copies_at + i] = None
            copies = [made.pop(copies_at + i) for i in part.params]
            sent = up(list(part.params), copies)
            results |= made | {copies_at + i: x for i, x in zip(part.params, sent, strict=True)}
            in_flight.append(copies)
        for x in jax.tree.leaves(home):  # the few that no part alone could be given: scalars
            if not x.is_deleted():
                x.delete()
        rate = results.get(copies_at + n)
        ordered = [results[i] for i in range(copies_at + n)]
        return ordered[:n], ordered[n:copies_at], ordered[copies_at:], rate


class _Program:
    """A part's program, with the indices of what it takes and gives."""

    def __init__(self, jitted: Any, donated: list[int], others: list[int], results: list[int]):
        self._jitted, self._donated, self._others, self._results = jitted, donated, others, results

    def __call__(self, values: Sequence[Any]) -> dict[int, jax.Array]:
        made = self._jitted([values[i] for i in self._donated], [values[i] for i in self._others])
        return dict(zip(self._results, made, strict=True))
