"""What a wrong configuration says, for the tests of reading it."""

import pytest

from zero2jax.config.reading import ConfigError, read_config


def errors_of(source):
    """All errors of a source that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        read_config(source)
    return caught.value.errors


def zero(**keys):
    """A file with these keys in its block `zero_optimization`."""
    return {"train_batch_size": 8, "zero_optimization": keys}
