"""Continue a text from a sharded state: no device gathers more than a forward pass does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero2jax
from examples.llama.config import LlamaConfig
from examples.llama.model import head, hidden_states


def make_sampler(engine: zero2jax.Engine, config: LlamaConfig) -> Callable[..., list[int]]:
    """`sample(state, prompt, num_tokens, *, end=None, temperature=0.8, seed=0) -> tokens after the prompt`.

    One forward pass per token over prompt and sample, by `engine.evaluate`, each device the same; nothing is cached.
    Every process must call it. Programs are compiled once per length of prompt and sample.
    """

    def next_token(
        params: Any, batch: jax.Array, *, last: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, Any]:
        hidden = jnp.take(hidden_states(config, params, batch[:1])[0], last, axis=0)
        weight = head(config, params).astype(hidden.dtype)
        logits = jnp.einsum("d,vd->v", hidden, weight, preferred_element_type=jnp.float32)
        # Integers come back as sums over devices; with independent Gumbel noise the largest is a draw from the softmax.
        token = jnp.argmax(logits + noise).astype(jnp.int32)
        return jnp.zeros((), jnp.float32), {"token": token, "devices": jnp.ones((), jnp.int32)}

    def sample(
        state: zero2jax.TrainState,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        end: int | None = None,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> list[int]:
        rng = np.random.default_rng(seed)
        mesh, rows = engine.mesh, engine.num_batch_shards
        text = np.zeros((rows, len(prompt) + num_tokens), np.int32)
        text[:, : len(prompt)] = prompt
        for i in range(len(prompt), text.shape[1]):
            noise = (temperature * rng.gumbel(size=config.vocab)).astype(np.float32)
            batch = zero2jax.global_batch(text[zero2jax.local_rows(rows, mesh)], mesh)
            arguments = {"last": np.int32(i - 1), "noise": noise}
            _, aux = engine.evaluate(state, batch, loss_fn=next_token, loss_args=arguments)
            text[:, i] = int(aux["token"]) // int(aux["devices"])
            if text[0, i] == end:
                return text[0, len(prompt) : i].tolist()
        return text[0, len(prompt) :].tolist()

    return sample
