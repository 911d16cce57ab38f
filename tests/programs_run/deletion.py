"""Process 1 reads the directory while process 0 deletes the oldest checkpoint from it: `... DIRECTORY MARKS SAVES`.

Each save meets the deletion at another access of process 1 to the directory: its first since all agreed that the save
is complete, its second, ... The access is held until process 0 has deleted. Prints the saves where there was one.
"""

import json
import os
import threading
import time
from pathlib import Path

from helpers import make_engine, make_params
from jax.experimental import multihost_utils
from worker import arguments, index

from zero2jax import Checkpointer
from zero2jax.checkpoints import directory as checkpoint_directory

directory, marks, num_saves = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
delete, allgather = checkpoint_directory.delete, multihost_utils.process_allgather
held = []
step = 0
waiting = False
accesses = None  # of process 1 since all agreed; None when it is not waiting for them or has met the deletion


def wait_for(name):
    end = time.monotonic() + 30
    while not os.access(marks / f"{name}{step}", os.F_OK):
        assert time.monotonic() < end, (index, name, step)
        time.sleep(0.001)


def mark(name):
    (marks / f"{name}{step}").touch()


def delete_while_read(*args):
    wait_for("reading")
    delete(*args)
    mark("deleted")


def counting_from_agreement(*args, **settings):
    global accesses
    answer = allgather(*args, **settings)
    if threading.current_thread() is threading.main_thread():  # Orbax's threads gather, too
        accesses = 0 if waiting else None
    return answer


def over_deletion(access):
    def wrapped(path=".", *args, **settings):
        global accesses
        if accesses is not None and str(path).startswith(str(directory)):
            accesses += 1
            if accesses == step - 1:
                accesses = None
                held.append(step)
                mark("reading")
                wait_for("deleted")
        return access(path, *args, **settings)

    return wrapped


if index == 0:
    checkpoint_directory.delete = delete_while_read
else:
    multihost_utils.process_allgather = counting_from_agreement
    for name in ("listdir", "stat", "lstat"):
        setattr(os, name, over_deletion(getattr(os, name)))
engine = make_engine(8, stage=2)
state = engine.init(make_params())
with Checkpointer(directory, engine, max_to_keep=1) as checkpointer:
    for step in range(1, num_saves + 1):
        checkpointer.save(step, state)
        waiting = True
        checkpointer.wait()
        if index == 1:
            assert checkpointer.all_steps()[-1] == step
            Checkpointer(directory)
            waiting, accesses = False, None
            mark("reading")  # whether or not there were as many accesses
assert Checkpointer(directory).latest_step() == num_saves
print(json.dumps(held))
