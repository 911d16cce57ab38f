"""Host memory that saving takes above what the process holds: `... DIRECTORY`. Prints [asynchronous, synchronous]."""

import json
from pathlib import Path

import jax
from large_state import PARAMS, make_large_engine
from worker import arguments, peak_above_now

from zero2jax import Checkpointer

directory = Path(arguments[0])
engine = make_large_engine()
state = engine.init(
    lambda: {name: jax.numpy.full(x.shape, i, x.dtype) for i, (name, x) in enumerate(PARAMS.items())}
)
with Checkpointer(directory / "warm", engine) as warm:
    warm.save(0, state)  # imports, threads, buffers
    warm.wait()
with Checkpointer(directory / "large", engine, asynchronous=True) as checkpointer:
    asynchronous, _ = peak_above_now(lambda: (checkpointer.save(0, state), checkpointer.wait()))
with Checkpointer(directory / "synchronous", engine, asynchronous=False) as checkpointer:
    synchronous, _ = peak_above_now(lambda: checkpointer.save(0, state))
print(json.dumps([asynchronous, synchronous]))
