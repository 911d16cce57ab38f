"""What only one process refuses is refused in all, at once: `... DIRECTORY`. Prints the messages."""

import json
import time

import numpy as np
from helpers import make_engine, make_params
from worker import arguments, index

from zero2jax import Checkpointer
from zero2jax.checkpoints import checkpointer as module

directory = arguments[0]
engine = make_engine(8, stage=2)
state = engine.init(make_params())
messages, start = [], time.monotonic()


def refused(*args):
    try:
        checkpointer.save(*args)
        checkpointer.wait()
    except (TypeError, ValueError) as error:
        messages.append(str(error))


def fail(*args, **settings):
    raise IndexError("of one process")


with Checkpointer(directory, engine) as checkpointer:
    refused(1, state, object())
    refused(2**31, state)
    host_blocks = module.host_blocks
    if index == 1:
        module.host_blocks = fail
    refused(1, state)
    module.host_blocks = host_blocks
    checkpointer.save(1, state, object() if index else [np.ones(2)])
    checkpointer.wait()
    assert list(checkpointer.restore()[1][0]) == [1, 1]
try:
    with Checkpointer(directory, engine) as checkpointer:
        checkpointer.save(2, state)
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
assert checkpointer.latest_step() == 2
assert time.monotonic() - start < 60
print(json.dumps(messages))
