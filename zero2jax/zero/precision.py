"""In which dtype a parameter is stored and computed with, and its gradient reduced and accumulated.

Masters are stored in fp32 (a wider dtype stays as it is); the loss sees the compute dtype. Frozen leaves keep the dtype
they were given, in the step too: hand over a frozen base model in bf16, batch statistics in fp32.
Mixed precision as in Micikevicius et al., arXiv:1710.03740; ZeRO, arXiv:1910.02054, section 3.1.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from zero2jax.base.pytrees import LeafPredicate
from zero2jax.zero.shard_plan import LeafPlan


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a step.

    Attributes:
      compute_dtype: what the loss function sees of a floating parameter; bf16, or fp32 for plain training.
      reduce_dtype: gradients are summed over devices in it; None means the dtype the leaf is computed in.
      accumulate_dtype: gradients are summed over microbatches in it.
      keep_fp32: predicate `(path, leaf) -> bool` for leaves that are computed in fp32 (norms, say).
    """

    compute_dtype: DTypeLike = jnp.bfloat16
    reduce_dtype: DTypeLike | None = None
    accumulate_dtype: DTypeLike = jnp.float32
    keep_fp32: LeafPredicate | None = None

    @property
    def names(self) -> list[str | None]:
        """The three dtypes by name, to compare and to record; the predicate shows in the step alone."""
        dtypes = (self.compute_dtype, self.reduce_dtype, self.accumulate_dtype)
        return [None if dtype is None else jnp.dtype(dtype).name for dtype in dtypes]

    def compute(self, leaf: LeafPlan) -> Any:
        """The dtype in which the loss sees a trainable leaf."""
        if self.keep_fp32 is not None and self.keep_fp32(leaf.path, leaf):
            return master_dtype(leaf.dtype)
        return jnp.dtype(self.compute_dtype)

    def reduce(self, leaf: LeafPlan) -> Any:
        """The dtype in which a leaf's gradient is summed over devices."""
        return self.compute(leaf) if self.reduce_dtype is None else jnp.dtype(self.reduce_dtype)


def master_dtype(dtype: DTypeLike) -> Any:
    """The dtype in which a trainable leaf is stored: fp32, or wider if it came so."""
    return jnp.promote_types(dtype, jnp.float32)
