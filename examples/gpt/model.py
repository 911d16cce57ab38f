"""A pre-LN GPT in Flax NNX, layers under `nnx.scan`, each recomputed in backward by `nnx.remat`.

Nothing in this file knows about ZeRO or about devices. `make_loss(config)` gives the two pure functions that
a training loop needs: `init_fn(key) -> params` and `loss_fn(params, tokens) -> loss`, with `params` a nested
dict of arrays. The parameters of all layers are stacked, (L, ...), and scanned over, so each layer's parameters
are used, and can be gathered, inside the loop.

    B sequences, T tokens each, D width, H heads, L layers, V vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    num_layers: int
    hidden: int
    num_heads: int
    context: int
    vocab: int
    saved: str = "nothing_saveable"
    """What a layer saves for backward, a name in `jax.checkpoint_policies`; everything else is recomputed."""


PRESETS = {
    "tiny": GPTConfig(num_layers=2, hidden=128, num_heads=4, context=128, vocab=256),
    "small": GPTConfig(num_layers=12, hidden=768, num_heads=12, context=1024, vocab=50304),  # GPT-2, 124e6
    "6.7b": GPTConfig(num_layers=32, hidden=4096, num_heads=32, context=2048, vocab=50304),  # GPT-3, 6.7e9
}


def make_norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm that computes in fp32, whatever its scale is stored in; cast its result back."""
    return nnx.LayerNorm(dim, use_bias=False, dtype=jnp.float32, rngs=rngs)


class Block(nnx.Module):
    """One layer: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        D, L = config.hidden, config.num_layers
        init = nnx.initializers.lecun_normal()
        # 2 L sums go into the residual.
        out_init = nnx.initializers.variance_scaling(0.5 / L, "fan_in", "normal")
        self.num_heads = config.num_heads
        self.norm1 = make_norm(D, rngs)
        self.qkv = nnx.Linear(D, 3 * D, use_bias=False, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(D, D, use_bias=False, kernel_init=out_init, rngs=rngs)
        self.norm2 = make_norm(D, rngs)
        self.up = nnx.Linear(D, 4 * D, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, use_bias=False, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # The names are for remat policies, which may save or offload a tensor by its name.
        qkv = checkpoint_name(self.qkv(self.norm1(x).astype(x.dtype)), "qkv_proj")
        heads = qkv.reshape(*x.shape[:2], self.num_heads, -1)
        q, k, v = jnp.split(heads, 3, axis=-1)  # (B, T, H, 3 D/H) -> 3 * (B, T, H, D/H)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        attended = checkpoint_name(attended.reshape(x.shape), "attention")
        x = x + checkpoint_name(self.out(attended), "out_proj")
        hidden = checkpoint_name(self.up(self.norm2(x).astype(x.dtype)), "up_proj")
        return x + checkpoint_name(self.down(jax.nn.gelu(hidden)), "down_proj")


class GPT(nnx.Module):
    """Tokens (B, T) -> logits (B, T, V) in fp32; embedding and output projection are tied."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        # Plain parameters: `nnx.Embed` would compute in the dtype that it was created with.
        self.embed = nnx.Param(init(rngs.params(), (config.vocab, config.hidden)))
        self.position = nnx.Param(init(rngs.params(), (config.context, config.hidden)))
        self.norm = make_norm(config.hidden, rngs)
        self.saved = config.saved

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = make_blocks(rngs)  # every parameter stacked: (L, ...)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(policy=getattr(jax.checkpoint_policies, self.saved))
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        x = self.embed[tokens] + self.position[None, : tokens.shape[1]]
        x = layer(x, self.blocks)
        x = self.norm(x).astype(x.dtype)
        return (x @ self.embed.T).astype(jnp.float32)


def make_apply(config: GPTConfig) -> tuple[Callable, Callable]:
    """(`init_fn(key) -> params`, `apply_fn(params, tokens) -> logits`); allocates nothing."""
    # The model's structure without its arrays: shapes only.
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))

    def init_fn(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(key)), nnx.Param))

    def apply_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens)

    return init_fn, apply_fn


def make_loss(config: GPTConfig) -> tuple[Callable, Callable]:
    """(`init_fn(key) -> params`, `loss_fn(params, tokens) -> loss`).

    `tokens` is (B, T + 1), any integer dtype; the loss is the mean over its B * T predictions, in nats.
    """
    init_fn, apply_fn = make_apply(config)

    def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        tokens = tokens.astype(jnp.int32)
        logits = apply_fn(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return init_fn, loss_fn


def tensor_parallel_specs(params: dict[str, Any]) -> dict[str, Any]:
    """Specs over a mesh axis `model`: attention heads and hidden units of the MLP are sharded, all else replicated."""
    sharded = {"qkv": P(None, None, "model"), "up": P(None, None, "model")}  # (L, D, outputs)
    sharded |= {"out": P(None, "model"), "down": P(None, "model")}  # (L, inputs, D)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: sharded.get(getattr(path[-2:][0], "key", None), P()), params
    )


def generate(
    apply_fn: Callable, params: dict[str, Any], prompt: jax.Array, num_bytes: int, key: jax.Array
) -> jax.Array:
    """`num_bytes` sampled bytes that continue `prompt`, a full context (T,) of bytes; full parameters."""

    def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = apply_fn(params, window)[0, -1, :256]  # of a larger vocabulary, no more is trained
        byte = jax.random.categorical(key, logits / 0.8)
        return jnp.roll(window, -1, axis=1).at[0, -1].set(byte), byte

    return jax.lax.scan(next_byte, prompt[None].astype(jnp.int32), jax.random.split(key, num_bytes))[1]
