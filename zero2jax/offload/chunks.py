"""The host's half of a step, a chunk of leaves at a time: down, updated, up. Global arrays, outside of any program."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero2jax.base import jaxprs
from zero2jax.base.pytrees import PyTree
from zero2jax.offload.host_memory import IN_FLIGHT
from zero2jax.offload.parts import Part, Split, split_update

Move = Callable[[tuple[int, ...], list[jax.Array]], list[jax.Array]]
"""(indices of parameters, an array of each) -> the arrays elsewhere."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """An update as a jaxpr over flat arguments: n parameters, m leaves of the state, n gradients, and others.

    Attributes:
      jaxpr: from these to n parameters, m leaves of the state, n copies and perhaps the learning rate.
      num_params: n.
      num_state: m.
    """

    jaxpr: Any
    num_params: int
    num_state: int

    @classmethod
    def of(cls, update: Callable[..., Any], args: Sequence[PyTree]) -> "Flat":
        """The update traced for arguments of these shapes."""
        num_params, num_state = (len(jax.tree.leaves(tree)) for tree in args[:2])
        return cls(jaxprs.inlined(jaxprs.trace(update, *args)[0]), num_params, num_state)

    @property
    def copies_at(self) -> int:
        """Index of the first gradient among the arguments, and of the first copy among the results."""
        return self.num_params + self.num_state

    @property
    def num_results(self) -> int:
        """How many results there are."""
        return len(jaxprs.outputs(self.jaxpr))

    def split(self) -> Split:
        """Its parts, as small as can be."""
        return split_update(self.jaxpr, self.num_params, self.num_state)


class ChunkedUpdate:
    """An update in parts, each a program of its own.

    Args:
      flat: the update.
      split: its parts, or some of them.
      shardings: of its results.
      complete: whether copies are made, and what belongs to no part: shared leaves of the state, the learning rate.
      options: for the compiler.
      in_flight: how many parts' gradients and copies may be in host memory at a time; None for all, waiting for none.
      reuse: whether a copy is written over its gradient, where they have one dtype; nobody else may look at it then.
      in_place: whether masters and state are written over. Of memory that is not XLA's it would update a copy.

    Attributes:
      shared: indices of arguments, leaves of the state, that all parts read.
    """

    def __init__(
        self,
        flat: Flat,
        split: Split,
        shardings: Sequence[NamedSharding],
        *,
        complete: bool,
        options: Mapping[str, Any],
        in_flight: int | None = IN_FLIGHT,
        reuse: bool = False,
        in_place: bool = True,
    ):
        self._in_flight = in_flight
        self._flat, self._shardings, self._complete = flat, shardings, complete
        self.shared = [flat.num_params + j for j in split.shared]
        more = [*self.shared, *range(flat.copies_at + flat.num_params, flat.num_results)]
        self._parts: list[tuple[Part, _Program]] = []
        for k, part in enumerate(split.parts):
            own = [*part.params, *[flat.num_params + j for j in part.state]]
            copies = [flat.copies_at + i for i in part.params]
            which = [*own, *copies, *(more if k == 0 else [])] if complete else own
            spent = [i for i in copies if complete and reuse and _same_type(flat.jaxpr, i)]
            self._parts.append(
                (part, self._program(flat.jaxpr, [*(own if in_place else []), *spent], which, options))
            )

    def _program(
        self, jaxpr: Any, donatable: Sequence[int], which: Sequence[int], options: Mapping[str, Any]
    ) -> "_Program":
        function, used = jaxprs.part_of(jaxpr, which)
        donated = [i for i in used if i in set(donatable)]
        others = [i for i in used if i not in set(donatable)]

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
        self, values: list[Any], sums: list[Any], down: Move | None = None, up: Move | None = None
    ) -> dict[int, jax.Array]:
        """The results by index; copies are on the devices.

        Args:
          values: the arguments, those of its parts donated; gradients are yet to come.
          sums: gradients on the devices; taken out one after the other, so that their memory is free.
          down: brings gradients to the host; None leaves them where they are.
          up: brings copies to the devices, likewise.
        """
        results: dict[int, Any] = {}
        in_flight: collections.deque[list[jax.Array]] = collections.deque()
        for k in range(len(self._parts)):
            if len(in_flight) == self._in_flight:
                jax.block_until_ready(in_flight.popleft())
            made, sent = self.update_part(k, values, sums, down, up)
            if self._complete:
                in_flight.append(sent)  # there, so no longer in host memory
            results |= made
        return results

    def update_part(
        self, k: int, values: list[Any], sums: list[Any], down: Move | None, up: Move | None
    ) -> tuple[dict[int, jax.Array], list[jax.Array]]:
        """The results of one part, as `__call__`, and the copies among them."""
        at = self._flat.copies_at
        part, program = self._parts[k]
        grads = [sums[i] for i in part.params]
        for i, x in zip(part.params, grads if down is None else down(part.params, grads), strict=True):
            values[at + i], sums[i] = x, None
        del grads
        made = program(values)
        for i in part.params:
            values[at + i] = None
        if not self._complete:
            return made, []
        copies = [made[at + i] for i in part.params]
        sent = copies if up is None else up(part.params, copies)
        return made | {at + i: x for i, x in zip(part.params, sent, strict=True)}, sent


def _same_type(jaxpr: Any, i: int) -> bool:
    """Whether gradient and copy, which have one index, have one shape and dtype."""
    before, after = jaxprs.inputs(jaxpr)[i].aval, jaxprs.outputs(jaxpr)[i].aval
    return (before.shape, before.dtype) == (after.shape, after.dtype)


class _Program:
    """A part's program, with the indices of what it takes and gives."""

    def __init__(self, jitted: Any, donated: list[int], others: list[int], results: list[int]):
        self._jitted, self._donated, self._others, self._results = jitted, donated, others, results

    def __call__(self, values: Sequence[Any]) -> dict[int, jax.Array]:
        made = self._jitted([values[i] for i in self._donated], [values[i] for i in self._others])
        return dict(zip(self._results, made, strict=True))
