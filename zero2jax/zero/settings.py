"""What is fixed about a training step when an engine is built: one record, read by everyone who asks.

`Engine` builds it from its keywords; `gradients` and `step` compute by it, `agreement` compares it over processes, a
checkpoint's manifest records it, and a configuration is translated into it once. A module of its own rather than a
part of `gradients`, so that what only reads settings need not import how gradients are made.
"""

import dataclasses
from typing import Any

from zero2jax.base.mesh import DataAxes
from zero2jax.zero.loss_scale import LossScale
from zero2jax.zero.precision import Precision


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
    loss_scale: LossScale | None = None
    axes: DataAxes = dataclasses.field(default_factory=DataAxes)

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"building the engine: stage is {self.stage!r}; ZeRO has the stages 0, 1, 2 and 3."
            )
        if not isinstance(self.num_microbatches, int) or self.num_microbatches < 1:
            raise ValueError(
                f"building the engine: num_microbatches is {self.num_microbatches!r}; it must be a whole number of at "
                f"least 1."
            )
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"building the engine: reduction is {self.reduction!r}; it is 'mean' or 'sum'.")
        if self.precision.has_float16 and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        if self.gather not in ("auto", "use", "once") or (self.gather == "once" and self.stage != 2):
            raise ValueError(
                f"building the engine: gather is {self.gather!r} at stage {self.stage}. It is 'auto', 'use' or "
                f"'once', and only stage 2 has the choice: stages 0 and 1 gather once, stage 3 at each use."
            )
        if self.axes.rest_over_replicas and self.stage == 0:
            raise ValueError(
                "building the engine: shard_over_replicas at stage 0, which replicates the state. Use a stage from 1 "
                "up, or leave it out."
            )

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
        plain = {"precision": self.precision.names, "clip_norm": clip_norm, "axes": axes, "loss_scale": scale}
        return {**values, **plain}
