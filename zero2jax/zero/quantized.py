"""Collectives whose operands travel in 8 or 4 bits: int8 gathers of parameters, int8 or int4 sums of gradients.

Per-device code, inside a `shard_map` that is manual over the data axes. Quantised in blocks, symmetrically:

    scale     s = bf16(max |x| / m) of each block, m = 127 or 7; |x - s q| <= s / 2
    number    q = round(x / s), from -m to m; two of 4 bits lie in a byte

    all_gather   this device's shard is quantised, bytes travel, and all shards are dequantised on arrival
    scatter      each slice is quantised for its device, an all-to-all; addends are summed in fp32, in a fixed order
    psum         `scatter`, and the sums gathered in 8 bits

n numbers are n or n / 2 bytes on the wire, and 2 for each block: 0.504 of bf16 for 8 bits in blocks of 256, 0.266 for 4
bits in blocks of 64, which cut off more of a number and so share a scale with fewer. A block with
a number that is not finite has no finite scale, so all of it arrives as NaN, and the verdict on the step sees it.

ZeRO++, arXiv:2306.10209: qwZ (section 3.1) and qgZ (section 3.3). Over groups of devices a gradient takes its two hops:
inside a group first, and a shard of the group's sum between groups. Without error feedback (LoCo, arXiv:2407.04480).

Limit: the dequantised addends of a leaf, or of one layer, exist for a moment in fp32.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.base.checks import is_whole
from zero2jax.base.mesh import padded_size
from zero2jax.zero.collectives import on_local_shard, pad_to, tree_sum
from zero2jax.zero.shard_plan import LeafPlan, Placement

_LARGEST = {8: 127, 4: 7}
_BLOCK_SIZE = {8: 256, 4: 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """What travels quantised between devices, and how: static and hashable. Off where bits are None.

    Matrices are quantised: floating leaves with at least two dims besides those of layers, that are sharded and that
    `Precision.keep_fp32` does not keep. Nothing is stored quantised: masters, sums and checkpoints are as without.

    Attributes:
      params_bits: 8, for gathers of trainable parameters (ZeRO++'s quantised weights).
      frozen_bits: 8, for gathers of those that are not trained.
      grads_bits: 8 or 4, for sums of gradients over devices; other gradients are then summed as by `fp32_sum`.
      block_size: most numbers that share a scale; those of a slice are divided evenly into blocks. 256 of 8 bits and 64
        of 4 bits if None.
      min_size: elements of a parameter, or of one layer of it, below which it travels as it is.

    Raises:
      ValueError: a value is none of those it can have, or nothing is quantised.
    """

    params_bits: int | None = None
    frozen_bits: int | None = None
    grads_bits: int | None = None
    block_size: int | None = None
    min_size: int = 4096

    def __post_init__(self) -> None:
        allowed = {"params_bits": (None, 8), "frozen_bits": (None, 8), "grads_bits": (None, 8, 4)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values or isinstance(value, bool):
                raise ValueError(f"reading what is quantised: {name} is {value!r}; it is one of {values}.")
        for name, least in (("block_size", 2), ("min_size", 0)):
            value = getattr(self, name)
            if name == "block_size" and value is None:
                continue
            if not is_whole(value) or value < least:
                raise ValueError(
                    f"reading what is quantised: {name} is {value!r}; it is a whole number of at least {least}."
                )
        if not self.plain:
            raise ValueError(
                "reading what is quantised: nothing is. Give params_bits=8, frozen_bits=8 or grads_bits=8 or 4, or "
                "leave `quantize` out."
            )

    @property
    def plain(self) -> list[str]:
        """What is quantised, in words, to compare over processes and to record."""
        named = {"parameters": self.params_bits, "frozen": self.frozen_bits, "gradients": self.grads_bits}
        wires = {name: wire for name, bits in named.items() if (wire := self.wire(bits)) is not None}
        words = [f"{name} int{wire.bits} in blocks of {wire.block_size}" for name, wire in wires.items()]
        return [*words, f"from {self.min_size} on"] if words else []

    def takes(self, leaf: LeafPlan) -> bool:
        """Whether a leaf of this shape and layout is quantised."""
        dims = leaf.shape[leaf.layer_dims :]
        return leaf.dim is not None and len(dims) > 1 and math.prod(dims) >= self.min_size

    def wire(self, bits: int | None) -> "Wire | None":
        """How an array travels in so many bits."""
        return None if bits is None else Wire(bits, self.block_size or _BLOCK_SIZE[bits])


@dataclasses.dataclass(frozen=True)
class Wire:
    """How one array is quantised: `bits` of a number, 8 or 4, and at most `block_size` numbers in a block."""

    bits: int
    block_size: int

    def blocks(self, size: int) -> tuple[int, int]:
        """(number of blocks, numbers in each) of `size` numbers; 4-bit ones are a pair in a byte."""
        num_blocks = max(1, -(-size // self.block_size))
        length = -(-size // num_blocks)
        return num_blocks, padded_size(length, 8 // self.bits)

    def num_bytes(self, size: int) -> int:
        """Bytes of `size` numbers, those of their scales included."""
        num_blocks, length = self.blocks(size)
        return num_blocks * (length * self.bits // 8 + 2)


def quantized(x: jax.Array, wire: Wire) -> jax.Array:
    """(..., n) floating -> (..., wire.num_bytes(n)) uint8: all numbers, and behind them the scales of their blocks."""
    *outer, size = x.shape
    num_blocks, length = wire.blocks(size)
    x = pad_to(x.astype(jnp.float32), (*outer, num_blocks * length)).reshape(*outer, num_blocks, length)
    most = _LARGEST[wire.bits]
    scales = (jnp.max(jnp.abs(x), -1, keepdims=True) * np.float32(1 / most)).astype(jnp.bfloat16)
    divisor = jnp.where(scales == 0, jnp.bfloat16(1), scales).astype(jnp.float32)
    numbers = jnp.clip(jnp.round(x / divisor), -most, most).astype(jnp.int8)
    packed = jax.lax.bitcast_convert_type(numbers, jnp.uint8)
    if wire.bits == 4:  # the first half of a block in the low bits, the second in the high ones
        low, high = jnp.split(packed, 2, axis=-1)
        packed = (low & np.uint8(15)) | (high << np.uint8(4))
    parts = (packed, jax.lax.bitcast_convert_type(scales, jnp.uint8))
    return jnp.concatenate([part.reshape(*outer, -1) for part in parts], axis=-1)


def dequantized(packed: jax.Array, size: int, wire: Wire) -> jax.Array:
    """(..., wire.num_bytes(n)) uint8 -> (..., n) fp32, n being `size`. Each is exact: 8 bits times the 8 of bf16."""
    outer, (num_blocks, length) = packed.shape[:-1], wire.blocks(size)
    numbers, scales = jnp.split(packed, [num_blocks * length * wire.bits // 8], axis=-1)
    numbers = jax.lax.bitcast_convert_type(numbers.reshape(*outer, num_blocks, -1), jnp.int8)
    if wire.bits == 4:  # shifted right, the sign fills the upper bits
        halves = [numbers << np.int8(4) >> np.int8(4), numbers >> np.int8(4)]
        numbers = jnp.concatenate(halves, axis=-1)
    scales = jax.lax.bitcast_convert_type(scales.reshape(*outer, num_blocks, 1, 2), jnp.bfloat16)
    x = numbers.astype(jnp.float32) * scales.astype(jnp.float32)
    return x.reshape(*outer, num_blocks * length)[..., :size]


def all_gather(
    x: jax.Array, axis_name: str, dim: int, wire: Wire, dtype: Any, placement: Placement = ()
) -> jax.Array:
    """`collectives.all_gather` of what is quantised on the way: (..., d/N, ...) -> (..., d, ...) of `dtype`."""

    def gather(x: jax.Array) -> jax.Array:
        num = jax.lax.axis_size(axis_name)
        if num == 1:
            return x.astype(dtype)
        packed = jax.lax.all_gather(quantized(x.reshape(-1), wire), axis_name)  # (N, bytes)
        parts = dequantized(packed, x.size, wire).astype(dtype).reshape(num, *x.shape)
        return jnp.moveaxis(parts, 0, dim).reshape(*x.shape[:dim], num * x.shape[dim], *x.shape[dim + 1 :])

    return on_local_shard(gather, placement)(x)


def scatter(x: jax.Array, axis_name: str, dim: int, wire: Wire, placement: Placement = ()) -> jax.Array:
    """`collectives.scatter_in_order` of addends that are quantised on the way: (..., d, ...) -> (..., d/N, ...)."""

    def summed(x: jax.Array) -> jax.Array:
        num = jax.lax.axis_size(axis_name)
        if num == 1:
            return x.astype(jnp.float32)
        parts = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
        parts = jnp.moveaxis(parts, dim, 0)  # for device 0, for device 1, ...
        packed = quantized(parts.reshape(num, -1), wire)
        packed = jax.lax.all_to_all(packed, axis_name, 0, 0, tiled=True)  # of device 0, of device 1, ...
        return tree_sum(dequantized(packed, parts[0].size, wire).reshape(parts.shape))

    return on_local_shard(summed, placement)(x)


def psum(x: jax.Array, axis_name: str, wire: Wire, placement: Placement = ()) -> jax.Array:
    """`collectives.sum_in_order`, addends quantised on the way, and their sum, in 8 bits, on the way back."""

    def summed(x: jax.Array) -> jax.Array:
        flat = pad_to(x.reshape(-1), (padded_size(x.size, jax.lax.axis_size(axis_name)),))
        shard = scatter(flat, axis_name, 0, wire)
        back = Wire(8, wire.block_size)
        return all_gather(shard, axis_name, 0, back, jnp.float32)[: x.size].reshape(x.shape)

    return on_local_shard(summed, placement)(x)
