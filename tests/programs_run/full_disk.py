"""The disk is full for one process, then for the other; each time all fail, and save again: `... DIRECTORY`.

Prints the messages.
"""

import errno
import json
import os

from helpers import make_engine, make_params
from worker import arguments, index

from zero2jax import Checkpointer, CheckpointError
from zero2jax.checkpoints import safetensors_file


def full(*args):
    raise OSError(errno.ENOSPC, "no space")


engine = make_engine(8, stage=2)
state = engine.init(make_params())
messages, pwrite = [], os.pwrite
for failing in (0, 1):
    with Checkpointer(f"{arguments[0]}/{failing}", engine, max_to_keep=1) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        if index == failing:
            safetensors_file.os.pwrite = full
        checkpointer.save(2, state)
        try:
            checkpointer.wait()
        except CheckpointError as error:
            messages.append(str(error))
        safetensors_file.os.pwrite = pwrite
        assert checkpointer.all_steps() == [1], checkpointer.all_steps()
        checkpointer.save(2, state)
        checkpointer.wait()
        if index == 0:
            assert checkpointer.all_steps() == [2], checkpointer.all_steps()
print(json.dumps(messages))
