"""Parameters that are read when they are sliced: each device's part, a piece at a time."""

import jax
import numpy as np
import optax
import pytest
from helpers import FP32

import zero2jax
from zero2jax.zero import placement


class OnDisk:
    """A leaf with shape, dtype and slices; it notes the bytes of what it is asked for, and is never read in full."""

    def __init__(self, values):
        self.values, self.asked = values, []
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index):
        part = self.values[index]
        self.asked.append(part.nbytes)
        return part


@pytest.mark.parametrize(("num_devices", "stage"), [(8, 2), (3, 3), (2, 0)])
def test_a_leaf_that_is_read_by_slices_is_placed_as_an_array_is_a_piece_at_a_time(
    monkeypatch, num_devices, stage
):
    rng = np.random.default_rng(0)
    arrays = {
        "blocks": {"w": rng.normal(size=(4, 10, 7)).astype(np.float16)},
        "embed": rng.normal(size=(13, 6)).astype(np.float32),
        "scale": rng.normal(size=()).astype(np.float32),
    }
    monkeypatch.setattr(placement, "PIECE_BYTES", 128)
    loss = lambda params, batch: sum(x.sum() for x in jax.tree.leaves(params)) * batch.mean()
    mesh = zero2jax.make_mesh(data=num_devices)
    engine = zero2jax.Engine(loss, optax.sgd(0.1), mesh, stage=stage, precision=FP32)
    lazy = jax.tree.map(OnDisk, arrays)
    found, expected = engine.init(lazy), engine.init(arrays)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)
    # at most 128 bytes of the shard in fp32, or one row of its first dim
    row = -(-10 // num_devices) * 7 * 2 if stage else 10 * 7 * 2
    assert max(lazy["blocks"]["w"].asked) <= max(row, 64)
    assert max(lazy["embed"].asked) <= 128
    engine.step(found, np.ones((8 * num_devices, 1), np.float32))  # donates it
