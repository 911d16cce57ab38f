"""In which dtype a parameter is stored and computed with, and its gradient reduced and accumulated.

Masters are stored in fp32 unless they are to be 16-bit (a wider dtype stays as it is); the loss sees the compute dtype.
Frozen leaves keep the dtype they were given, in the step too: hand over a frozen base model in bf16, batch statistics
in fp32.
Mixed precision as in Micikevicius et al., arXiv:1710.03740; ZeRO, arXiv:1910.02054, section 3.1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero2jax.base.checks import is_positive
from zero2jax.base.pytrees import LeafPredicate
from zero2jax.zero.quantized import QuantizeSettings
from zero2jax.zero.shard_plan import LeafPlan

_SHORT_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp16": "float16"}
_STORED = {
    "master_dtype": (("float32", "bfloat16", "float16"), "masters are stored in fp32, bf16 or fp16"),
    "state_dtype": (
        ("float32", "bfloat16"),
        "moments are stored in fp32 or bf16: squares of gradients leave float16's range",
    ),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a step: bf16, fp16, fp32 or float64, by dtype or by name (`"bf16"`). fp16 brings a `LossScale`.

    Attributes:
      compute_dtype: what the loss function sees of a floating parameter; bf16, or fp32 for plain training.
      reduce_dtype: gradients are summed over devices in it; None means the dtype the leaf is computed in.
      accumulate_dtype: gradients are summed over microbatches in it, float64 ones in float64.
      keep_fp32: predicate `(path, leaf) -> bool` for leaves that are computed, and stored, in fp32 (norms, say).
      fp32_sum: gradients travel in `reduce_dtype`, and each device adds its slices of them in fp32, in a fixed order:
        an all-to-all of the same bytes in place of the reduce-scatter, which rounds at each addition.
      master_dtype: trainable parameters are stored in it between steps: fp32, or bf16 or fp16 for no fp32 masters. The
        update is computed in fp32 and rounded.
      state_dtype: likewise the optimizer's moments: fp32, or bf16.
      stochastic_rounding: whether what is stored in bf16 is rounded up or down at random, so that its mean is exact and
        updates smaller than half a unit in the last place are not lost; None means yes. fp16 is rounded to nearest.
      quantize: what travels between devices in 8 or 4 bits (ZeRO++); gradients in so many bits bring `fp32_sum`.
      predivide: gradients are divided by it before they are summed over devices, and by what is left of the number of
        devices after; None means 1, or, with a loss scale, that number.

    Raises:
      ValueError: a dtype that gradients cannot be summed in, or that masters or moments cannot be stored in; a divisor
        that is no positive number.
    """

    compute_dtype: DTypeLike = jnp.bfloat16
    reduce_dtype: DTypeLike | None = None
    accumulate_dtype: DTypeLike = jnp.float32
    keep_fp32: LeafPredicate | None = None
    fp32_sum: bool = False
    master_dtype: DTypeLike = jnp.float32
    state_dtype: DTypeLike = jnp.float32
    stochastic_rounding: bool | None = None
    quantize: QuantizeSettings | None = None
    predivide: float | None = None

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype", "accumulate_dtype"):
            value = getattr(self, name)
            if value is not None or name != "reduce_dtype":
                object.__setattr__(self, name, _checked_dtype(name, value))
        if self.quantize is not None and self.quantize.grads_bits is not None:
            object.__setattr__(self, "fp32_sum", True)
        for name, (dtypes, rule) in _STORED.items():
            dtype = _checked_dtype(name, getattr(self, name))
            if dtype.name not in dtypes:
                raise ValueError(f"reading the precision: {name} is {getattr(self, name)!r}; {rule}.")
            object.__setattr__(self, name, dtype)
        if self.stochastic_rounding and jnp.bfloat16 not in (self.master_dtype, self.state_dtype):
            raise ValueError(
                f"reading the precision: stochastic_rounding is True, and nothing is stored in bfloat16: master_dtype "
                f"is {self.master_dtype}, state_dtype {self.state_dtype}. Store masters or state in 'bf16', or leave "
                f"it out."
            )
        if self.predivide is not None:
            if not is_positive(self.predivide):
                raise ValueError(
                    f"reading the precision: predivide is {self.predivide!r}; it must be a number above 0."
                )
            object.__setattr__(self, "predivide", float(self.predivide))

    @classmethod
    def of(cls, value: "Precision | DTypeLike | None") -> "Precision":
        """The precision of an engine: as it is given; for a dtype by itself, computing in it; for None, the default."""
        if not isinstance(value, Precision):
            value = cls() if value is None else cls(compute_dtype=value)
        return value

    @property
    def has_float16(self) -> bool:
        """Whether gradients pass through float16, whose range needs a loss scale."""
        return jnp.dtype(jnp.float16).name in self.names

    @property
    def names(self) -> list[str | None]:
        """The three dtypes by name, to compare and to record; the predicate shows in the step alone."""
        dtypes = (self.compute_dtype, self.reduce_dtype, self.accumulate_dtype)
        return [None if dtype is None else jnp.dtype(dtype).name for dtype in dtypes]

    @property
    def plain(self) -> list[str | None]:
        """What the fields say but for the predicate, as plain values."""
        stored = {name: getattr(self, name).name for name in _STORED}
        others = [f"{name} {dtype}" for name, dtype in stored.items() if dtype != "float32"]
        if "bfloat16" in stored.values() and not self.rounds_at_random:
            others.append("rounded to nearest")
        if self.predivide is not None:
            others.append(f"predivide {self.predivide:g}")
        quantized = [] if self.quantize is None else self.quantize.plain
        return [*self.names, *["fp32_sum"] * self.fp32_sum, *others, *quantized]

    @property
    def rounds_at_random(self) -> bool:
        """Whether something that is stored is rounded stochastically."""
        return self.stochastic_rounding is not False and jnp.bfloat16 in (self.master_dtype, self.state_dtype)

    def is_kept(self, path: str, leaf: Any) -> bool:
        """Whether a trainable leaf is computed and stored in fp32, or wider, whatever the dtypes say."""
        return self.keep_fp32 is not None and bool(self.keep_fp32(path, leaf))

    def stored(self, path: str, leaf: Any) -> Any:
        """The dtype in which a trainable leaf, as the user gives it, is stored between steps."""
        wide = wide_dtype(leaf.dtype)
        is_narrow = wide == jnp.float32 and not self.is_kept(path, leaf)
        return jnp.dtype(self.master_dtype) if is_narrow else wide

    def compute(self, leaf: LeafPlan) -> Any:
        """The dtype in which the loss sees a trainable leaf."""
        return wide_dtype(leaf.dtype) if self.is_kept(leaf.path, leaf) else jnp.dtype(self.compute_dtype)

    def reduce(self, leaf: LeafPlan) -> Any:
        """The dtype in which a leaf's gradient is summed over devices."""
        return self.compute(leaf) if self.reduce_dtype is None else jnp.dtype(self.reduce_dtype)

    def summed(self, leaf: LeafPlan) -> Any:
        """The dtype that the sum over devices comes out in."""
        dtype = self.reduce(leaf)
        return jnp.promote_types(dtype, jnp.float32) if self.fp32_sum else dtype

    def accumulate(self, leaf: LeafPlan) -> Any:
        """The dtype in which a leaf's gradient is summed over microbatches."""
        float64 = jnp.dtype("float64")
        return float64 if self.reduce(leaf) == float64 else jnp.dtype(self.accumulate_dtype)


def _checked_dtype(name: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(_SHORT_NAMES.get(value, value) if isinstance(value, str) else value or "none")
    except TypeError:
        dtype = None
    if dtype in (jnp.bfloat16, jnp.float16, jnp.float32) or (
        dtype == jnp.float64 and jax.dtypes.canonicalize_dtype(dtype) == dtype
    ):
        return dtype
    if dtype == jnp.float64:
        reason = "float64 needs jax.config.update('jax_enable_x64', True), before the first array is made"
    else:
        reason = "it is bfloat16, float16, float32 or float64, or one of 'bf16', 'fp16', 'fp32', 'fp64'"
    raise ValueError(f"reading the precision: {name} is {value!r}; {reason}.")


def wide_dtype(dtype: DTypeLike) -> Any:
    """The dtype in which the optimizer sees a trainable leaf: fp32, or wider if it came so."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize > 4 else jnp.dtype("float32")  # promotion is refused by a strict jax
