"""The functions of an engine that offloads, jitted: stands in for `zero.compiled.Compiled`. Global arrays.

A step: gradients on the devices; sums and scalars go down; the update, with masters and optimizer state donated; copies
in the computed dtype come up. Nothing of it waits for numbers in Python.
"""

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero2jax.base.mesh import moved, replicated
from zero2jax.base.pytrees import PyTree, is_traced, shapes_of
from zero2jax.offload.chunks import ChunkedUpdate
from zero2jax.offload.host_step import Handed, HostStep, Reduced
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.state import TrainState, merge
from zero2jax.zero.step import Metrics, StepProgram


class Offloaded(Compiled):
    """The functions of one layout whose masters and optimizer state are stored on its `host`."""

    def __init__(self, program: StepProgram, options: CompilerOptions, settings: OffloadSettings):
        super().__init__(program, options)
        self._settings = settings
        self._halves = HostStep(program)
        self._copies = _Copies()

    @property
    def step(self) -> "OffloadedStep":
        """`(state, batch, loss arguments, extra arguments) -> (state, metrics)`, the state donated."""
        if self._step is None:
            self._step = OffloadedStep(self, self._halves, self._settings, self._compiler_options())
        return self._step  # type: ignore[no-any-return]

    def programs(self, state: TrainState, batch: PyTree, *more: PyTree) -> list[jax.stages.Lowered]:
        """What a step of these arguments runs, lowered: both halves."""
        return [self.step.lower(state, batch, *more), self.step.lower_update(batch, *more)]

    @property
    def step_inside(self) -> Any:
        """Refused: a program of the user's runs on devices alone."""
        raise ValueError(
            "running a step inside of a program of yours (jax.jit, jax.lax.scan): this engine offloads, and its update "
            "is a program of its own, of the host's CPU. Call engine.step outside of it, or build the engine without "
            "offload."
        )

    @functools.cached_property
    def params(self) -> Any:
        """`parameters at rest -> full ones`: their shards go up in the dtype that they are stored in."""
        full, plan = super().params, self.layout.params
        shardings = jax.tree.leaves(plan.shardings(self._program.mesh))
        return lambda params: full(plan.treedef.unflatten(moved(jax.tree.leaves(params), shardings)))

    def on_devices(self, state: TrainState) -> TrainState:
        """What the loss needs of a state, on the devices: trainable parameters as copies in their computed dtype."""
        if is_traced(state):
            _ = self.step_inside
        trained = jax.tree.leaves(self.layout.trained(state.params))
        copies = self._copies.of(trained)
        if copies is None:
            home = moved(trained, self.host_params)
            shardings = jax.tree.leaves(self.layout.trained_params.shardings(self._program.mesh))
            copies = moved(self._cast(home), shardings)
            self.keep_copies(trained, copies)
        params = merge(copies, state.params, self.layout.trainable)
        return state._replace(params=params, opt_state=())

    def keep_copies(self, masters: list[jax.Array], copies: list[jax.Array]) -> None:
        """Remember copies on the devices for as long as their masters are those of the state."""
        self._copies.keep(masters, copies)

    def forget_copies(self) -> None:
        """Let the memory of the copies go: the parameters will be others."""
        self._copies.forget()

    def abstract_on_devices(self) -> TrainState:
        """Shapes, dtypes and shardings of what `on_devices` gives."""
        mesh, settings = self._program.mesh, self._program.settings
        state = self.layout.abstract_state(mesh)
        leaves, treedef = jax.tree.flatten(self.layout.params.rest_shapes(mesh))
        shapes = [
            jax.ShapeDtypeStruct(x.shape, settings.compute_dtype(i), sharding=x.sharding)
            for i, x in enumerate(leaves)
        ]
        return state._replace(params=jax.tree.unflatten(treedef, shapes), opt_state=())

    @functools.cached_property
    def host_params(self) -> list[NamedSharding]:
        """Where trainable parameters are stored."""
        return jax.tree.leaves(self.layout.trained_params.shardings(self.layout.host))  # type: ignore[arg-type]

    @functools.cached_property
    def _cast(self) -> Any:
        return jax.jit(self._halves.copies, out_shardings=self.host_params)


class OffloadedStep:
    """A step as one function, of several programs.

    Attributes:
      reduce: `HostStep.reduced`, jitted for the devices; what it stores anew and the copies are given apart.
      update: `HostStep.update` in one piece, jitted for the host; masters and optimizer state are donated.
    """

    def __init__(
        self, functions: Offloaded, halves: HostStep, settings: OffloadSettings, options: Mapping[str, Any]
    ):
        program, layout = halves.program, functions.layout
        assert layout.host is not None
        self._functions, self._layout = functions, layout
        self._on_devices, self._on_host = replicated(program.mesh), replicated(layout.host)
        plan, everywhere = layout.trained_params, layout.abstract_state(program.mesh)
        self._device_sums = jax.tree.leaves(plan.shardings(program.mesh))
        kept, _ = _apart(everywhere._replace(opt_state=()), layout.trainable)

        def step(
            state: TrainState, copies: list[jax.Array], batch: PyTree, loss_args: Mapping[str, PyTree]
        ) -> Reduced:
            params = layout.params.treedef.unflatten(_joined(copies, state.params, layout.trainable))
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
        shardings = (
            plan.shardings(layout.host),
            layout.opt_state.shardings(layout.host),
            self._host_sums,
            self._on_host,
        )
        self._host_state = jax.tree.leaves(shardings[:2])
        # of the update in one piece, for what only looks at it
        self.update = jax.jit(halves.update, out_shardings=shardings, donate_argnums=(0, 1))
        self._halves, self._settings = halves, settings
        self._options = {k: v for k, v in options.items() if not k.startswith("xla_gpu")}
        self._updates: dict[Any, ChunkedUpdate] = {}

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
        there = functions.on_devices(state)
        sums, handed, kept, metrics = self.reduce(*_apart(there, layout.trainable), batch, loss_args)
        del there
        functions.forget_copies()
        scalars, treedef = jax.tree.flatten(handed)
        handed = jax.tree.unflatten(treedef, moved(scalars, [self._on_host] * len(scalars)))
        extra = jax.device_put(dict(extra_args), self._on_host)
        trained, opt_leaves, copies, rate = self._chunked(home, sums, handed, extra)(
            home, sums, handed, extra, self._down, self._up
        )
        functions.keep_copies(trained, copies)
        if rate is not None:
            (rate,) = moved([rate], [self._on_devices])
        params = layout.params.treedef.unflatten(_joined(trained, kept.params, layout.trainable))
        opt_state = layout.opt_state.treedef.unflatten(opt_leaves)
        return kept._replace(params=params, opt_state=opt_state), metrics | {"learning_rate": rate}

    def _chunked(self, home: PyTree, sums: list[jax.Array], handed: Handed, extra: PyTree) -> ChunkedUpdate:
        """The update for these shapes; other extra arguments make another."""
        leaves, treedef = jax.tree.flatten(extra)
        key = (treedef, *[(x.shape, x.dtype) for x in leaves])
        if key not in self._updates:
            shapes = shapes_of((*home, sums, handed, extra))
            self._updates[key] = ChunkedUpdate(
                self._halves,
                shapes,
                [*self._host_state, *self._host_sums],
                self._on_host,
                self._settings.chunk_bytes,
                self._options,
            )
        return self._updates[key]

    def _down(self, which: list[int], sums: list[jax.Array]) -> list[jax.Array]:
        return moved(sums, [self._host_sums[i] for i in which])

    def _up(self, which: list[int], copies: list[jax.Array]) -> list[jax.Array]:
        return moved(copies, [self._device_sums[i] for i in which])

    def _at_home(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Masters and optimizer state on the host, where those of an engine that does not offload are not yet."""
        stored = self._layout.trained(state.params), state.opt_state
        leaves, treedef = jax.tree.flatten(stored)
        return jax.tree.unflatten(treedef, moved(leaves, self._host_state))  # type: ignore[no-any-return]

    def lower(
        self, state: PyTree, batch: PyTree, loss_args: PyTree, extra_args: PyTree
    ) -> jax.stages.Lowered:
        """The half that runs on the devices, lowered for a batch of these shapes; of `state` nothing is read."""
        there = self._functions.abstract_on_devices()
        return self.reduce.lower(*_apart(there, self._layout.trainable), batch, loss_args)  # type: ignore[no-any-return]

    def lower_update(self, batch: PyTree, loss_args: PyTree, extra_args: PyTree) -> jax.stages.Lowered:
        """The half that runs on the host, lowered after the same batch."""
        there = self._functions.abstract_on_devices()
        reduced = jax.eval_shape(self.reduce, *_apart(there, self._layout.trainable), batch, loss_args)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        state = self._layout.abstract_state(self._on_devices.mesh)  # type: ignore[arg-type]
        return self.update.lower(  # type: ignore[no-any-return]
            self._layout.trained(state.params),
            state.opt_state,
            [place(x, sharding) for x, sharding in zip(reduced.sums, self._host_sums, strict=True)],
            jax.tree.map(lambda x: place(x, self._on_host), reduced.handed),
            jax.device_put(dict(extra_args), self._on_host),
        )


def _apart(state: TrainState, trainable: tuple[bool, ...]) -> tuple[TrainState, list[jax.Array]]:
    """What of a state on the devices a step stores anew, to be donated, its parameters a list of the frozen ones; and
    the copies, which are not donated.
    """
    leaves = jax.tree.leaves(state.params)
    frozen, copies = (
        [x for x, t in zip(leaves, trainable, strict=True) if t is kind] for kind in (False, True)
    )
    return state._replace(params=frozen), copies


def _joined(trained: list[Any], frozen: list[Any], trainable: tuple[bool, ...]) -> list[Any]:
    of = {True: iter(trained), False: iter(frozen)}
    return [next(of[t]) for t in trainable]


class _Copies:
    """What was sent up last, known by the very arrays that it was made of: other parameters are sent up anew."""

    def __init__(self) -> None:
        self._masters: list[weakref.ref[jax.Array]] = []
        self._copies: list[jax.Array] = []

    def of(self, masters: list[jax.Array]) -> list[jax.Array] | None:
        same = len(masters) == len(self._masters) and all(
            ref() is x for ref, x in zip(self._masters, masters, strict=True)
        )
        return self._copies if same else None

    def keep(self, masters: list[jax.Array], copies: list[jax.Array]) -> None:
        self._masters, self._copies = [weakref.ref(x) for x in masters], copies

    def forget(self) -> None:
        self._masters, self._copies = [], []
