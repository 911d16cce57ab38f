"""Train a small network with ZeRO stage 2 over eight devices: python examples/minimal.py. A CPU will do."""

import jax
import jax.numpy as jnp
import optax

import zero2jax

jax.config.update("jax_num_cpu_devices", 8)  # simulated, where there is no GPU; before anything else uses jax
tx, key = optax.adamw(1e-2), jax.random.key(0)


def init_fn(key):
    return {name: 0.1 * jax.random.normal(k, (64, 64)) for name, k in zip("ab", jax.random.split(key))}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"] - batch) ** 2)


batches = [jax.random.normal(jax.random.fold_in(key, i), (16, 64), jnp.bfloat16) for i in range(100)]
mesh = zero2jax.make_mesh()  # all devices, on an axis "data"
engine = zero2jax.Engine(loss_fn, tx, mesh, stage=2)  # loss_fn and tx as they are
state = engine.init(init_fn, key)  # straight into shards
for batch in batches:
    state, metrics = engine.step(state, batch)
    print(f"step {int(state.step)}: loss {metrics['loss']:.3f}")
params = engine.params(state)  # full fp32 parameters
