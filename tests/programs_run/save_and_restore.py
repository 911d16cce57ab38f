"""Restore what one process saved, save it at stage 2, restore that at stage 0: `... DIRECTORY`, which holds `one`."""

import json
from pathlib import Path

import numpy as np
from helpers import make_engine, make_params
from worker import arguments, index, values

from zero2jax import Checkpointer

directory = Path(arguments[0])
engine = make_engine(8, stage=2)
engine.abstract_state(make_params())
state, extra = Checkpointer(directory / "one").restore(engine)
assert extra == {"from": "one"}
before = values(state)
with Checkpointer(directory / "two", engine, max_to_keep=1) as checkpointer:
    for step in (2, 3):
        assert checkpointer.save(step, state, {"from": index})
other = make_engine(8, stage=0)
other.abstract_state(make_params())
_, extra = Checkpointer(directory / "two").restore(other)
assert extra == {"from": 0}
state, _ = Checkpointer(directory / "two").restore(engine, step=3)
for x, y in zip(values(state), before, strict=True):
    np.testing.assert_array_equal(x, y)
print(json.dumps(len(before)))
