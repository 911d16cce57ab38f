"""The batch triangle of a `Config`."""

import pytest

from zero2jax.config.reading import Config, ConfigError, read_config

# Batch triangle: (shards, TB, MB, GAS) as given -> result


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ((2, 32, 16, 1), (32, 16, 1)),
        ((2, 32, 8, 2), (32, 8, 2)),
        ((2, 32, 16, None), (32, 16, 1)),
        ((2, 32, 4, None), (32, 4, 4)),
        ((2, 32, None, 2), (32, 8, 2)),
        ((2, None, 8, 2), (32, 8, 2)),
        ((2, 32, None, None), (32, 16, 1)),
        ((2, None, 16, None), (32, 16, 1)),
    ],
)
def test_batch_triangle(given_sizes, expected):
    shards, total, micro, steps = given_sizes
    config = Config(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    )
    assert config.batch_sizes(shards) == expected


@pytest.mark.parametrize(
    "sizes", [(2, 33, 17, 2), (2, 32, 18, 1), (3, 32, None, None), (2, 32, 5, None), (8, 4, None, None)]
)
def test_batch_triangle_that_does_not_close(sizes):
    shards, total, micro, steps = sizes
    config = Config(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    )
    with pytest.raises(ConfigError) as caught:
        config.batch_sizes(shards, shards_from="axis 'data' of the mesh")
    message = str(caught.value)
    assert (
        "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * shards" in message
    )
    assert f"shards = {shards} (from axis 'data' of the mesh)" in message
    assert f"here {total} != " in message
    assert " 0 " not in message


def test_accumulation_steps_alone_take_the_batch_size_from_the_data():
    config = read_config({"gradient_accumulation_steps": 2})
    assert config.batch_sizes(4, batch_size=16) == (16, 2, 2)
    with pytest.raises(ConfigError, match="neither batch size is given"):
        config.batch_sizes(4)


def test_batch_sizes_left_at_auto_are_named():
    config = read_config({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})
    with pytest.raises(
        ConfigError, match='Still at "auto": train_batch_size, train_micro_batch_size_per_gpu'
    ):
        config.batch_sizes(4)
