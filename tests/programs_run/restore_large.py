"""Host memory and bytes that restoring takes of what `save_large.py` saved: `... DIRECTORY`. Prints [peak, read]."""

import json
from pathlib import Path

import jax
import numpy as np
from helpers import make_engine, make_params
from large_state import PARAMS, make_large_engine
from worker import arguments, count, peak_above_now

from zero2jax import Checkpointer

engine = make_large_engine()
engine.abstract_state(PARAMS)
checkpointer = Checkpointer(Path(arguments[0]) / "large")
warm = make_engine(4 * count).init(make_params())
peak, (state, _) = peak_above_now(lambda: checkpointer.restore(engine))
for i, x in enumerate(jax.tree.leaves(state.params)):
    assert all((np.asarray(s.data) == i).all() for s in x.addressable_shards)
print(json.dumps([peak, checkpointer.restored_from.bytes_read]))
