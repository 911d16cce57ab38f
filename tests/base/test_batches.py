"""Batches of several processes, as one process with its eight devices sees them: rows, order, refusals."""

import jax
import numpy as np
import pytest

import zero2jax


def test_local_rows_are_those_of_the_devices_here():
    mesh = zero2jax.make_mesh(data=4, model=2)
    np.testing.assert_array_equal(zero2jax.local_rows(8, mesh), np.arange(8))
    with pytest.raises(ValueError, match=r"10 / 4 = 2.5, and it must be a whole number. Use 8 or 12"):
        zero2jax.local_rows(10, mesh)


def test_global_batch_is_cut_over_the_data_axis():
    mesh = zero2jax.make_mesh(data=4)
    batch = {"x": np.arange(24.0).reshape(8, 3), "y": np.arange(8)}
    placed = zero2jax.global_batch(batch, mesh, batch_size=8)
    assert placed["x"].sharding == jax.NamedSharding(mesh, jax.P("data"))
    for name in batch:
        np.testing.assert_array_equal(placed[name], batch[name])


def test_groups_of_devices_cut_the_batch_too():
    mesh = zero2jax.make_mesh(replica=2, data=4)
    placed = zero2jax.global_batch(np.arange(16), mesh, batch_size=16)
    assert placed.sharding == jax.NamedSharding(mesh, jax.P(("replica", "data")))
    np.testing.assert_array_equal(placed, np.arange(16))
    with pytest.raises(ValueError, match=r"12 / 8 = 1.5"):
        zero2jax.local_rows(12, mesh)


def test_uneven_batches_are_refused_with_the_arithmetic():
    mesh = zero2jax.make_mesh(data=4)
    with pytest.raises(ValueError, match=r"7 / \(4 \* 1\) = 1.75"):
        zero2jax.global_batch(np.zeros((7, 2)), mesh)
    message = r"\(0 of 1\) has 4, and its part of a batch of 8 is 8 / 4 devices \* 4 devices here = 8"
    with pytest.raises(ValueError, match=message):
        zero2jax.global_batch(np.zeros((4, 2)), mesh, batch_size=8)


def test_order_is_disjoint_reproducible_and_resumable():
    mesh = zero2jax.make_mesh(data=2)
    order = zero2jax.BatchOrder(11, 4, mesh, seed=5)
    drawn = [next(order) for _ in range(5)]
    assert order.position == 5
    assert order.batches_per_epoch == 2
    assert len(set(np.concatenate(drawn[:2]))) == 8  # no example twice in an epoch
    assert sorted(np.concatenate(drawn[:2])) != sorted(np.concatenate(drawn[2:4]))  # others are left out
    resumed = zero2jax.BatchOrder(11, 4, mesh, seed=5, position=3)
    np.testing.assert_array_equal(np.stack([next(resumed) for _ in range(2)]), np.stack(drawn[3:]))
    assert not np.array_equal(next(zero2jax.BatchOrder(11, 4, mesh, seed=6)), drawn[0])


def test_order_refuses_batches_that_cannot_be():
    mesh = zero2jax.make_mesh(data=2)
    with pytest.raises(ValueError, match="an epoch must hold at least one batch"):
        zero2jax.BatchOrder(3, 4, mesh)
    with pytest.raises(ValueError, match=r"3 / 2 = 1.5"):
        zero2jax.BatchOrder(10, 3, mesh)
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="ordering examples from position"):
            zero2jax.BatchOrder(8, 4, mesh, position=wrong)
