"""Cross-entropy of a large vocabulary, in chunks of tokens: the logits (B, T, V) never exist, in backward neither.

    loss_i = log(sum_v exp(h_i . w_v)) - h_i . w_(target i)
    d loss_i / d h_i = sum_v (p_iv - [v = target i]) w_v        p = softmax of the logits
    d loss_i / d w_v = (p_iv - [v = target i]) h_i

Per chunk the logits are computed in forward, and again in backward, from `h`, `w` and the saved logarithms: one more
matrix product for a peak of chunk x V in place of B x T x V. Sums over chunks, and over tokens, are taken in fp32.

The target's logit is picked by comparing indices, not by a lookup: with `w` sharded over the vocabulary on a mesh axis
(`param_specs`), each device works on its own rows and the compiler adds what they found.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def chunked_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int = 1024,
    vocab: int | None = None,
) -> jax.Array:
    """The sum over tokens of weight x cross-entropy, a scalar in fp32; divide it by the sum of the weights.

    Args:
      hidden: (B, T, D), any floating dtype; products are taken in it.
      head: (V, D) or more rows.
      targets: (B, T), integers from 0 to V - 1.
      weights: (B, T), floating: 0 leaves a token out. No gradient flows to them.
      chunk_tokens: tokens whose logits exist at once.
      vocab: V, where `head` has rows behind it that stand for no word; their gradient is 0.
    """
    num_tokens = targets.size
    rows = min(chunk_tokens, num_tokens)
    padding = -num_tokens % rows

    def chunks(x: jax.Array) -> jax.Array:
        flat = x.reshape(num_tokens, *x.shape[2:])
        flat = jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1)))
        return flat.reshape(-1, rows, *flat.shape[1:])

    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    vocab = len(head) if vocab is None else vocab
    return _loss(
        vocab, chunks(hidden), head.astype(hidden.dtype), chunks(targets.astype(jnp.int32)), chunks(weights)
    )


def _logits(
    vocab: int, hidden: jax.Array, head: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(logits, where the target is), both of a row per token and as many columns as `head` has rows."""
    logits = jnp.einsum("rd,vd->rv", hidden, head, preferred_element_type=jnp.float32)
    words = jnp.arange(len(head))[None]
    if vocab < len(head):
        logits = jnp.where(words < vocab, logits, -jnp.inf)
    return logits, targets[:, None] == words


def _forward(
    vocab: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(the weighted sum, log of the sum of exponentials per token (chunks, rows))."""

    def chunk(total: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        h, t, w = inputs
        logits, is_target = _logits(vocab, h, head, t)
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        losses = log_sum - jnp.where(is_target, logits, 0).sum(-1)
        return total + (w * losses).sum(), log_sum

    return jax.lax.scan(chunk, jnp.zeros((), jnp.float32), (hidden, targets, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    vocab: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    return _forward(vocab, hidden, head, targets, weights)[0]


def _loss_forward(
    vocab: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    total, log_sums = _forward(vocab, hidden, head, targets, weights)
    return total, (hidden, head, targets, weights, log_sums)


def _loss_backward(
    vocab: int, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    hidden, head, targets, weights, log_sums = saved

    def chunk(of_head: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        h, t, w, log_sum = inputs
        logits, is_target = _logits(vocab, h, head, t)
        of_logits = jnp.exp(logits - log_sum[:, None]) - is_target
        of_logits = (of_logits * (cotangent * w)[:, None]).astype(h.dtype)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        of_head = of_head + product("rv,rd->vd", of_logits, h)
        return of_head, product("rv,vd->rd", of_logits, head).astype(h.dtype)

    start = jnp.zeros(head.shape, jnp.float32)
    of_head, of_hidden = jax.lax.scan(chunk, start, (hidden, targets, weights, log_sums))
    return of_hidden, of_head.astype(head.dtype), None, None


_loss.defvjp(_loss_forward, _loss_backward)
