"""Dynamic and static loss scaling, for gradients that pass through float16. Pure functions of replicated scalars.

In: whether a step's gradients were finite. Out: the scale of the next step.

Float16 gradients below 6e-8 are zero, so the loss is multiplied by a scale before backward, and the gradients are
divided by that same scale before anything looks at them. A scale that is too large makes them overflow: such a step is
skipped. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2. The rule is that of DeepSpeed's
ZeRO optimizers, but for an upper bound and for the growth step, whose gradients are divided by the scale they have.
"""

import collections
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.base.checks import is_positive, is_whole


class LossScaleError(RuntimeError):
    """Gradients were not finite although the loss scale was at its minimum: the run does not train."""


class LossScaleState(NamedTuple):
    """What a scale keeps between steps: replicated scalars, part of the training state.

    Fields:
      scale: float32, the scale of the next step.
      num_finite: int32, steps since the last overflow, or since the start.
      hysteresis: int32, overflows until the scale is halved.
      num_skipped: int32, steps skipped since the start.
    """

    scale: jax.Array
    num_finite: jax.Array
    hysteresis: jax.Array
    num_skipped: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss is scaled. Defaults are DeepSpeed's.

    Attributes:
      initial: the first scale, or, if not `dynamic`, the scale.
      dynamic: whether overflows halve the scale and steps without them double it.
      window: finite steps from one doubling to the next, and from an overflow, plus one, to a doubling.
      hysteresis: how many overflows until one halves the scale, from a doubling on; those before it only skip the step.
      consecutive_hysteresis: every finite step forgets the overflows before it, not only a doubling.
      minimum: the scale is not halved below it.
      maximum: nor doubled above it.
      at_minimum: "raise" or "warn" when gradients overflow at the minimum; two steps late, so that no step waits. At a
        static scale, which other batches may pass, the first overflow is warned of.

    Raises:
      ValueError: a value outside its range.
    """

    initial: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    maximum: float = 2.0**32
    at_minimum: str = "raise"

    def __post_init__(self) -> None:
        for name in ("initial", "minimum", "maximum"):
            value = getattr(self, name)
            if not (is_positive(value) and value <= 2.0**100):
                self._refuse(name, value, "a number above 0 and at most 2**100")
            object.__setattr__(self, name, float(value))  # of NumPy, too: JSON holds it
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            if not (is_whole(value) and 1 <= value < 2**31):
                self._refuse(name, value, "a whole number from 1 to 2**31 - 1")
            object.__setattr__(self, name, int(value))
        for name in ("dynamic", "consecutive_hysteresis"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, getattr(self, name), "True or False")
        if self.at_minimum not in ("raise", "warn"):
            self._refuse("at_minimum", self.at_minimum, "'raise' or 'warn'")
        if self.dynamic and not self.minimum <= self.initial <= self.maximum:
            self._refuse("initial", self.initial, f"from minimum={self.minimum} to maximum={self.maximum}")

    @classmethod
    def of(cls, value: "LossScale | float | None") -> "LossScale | None":
        """The loss scale that an engine is given; a number is a static scale."""
        if value is None or isinstance(value, LossScale):
            return value
        return cls(initial=value, dynamic=False)

    def unjudged(self) -> ValueError:
        """The refusal of an optimizer that takes gradients which no verdict looks at."""
        return ValueError(
            f"reading the optimizer: it asks for the gradient at other parameters than the step's own, as line "
            f"searches do, and would not notice if one overflowed at the loss scale ({self.words}). Compute in bf16 or "
            f"fp32, without a loss scale, or take another optimizer."
        )

    def _refuse(self, name: str, value: Any, rule: str) -> None:
        raise ValueError(f"reading the loss scale: {name} is {value!r}; it must be {rule}.")

    @property
    def words(self) -> str:
        """`dynamic from 65536, doubled after 1000 steps`, or `static 128`."""
        if not self.dynamic:
            return f"static {self.initial:g}"
        return f"dynamic from {self.initial:.6g}, doubled after {self.window} steps without overflow"

    def first(self) -> LossScaleState:
        """The state before the first step."""
        zero = jnp.int32(0)
        return LossScaleState(jnp.float32(self.initial), zero, jnp.int32(self.hysteresis), zero)

    def current(self, state: LossScaleState) -> jax.Array:
        """The scale of a step, float32: what these settings say wins over a state that other settings left."""
        if not self.dynamic:
            return jnp.float32(self.initial)
        return jnp.clip(state.scale, self.minimum, self.maximum)

    def after(self, state: LossScaleState, finite: jax.Array) -> tuple[LossScaleState, dict[str, jax.Array]]:
        """The state after a step, and its metrics.

        Args:
          state: of the step.
          finite: bool scalar, whether its gradients were.

        Returns:
          The new state; `loss_scale`, the step's own scale; `num_skipped`, steps skipped since the start;
          `loss_scale_exhausted`, whether the gradients overflowed at the minimum or at a static scale, where nothing is
          left to try.
        """
        new, exhausted = self._after(state, finite)
        return new, {
            "loss_scale": self.current(state),
            "num_skipped": new.num_skipped,
            "loss_scale_exhausted": exhausted,
        }

    def _after(self, state: LossScaleState, finite: jax.Array) -> tuple[LossScaleState, jax.Array]:
        num_skipped = state.num_skipped + jnp.where(finite, 0, 1)
        num_finite = jnp.where(finite, state.num_finite + 1, 0)
        scale = self.current(state)
        if not self.dynamic:
            return LossScaleState(scale, num_finite, state.hysteresis, num_skipped), ~finite
        full = jnp.int32(self.hysteresis)
        left = jnp.minimum(state.hysteresis, full)
        halve = ~finite & (left <= 1)
        double = finite & (state.num_finite > 0) & (state.num_finite % self.window == 0)
        exhausted = halve & (scale <= self.minimum)
        refill = finite if self.consecutive_hysteresis else double
        left = jnp.where(refill, full, jnp.where(finite | halve, left, left - 1))
        lower, higher = jnp.maximum(scale / 2, self.minimum), jnp.minimum(scale * 2, self.maximum)
        scale = jnp.where(halve, lower, jnp.where(double, higher, scale))
        return LossScaleState(scale, num_finite, left, num_skipped), exhausted


class ExhaustionWatch:
    """Tells the host of overflows at the minimum scale, two steps late: by then the values are there, in every process
    at the same step.
    """

    _LATE = 2

    def __init__(self, settings: LossScale | None):
        self._settings = settings
        self._steps: collections.deque[Mapping[str, Any]] = collections.deque()
        self._warned = False

    def forget(self) -> None:
        """Another run begins."""
        self._steps.clear()

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Remember the metrics of a step that was just dispatched; without a loss scale, nothing."""
        if self._settings is None:
            return
        self._steps.append(
            {name: metrics[name] for name in ("loss_scale_exhausted", "loss_scale", "num_skipped")}
        )

    def check(self) -> None:
        """Look at the step before the last.

        Raises:
          LossScaleError: it overflowed at the minimum scale, and changed no parameter.
        """
        if self._settings is None or len(self._steps) < self._LATE:
            return
        step = self._steps.popleft()
        if not np.asarray(step["loss_scale_exhausted"]) or self._warned:
            return
        self.forget()
        kind, way_out = "minimum", "LossScale(at_minimum='warn') goes on"
        if not self._settings.dynamic:
            kind, way_out = "static", "A smaller scale, or a dynamic one, may do"
        text = (
            f"training with float16: the gradients of the step before the last were not finite at the {kind} loss "
            f"scale, {float(step['loss_scale']):g}, and {int(step['num_skipped'])} steps have been skipped so far; "
            f"that step changed no parameter. Look for a loss that is not finite in itself (metrics['loss']), "
            f"lower the learning rate, or compute in bfloat16. {way_out}."
        )
        if self._settings.dynamic and self._settings.at_minimum == "raise":
            raise LossScaleError(text)
        self._warned = not self._settings.dynamic
        warnings.warn(text, stacklevel=3)
