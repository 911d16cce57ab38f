"""Trains with offloading and without, and prints as JSON which leaves of the last states differ in a bit, by case.

To be run with eight devices (JAX_NUM_CPU_DEVICES=8) and without fused multiply-adds (XLA_FLAGS=--xla_cpu_max_isa=AVX):
which product of `a * b + c * d` is fused with the sum is LLVM's choice, and it may be another in another program.
"""

import json

import jax
import numpy as np
from helpers import OPTIMIZERS, make_batches, make_engine, make_params, weighted_loss

import zero2jax

# (devices, stage, microbatches, optimizer, further settings); of each axis every value in some case
CASES = (
    (1, 2, 1, "clip_adamw", {}),
    (1, 0, 3, "lamb", {"clip_norm": 0.5}),
    (2, 1, 1, "adafactor", {"reduction": "sum", "clip_norm": 0.5, "precision": "float16"}),
    (2, 3, 3, "muon", {"skip_nonfinite": True}),
    (3, 2, 1, "lion", {}),
    (8, 3, 1, "sgd_momentum", {"precision": zero2jax.Precision(), "clip_norm": 0.5}),
)
STEPS = 20
# Of what sums over a leaf, the compiler chooses the order anew in each program: in one piece it is the same.
IN_ONE = ("lamb", "muon")
RATIOS = {"lion": 0.5, "adafactor": 0.4}


def trained(offload, num_shards, stage, num_microbatches, optimizer, settings):
    engine = make_engine(
        num_shards,
        loss_fn=weighted_loss,
        stage=stage,
        num_microbatches=num_microbatches,
        tx=OPTIMIZERS[optimizer](),
        offload=offload,
        **settings,
    )
    state = engine.init(make_params())
    metrics = []
    for batch in make_batches(STEPS, 48):
        state, found = engine.step(state, batch)
        metrics.append(found)
    return {"state": state, "metrics": metrics, "full": engine.params(state)}


differ = {}
for case in CASES:
    # Where there are devices enough, the host's are others, so that nothing can be taken from the wrong memory.
    host = tuple(jax.devices()[-case[0] :]) if case[0] <= 4 else None
    chunk_bytes = 2**28 if case[3] in IN_ONE else 64
    settings = zero2jax.OffloadSettings(
        host_devices=host, chunk_bytes=chunk_bytes, ratio=RATIOS.get(case[3], 1.0)
    )
    off, on = (jax.tree_util.tree_leaves_with_path(trained(offload, *case)) for offload in (None, settings))
    assert [path for path, _ in off] == [path for path, _ in on]
    pairs = zip(off, on, strict=True)
    differ[str(case[:4])] = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in pairs
        if a.dtype != b.dtype or not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    ]
print(json.dumps(differ))
