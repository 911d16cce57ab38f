"""What is fixed about a training step when an engine is built: one record, read by everyone who asks.

`Engine` builds it from its keywords; `gradients` and `step` compute by it, `agreement` compares it over processes, a
checkpoint's manifest records it, and a configuration is translated into it once. A module of its own rather than a
part of `gradients`, so that what only reads settings need not import how gradients are made.
"""

import dataclasses
from typing import Any, NoReturn

import numpy as np

from zero2jax.base.checks import is_positive, is_whole
from zero2jax.base.mesh import DataAxes
from zero2jax.zero.loss_scale import LossScale
from zero2jax.zero.precision import Precision

MAX_KEPT_SIZE = 100_000  # elements: to gather fewer again costs more than they hold (DeepSpeed's default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a step, hashable; see `Engine` for what each does.

    Attributes:
      stage: ZeRO stage, 0 to 3.
      num_microbatches: K; each device's batch is sliced into K equal parts.
      batch_size: examples of every batch over all devices; None takes it from the data.
      precision: dtypes.
      clip_norm: global norm that gradients are clipped to, or None.
      reduction: "mean" or "sum" of the gradients over the devices.
      skip_nonfinite: leave the state as it is when the gradient norm is not finite.
      gather: "auto", "use" or "once".
      seed: seed of the keys that the loss function gets.
      unused: "warn" or "error", where the loss does not use a trainable parameter.
      max_kept_size: stage 3 keeps, outside of loops, parameters with at most so many elements from forward to backward.
      max_kept_total: elements of all that it keeps; those that come first in the tree are kept. None for any number.
      loss_scale: how the loss is scaled for backward; None for not at all, or, with float16 anywhere, dynamically.
      axes: the mesh axes that hold different examples, and those that the state is sharded over.

    Raises:
      ValueError: a value is none of those it can have.
    """

    stage: int = 2
    num_microbatches: int = 1
    batch_size: int | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    clip_norm: float | None = None
    reduction: str = "mean"
    skip_nonfinite: bool = False
    gather: str = "auto"
    seed: int = 0
    unused: str = "warn"
    max_kept_size: int = MAX_KEPT_SIZE
    max_kept_total: int | None = None
    loss_scale: LossScale | None = None
    axes: DataAxes = dataclasses.field(default_factory=DataAxes)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.reduction not in ("mean", "sum"):
            _refuse("reduction", self.reduction, "it is 'mean' or 'sum'")
        if self.unused not in ("warn", "error"):
            _refuse("unused", self.unused, "it is 'warn' or 'error'")
        flags = {"skip_nonfinite": self.skip_nonfinite, "shard_over_replicas": self.axes.rest_over_replicas}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                _refuse(name, flag, "it is True or False")
        if self.precision.has_float16 and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        if self.gather not in ("auto", "use", "once") or (self.gather == "once" and self.stage != 2):
            raise ValueError(
                f"building the engine: gather is {self.gather!r} at stage {self.stage}. It is 'auto', 'use' or "
                f"'once', and only stage 2 has the choice: stage 3 gathers at each use, and stages 0 and 1 once if "
                f"there are microbatches."
            )
        if self.axes.rest_over_replicas and self.stage == 0:
            raise ValueError(
                "building the engine: shard_over_replicas at stage 0, which replicates the state. Use a stage from 1 "
                "up, or leave it out."
            )

        if self.precision.quantize is not None and self.stage == 0:
            raise ValueError(
                f"building the engine: Precision.quantize ({', '.join(self.precision.quantize.plain)}) at stage 0, "
                f"where nothing is gathered and gradients are all-reduced. Use a stage from 1 up, or leave it out."
            )

    def _check_numbers(self) -> None:
        """Refuse what is no number, or out of range; numbers of NumPy become Python's, which JSON can hold."""
        whole = {name: getattr(self, name) for name in ("stage", "num_microbatches", "batch_size", "seed")}
        if not is_whole(self.stage) or self.stage not in (0, 1, 2, 3):
            _refuse("stage", self.stage, "ZeRO has the stages 0, 1, 2 and 3")
        for name in ("num_microbatches", "batch_size"):
            absent = name == "batch_size" and whole[name] is None
            if not absent and (not is_whole(whole[name]) or whole[name] < 1):
                _refuse(name, whole[name], "it must be a whole number of at least 1")
        for name in ("max_kept_size", "max_kept_total"):
            value = getattr(self, name)
            if not (is_whole(value) and value >= 0) and not (value is None and name == "max_kept_total"):
                _refuse(name, value, "it must be a whole number of at least 0")
        if not is_whole(self.seed) or not -(2**31) <= self.seed < 2**32:
            _refuse(
                "seed", self.seed, "it must be a whole number of 32 bits, since a key holds no more of it"
            )
        for name, value in whole.items():
            object.__setattr__(self, name, None if value is None else int(value))
        tiny = float(np.finfo(np.float32).tiny)  # less is 0 in fp32, and so would every update be
        if self.clip_norm is not None and not (is_positive(self.clip_norm) and float(self.clip_norm) >= tiny):
            rule = (
                f"it must be a finite number above 0, or None for no clipping (which 0.0 means in a DeepSpeed JSON); "
                f"below {tiny:.3g} it is 0 in fp32"
            )
            _refuse("clip_norm", self.clip_norm, rule)

    @property
    def at_use(self) -> bool:
        """Whether parameters are gathered, and gradients reduced, where they are used. Stage 1 does so, too, unless
        it adds full gradients of several microbatches.
        """
        return self.stage >= 2 or (self.stage == 1 and self.num_microbatches == 1)

    @property
    def gather_once(self) -> bool:
        """Whether stage 2 gathers all parameters before the microbatches, instead of at each use."""
        several = self.stage == 2 and self.num_microbatches > 1
        return self.gather == "once" or (self.gather == "auto" and several)

    @property
    def plain(self) -> dict[str, Any]:
        """The settings as plain values by name, to compare over processes and to record."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        clip_norm = None if self.clip_norm is None else float(self.clip_norm)
        axes = dataclasses.asdict(self.axes)
        scale = None if self.loss_scale is None else dataclasses.asdict(self.loss_scale)
        plain = {"precision": self.precision.plain, "clip_norm": clip_norm, "axes": axes, "loss_scale": scale}
        return {**values, **plain}


class WithSettings:
    """The settings that others ask for most, by their own names. For what has a record of them."""

    settings: StepSettings

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self.settings.stage

    @property
    def num_microbatches(self) -> int:
        """The number of slices of each device's part of a batch."""
        return self.settings.num_microbatches

    @property
    def batch_size(self) -> int | None:
        """Examples of every batch over all devices; None takes it from the data."""
        return self.settings.batch_size

    @property
    def precision(self) -> Precision:
        """The dtypes of a step."""
        return self.settings.precision

    @property
    def axes(self) -> DataAxes:
        """The mesh axes that hold different examples."""
        return self.settings.axes


def _refuse(name: str, value: Any, rule: str) -> NoReturn:
    raise ValueError(f"building the engine: {name} is {value!r}; {rule}.")
