"""The loss of fine-tuning: cross-entropy of the tokens that count, in chunks of the vocabulary's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from examples.cross_entropy import chunked_cross_entropy
from examples.llama.config import LlamaConfig
from examples.llama.model import head, hidden_states


def make_loss(
    config: LlamaConfig, chunk_tokens: int = 1024
) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """`loss_fn(params, batch) -> (mean cross-entropy, {"weight": ..., "num_tokens": ...})`.

    A batch holds `tokens`, `targets`, `weights`, `segments` and `positions`, each (B, T), as `data.Rows` gives them.
    The mean is over the weights: with a prompt's tokens at 0, over the completions. `num_tokens` is their sum, an
    integer.
    """

    def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
        packing = {name: batch[name] for name in ("segments", "positions") if name in batch}
        hidden = hidden_states(config, params, batch["tokens"], **packing)
        weights = batch["weights"].astype(jnp.float32)
        total = chunked_cross_entropy(hidden, head(config, params), batch["targets"], weights, chunk_tokens)
        weight = weights.sum()
        return total / jnp.maximum(weight, 1), {"weight": weight, "num_tokens": weight.astype(jnp.int32)}

    return loss_fn
