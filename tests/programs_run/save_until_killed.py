"""Children that save one step after the other until they are killed, one per line of input: `... DIRECTORY`.

The parent has imported everything, and forks before a backend runs.
"""

import os
import sys

import jax
import numpy as np
import optax
from helpers import make_engine

import zero2jax.checkpoints.saver  # noqa: F401, imports Orbax
from zero2jax import Checkpointer


def save_forever(directory):
    jax.config.update("jax_num_cpu_devices", 2)
    params = {f"w{i:02}": np.full((64, 33), -1.0, np.float32) for i in range(40)}
    engine = make_engine(2, loss_fn=lambda p, b: p["w00"].sum(), tx=optax.sgd(0.1))
    state = engine.init(params)
    checkpointer = Checkpointer(directory, engine, max_to_keep=2)
    step = checkpointer.latest_step() or 0
    while True:
        step += 1
        value = np.float32(step)
        params = jax.tree.map(
            lambda x, value=value: jax.device_put(np.full(x.shape, value), x.sharding), state.params
        )
        checkpointer.save(step, state._replace(params=params), {"step": step})
        if step == 1:
            checkpointer.wait()  # from here on there is one to load
        # In one piece, where print would write word by word if unbuffered.
        os.write(1, f"saving {step}\n".encode())


for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        save_forever(sys.argv[1])
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
