"""Which leaves an optimizer updates apart from the others, and chunks of them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import make_batch, make_engine

import zero2jax
from zero2jax.base import jaxprs
from zero2jax.offload.parts import Part, split_update

SIZES = {"a": 4, "b": 6, "c": 1, "d": 5}  # c is a scalar


def labels(params):
    return {name: "slow" if name in "ab" else "fast" for name in params}


def split(tx, chunk_size=1):
    params = {name: jax.ShapeDtypeStruct((n,) if n > 1 else (), jnp.float32) for name, n in SIZES.items()}
    state = jax.eval_shape(tx.init, params)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    jaxpr, _ = jaxprs.trace(update, params, state, params)
    found = split_update(jaxprs.inlined(jaxpr), 4, len(jax.tree.leaves(state)))
    return found.joined(list(SIZES.values()), chunk_size)


def test_adam_updates_each_leaf_by_itself_and_counts_once():
    found = split(optax.adamw(optax.linear_schedule(1e-2, 0.0, 9)))
    assert found.parts == tuple(Part((i,), (1 + i, 5 + i)) for i in range(4))
    assert found.shared == (0, 9)  # two counts


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 2),
    ],
)
def test_what_looks_at_all_gradients_stays_in_one_piece(tx):
    found = split(tx)
    assert [part.params for part in found.parts] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    "tx",
    [
        optax.lamb(1e-2),
        optax.adafactor(1e-2),
        optax.multi_transform({"slow": optax.adam(1e-3), "fast": optax.lion(1e-2)}, labels),
        jax.tree.map(lambda f: f, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)),
    ],
)
def test_norms_and_groups_of_single_leaves_tie_nothing_together(tx):
    assert [part.params for part in split(tx).parts] == [(0,), (1,), (2,), (3,)]


def test_a_norm_over_a_group_ties_the_group():
    grouped = {
        "slow": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
        "fast": optax.sgd(1e-2),
    }
    assert [part.params for part in split(optax.multi_transform(grouped, labels)).parts] == [
        (0, 1),
        (2,),
        (3,),
    ]


def test_leaves_are_joined_until_a_chunk_is_full():
    assert [part.params for part in split(optax.sgd(1e-2), 7).parts] == [(0, 1), (2, 3)]
    assert [part.params for part in split(optax.sgd(1e-2), 100).parts] == [(0, 1, 2, 3)]


def test_a_step_in_chunks_is_the_step_in_one_and_no_chunk_size_is_none():
    trained = []
    for chunk_bytes in (1, 2**28):
        host = zero2jax.OffloadSettings(chunk_bytes=chunk_bytes)
        loss = lambda params, batch: (
            sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) * batch["weight"].mean()
        )
        engine = make_engine(1, loss_fn=loss, tx=optax.sgd(0.125, momentum=0.5), offload=host)
        state = engine.init({name: jnp.arange(n, dtype=jnp.float32) for name, n in SIZES.items()})
        state, _ = engine.step(state, make_batch())
        trained.append(jax.tree.leaves(engine.params(state)))
    assert all(jnp.array_equal(x, y) for x, y in zip(*trained, strict=True))
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        zero2jax.OffloadSettings(chunk_bytes=0)


def test_a_rate_that_follows_a_gradient_is_made_with_the_first_part():
    # two parameters and no state; the number at the end is made from the second
    flat, _ = jaxprs.trace(
        lambda p, g: ([p[0] - g[0], p[1]], [], [p[0], p[1]], p[1] * g[1]), [1.0, 2.0], [3.0, 4.0]
    )
    assert [part.params for part in split_update(flat, 2, 0).parts] == [(0, 1)]
    assert split_update(jaxprs.trace(lambda: ())[0], 0, 0).parts == (Part((), ()),)
