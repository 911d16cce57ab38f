"""The functions of an engine that offloads, jitted: stands in for `zero.compiled.Compiled`. Global arrays.

A step: gradients on the devices; sums and scalars go down; the update, with masters and optimizer state donated; copies
in the computed dtype come up. Python waits for none of it but, with several chunks, for the last but one to be up.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zero2jax.base.mesh import moved, replicated
from zero2jax.base.pytrees import PyTree, is_traced, shapes_of
from zero2jax.offload.chunks import ChunkedUpdate, Flat
from zero2jax.offload.host_memory import (
    IN_FLIGHT,
    check_hosts,
    check_pinned,
    memory_row,
    param_bytes,
    pinned_row,
)
from zero2jax.offload.host_step import Handed, HostStep, Reduced
from zero2jax.offload.parts import Split, grouped
from zero2jax.offload.rates import Rates
from zero2jax.offload.residents import in_host_memory_at_once
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import Compiled, CompilerOptions, Gather
from zero2jax.zero.state import TrainState, merge
from zero2jax.zero.step import Metrics, StepProgram


class Offloaded(Compiled):
    """The functions of one layout whose masters and optimizer state are stored on its `host`."""

    def __init__(self, program: StepProgram, options: CompilerOptions, settings: OffloadSettings):
        super().__init__(program, options)
        self._settings = settings
        assert program.layout.host is not None
        self._halves = HostStep(program, program.layout.host)
        resident = program.layout.resident_params
        self._moving = [i for i in range(len(program.layout.trained_params.leaves)) if i not in resident]
        self._copies = CopiesOf()
        self._casts: dict[tuple[int, ...], Any] = {}

    @property
    def step(self) -> "OffloadedStep":
        """`(state, batch, loss arguments, extra arguments) -> (state, metrics)`, the state donated."""
        if self._step is None:
            self._step = OffloadedStep(self, self._halves, self._settings, self.options)
        return self._step  # type: ignore[no-any-return]

    def check_room(self, gather: Gather) -> None:
        """Raise a ValueError if the processes of a host need more memory than it has, or than can be pinned."""
        layout, settings, mesh = self.layout, self._program.settings, self._program.mesh
        staged = in_host_memory_at_once(self._program, self._settings)
        check_hosts(*gather(memory_row(layout, settings, mesh, staged)))
        self.check_pinned_room(gather)

    def check_pinned_room(self, gather: Gather) -> None:
        """Raise a ValueError if a process needs more pinned memory than XLA gives it."""
        layout = self.layout
        if layout.pinned_state or layout.pinned_params:
            check_pinned(*gather(pinned_row(layout, self._program.settings, self._program.mesh)))

    def programs(self, state: TrainState, batch: PyTree, *more: PyTree) -> list[jax.stages.Lowered]:
        """What a step of these arguments runs, lowered: both halves."""
        return [self.step.lower(state, batch, *more), self.step.lower_update(batch, *more)]

    @property
    def step_inside(self) -> Any:
        """Refused: a program of the user's runs on devices alone."""
        raise ValueError(
            "running a step inside of a program of yours (jax.jit, jax.lax.scan): this engine offloads, and its step "
            "moves arrays between programs of its own. Call engine.step outside of it, or build the engine without "
            "offload."
        )

    @functools.cached_property
    def params(self) -> Any:
        """`parameters at rest -> full ones`: their shards go up in the dtype that they are stored in."""
        full, plan = super().params, self.layout.params
        shardings = jax.tree.leaves(plan.shardings(self._program.mesh))
        return lambda params: full(plan.treedef.unflatten(moved(jax.tree.leaves(params), shardings)))

    def on_devices(self, state: TrainState) -> TrainState:
        """What the loss needs of a state: trainable parameters as copies in their computed dtype, where they wait."""
        if is_traced(state):
            _ = self.step_inside
        trained = jax.tree.leaves(self.layout.trained(state.params))
        copies = self._copies.of(trained)
        if copies is None:
            copies = self._sent_up(trained)
            self._copies.keep(trained, copies)
        return self._with_copies(state, copies)

    def for_step(self, state: TrainState) -> TrainState:
        """What the loss of a step needs of it."""
        return self.on_devices(state)

    def _with_copies(self, state: TrainState, copies: list[jax.Array]) -> TrainState:
        trained = jax.tree.leaves(self.layout.trained(state.params))
        homes = self.layout.homes(self._program.mesh)[0]
        resident = [i for i in range(len(trained)) if i not in set(self._moving)]
        here = moved([trained[i] for i in resident], [homes[i] for i in resident])
        seen = dict(zip([*self._moving, *resident], [*copies, *here], strict=True))
        copies = [seen[i] for i in range(len(trained))]
        params = merge(copies, state.params, self.layout.trainable)
        return state._replace(params=params, opt_state=())

    def _sent_up(self, trained: Sequence[jax.Array]) -> list[jax.Array]:
        """New copies, on the devices, of what the host stores; in groups of leaves, two of which are on their way."""
        sizes, there = param_bytes(self.layout, self._program.mesh), self.layout.copies(self._program.mesh)
        groups = grouped([sizes[i] for i in self._moving], self._settings.chunk_bytes)
        sent: list[list[jax.Array]] = []
        for n, group in enumerate(groups):
            if n >= IN_FLIGHT:
                jax.block_until_ready(sent[n - IN_FLIGHT])
            which = tuple(self._moving[k] for k in group)
            home = self._at_rest(which, [trained[i] for i in which])
            sent.append(moved(self._cast(which, home), [there[i] for i in which]))
        return [x for group in sent for x in group]

    def _at_rest(self, which: Sequence[int], trained: Sequence[Any]) -> list[jax.Array]:
        """Some trainable parameters where they are stored."""
        homes = self.layout.homes(self._program.mesh)[0]
        return moved(trained, [homes[i] for i in which])

    @property
    def delays_next(self) -> bool:
        """Whether the next step begins with the copies of the step before this one, after `for_step` of this one."""
        return False

    def after_step(self, masters: list[jax.Array], copies: list[jax.Array]) -> None:
        """Remember copies on the devices for as long as their masters are those of the state."""
        self._copies.keep(masters, copies)

    def forget_copies(self) -> None:
        """Let the memory of the copies go: the parameters will be others."""
        self._copies.forget()

    def abstract_on_devices(self) -> TrainState:
        """Shapes, dtypes and shardings of what `on_devices` gives."""
        mesh, settings, layout = self._program.mesh, self._program.settings, self.layout
        leaves, treedef = jax.tree.flatten(layout.params.rest_shapes(mesh))
        copies = layout.copies(mesh)
        for k in self._moving:
            i = settings.trained[k]
            leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, settings.compute_dtype(i), sharding=copies[k])
        params = jax.tree.unflatten(treedef, leaves)
        return layout.abstract_state(mesh)._replace(params=params, opt_state=())

    def _cast(self, which: tuple[int, ...], home: list[jax.Array]) -> list[jax.Array]:
        """Some of them in the computed dtype, on the host."""
        if which not in self._casts:
            homes = self.layout.homes(self._program.mesh)[0]
            cast = functools.partial(self._halves.copies, which=which)
            self._casts[which] = jax.jit(cast, out_shardings=[homes[i] for i in which])
        return self._casts[which](home)  # type: ignore[no-any-return]


class OffloadedStep:
    """A step as one function, of several programs.

    Attributes:
      reduce: `HostStep.reduced`, jitted for the devices; what it stores anew and the copies are given apart.
      update: `HostStep.update` in one piece, jitted for the host; masters and optimizer state are donated.
      rates: measured of what moves, if it is.
    """

    _in_flight: int | None = IN_FLIGHT

    def __init__(
        self, functions: Offloaded, halves: HostStep, settings: OffloadSettings, options: Mapping[str, Any]
    ):
        program, layout = halves.program, functions.layout
        assert layout.host is not None
        self._functions, self._layout = functions, layout
        self._on_devices, self._on_host = replicated(program.mesh), replicated(layout.host)
        plan, everywhere = layout.trained_params, layout.abstract_state(program.mesh)
        self._device_sums = jax.tree.leaves(plan.shardings(program.mesh))
        self._device_copies = layout.copies(program.mesh)
        kept, _ = apart(everywhere._replace(opt_state=()), layout.trainable)

        def step(
            state: TrainState, copies: list[jax.Array], batch: PyTree, loss_args: Mapping[str, PyTree]
        ) -> Reduced:
            params = layout.params.treedef.unflatten(joined(copies, state.params, layout.trainable))
            return halves.reduced(state._replace(params=params), batch, loss_args)

        self.reduce = jax.jit(
            step,
            out_shardings=Reduced(
                sums=self._device_sums,
                handed=self._on_devices,  # type: ignore[arg-type]
                kept=jax.tree.map(lambda x: x.sharding, kept),
                metrics=self._on_devices,  # type: ignore[arg-type]
            ),
            donate_argnums=0,
            compiler_options=dict(options) or None,
        )
        self._host_sums = jax.tree.leaves(plan.shardings(layout.host))
        self._homes = layout.homes(program.mesh)
        of_state = layout.opt_state.shardings(layout.host)
        self._host_results = [*self._host_sums, *jax.tree.leaves(of_state), *self._host_sums, self._on_host]
        of_state = layout.opt_state.shardings(program.mesh)
        self._device_results = [*self._device_sums, *jax.tree.leaves(of_state)]
        # of the update in one piece, for what only looks at it
        self.update = jax.jit(halves.update, donate_argnums=(0, 1))
        self._halves, self._settings = halves, settings
        self._options = {k: v for k, v in options.items() if not k.startswith("xla_gpu")}
        self._device_options = options
        self.rates = Rates() if settings.measure else None
        self._updates: dict[Any, tuple[ChunkedUpdate, ChunkedUpdate | None]] = {}

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, Metrics]:
        """See `Engine.step`."""
        layout, functions = self._layout, self._functions
        home = self._at_home(state)
        there = functions.for_step(state)
        sums, handed, kept, metrics = self.reduce(*apart(there, layout.trainable), batch, loss_args)
        del there
        if self.rates is not None:
            self.rates.begin(metrics["loss"])
        functions.forget_copies()
        extra = dict(extra_args)
        on_host, on_devices = self._chunked(home, sums, handed, extra)
        num, at = len(sums), len(sums) + len(layout.opt_state.leaves)
        results: dict[int, Any] = {}
        if on_devices is not None:
            values = self._values(home, handed, extra, self._on_devices)
            shared = on_devices.shared
            arrived = moved([values[i] for i in shared], [self._device_results[i] for i in shared])
            for i, x in zip(shared, arrived, strict=True):
                values[i] = x
            results |= on_devices(values, sums)
        values = self._values(home, handed, extra, self._on_host)
        results |= on_host(values, sums, self._down, self._up)
        if self.rates is not None:
            self.rates.end(functions.delays_next)
            metrics |= self.rates.metrics()
        for x in home:  # the few that no part alone could be given: scalars
            if not x.is_deleted():
                x.delete()
        trained, opt_leaves = ([results[i] for i in range(*ends)] for ends in ((0, num), (num, at)))
        functions.after_step(trained, [results[at + i] for i in range(num) if at + i in results])
        rate = results.get(at + num)
        if rate is not None:
            (rate,) = moved([rate], [self._on_devices])
        params = layout.params.treedef.unflatten(joined(trained, kept.params, layout.trainable))
        opt_state = layout.opt_state.treedef.unflatten(opt_leaves)
        return kept._replace(params=params, opt_state=opt_state), metrics | {"learning_rate": rate}

    def _values(self, home: list[Any], handed: Handed, extra: PyTree, scalar: NamedSharding) -> list[Any]:
        """Flat arguments of the update, gradients left out, its scalars where it runs."""
        scalars = jax.tree.leaves(handed)
        num_params = len(self._homes[0])
        scalars = moved(scalars, [scalar] * len(scalars))
        return [*home, *[None] * num_params, *scalars, *jax.tree.leaves(jax.device_put(extra, scalar))]

    def _chunked(
        self, home: list[Any], sums: list[jax.Array], handed: Handed, extra: PyTree
    ) -> tuple[ChunkedUpdate, ChunkedUpdate | None]:
        """The update on the host and that on the devices for these shapes; other extra arguments make others."""
        leaves, treedef = jax.tree.flatten(extra)
        key = (treedef, *[(np.shape(x), jnp.result_type(x)) for x in leaves])
        if key not in self._updates:
            layout, num = self._layout, len(sums)
            trained = jax.tree.unflatten(jax.tree.structure(layout.trained(layout.params.tree)), home[:num])
            shapes = shapes_of((trained, layout.opt_state.treedef.unflatten(home[num:]), sums, handed, extra))
            flat = Flat.of(self._halves.update, shapes)
            split, sizes = flat.split(), param_bytes(layout, self._halves.program.mesh)
            resident = layout.resident_params
            chunks = split.only(frozenset(range(num)) - resident).joined(sizes, self._settings.chunk_bytes)
            on_host = self._update_on_host(flat, chunks)
            on_devices = None
            if resident:
                halves = dataclasses.replace(self._halves, home=self._halves.program.mesh)
                on_devices = ChunkedUpdate(
                    Flat.of(halves.update, shapes),
                    split.only(resident).joined(sizes, sum(sizes)),
                    self._device_results,
                    complete=False,
                    options=self._device_options,
                )
            self._updates[key] = on_host, on_devices
        return self._updates[key]

    def _update_on_host(self, flat: Flat, chunks: Split) -> ChunkedUpdate:
        return ChunkedUpdate(
            flat,
            chunks,
            self._host_results,
            complete=True,
            options=self._options,
            in_flight=self._in_flight,
            reuse=self.rates is None,  # a thread waits for the gradients that it measures
        )

    def _down(self, which: tuple[int, ...], sums: list[jax.Array]) -> list[jax.Array]:
        arrived = moved(sums, [self._host_sums[i] for i in which])
        if self.rates is not None:
            self.rates.moving("down", sums, arrived)
        return arrived

    def _up(self, which: tuple[int, ...], copies: list[jax.Array]) -> list[jax.Array]:
        sent = moved(copies, [self._device_copies[i] for i in which])
        if self.rates is not None:
            self.rates.moving("up", copies, sent)
        return sent

    def _at_home(self, state: TrainState) -> list[jax.Array]:
        """Masters and leaves of the optimizer state where they are stored, if those of another engine are not yet."""
        leaves = jax.tree.leaves((self._layout.trained(state.params), state.opt_state))
        return moved(leaves, [*self._homes[0], *self._homes[1]])

    def lower(
        self, state: PyTree, batch: PyTree, loss_args: PyTree, extra_args: PyTree
    ) -> jax.stages.Lowered:
        """The half that runs on the devices, lowered for a batch of these shapes; of `state` nothing is read."""
        there = self._functions.abstract_on_devices()
        return self.reduce.lower(*apart(there, self._layout.trainable), batch, loss_args)  # type: ignore[no-any-return]

    def lower_update(self, batch: PyTree, loss_args: PyTree, extra_args: PyTree) -> jax.stages.Lowered:
        """The half that runs on the host, lowered after the same batch."""
        there = self._functions.abstract_on_devices()
        reduced = jax.eval_shape(self.reduce, *apart(there, self._layout.trainable), batch, loss_args)
        state = self._layout.abstract_state(self._on_devices.mesh)  # type: ignore[arg-type]
        shapes = (self._layout.trained(state.params), state.opt_state, reduced.sums, reduced.handed)
        return self.update.lower(*shapes_of(shapes), shapes_of(dict(extra_args)))  # type: ignore[no-any-return]


def apart(state: TrainState, trainable: tuple[bool, ...]) -> tuple[TrainState, list[jax.Array]]:
    """What of a state on the devices a step stores anew, to be donated, its parameters a list of the frozen ones; and
    the copies, which are not donated.
    """
    leaves = jax.tree.leaves(state.params)
    frozen, copies = (
        [x for x, t in zip(leaves, trainable, strict=True) if t is kind] for kind in (False, True)
    )
    return state._replace(params=frozen), copies


def joined(trained: list[Any], frozen: list[Any], trainable: tuple[bool, ...]) -> list[Any]:
    """The leaves of all parameters from trainable and frozen ones."""
    of = {True: iter(trained), False: iter(frozen)}
    return [next(of[t]) for t in trainable]


class CopiesOf:
    """What was sent up last, known by the very arrays that it was made of: other parameters are sent up anew."""

    def __init__(self) -> None:
        self._masters: list[weakref.ref[jax.Array]] = []
        self._copies: list[jax.Array] = []

    def of(self, masters: list[jax.Array]) -> list[jax.Array] | None:
        """What was kept for these very arrays; None for others."""
        same = len(masters) == len(self._masters) and all(
            ref() is x for ref, x in zip(self._masters, masters, strict=True)
        )
        return self._copies if same else None

    def keep(self, masters: list[jax.Array], copies: list[jax.Array]) -> None:
        """Keep copies in the place of what was kept."""
        self._masters, self._copies = [weakref.ref(x) for x in masters], copies

    def forget(self) -> None:
        """Keep nothing."""
        self._masters, self._copies = [], []
