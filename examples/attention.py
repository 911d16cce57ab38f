"""Causal attention of the examples: a block of queries at a time, or cuDNN's kernel on GPUs that have it.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j        j <= i, in i's segment and window

`blocked_attention` runs everywhere and is exact: only the scores of one block of queries exist at once, in backward
too, which computes them again. The queries are in up to `PIECES` pieces, and none multiplies by the keys behind its
end: of four, three eighths of the work are left out. Softmax and sums are fp32; products, forward and backward, take
operands in the dtype of `q`. `cudnn_refusal` says whether cuDNN's kernel, which holds no scores in memory, can be had
for such arrays here.

Each piece is a loop over blocks. Written out, XLA's scheduler would hide collectives behind their small products, which
it takes to be slower than they are.

    B sequences, T tokens each, H size of a head; several heads of queries may share one of keys and values
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("blocked", "cudnn", "xla")  # the last two are those of jax.nn.dot_product_attention
SCORE_ELEMENTS = (
    2**25
)  # of a block of queries, over all sequences and heads of a device's batch: 128 MiB in fp32
PIECES = 4  # of the queries, each of which multiplies by the keys up to its own end
MASKED = -1e30  # not -inf: a padded row sees nothing, and must not be NaN


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    window: Any = None,
    implementation: str = "blocked",
    score_elements: int | None = None,
) -> jax.Array:
    """Causal attention within segments and a window; (B, T, heads, H) like `q`.

    Args:
      q: (B, T, heads, H).
      k: (B, T, kv_heads, H), like `v`; heads are a multiple of kv_heads.
      v: values.
      segments: (B, T), or None for one segment per row.
      window: tokens that a token sees, itself included: an int, a scalar array, or None.
      implementation: one of `IMPLEMENTATIONS`. A window that is an array is known to `blocked` alone, which is then
        taken.
      score_elements: of `blocked`; `SCORE_ELEMENTS` if absent.
    """
    if implementation == "blocked" or isinstance(window, jax.Array):
        return blocked_attention(q, k, v, segments, window, score_elements)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None])[:, None]
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation=implementation
    )


@functools.cache
def cudnn_refusal(
    dtype: Any, heads: int, kv_heads: int, head_dim: int, *, packed: bool = False, window: int | None = None
) -> str | None:
    """Why cuDNN's attention cannot be had on the GPUs here, in the words of who refuses; None if it can.

    Compiles it, forward and backward, for 128 tokens: call it before the step is traced.
    """
    if jax.default_backend() != "gpu":
        return f"the devices are of platform {jax.default_backend()!r}, and cuDNN's is for GPUs"
    array = lambda n: jax.ShapeDtypeStruct((1, 128, n, head_dim), dtype)
    segments = jax.ShapeDtypeStruct((1, 128), jnp.int32) if packed else None

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        out = attention(q, k, v, segments=segments, window=window, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    try:
        jax.jit(jax.grad(total, (0, 1, 2))).lower(
            array(heads), array(kv_heads), array(kv_heads), segments
        ).compile()
    except (
        RuntimeError,
        ValueError,
        NotImplementedError,
    ) as error:  # no library; shapes; what it does not do
        return str(error).strip().splitlines()[0]
    return None


def choose(
    dtype: Any, heads: int, kv_heads: int, head_dim: int, *, packed: bool = False, window: int | None = None
) -> tuple[str, str]:
    """An implementation for the devices here, and in words which it is, and why it is not cuDNN's where it is not."""
    refusal = cudnn_refusal(jnp.dtype(dtype), heads, kv_heads, head_dim, packed=packed, window=window)
    return ("cudnn", "cuDNN's") if refusal is None else ("blocked", f"in blocks, not cuDNN's: {refusal}")


def blocked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    window: Any = None,
    score_elements: int | None = None,
) -> jax.Array:
    """As `attention`, a block of queries at a time, recomputed in backward: scores of a block alone exist at once."""
    B, T, heads, H = q.shape
    kv_heads = k.shape[2]
    score_elements = SCORE_ELEMENTS if score_elements is None else score_elements
    rows = min(T, 2 ** int(math.log2(max(1, score_elements // (B * heads * T)))))
    num_blocks = -(-T // rows)
    per_piece = max(2, -(-num_blocks // PIECES))
    padded = jnp.pad(q, ((0, 0), (0, num_blocks * rows - T), (0, 0), (0, 0)))
    blocks = padded.reshape(B, num_blocks, rows, kv_heads, heads // kv_heads, H).swapaxes(0, 1)
    firsts = rows * jnp.arange(num_blocks)

    def piece(start: int) -> jax.Array:
        stop = min(start + per_piece, num_blocks)
        since = max(0, start * rows - window + 1) if isinstance(window, int) else 0
        keys = slice(since, min(stop * rows, T))
        # cut here: what the loop closes over has as large a gradient, a sum that it carries
        k_seen, v_seen = k[:, keys], v[:, keys]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, first = block
            queries = first + jnp.arange(rows)
            distance = queries[:, None] - jnp.arange(T)[None, keys]
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            seen = seen[None, None, None]
            if segments is not None:
                own = segments[:, jnp.minimum(queries, T - 1)]
                seen = seen & (own[:, :, None] == segments[:, None, keys])[:, None, None]
            scores = jnp.where(seen, _scores(q, k_seen) / math.sqrt(H), MASKED)
            weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            return jnp.einsum("bkgrt,btkh->brkgh", weights, v_seen)

        return jax.lax.map(attend, (blocks[start:stop], firsts[start:stop]))

    out = jnp.concatenate([piece(start) for start in range(0, num_blocks, per_piece)])
    return out.swapaxes(0, 1).reshape(B, num_blocks * rows, heads, H)[:, :T]


@jax.custom_vjp
def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q . k, (B, rows, kv_heads, group, H) x (B, T, kv_heads, H) -> (B, kv_heads, group, rows, T) in fp32.

    Its own derivative, for the products of backward: jax's would multiply an fp32 cotangent by 16-bit keys in fp32.
    """
    return jnp.einsum("brkgh,btkh->bkgrt", q, k, preferred_element_type=jnp.float32)


def _scores_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = saved
    cotangent = cotangent.astype(q.dtype)
    return jnp.einsum("bkgrt,btkh->brkgh", cotangent, k), jnp.einsum("bkgrt,brkgh->btkh", cotangent, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)
