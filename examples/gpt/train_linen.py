"""The loop of train.py in short, with a Flax Linen model: `nn.scan` over layers, `nn.remat` on each.

    python examples/gpt/train_linen.py --devices 8

About a minute on 2 CPU cores that other programs kept busy too (jax 0.12.0.1): the loss on held-out text falls from
5.66 to 2.27 nats per byte in 300 steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from data import load_text, make_batches

import zero2jax

LAYERS, WIDTH, HEADS, CONTEXT = 2, 128, 4, 128  # as the preset "tiny" of model.py; every byte is a token


class Block(nn.Module):
    """One pre-LN layer, (B, T, D) -> (B, T, D); as a body of `nn.scan` it also returns None."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        dense = functools.partial(nn.Dense, use_bias=False)
        # The norms compute in fp32, whatever the other layers compute in.
        norm = lambda x: nn.LayerNorm(dtype=jnp.float32, use_bias=False)(x).astype(x.dtype)
        heads = dense(3 * WIDTH)(norm(x)).reshape(*x.shape[:2], HEADS, -1)
        q, k, v = jnp.split(heads, 3, axis=-1)  # (B, T, H, 3 D/H) -> 3 * (B, T, H, D/H)
        x = x + dense(WIDTH)(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(norm(x)))), None


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, 256), embedding and output tied."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(256, WIDTH, embedding_init=nn.initializers.normal(0.02))
        position = nn.Embed(CONTEXT, WIDTH, embedding_init=nn.initializers.normal(0.02))
        # Parameters stacked (L, ...); `nn.remat` inside the scan recomputes each layer in backward.
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))[None]
        x, _ = blocks()(x)
        x = nn.LayerNorm(dtype=jnp.float32, use_bias=False)(x).astype(x.dtype)
        return embed.attend(x).astype(jnp.float32)


def init_fn(key: jax.Array) -> dict:
    return GPT().init(key, jnp.zeros((1, CONTEXT), jnp.int32))["params"]


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    """Mean nats per byte; `tokens` is (B, T + 1) uint8."""
    tokens = tokens.astype(jnp.int32)
    logits = GPT().apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@dataclass(frozen=True)
class Args:
    """Train a byte-level Linen GPT with ZeRO stage 2."""

    steps: int = 300
    """Optimizer updates."""
    devices: int | None = None
    """Devices to simulate on a machine that has only CPUs."""


def main(args: Args) -> None:
    if args.devices:  # before the backend starts; GPUs do not care
        jax.config.update("jax_num_cpu_devices", args.devices)
    train_text, held_out_text = load_text()
    schedule = optax.cosine_onecycle_schedule(args.steps, 4e-3)
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}  # zero2jax
    mesh = zero2jax.make_mesh()  # zero2jax
    engine = zero2jax.initialize(loss_fn, optax.adamw(schedule, b2=0.95), config, mesh)  # zero2jax
    state = engine.init(init_fn, jax.random.key(0))  # zero2jax

    # 8 devices * 2 = 16 sequences; 16 * 128 bytes = 2048 tokens per step
    batches = make_batches(train_text, 2 * engine.num_shards, CONTEXT, seed=0)
    held_out = next(make_batches(held_out_text, 32 * engine.num_shards, CONTEXT, seed=1))
    print(f"before training: held out {engine.evaluate(state, held_out):.3f} nats per byte")  # zero2jax
    for step in range(1, args.steps + 1):
        state, metrics = engine.step(state, next(batches))  # zero2jax
        if step % 50 == 0 or step == args.steps:
            held_out_loss = engine.evaluate(state, held_out)  # zero2jax
            print(f"step {step}: loss {metrics['loss']:.3f}, held out {held_out_loss:.3f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
