"""A small GPT, written once for every way of sharding it that is compared: plain functions, nothing of zero2jax.

Pre-LN, no biases, GELU by tanh, tied embedding; norms, scores, softmax and logits in fp32; each layer recomputed in
backward. Attention goes by blocks of queries and the cross-entropy by blocks of tokens, both along T: the dim of the
batch stays as it is, so that it can be sharded by whoever decides that. `torch_gpt.py` has the same arithmetic.

    B sequences, T tokens each, D width, H heads, L layers, V vocabulary
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Config:
    num_layers: int
    hidden: int
    num_heads: int
    context: int
    vocab: int
    block: int = 256
    """Queries whose scores, and tokens whose logits, exist at once; divides `context`."""
    scanned: bool = True
    """Layers stacked, (L, ...), and scanned over; or a list of them and a Python loop."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where a way of sharding takes part in the model; by default nowhere."""

    weights: Callable[[dict], dict] = lambda params: params
    """Parameters by name -> the same where they are used: one layer's, inside of its checkpoint, or the others."""
    activation: Callable[[jax.Array], jax.Array] = lambda x: x
    """(B, T, D) -> the same, after the embedding and after each layer."""
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = lambda embed, tokens: embed[tokens]
    """(V, D), (B, T) -> (B, T, D)."""


NO_HOOKS = Hooks()

# Flax's names of each dim, by the name of the parameter; `embed` is D.
LOGICAL_AXES = {
    "embed": ("vocab", "embed"),
    "position": ("length", "embed"),
    "norm": ("embed",),
    "norm1": ("embed",),
    "qkv": ("embed", "heads"),
    "out": ("heads", "embed"),
    "norm2": ("embed",),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}


def shapes(config: Config) -> PyTree:
    """Shapes of the parameters, fp32."""
    D, L = config.hidden, config.num_layers
    attention = {"norm1": (D,), "qkv": (D, 3 * D), "out": (D, D)}
    layer = {**attention, "norm2": (D,), "up": (D, 4 * D), "down": (4 * D, D)}
    top = {"embed": (config.vocab, D), "position": (config.context, D), "norm": (D,)}
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    stacked = {name: struct((L, *shape)) for name, shape in layer.items()}
    in_list = [{name: struct(shape) for name, shape in layer.items()} for _ in range(L)]
    return {name: struct(shape) for name, shape in top.items()} | {
        "blocks": stacked if config.scanned else in_list
    }


def layer_dims(config: Config) -> PyTree:
    """How many leading dims of each parameter count layers."""
    stacked = int(config.scanned)
    return jax.tree.map_with_path(lambda path, _: stacked * (path[0].key == "blocks"), shapes(config))


def first_params(config: Config) -> PyTree:
    """NumPy arrays from a fixed seed: norms are ones, all else is normal."""
    rng = np.random.default_rng(0)

    def make(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if "norm" in path[-1].key:
            return np.ones(leaf.shape, np.float32)
        scale = 0.02 if path[-1].key in ("embed", "position") else 1 / math.sqrt(leaf.shape[-2])
        return (scale * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map_with_path(make, shapes(config))


def loss_fn(config: Config, params: PyTree, tokens: jax.Array, hooks: Hooks = NO_HOOKS) -> jax.Array:
    """Mean cross-entropy in nats of (B, T + 1) tokens; products in the dtype of what `hooks.weights` gives."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    top = hooks.weights({name: x for name, x in params.items() if name != "blocks"})
    x = hooks.activation(hooks.lookup(top["embed"], inputs) + top["position"][None])

    def layer(x: jax.Array, params: dict) -> jax.Array:
        return hooks.activation(_layer(config, x, hooks.weights(params)))

    if config.scanned:  # in a loop nothing can be merged across forward and backward, so no barrier is needed
        layer = jax.checkpoint(layer, prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, params: (layer(x, params), None), x, params["blocks"])
    else:
        for block in params["blocks"]:
            x = jax.checkpoint(layer)(x, block)
    return _cross_entropy(config, _norm(x, top["norm"]), top["embed"], targets)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _layer(config: Config, x: jax.Array, p: dict) -> jax.Array:
    y = _norm(x, p["norm1"]) @ p["qkv"]
    q, k, v = jnp.split(y.reshape(*y.shape[:2], config.num_heads, -1), 3, axis=-1)  # (B, T, H, D/H) each
    x = x + _attention(config, q, k, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def _blocks(config: Config, x: jax.Array) -> jax.Array:
    """(B, T, ...) -> (T / block, B, block, ...)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, min(config.block, config.context), *x.shape[2:]), 1, 0)


def _attention(config: Config, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    positions = jnp.arange(config.context)

    def attend(_: None, block: tuple) -> tuple[None, jax.Array]:
        q, queries = block
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(queries[:, None] >= positions, scores, -1e30)
        return None, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)

    queries = positions.reshape(-1, min(config.block, config.context))
    out = _map(attend, (_blocks(config, q), queries))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _cross_entropy(config: Config, x: jax.Array, embed: jax.Array, targets: jax.Array) -> jax.Array:
    def nats(_: None, block: tuple) -> tuple[None, jax.Array]:
        x, targets = block
        logits = (x @ embed.T).astype(jnp.float32)
        here = targets[..., None] == jnp.arange(config.vocab)
        return None, jax.nn.logsumexp(logits, -1) - jnp.where(here, logits, 0).sum(-1)

    return _map(nats, (_blocks(config, x), _blocks(config, targets))).mean()


def _map(body: Callable, blocks: tuple) -> jax.Array:
    """`body` over blocks, one at a time, each recomputed in backward; without a loop for one."""
    if len(blocks[0]) == 1:
        return body(None, jax.tree.map(lambda x: x[0], blocks))[1][None]
    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, blocks)[1]
