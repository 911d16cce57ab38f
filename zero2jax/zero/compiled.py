"""The functions of an engine, jitted: the step with its donation, evaluations, full parameters. Global arrays.

`step` holds the pure functions. One `Compiled` belongs to one layout of the state.
"""

import collections
import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zero2jax.base import losses
from zero2jax.base.losses import LossFn
from zero2jax.base.mesh import replicated
from zero2jax.base.pytrees import PyTree
from zero2jax.zero.placement import make_opt_state
from zero2jax.zero.schedule import with_pipelined_gathers, with_room_for_layers
from zero2jax.zero.shard_plan import ShardPlan
from zero2jax.zero.state import TrainState
from zero2jax.zero.state_checks import KeptState
from zero2jax.zero.step import StepProgram

CompilerOptions = Mapping[str, Any] | Callable[[ShardPlan], Mapping[str, Any]] | None

Gather = Callable[[np.ndarray], tuple[np.ndarray, tuple[str, ...]]]
"""A row of numbers -> (the rows of all processes, the names of their hosts)."""

_MAX_EVALUATIONS = 8  # loss functions whose evaluation stays compiled


class Compiled:
    """The functions of one layout, each compiled when it is first called. Another layout gets another object."""

    def __init__(self, program: StepProgram, options: CompilerOptions):
        self.layout = program.layout
        self._program = program
        self._given_options = options
        self._options: dict[str, Any] | None = None
        self._replicated = replicated(program.mesh)
        self._step: Any = None
        self._step_inside: Any = None
        self._kept_state: KeptState | None = None
        self.evaluations: dict[Any, Any] = {}  # by the identity of the loss: it may be unhashable
        self._sources: collections.Counter[Any] = collections.Counter()  # losses compiled of the same code
        self.compared = False  # whether the processes have agreed that they run the same step

    @property
    def program(self) -> StepProgram:
        """The step's pure functions."""
        return self._program

    # No `functools.cached_property`, whose frame would hide the user's line from the warnings that are given here.

    @property
    def step(self) -> Any:
        """`(state, batch, loss arguments, extra arguments) -> (state, metrics)`, the state donated."""
        if self._step is None:
            self._step = self._jit_step(donate_argnums=0, compiler_options=self.options or None)
        return self._step

    @property
    def step_inside(self) -> Any:
        """`step` as a part of a program of the user's, which alone can donate and have options for the compiler."""
        if self._step_inside is None:
            self._step_inside = self._jit_step()
            if self.options:
                warnings.warn(
                    f"a step inside of a program of yours: the compiler options {sorted(self.options)} have no effect "
                    f"there. Give them to your own jax.jit.",
                    stacklevel=3,
                )
        return self._step_inside

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the step."""
        if self._options is None:
            given = self._given_options
            given = given(self.layout.params) if callable(given) else given or {}
            step, mesh = self._program.settings.step, self._program.mesh
            held = self._program.settings.held_layer_bytes(mesh)
            stored = sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(self.abstract_state())
            )
            in_twos = step.num_microbatches == 1 and set(mesh.axis_names) <= set(step.axes.names)
            options = with_pipelined_gathers(given, step.at_use, mesh, in_twos)
            self._options = with_room_for_layers(options, held, stored, mesh)
        return self._options

    def _jit_step(self, **options: Any) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        return jax.jit(self._program.step, out_shardings=(shardings, self._replicated), **options)

    def check_room(self, gather: Gather) -> None:
        """Raise a ValueError if a host has no room for a state: its devices say so themselves."""

    def keep(self, position: int, x: jax.Array) -> Any:
        """What stands in a new state for its leaf at a position, given where it is stored: the array itself."""
        return x

    def reopened(self, gather: Gather) -> list[Any]:
        """The leaves of a state that is in files: there are none."""
        raise ValueError(
            "reopening a state: this engine keeps no files. Build it with OffloadSettings(nvme_path=...), like that of "
            "the run that left them, or restore a checkpoint."
        )

    def first_opt_state(self, params: PyTree) -> PyTree:
        """The optimizer's initial state where it is stored, from parameters where they are."""
        return make_opt_state(self._program.tx, params, self.layout, self._program.mesh)

    def programs(self, state: TrainState, batch: PyTree, *more: PyTree) -> list[jax.stages.Lowered]:
        """What a step of these arguments runs, lowered."""
        return [self.step.lower(state, batch, *more)]

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state as a step takes it."""
        return self.layout.abstract_state(self._program.mesh)

    def placed(self, state: TrainState) -> TrainState:
        """A state that a program may take; see `place_state`."""
        return self.with_leaves(state)[0]

    def with_leaves(self, state: TrainState) -> tuple[TrainState, list[jax.Array]]:
        """A state that a program may take, and its leaves."""
        if self._kept_state is None:
            self._kept_state = KeptState(self.layout, self._program.mesh)
        return self._kept_state.placed(state)

    def stored(self, state: TrainState) -> TrainState:
        """A new state, of leaves, as a step takes it."""
        return state

    def unpacked(self, state: TrainState) -> TrainState:
        """The leaves of a state."""
        return state

    def on_devices(self, state: TrainState) -> TrainState:
        """What the loss takes of a state: all of it is there."""
        return state

    def forget_copies(self) -> None:
        """Let go of device memory that is not part of a state: there is none."""

    def abstract_on_devices(self) -> TrainState:
        """Shapes, dtypes and shardings of that, as leaves."""
        return self.layout.abstract_state(self._program.mesh)

    @functools.cached_property
    def params(self) -> Any:
        """`parameters at rest -> full ones`."""
        return jax.jit(self._program.full_params, out_shardings=self._replicated)

    def evaluate(self, loss_fn: LossFn) -> Any:
        """`(state, batch, loss arguments) -> mean loss terms` of a loss function; the last few stay compiled."""
        # What is kept holds the loss function: its id is not used again. A method is another object at each access.
        method = inspect.ismethod(loss_fn)
        key = (id(loss_fn.__self__), id(loss_fn.__func__)) if method else id(loss_fn)  # type: ignore[attr-defined]
        if key not in self.evaluations:
            self._warn_of_copies(loss_fn)
            while len(self.evaluations) >= _MAX_EVALUATIONS:
                self.evaluations.pop(next(iter(self.evaluations)))
            program = dataclasses.replace(self._program, loss=losses.normalized(loss_fn))
            self.evaluations[key] = jax.jit(program.evaluate, out_shardings=self._replicated)
        return self.evaluations[key]

    def _warn_of_copies(self, loss_fn: LossFn) -> None:
        code = getattr(getattr(loss_fn, "func", loss_fn), "__code__", None)
        self._sources[code] += 1
        if code is not None and self._sources[code] == 3:
            warnings.warn(
                f"evaluating: {code.co_name} of {code.co_filename}:{code.co_firstlineno} is the third function of the "
                f"same code, and each is compiled anew. Define it once, outside of the loop; what changes goes into "
                f"loss_args={{...}}.",
                stacklevel=4,
            )
