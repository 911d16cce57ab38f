"""A decoder of the Llama family in Flax NNX: `apply(config, params, tokens) -> logits`. Knows neither ZeRO nor devices.

    x = embed[tokens];  per layer  x += attention(norm(x));  x += down(silu(gate(n)) * up(n)), n = norm(x)
    logits = norm(x) @ head.T, with head = embed where they are tied

RMSNorm: x / sqrt(mean(x^2) + eps) * scale (arXiv:1910.07467). Rotary embeddings turn each pair (x_i, x_{i + H/2}) of a
head by position * theta^(-2i/H) (arXiv:2104.09864). Grouped queries: a head of keys and values serves several heads of
queries (arXiv:2305.13245). SwiGLU: arXiv:2002.05202. LoRA: x W + (alpha / r) x A B (arXiv:2106.09685). Stretched
rotations: linear (arXiv:2306.15595), dynamic (the base grows with the context), llama3 (the Llama 3.1 report), yarn
(arXiv:2309.00071).

The layers' parameters are stacked, (L, ...), and scanned over, so that each layer's are used, and can be gathered,
inside the loop. A layer is recomputed in backward by `jax.checkpoint`; the tensors that a policy may save are named.

    B sequences, T tokens each, D width, F width of the MLP, H size of a head, L layers, V vocabulary
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from examples.attention import attention
from examples.llama.config import LlamaConfig


class Norm(nnx.Module):
    """RMSNorm over the last dim, in fp32; the result has the dtype of its input."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Linear(nnx.Module):
    """(B, T, inputs) -> (B, T, outputs), with a bias or an adapter where the configuration says so."""

    def __init__(self, config: LlamaConfig, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs):
        normal = jax.random.normal
        self.kernel = nnx.Param(0.02 * normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None
        self.scale = config.lora_alpha / config.lora_rank if config.lora_rank else None
        if config.lora_rank:
            self.lora_a = nnx.Param(normal(rngs.params(), (inputs, config.lora_rank)) / math.sqrt(inputs))
            self.lora_b = nnx.Param(jnp.zeros((config.lora_rank, outputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        if self.scale is not None:
            y = y + self.scale * ((x @ self.lora_a[...].astype(x.dtype)) @ self.lora_b[...].astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, None]


class Layer(nnx.Module):
    """One layer: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, config, rngs=rngs)
        D, H = config.hidden, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.config = config
        self.attn_norm, self.mlp_norm = Norm(D, config.norm_eps), Norm(D, config.norm_eps)
        self.q = linear(D, heads * H, bias=config.qkv_bias)
        self.k = linear(D, kv_heads * H, bias=config.qkv_bias)
        self.v = linear(D, kv_heads * H, bias=config.qkv_bias)
        self.o = linear(heads * H, D, bias=config.out_bias)
        self.gate = linear(D, config.mlp, bias=config.mlp_bias)
        self.up = linear(D, config.mlp, bias=config.mlp_bias)
        self.down = linear(config.mlp, D, bias=config.mlp_bias)
        self.q_norm = Norm(H, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(H, config.norm_eps) if config.qk_norm else None

    def __call__(
        self, x: jax.Array, rotations: tuple[jax.Array, jax.Array], segments: jax.Array | None, window: Any
    ) -> jax.Array:
        y = self.attn_norm(x)
        q, k, v = (
            checkpoint_name(f(y), f"{name}_proj").reshape(*x.shape[:2], -1, self.config.head_dim)
            for f, name in ((self.q, "q"), (self.k, "k"), (self.v, "v"))
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotations), rotate(k, *rotations)
        how = self.config.attention
        attended = attention(q, k, v, segments=segments, window=window, implementation=how)
        attended = checkpoint_name(attended.reshape(*x.shape[:2], -1), "attention")
        x = x + checkpoint_name(self.o(attended), "out_proj")
        y = self.mlp_norm(x)
        gate, up = checkpoint_name(self.gate(y), "gate_proj"), checkpoint_name(self.up(y), "up_proj")
        return x + checkpoint_name(self.down(jax.nn.silu(gate) * up), "down_proj")


class Llama(nnx.Module):
    """Tokens (B, T) -> the last norm's output (B, T, D); `head` makes logits of it."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab, config.hidden)
        self.config = config
        self.embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.norm = Norm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.layers = make_layers(rngs)  # every parameter stacked: (L, ...)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array:
        config = self.config
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        rotations = make_rotations(config, positions)
        layer_def, stacked = nnx.split(self.layers)
        alike = len(set(config.windows)) == 1
        none = np.iinfo(np.int32).max  # where layers differ, a window is an operand of the loop
        windows = None if alike else jnp.array([none if w is None else w for w in config.windows])

        @functools.partial(
            jax.checkpoint, policy=getattr(jax.checkpoint_policies, config.saved), prevent_cse=False
        )
        def layer(x: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, None]:
            window = config.windows[0] if alike else inputs[1]
            return nnx.merge(layer_def, inputs[0])(x, rotations, segments, window), None

        x, _ = jax.lax.scan(layer, self.embed[...][tokens], (stacked, windows))
        return self.norm(x)


@functools.lru_cache(64)
def _graphdef(config: LlamaConfig) -> Any:
    """The model's structure without its arrays."""
    return nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))


def init(config: LlamaConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters in fp32, a nested dict; under `jax.eval_shape`, their shapes."""
    return nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(key)), nnx.Param))


def param_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Shapes of the parameters, fp32."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def hidden_states(
    config: LlamaConfig,
    params: dict[str, Any],
    tokens: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """The last norm's output, (B, T, D), in the dtype of the embedding.

    Args:
      config: shapes and choices.
      params: as `init` makes them, in any floating dtype.
      tokens: (B, T), integers.
      segments: (B, T), integers: a token sees earlier tokens of its own segment; None for one segment per row.
      positions: (B, T), integers: place of a token in its document; None counts from the row's start.
    """
    packing = [None if x is None else jnp.asarray(x) for x in (segments, positions)]
    return nnx.merge(_graphdef(config), params)(jnp.asarray(tokens, jnp.int32), *packing)


def head(config: LlamaConfig, params: dict[str, Any]) -> jax.Array:
    """The output projection, (V, D)."""
    return params["embed"] if config.tied else params["head"]


def apply(config: LlamaConfig, params: dict[str, Any], tokens: jax.Array, **packing: jax.Array) -> jax.Array:
    """Logits (B, T, V) in fp32 of tokens (B, T); `segments` and `positions` as for `hidden_states`."""
    x = hidden_states(config, params, tokens, **packing)
    weight = head(config, params).astype(x.dtype)
    return jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=jnp.float32)


def frequencies(config: LlamaConfig, num_tokens: int) -> tuple[np.ndarray, float]:
    """(turns in radians per position of each pair (H/2,), factor of the rotated values), of a context of T tokens."""
    rope, H = config.rope, config.head_dim
    theta, factor = rope.theta, rope.get("factor", 1.0)
    if rope.kind == "dynamic" and num_tokens > config.max_positions:
        theta *= (factor * num_tokens / config.max_positions - (factor - 1)) ** (H / (H - 2))
    plain = theta ** (-np.arange(0, H, 2) / H)
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        # Fast turns stay, slow ones are stretched, those between are mixed by how often they turn in the context.
        turns = rope.get("original_max_position_embeddings") * plain / (2 * math.pi)
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    if rope.kind == "yarn":
        return _yarn(config, plain)
    return plain, 1.0


def _yarn(config: LlamaConfig, plain: np.ndarray) -> tuple[np.ndarray, float]:
    rope, H = config.rope, config.head_dim
    context = rope.get("original_max_position_embeddings") or config.max_positions
    factor = rope.get("factor")

    def pair_that_turns(count: float) -> float:  # so often in the original context; solved for its index
        return H * math.log(context / (2 * math.pi * count)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.get("beta_fast", 32)), pair_that_turns(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, H - 1)
    stretched = np.clip((np.arange(H // 2) - first) / max(last - first, 1e-3), 0, 1)
    magnitude = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = magnitude(rope.get("mscale")) / magnitude(rope.get("mscale_all_dim"))
    if scale is None:
        scale = magnitude(1.0)
    return (1 - stretched) * plain + stretched * plain / factor, scale


def make_rotations(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of each pair's angle, (B, T, 1, H/2) fp32."""
    turns, scale = frequencies(config, positions.shape[1])
    angles = (
        positions.astype(jnp.float32)[:, :, None, None] * jnp.asarray(turns, jnp.float32)[None, None, None]
    )
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x_i, x_{i + H/2}) of each head, (B, T, heads, H), in fp32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def tensor_parallel_specs(params: dict[str, Any]) -> dict[str, Any]:
    """Specs over a mesh axis `model`: heads, hidden units of the MLP and the vocabulary are sharded.

    An adapter's `lora_a` is replicated where its matrix is sharded over outputs, and the other way round.
    """
    over_outputs = {
        "kernel": P(None, None, "model"),
        "lora_b": P(None, None, "model"),
        "bias": P(None, "model"),
    }
    over_inputs = {"kernel": P(None, "model"), "lora_a": P(None, "model")}
    sharded = dict.fromkeys(("q", "k", "v", "gate", "up"), over_outputs)
    sharded |= dict.fromkeys(("o", "down"), over_inputs)

    def spec(path: Any, leaf: Any) -> P:
        *_, module, kind = ["", *(key.key for key in path)]
        return P("model") if kind in ("embed", "head") else sharded.get(module, {}).get(kind, P())

    return jax.tree_util.tree_map_with_path(spec, params)
