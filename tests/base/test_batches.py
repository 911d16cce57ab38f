"""Batches of several processes, as one process with its eight devices sees them: rows, order, refusals."""

import json

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


def drawn(order, count):
    return [int(i) for _ in range(count) for i in next(order)]


@pytest.mark.parametrize(
    ("num_examples", "before", "num_before", "after", "devices"),
    [
        (960, 32, 10, 48, 8),  # 320 is no number of batches of 48
        (960, 32, 10, 24, 3),  # fewer devices
        (1000, 40, 12, 80, 8),
        (1000, 40, 12, 40, 4),
        (1000, 40, 25 + 3, 56, 8),  # in the second epoch
        (1000, 48, 20, 8, 8),  # 40 left over, which is five batches of 8
        (100, 40, 2, 60, 4),  # the 20 left over fill no batch: the next epoch begins
    ],
)
def test_another_batch_size_neither_skips_nor_repeats(num_examples, before, num_before, after, devices):
    order = zero2jax.BatchOrder(num_examples, before, zero2jax.make_mesh(data=8), seed=1)
    epoch = (num_before - 1) // order.batches_per_epoch
    seen = drawn(order, num_before)[epoch * order.batches_per_epoch * before :]
    resumed = zero2jax.BatchOrder(num_examples, after, zero2jax.make_mesh(data=devices), seed=1)
    resumed.state = json.loads(json.dumps(order.state))
    while len(seen) + after <= num_examples:
        seen += drawn(resumed, 1)
    assert num_examples - len(set(seen)) < after  # all but the last ones, which fill no batch
    # none twice, in the order that the epoch had anyway
    np.testing.assert_array_equal(
        seen, np.random.default_rng((1, epoch)).permutation(num_examples)[: len(seen)]
    )
    following = np.random.default_rng((1, epoch + 1)).permutation(num_examples)
    np.testing.assert_array_equal(drawn(resumed, 1), following[:after])


@pytest.mark.parametrize("saved", [28, {"position": 28, "batch_size": 40}])
def test_numbers_of_batches_that_were_saved_keep_their_meaning(saved):
    mesh = zero2jax.make_mesh(data=8)
    order = zero2jax.BatchOrder(1000, 40, mesh, seed=1)
    before = drawn(order, 28)
    assert order.position == 28
    for resumed in (
        zero2jax.BatchOrder(1000, 40, mesh, seed=1, position=saved),
        zero2jax.BatchOrder(1000, 40, mesh, seed=1),
    ):
        resumed.state = saved
        assert resumed.state == order.state == {"epoch": 1, "drawn": 120, "num_examples": 1000, "seed": 1}
    other = zero2jax.BatchOrder(1000, 56, mesh, seed=1, position={"position": 28, "batch_size": 40})
    assert not set(drawn(other, 880 // 56)) & set(before[1000:])
    # a bare number counts batches of the order that it is given to, as it always has
    assert zero2jax.BatchOrder(1000, 56, mesh, seed=1, position=28).state["drawn"] == 11 * 56


def test_a_number_of_batches_is_refused_where_there_is_none():
    mesh = zero2jax.make_mesh(data=8)
    order = zero2jax.BatchOrder(960, 48, mesh, position={"position": 10, "batch_size": 32})
    with pytest.raises(ValueError, match=r"320 examples of epoch 0 were drawn .* Save `state` in place of"):
        order.position  # noqa: B018
    assert zero2jax.BatchOrder(960, 40, mesh, position=order.state).position == 8


def test_the_state_of_another_order_is_refused_with_the_way_to_begin_an_epoch():
    mesh = zero2jax.make_mesh(data=8)
    order = zero2jax.BatchOrder(960, 48, mesh, seed=1, position=3)
    for other in (zero2jax.BatchOrder(1000, 48, mesh, seed=1), zero2jax.BatchOrder(960, 48, mesh, seed=2)):
        with pytest.raises(
            ValueError, match=r"in the order of 960 examples with seed 1, and this is another"
        ) as e:
            other.state = order.state
        assert f"set `state` to {other.state | {'epoch': 1}}" in str(e.value)
        other.state = other.state | {"epoch": 1}
        assert other.position == other.batches_per_epoch


def test_order_refuses_batches_that_cannot_be():
    mesh = zero2jax.make_mesh(data=2)
    with pytest.raises(ValueError, match="an epoch must hold at least one batch"):
        zero2jax.BatchOrder(3, 4, mesh)
    with pytest.raises(ValueError, match=r"3 / 2 = 1.5"):
        zero2jax.BatchOrder(10, 3, mesh)
    wrong_states = (
        {"epoch": 1},
        {"position": 1, "batch_size": 9},
        {"position": 1, "batch_size": 0},
        {"epoch": -1},
    )
    for wrong in (-1, 1.5, "2", *wrong_states):
        with pytest.raises(ValueError, match="ordering examples from position"):
            zero2jax.BatchOrder(8, 4, mesh, position=wrong)
