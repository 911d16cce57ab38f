"""One-step-delayed updates: the host updates while the devices compute the next step with the parameters before it.

With theta_k the masters after step k, a gradient of step k is taken at theta_{k-2} in place of theta_{k-1}:

    devices   gradient k     (theta_{k-2})   gradient k+1 (theta_{k-1})
    host      update k-1 -> theta_{k-1}      update k -> theta_k

Nothing waits in between: what a step returns is the state after its own update, as arrays that the host still makes, so
checkpoints, evaluations and `engine.params` are of that state, without a flush. What is delayed are the copies on the
devices, which are those of the step before; a state that did not come from the step before, from a checkpoint say, has
none, and its first step is not delayed. ZeRO-Offload, arXiv:2101.06840, section 4.4.
"""

import jax
import numpy as np

from zero2jax.offload.offloaded import CopiesOf, Offloaded, OffloadedStep
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import CompilerOptions
from zero2jax.zero.state import TrainState
from zero2jax.zero.step import StepProgram


class Delayed(Offloaded):
    """The functions of an engine whose updates are delayed after `delay_after` steps."""

    def __init__(self, program: StepProgram, options: CompilerOptions, settings: OffloadSettings):
        super().__init__(program, options, settings)
        assert settings.delay_after is not None
        self._delay_after = settings.delay_after
        self._before = CopiesOf()  # of the step before; none where the next step is not delayed
        self._latest: list[jax.Array] = []
        self._num_steps = 0
        self._simulated = program.mesh.devices.flat[0].platform == "cpu"

    @property
    def step(self) -> "DelayedStep":
        """As `Offloaded.step`."""
        if self._step is None:
            self._step = DelayedStep(self, self._halves, self._settings, self.options)
        return self._step  # type: ignore[no-any-return]

    def for_step(self, state: TrainState) -> TrainState:
        """What the loss of a step needs, with the copies of the step before, if there are any."""
        there = self.on_devices(state)
        trained = jax.tree.leaves(self.layout.trained(state.params))
        before, self._latest = self._before.of(trained), self._copies.of(trained) or []
        self._num_steps = (int(np.asarray(state.step)) if before is None else self._num_steps) + 1
        if self._simulated:
            # Programs of simulated devices that run beside each other may hold the threads that one of them waits for.
            jax.block_until_ready(trained)
        return self._with_copies(state, before) if before else there

    def forget_copies(self) -> None:
        """As `Offloaded.forget_copies`."""
        super().forget_copies()
        self._before.forget()

    @property
    def delays_next(self) -> bool:
        """As `Offloaded.delays_next`; simulated devices wait for the update all the same."""
        return self._num_steps >= self._delay_after and not self._simulated

    def after_step(self, masters: list[jax.Array], copies: list[jax.Array]) -> None:
        """Keep the copies that this step has made, and those that it could have used for the next."""
        self._copies.keep(masters, copies)
        self._before.keep(masters, self._latest if self._num_steps >= self._delay_after else [])
        self._latest = []


class DelayedStep(OffloadedStep):
    """A step of which Python waits for nothing: the next one is to start while this one's update runs."""

    _in_flight = None
