"""Sequence-parallel attention, data 4 x seq 2: python examples/sequence.py. A CPU will do.

The tokens of a sequence lie on the devices of the axis `seq`: each computes its own, but for attention, where every
query meets all keys before it. `ring_attention` hands keys and values around, a device's at a time, and keeps a running
softmax (Liu et al., Ring Attention, arXiv:2310.01889). ZeRO is the data-parallel dimension, over `data` alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax

WIDTH, HEADS, VOCAB, LENGTH = 8, 2, 7, 6


def init_fn(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "qkv": 0.5 * jax.random.normal(keys[1], (WIDTH, 3, HEADS, WIDTH // HEADS)),
        "out": 0.5 * jax.random.normal(keys[2], (HEADS, WIDTH // HEADS, WIDTH)),
    }


def attention(q, k, v):
    """Causal attention of (examples, tokens, heads, size) on one device."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    probs = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", probs.astype(v.dtype), v)


def ring_attention(q, k, v, axis_name="seq"):
    """The same, of this device's tokens. Per-device code, inside a `shard_map` over `axis_name`."""
    num, index, tokens = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name), q.shape[1]
    position = index * tokens + jnp.arange(tokens)
    around = [(i, (i + 1) % num) for i in range(num)]

    def meet(carry, hop):
        k, v, top, total, out = carry
        source = (index - hop) % num  # whose keys these are
        seen = position[:, None] >= source * tokens + jnp.arange(tokens)[None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))  # finite: the first keys are a device's own
        probs, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        out = out * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", probs, v.astype(jnp.float32))
        k, v = (jax.lax.ppermute(x, axis_name, around) for x in (k, v))
        return (k, v, new_top, total * old + probs.sum(-1), out), None

    rows = (q.shape[0], q.shape[2], tokens)
    start = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, q.shape[3]))
    (_, _, _, total, out), _ = jax.lax.scan(meet, (k, v, *start), jnp.arange(num))
    return jnp.moveaxis(out / total[..., None], 1, 2).astype(v.dtype)


def network(params, tokens, attend=attention):
    """Logits (examples, tokens, vocabulary); nothing but `attend` looks at other tokens."""
    x = params["embed"][tokens]
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, params["qkv"]), 2, 0)
    x = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), params["out"])
    return (x @ params["embed"].T).astype(jnp.float32)


def sequence_parallel(params, tokens):
    run = jax.shard_map(
        functools.partial(network, attend=ring_attention),
        mesh=jax.sharding.get_abstract_mesh(),  # inside of the step: manual over data, automatic over the others
        in_specs=(jax.P(), jax.P(None, "seq")),
        out_specs=jax.P(None, "seq"),
        axis_names={"seq"},
        check_vma=False,
    )
    return run(params, tokens)


def loss_fn(params, batch, logits=sequence_parallel):
    found = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean()


def main():
    jax.config.update(
        "jax_num_cpu_devices", 8
    )  # simulated, where there is no GPU; before anything else uses jax
    engine = zero2jax.Engine(loss_fn, optax.adamw(1e-2), zero2jax.make_mesh(data=4, seq=2))
    state = engine.init(init_fn, jax.random.key(0))
    rng = np.random.default_rng(0)
    for step in range(20):
        x = rng.integers(0, VOCAB, (16, LENGTH)).astype(np.int32)
        state, metrics = engine.step(state, {"x": x, "y": (x + 1) % VOCAB})
        print(f"step {step + 1}: loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
