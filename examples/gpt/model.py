"""A pre-LN GPT in Flax NNX, layers under `nnx.scan`, each recomputed in backward by `nnx.remat`.

Nothing in this file knows about ZeRO or about devices. `make_loss(config)` gives the two pure functions that
a training loop needs: `init_fn(key) -> params` and `loss_fn(params, tokens) -> loss`, with `params` a nested
dict of arrays. The parameters of all layers are stacked, (L, ...), and scanned over, so each layer's parameters
are used, and can be gathered, inside the loop.

Each parameter says by its metadata which of its dims a mesh axis `model` may shard: the vocabulary, the attention heads
and the hidden units of the MLP (arXiv:1909.08053). `tensor_parallel_specs` reads them.

    B sequences, T tokens each, D width, H heads, L layers, V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from examples.attention import attention
from examples.cross_entropy import chunked_cross_entropy


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    num_layers: int
    hidden: int
    num_heads: int
    context: int
    vocab: int
    """Words; the embedding has rows behind them, to `padded_vocab`."""
    saved: str = "nothing_saveable"
    """What a layer saves for backward, a name in `jax.checkpoint_policies`; everything else is recomputed."""
    attention: str = "blocked"
    """One of `examples.attention.IMPLEMENTATIONS`."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at once."""
    sequence_axis: str | None = None
    """Mesh axis that T is sharded over between the products of a layer: its devices have one copy of `x` together, and
    of what a layer saves. `model`, with tensor parallelism; needs a loss that runs on such a mesh."""

    @property
    def padded_vocab(self) -> int:
        """A multiple of 128: of any usual number of devices, so that checkpoints go from one to another."""
        return -(-self.vocab // 128) * 128


PRESETS = {
    "tiny": GPTConfig(num_layers=2, hidden=128, num_heads=4, context=128, vocab=256),
    "small": GPTConfig(num_layers=12, hidden=768, num_heads=12, context=1024, vocab=50257),  # GPT-2, 124e6
    "1.5b": GPTConfig(num_layers=48, hidden=1600, num_heads=25, context=1024, vocab=50257),  # GPT-2
    "6.7b": GPTConfig(num_layers=32, hidden=4096, num_heads=32, context=2048, vocab=50257),  # GPT-3, 6.7e9
    # Megatron-LM's vocabulary, padded for 16-way model parallelism, as in the ZeRO paper and the blog of ZeRO-2
    "8b": GPTConfig(num_layers=72, hidden=3072, num_heads=24, context=1024, vocab=51200),
    "13b": GPTConfig(num_layers=62, hidden=4096, num_heads=32, context=1024, vocab=51200),
    "17b": GPTConfig(num_layers=78, hidden=4256, num_heads=28, context=1024, vocab=51200),  # Turing-NLG
    "40b": GPTConfig(num_layers=88, hidden=6144, num_heads=32, context=1024, vocab=51200),
    "60b": GPTConfig(num_layers=132, hidden=6144, num_heads=32, context=1024, vocab=51200),
    "100b": GPTConfig(num_layers=125, hidden=8192, num_heads=64, context=1024, vocab=51200),
    "170b": GPTConfig(num_layers=212, hidden=8192, num_heads=64, context=1024, vocab=51200),
}


def sharded(init: Callable, *axes: str | None) -> Callable:
    """An initializer whose parameter says which mesh axis may shard each of its dims."""
    # Metadata alone: the arrays are made where they belong by whoever jits `init_fn`.
    return nnx.with_partitioning(init, axes, eager_sharding=False)


def spread(x: jax.Array, axis: str | None, dim: int = 0) -> jax.Array:
    """(T, B, D), with T (or another dim) sharded over a mesh axis; untouched without an axis.

    A layer's first products need all of T, and its second ones are sums over `axis`: the compiler gathers before those
    and reduce-scatters after these, in place of an all-reduce (arXiv:2205.05198).
    """
    spec = P(*(axis if i == dim else None for i in range(x.ndim)))
    return x if axis is None else jax.lax.with_sharding_constraint(x, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def full(x: jax.Array, axis: str | None) -> jax.Array:
    """(T, B, D) with all of T on each device of a mesh axis; its cotangent is spread."""
    return x if axis is None else jax.lax.with_sharding_constraint(x, P(*[None] * x.ndim))


full.defvjp(lambda x, axis: (full(x, axis), None), lambda axis, _, cotangent: (spread(cotangent, axis),))


class Summed(nnx.Module):
    """x @ kernel.T, (T, B, inputs) -> (T, B, outputs), with inputs sharded over `model`.

    The kernel is (outputs, inputs): the dim that is left for the data axis comes first, and a gather over a later dim
    needs a copy of all layers in another layout.
    """

    def __init__(self, inputs: int, outputs: int, num_layers: int, rngs: nnx.Rngs):
        # 2 L sums go into the residual.
        init = nnx.initializers.variance_scaling(
            0.5 / num_layers, "fan_in", "normal", in_axis=-1, out_axis=-2
        )
        self.kernel = nnx.Param(sharded(init, None, "model")(rngs.params(), (outputs, inputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...].T


def make_norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm that computes in fp32, whatever its scale is stored in; cast its result back."""
    return nnx.LayerNorm(dim, use_bias=False, dtype=jnp.float32, rngs=rngs)


class Block(nnx.Module):
    """One layer: (T, B, D) -> (T, B, D). T comes first: a gather over a later dim would be copied before a product."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        D, L = config.hidden, config.num_layers
        init = sharded(nnx.initializers.lecun_normal(), None, "model")
        self.config = config
        self.norm1 = make_norm(D, rngs)
        self.qkv = nnx.Linear(D, 3 * D, use_bias=False, kernel_init=init, rngs=rngs)  # by heads
        self.out = Summed(D, D, L, rngs)
        self.norm2 = make_norm(D, rngs)
        self.up = nnx.Linear(D, 4 * D, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = Summed(4 * D, D, L, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        axis = self.config.sequence_axis
        # The names are for remat policies, which may save or offload a tensor by its name.
        y = full(self.norm1(x).astype(x.dtype), axis)
        qkv = checkpoint_name(spread(self.qkv(y), axis, 2), "qkv_proj")
        heads = qkv.reshape(*x.shape[:2], self.config.num_heads, -1)
        q, k, v = jnp.split(heads.swapaxes(0, 1), 3, axis=-1)  # (T, B, H, 3 D/H) -> 3 * (B, T, H, D/H)
        attend = functools.partial(attention, implementation=self.config.attention)
        # Parts of keys and values are cut out again in backward: 40 MiB of 170B, where memory is short.
        attended = (attend if axis is None else jax.checkpoint(attend))(q, k, v).swapaxes(0, 1)
        attended = checkpoint_name(spread(attended.reshape(x.shape), axis, 2), "attention")
        x = x + checkpoint_name(spread(self.out(attended), axis), "out_proj")
        y = full(self.norm2(x).astype(x.dtype), axis)
        hidden = checkpoint_name(spread(self.up(y), axis, 2), "up_proj")
        return x + checkpoint_name(spread(self.down(jax.nn.gelu(hidden)), axis), "down_proj")


class GPT(nnx.Module):
    """Tokens (B, T) -> logits (B, T, V) in fp32; embedding and output projection are tied."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        # Plain parameters: `nnx.Embed` would compute in the dtype that it was created with.
        embed = sharded(init, "model", None)
        self.embed = nnx.Param(embed(rngs.params(), (config.padded_vocab, config.hidden)))
        self.position = nnx.Param(init(rngs.params(), (config.context, config.hidden)))
        self.norm = make_norm(config.hidden, rngs)
        self.config = config

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = make_blocks(rngs)  # every parameter stacked: (L, ...)

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        """The last norm's output, (T, B, D)."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(policy=getattr(jax.checkpoint_policies, self.config.saved))
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        axis = self.config.sequence_axis
        x = spread(self.embed[tokens.T] + self.position[: tokens.shape[1], None], axis)
        return full(self.norm(layer(x, self.blocks)).astype(x.dtype), axis)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        words = self.embed[: self.config.vocab]
        return (self.hidden_states(tokens).swapaxes(0, 1) @ words.T).astype(jnp.float32)


def shapes_of(config: GPTConfig) -> GPT:
    """The model without its arrays: structure, shapes and metadata."""
    return nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))


def make_apply(config: GPTConfig) -> tuple[Callable, Callable]:
    """(`init_fn(key) -> params`, `apply_fn(params, tokens) -> logits`); allocates nothing."""
    graphdef = nnx.graphdef(shapes_of(config))

    def init_fn(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(key)), nnx.Param))

    def apply_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens)

    return init_fn, apply_fn


def make_loss(config: GPTConfig) -> tuple[Callable, Callable]:
    """(`init_fn(key) -> params`, `loss_fn(params, tokens) -> loss`).

    `tokens` is (B, T + 1), any integer dtype; the loss is the mean over its B * T predictions, in nats. The logits of
    `chunk_tokens` tokens exist at a time, on each device those of its part of the vocabulary.
    """
    init_fn, _ = make_apply(config)
    graphdef = nnx.graphdef(shapes_of(config))

    def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        tokens = tokens.astype(jnp.int32)
        gpt, targets = nnx.merge(graphdef, params), tokens[:, 1:].T
        hidden, weights = gpt.hidden_states(tokens[:, :-1]), jnp.ones(targets.shape)
        total = chunked_cross_entropy(
            hidden, gpt.embed[...], targets, weights, config.chunk_tokens, config.vocab
        )
        return total / targets.size

    return init_fn, loss_fn


def tensor_parallel_specs(config: GPTConfig) -> dict[str, Any]:
    """PartitionSpecs over a mesh axis `model`, as the parameters' metadata say; same structure as `params`."""
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(shapes_of(config), nnx.Param)))


def generate(
    apply_fn: Callable, params: dict[str, Any], prompt: jax.Array, num_bytes: int, key: jax.Array
) -> jax.Array:
    """`num_bytes` sampled bytes that continue `prompt`, a full context (T,) of bytes; full parameters."""

    def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = apply_fn(params, window)[0, -1, :256]  # of a larger vocabulary, no more is trained
        byte = jax.random.categorical(key, logits / 0.8)
        return jnp.roll(window, -1, axis=1).at[0, -1].set(byte), byte

    return jax.lax.scan(next_byte, prompt[None].astype(jnp.int32), jax.random.split(key, num_bytes))[1]
