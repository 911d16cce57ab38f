"""Trains with offloading and without, and prints as JSON which leaves of the last states differ in a bit, by case.

To be run with eight devices (JAX_NUM_CPU_DEVICES=8) and without fused multiply-adds (XLA_FLAGS=--xla_cpu_max_isa=AVX):
which product of `a * b + c * d` is fused with the sum is LLVM's choice, and it may be another in another program.
"""

import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import OPTIMIZERS, make_batches, make_engine, make_params, weighted_loss
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.offload.disk_arrays import DiskArray

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
    return after(engine, make_params(), make_batches(STEPS, 48))


def after(engine, params, batches):
    state, metrics = engine.init(params), []
    for batch in batches:
        state, found = engine.step(state, batch)
        metrics.append(found)
    return {"state": state, "metrics": metrics, "full": engine.params(state)}


def differing(off, on):
    off, on = (jax.tree_util.tree_leaves_with_path(tree) for tree in (off, on))
    assert [path for path, _ in off] == [path for path, _ in on]
    return [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(off, on, strict=True)
        if a.dtype != b.dtype or not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    ]


# (mesh axes, engine, offload) of a network that divides over groups, shards and a model axis
FP16 = {"precision": "float16", "num_microbatches": 2}
AXES = {
    "streamed in blocks, a model axis": (
        {"data": 2, "model": 2},
        {"stage": 3, "tx": optax.lion(1e-3), "clip_norm": 0.5, "precision": zero2jax.Precision()},
        {"update_on": "device", "params": True, "chunk_bytes": 64},
    ),
    "streamed, groups, overflow": (
        {"replica": 2, "data": 2},
        {
            "stage": 2,
            "tx": optax.adamw(1e-2),
            "shard_over_replicas": True,
            "precision": "float16",
            "num_microbatches": 2,
        },
        {"update_on": "device"},
    ),
    "on the host in chunks, groups, a model axis, overflow": (
        {"replica": 2, "data": 2, "model": 2},
        {"stage": 3, "tx": optax.sgd(1e-2, momentum=0.9), "clip_norm": 0.5, **FP16},
        {"params": True, "chunk_bytes": 64},
    ),
}
SPECS = {"down": P(None, "model"), "up": P(None, None, "model")}


def on_axes(axes, settings, offload):
    def loss_fn(params, batch):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None))
        return jnp.mean(jax.lax.scan(layer, batch.astype(params["up"].dtype), params)[0] ** 2)

    params = {
        name: jax.random.normal(jax.random.key(len(name)), (3, *shape))
        for name, shape in (("down", (8, 4)), ("up", (4, 8)))
    }
    batches = [np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32) for i in range(4)]
    if settings["precision"] == "float16":  # one example of one device and microbatch
        batches[2][5] = 1e4
    specs = SPECS if "model" in axes else None
    mesh = zero2jax.make_mesh(**axes)
    engine = zero2jax.Engine(loss_fn, mesh=mesh, param_specs=specs, offload=offload, **settings)
    result = after(engine, params, batches)
    skipped = sum(not found["applied"] for found in result["metrics"])
    assert (skipped > 0) == (settings["precision"] == "float16"), skipped
    return result


differ = {}
for name, (axes, engine, offload) in AXES.items():
    off = on_axes(axes, engine, None)
    differ[name] = differing(off, on_axes(axes, engine, zero2jax.OffloadSettings(**offload)))
    if "on the host" in name:
        with tempfile.TemporaryDirectory() as path:
            offload = offload | {"nvme_path": path}
            on = on_axes(axes, engine, zero2jax.OffloadSettings(**offload))
            assert {type(x) for x in jax.tree.leaves(on["state"].params)} == {DiskArray}
            differ[name.replace("on the host", "in files")] = differing(off, on)
            del on
for case in CASES:
    # Where there are devices enough, the host's are others, so that nothing can be taken from the wrong memory.
    host = tuple(jax.devices()[-case[0] :]) if case[0] <= 4 else None
    chunk_bytes = 2**28 if case[3] in IN_ONE else 64
    settings = zero2jax.OffloadSettings(
        host_devices=host, chunk_bytes=chunk_bytes, ratio=RATIOS.get(case[3], 1.0)
    )
    differ[str(case[:4])] = differing(*(trained(offload, *case) for offload in (None, settings)))
print(json.dumps(differ))
