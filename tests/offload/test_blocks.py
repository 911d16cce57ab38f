"""Which updates work row by row, read from their jaxprs, and blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zero2jax.base import jaxprs
from zero2jax.offload.blocks import Blocks, by_block

ROWS, SIZE = 6, 2
PARAMS = jnp.arange(1.0, 1 + ROWS * 6).reshape(ROWS, 2, 3)


def flat_update(tx):
    """The jaxpr of an update, its arguments, and the indices of those that have rows; results come in their order."""
    state = tx.init(PARAMS)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = jax.tree.leaves((PARAMS, state, PARAMS / 7))
    jaxpr = jaxprs.inlined(jaxprs.trace(update, PARAMS, state, PARAMS)[0])
    return jaxpr, args, [i for i, x in enumerate(args) if np.shape(x)]


@pytest.mark.parametrize(
    ("tx", "is_by_row"),
    [
        (optax.adamw(1e-2), True),
        (optax.lion(1e-3), True),
        (optax.lamb(1e-2), False),
        (optax.adafactor(1e-2, min_dim_size_to_factor=2), False),
    ],
)
def test_elementwise_optimizers_work_row_by_row_and_give_the_same(tx, is_by_row):
    jaxpr, args, stacks = flat_update(tx)
    which = [i for i in stacks if i < len(args) - 1]  # all but the gradient have a result
    found = by_block(jaxpr, which, stacks, Blocks(ROWS, SIZE))
    assert (found is not None) == is_by_row
    if found is None:
        return
    function, used = found
    whole, _ = jaxprs.part_of(jaxpr, which)
    rows = lambda x, at: x[at : at + SIZE]
    blocks = [function(*[rows(args[i], at) if i in stacks else args[i] for i in used]) for at in (0, 2, 4)]
    for full, *parts in zip(whole(*[args[i] for i in used]), *blocks, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), full, rtol=1e-6)


@pytest.mark.parametrize(
    ("fun", "is_by_row"),
    [
        (lambda x: jnp.pad(x[:, :1], ((0, 0), (0, 1), (0, 0))), True),  # padding of another dim
        (lambda x: jnp.pad(x[:5], ((0, 1), (0, 0), (0, 0))), False),
        (lambda x: x[::-1] + x, False),
        (lambda x: x * jnp.ones(x.shape), True),
        (lambda x: x * jnp.arange(6.0).reshape(6, 1, 1), False),
        (lambda x: jnp.ones(x.shape), True),
        (lambda x: x.sum(1, keepdims=True) * x, False),
    ],
)
def test_rows_are_not_mixed(fun, is_by_row):
    jaxpr = jaxprs.inlined(jaxprs.trace(fun, PARAMS)[0])
    assert (by_block(jaxpr, [0], [0], Blocks(ROWS, SIZE)) is not None) == is_by_row


def test_blocks_are_as_large_as_divides_the_rows():
    assert [Blocks.of(12, 1200, size).size for size in (50, 100, 599, 600, 10**6)] == [1, 1, 4, 6, 12]
    assert Blocks.of(7, 700, 600) == Blocks(7, 1)
    assert Blocks(12, 4).number == 3
