"""The functions of an engine whose state lies in pinned host memory and is updated on the devices. Global arrays.

A step is one program: gradients, then the update, chunk by chunk. State and copies are donated and written in place.
"""

from collections.abc import Mapping
from typing import Any

import jax

from zero2jax.base.mesh import moved, replicated
from zero2jax.base.pytrees import PyTree, shapes_of
from zero2jax.offload.chunks import Flat
from zero2jax.offload.host_step import HostStep
from zero2jax.offload.offloaded import Offloaded, apart, joined
from zero2jax.offload.settings import OffloadSettings
from zero2jax.offload.streams import StreamedUpdate
from zero2jax.zero.state import TrainState
from zero2jax.zero.step import Metrics


class Streamed(Offloaded):
    """The functions of one layout whose host is the pinned memory of its own devices."""

    @property
    def step(self) -> "StreamedStep":  # type: ignore[override]
        """`(state, batch, loss arguments, extra arguments) -> (state, metrics)`, the state donated."""
        if self._step is None:
            self._step = StreamedStep(self, self._halves, self._settings, self.options)
        return self._step  # type: ignore[no-any-return]

    def programs(self, state: TrainState, batch: PyTree, *more: PyTree) -> list[jax.stages.Lowered]:
        """What a step of these arguments runs, lowered."""
        return [self.step.lower(state, batch, *more)]

    def _cast(self, which: tuple[int, ...], home: list[jax.Array]) -> list[jax.Array]:
        """Copies in the computed dtype, on the devices; one after the other, so that no second comes up in full."""
        plan, settings = self.layout.trained_params, self._program.settings
        copies = []
        for i, x in zip(which, home, strict=True):
            (up,) = moved([x], [plan.sharding(plan.leaves[i], self._program.mesh)])
            copies.append(jax.block_until_ready(up.astype(settings.compute_dtype(settings.trained[i]))))
        return copies


class StreamedStep:
    """A step as one function of a state, around one program."""

    def __init__(
        self, functions: Streamed, halves: HostStep, settings: OffloadSettings, options: Mapping[str, Any]
    ):
        program, layout = halves.program, functions.layout
        self._functions, self._layout, self._halves = functions, layout, halves
        self._settings = settings
        self._homes = layout.homes(program.mesh)
        self._moving = [i for i in range(len(self._homes[0])) if i not in layout.resident_params]
        copies = layout.copies(program.mesh)
        state = layout.abstract_state(program.mesh)
        kept, _ = apart(state._replace(opt_state=()), layout.trainable)
        self._jitted = jax.jit(
            self._program,
            out_shardings=(
                jax.tree.map(lambda x: x.sharding, kept),
                *self._homes,
                [copies[i] for i in self._moving],
                replicated(program.mesh),
            ),
            donate_argnums=(0, 1, 2, 3),
            compiler_options=dict(options) or None,
        )

    def _program(
        self,
        state: TrainState,
        masters: list[jax.Array],
        opt_state: list[jax.Array],
        copies: list[jax.Array],
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, list[jax.Array], list[jax.Array], list[jax.Array], Metrics]:
        """What a step stores anew, and its metrics.

        Args:
          state: with the frozen parameters alone, a list, and no optimizer state.
          masters: trainable parameters where they are stored.
          opt_state: leaves of the optimizer state, likewise.
          copies: of the masters in host memory, what the loss sees.
          batch: as for `Engine.step`, like `loss_args` and `extra_args`.
        """
        layout, halves = self._layout, self._halves
        seen = dict(enumerate(masters)) | dict(zip(self._moving, copies, strict=True))
        params = joined([seen[i] for i in range(len(masters))], state.params, layout.trainable)
        whole = state._replace(params=layout.params.treedef.unflatten(params))
        sums, handed, kept, metrics = halves.reduced(whole, batch, loss_args)
        # Every gradient is there before the first update writes over a copy.
        sums = jax.lax.optimization_barrier(sums)
        trained = jax.tree.unflatten(jax.tree.structure(layout.trained(layout.params.tree)), masters)
        args = (trained, layout.opt_state.treedef.unflatten(opt_state), sums, handed, extra_args)
        flat = Flat.of(halves.update, shapes_of(args))
        update = StreamedUpdate(flat, layout, halves.program.mesh, self._settings.chunk_bytes)
        values = [*masters, *opt_state, *sums, *jax.tree.leaves((handed, extra_args))]
        made = update(values, [seen[i] for i in range(len(masters))])
        num, at = len(masters), flat.copies_at
        rate = made.get(at + num)
        new = [made[i] for i in range(num)], [made[i] for i in range(num, at)]
        return kept, *new, [made[at + i] for i in self._moving], metrics | {"learning_rate": rate}

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, Metrics]:
        """See `Engine.step`."""
        layout, functions = self._layout, self._functions
        trained, opt_state = jax.tree.leaves(layout.trained(state.params)), jax.tree.leaves(state.opt_state)
        masters, opt_state = moved(trained, self._homes[0]), moved(opt_state, self._homes[1])
        kept, seen = apart(functions.on_devices(state), layout.trainable)
        functions.forget_copies()
        copies = [seen[i] for i in self._moving]
        del seen
        kept, masters, opt_state, copies, metrics = self._jitted(
            kept, masters, opt_state, copies, batch, loss_args, dict(extra_args)
        )
        functions.after_step(masters, copies)
        params = layout.params.treedef.unflatten(joined(masters, kept.params, layout.trainable))
        state = kept._replace(params=params, opt_state=layout.opt_state.treedef.unflatten(opt_state))
        return state, metrics

    def lower(
        self, state: PyTree, batch: PyTree, loss_args: PyTree, extra_args: PyTree
    ) -> jax.stages.Lowered:
        """The step lowered for a batch of these shapes; of `state` nothing is read."""
        layout = self._layout
        kept, seen = apart(self._functions.abstract_on_devices(), layout.trainable)
        stored = layout.abstract_state(self._halves.program.mesh)
        masters, opt_state = jax.tree.leaves(layout.trained(stored.params)), jax.tree.leaves(stored.opt_state)
        copies = [seen[i] for i in self._moving]
        return self._jitted.lower(kept, masters, opt_state, copies, batch, loss_args, dict(extra_args))  # type: ignore[no-any-return]
