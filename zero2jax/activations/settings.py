"""What is wanted of saved activations: one record, which `remat_layers`, `Engine` and the configuration share."""

import dataclasses

from zero2jax.activations.policies import NESTED, PolicyLike, remat_policy


@dataclasses.dataclass(frozen=True)
class ActivationSettings:
    """What is saved of a model's layers for backward, and where.

    Whatever is set, each segment of layers becomes a `jax.checkpoint`, if the model has not made it one.

    Attributes:
      policy: what is saved within a layer, see `remat_policy`; or `nested`. None keeps what the model's own
        `jax.checkpoint` says, and where it has none, recomputes everything (`nothing`).
      num_checkpoints: number of segments that the layers are cut into; None gives every layer one of its own.
      partition_axis: mesh axis over which the saved boundary activation is partitioned; `model` is the one that
        saves something, see `boundary`.
      offload: keep the saved boundary activation in pinned host memory.
      contiguous: insist on one buffer for all saved boundary activations, which a scanned model has.
      barrier: an optimization barrier at each boundary.
      profile: `Engine.activation_profile` is asked for; see `profile`.
    """

    policy: PolicyLike | None = None
    num_checkpoints: int | None = None
    partition_axis: str | None = None
    offload: bool = False
    contiguous: bool = False
    barrier: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if self.policy is not None and self.policy != NESTED:
            remat_policy(self.policy)
        number = self.num_checkpoints
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(
                f"reading activation settings: num_checkpoints is {number!r}; it is a number of segments, at least 1, "
                f"or None for one per layer."
            )
