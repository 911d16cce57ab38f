"""Host memory while a model folder goes into shards: python tests/benchmarks/llama_loading.py

Writes a folder of 1.1e9 random parameters in bf16 (four layers of Llama 3 8B's shapes), loads it into fp32 shards of 8
simulated devices, and prints the process's own memory at its highest, less the shards, which here are host memory too.
Mapped pages of the files are not counted: the system takes them back when it needs them.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax

import zero2jax

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.llama import weights
from examples.llama.config import read_config
from examples.llama.losses import make_loss
from examples.llama.model import param_shapes
from examples.llama.program import SHAPES

NUM_DEVICES = 8


def own_bytes():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Peak(threading.Thread):
    """The most memory that the process had, sampled every 2 ms."""

    def __enter__(self):
        self.running, self.most = True, own_bytes()
        self.start()
        return self

    def run(self):
        while self.running:
            self.most = max(self.most, own_bytes())
            time.sleep(0.002)

    def __exit__(self, *_):
        self.running = False
        self.join()


def main():
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    config = read_config({**SHAPES["mistral_7b"], "num_hidden_layers": 4})
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16)
    random = lambda shape, read: weights.Lazy(shape, noise.dtype, read)
    fill = lambda index: np.resize(noise, [s.stop - s.start for s in index])
    shapes = param_shapes(config)
    layer_bytes = sum(4 * x.size for x in jax.tree.leaves(shapes["layers"])) // config.num_layers
    with tempfile.TemporaryDirectory() as folder:
        weights.save_folder(folder, config, jax.tree.map(lambda x: random(x.shape, fill), shapes))
        _, params = weights.open_folder(folder)
        mesh = zero2jax.make_mesh(data=NUM_DEVICES)
        engine = zero2jax.Engine(make_loss(config), optax.sgd(1e-3), mesh, stage=3)
        engine.abstract_state(params)
        before, start = own_bytes(), time.perf_counter()
        with Peak() as peak:
            state = engine.init(params)
        seconds = time.perf_counter() - start
    shard_bytes = NUM_DEVICES * zero2jax.live_bytes(state.params)
    row = {
        "num_params": sum(x.size for x in jax.tree.leaves(shapes)),
        "shards_mib": round(shard_bytes / 2**20),
        "above_shards_mib": round((peak.most - before - shard_bytes) / 2**20),
        "layer_mib": round(layer_bytes / 2**20),
        "seconds": round(seconds, 1),
        "jax": jax.__version__,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
