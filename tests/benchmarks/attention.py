"""Attention written out, for the example's GPT in float16 on a CPU.

`jax.nn.dot_product_attention` asks for products of float16 by an algorithm that XLA's CPU backend does not have. All
dtypes get this one, so that they are the same model. Importing this module puts it in place.
"""

import math

import jax
import jax.numpy as jnp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
    """Causal attention, (B, T, H, D) each -> (B, T, H, D); logits and softmax in fp32."""
    assert is_causal
    logits = jnp.einsum("bthd,bshd->bhts", query, key).astype(jnp.float32) / math.sqrt(query.shape[-1])
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    logits = jnp.where(seen[None, None], logits, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(value.dtype), value)


jax.nn.dot_product_attention = attention
