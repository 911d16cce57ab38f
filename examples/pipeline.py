"""3-D parallel training, data 2 x pipe 2 x model 2: python examples/pipeline.py. A CPU will do.

A GPipe-style pipeline inside of the loss. Each device of the axis `pipe` holds a stage, which is some of the layers; a
batch goes through in microbatches, each handed on from stage to stage. ZeRO is the data-parallel dimension: a stage's
masters and moments are sharded over `data` besides. What the loss differs in from one on one device is `pipelined`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax

STAGES, LAYERS, WIDTH, HIDDEN, VOCAB, MICROBATCHES = 2, 2, 8, 12, 7, 4

SPECS = {
    "embed": None,
    "up": jax.P("pipe", None, None, "model"),  # (stages, layers of a stage, width, hidden)
    "down": jax.P("pipe", None, "model", None),
}


def init_fn(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "up": 0.3 * jax.random.normal(keys[1], (STAGES, LAYERS, WIDTH, HIDDEN)),
        "down": 0.3 * jax.random.normal(keys[2], (STAGES, LAYERS, HIDDEN, WIDTH)),
    }


def stage(params, x):
    """The layers of one stage, (layers, ...) each, of activations (examples, width)."""
    block = lambda x, layer: (x + jnp.tanh(x @ layer["up"]) @ layer["down"], None)
    return jax.lax.scan(jax.checkpoint(block), x, params)[0]


def one_after_the_other(params, x):
    """All stages on one device."""
    return stage(jax.tree.map(lambda p: p.reshape(STAGES * LAYERS, *p.shape[2:]), params), x)


def pipelined(params, x, num_microbatches=MICROBATCHES):
    """All stages, each on its devices: in clock tick t stage i works on microbatch t - i."""

    def on_each_stage(params, microbatches):
        params = jax.tree.map(lambda p: p[0], params)  # (1, layers, ...): this device's stage
        index, last = jax.lax.axis_index("pipe"), jax.lax.axis_size("pipe") - 1
        onwards = [(i, i + 1) for i in range(last)]

        def tick(received, t):
            fresh = microbatches[jnp.minimum(t, num_microbatches - 1)]
            y = stage(params, jnp.where(index == 0, fresh, received))
            return jax.lax.ppermute(y, "pipe", onwards), y

        ticks = jnp.arange(num_microbatches + last)
        _, ys = jax.lax.scan(tick, jnp.zeros_like(microbatches[0]), ticks)
        return jax.lax.psum(
            jnp.where(index == last, ys[last:], 0), "pipe"
        )  # every stage gets the last one's results

    run = jax.shard_map(
        on_each_stage,
        mesh=jax.sharding.get_abstract_mesh(),  # inside of the step: manual over data, automatic over the others
        in_specs=(jax.P("pipe"), jax.P()),
        out_specs=jax.P(),
        axis_names={"pipe"},
        check_vma=False,
    )
    return run(params, x.reshape(num_microbatches, -1, x.shape[-1])).reshape(x.shape)


def loss_fn(params, batch, layers=pipelined):
    x = layers({name: params[name] for name in ("up", "down")}, params["embed"][batch["x"]])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main():
    jax.config.update(
        "jax_num_cpu_devices", 8
    )  # simulated, where there is no GPU; before anything else uses jax
    mesh = zero2jax.make_mesh(data=2, pipe=STAGES, model=2)
    engine = zero2jax.Engine(
        loss_fn, optax.adamw(1e-2), mesh, param_specs=SPECS, layer_dims={"embed": 0, "up": 2, "down": 2}
    )
    state = engine.init(init_fn, jax.random.key(0))
    print(engine.layout.params)
    rng = np.random.default_rng(0)
    for step in range(20):
        x = rng.integers(0, VOCAB, 32).astype(np.int32)
        state, metrics = engine.step(state, {"x": x, "y": (x + 1) % VOCAB})
        print(f"step {step + 1}: loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
