"""A state whose size shows in the memory of a process: 24 parameters of 4 MiB each, and their momenta."""

import jax
import numpy as np
import optax
from helpers import make_engine
from worker import count

PARAMS = {f"w{i:02}": jax.ShapeDtypeStruct((1024, 1024), np.float32) for i in range(24)}


def make_large_engine():
    return make_engine(4 * count, loss_fn=lambda p, b: p["w00"].sum(), tx=optax.sgd(0.1, momentum=0.9))
