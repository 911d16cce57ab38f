"""Tiny models, and the oracle: the same loss and the same optax transformation on one device, unsharded."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax

FP32 = zero2jax.Precision(compute_dtype=jnp.float32)
NUM_EXAMPLES = 24  # divides by 1, 2, 3 and 8 devices
VOCAB, WIDTH, LAYERS = 7, 5, 3  # no dim divides by 2, 3 (but for the layers) or 8

OPTIMIZERS = {
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "sgd_momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def make_params(seed=0):
    """A tied embedding, a stack of layers, a small vector and a scalar: 138 parameters that divide by nothing."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "blocks": {
            "b": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH)),
            "w": 0.5 * jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)),
        },
        "embed": jax.random.normal(keys[2], (VOCAB, WIDTH)),
        "norm": 1 + 0.1 * jax.random.normal(keys[3], (WIDTH,)),
        "scale": jnp.float32(0.7),
    }


def make_batch(num_examples=NUM_EXAMPLES, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, VOCAB, num_examples).astype(np.int32),
        "y": rng.integers(0, VOCAB, num_examples).astype(np.int32),
        "weight": rng.uniform(0.5, 2, num_examples).astype(np.float32),
    }


def make_batches(num_steps, num_examples=NUM_EXAMPLES):
    return [make_batch(num_examples, seed=1 + i) for i in range(num_steps)]


def losses_per_example(params, batch):
    """Cross-entropy per example of a scanned, rematerialized residual network with tied embeddings."""

    def block(x, layer):
        return x + jnp.tanh(x @ layer["w"] + layer["b"][None]), None

    x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][batch["x"]], params["blocks"])
    logits = params["scale"] * ((x * params["norm"][None]) @ params["embed"].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])


def mean_loss(params, batch):
    return losses_per_example(params, batch).mean()


def weighted_loss(params, batch):
    """A mean over the examples' weights, which it returns, as a loss over tokens that count would."""
    losses = losses_per_example(params, batch)
    weight = batch["weight"].sum()
    aux = {
        "weight": weight,
        "weighted_mean": (losses * batch["weight"]).sum() / weight,
        "examples": losses.size,
    }
    return aux["weighted_mean"], aux


def make_engine(
    num_shards, *, loss_fn=mean_loss, tx=None, stage=2, num_microbatches=1, precision=FP32, **settings
):
    mesh = zero2jax.make_mesh(data=num_shards)
    tx = optax.adam(1e-2) if tx is None else tx
    return zero2jax.Engine(
        loss_fn, tx, mesh, stage=stage, num_microbatches=num_microbatches, precision=precision, **settings
    )


def train(engine, state, batches, **extra_args):
    """The last state and all metrics of some steps, with implicit transfers from and to the host forbidden."""
    metrics = []
    for batch in batches:
        with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_host("disallow"):
            state, found = engine.step(state, batch, **extra_args)
        metrics.append(found)
    return state, metrics


def oracle(loss_fn, tx, params, batches, **extra_args):
    """The same steps on one device: final parameters, losses and gradient norms."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, opt_state, batch):
        scalar = lambda p: out if not isinstance(out := loss_fn(p, batch), tuple) else out[0]
        loss, grads = jax.value_and_grad(scalar)(params)
        updates, opt_state = tx.update(grads, opt_state, params, **{"value": loss, **extra_args})
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    opt_state = jax.jit(tx.init)(params)
    losses, norms = [], []
    for batch in batches:
        params, opt_state, loss, norm = step(params, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return params, losses, norms


def assert_trees_close(found, expected, *, rtol=0.0, atol=0.0):
    """Same structure, shapes and dtypes, and values within a tolerance; names the leaf that differs."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, name
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol, err_msg=name
        )


def assert_trees_equal(found, expected):
    """Bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


def bytes_on_device(tree, device):
    """Bytes of the shards that one device holds."""
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.device == device
    )


@dataclasses.dataclass
class Primitives:
    """How often each primitive stands in a traced program, outside and inside of loops; shapes and dtypes it makes."""

    outside_loops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    in_loops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    shapes: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    dtypes: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def total(self, name):
        return self.outside_loops[name] + self.in_loops[name]


def count_primitives(jaxpr):
    """Count the equations of a jaxpr and of all jaxprs in it."""
    found = Primitives()

    def walk(jaxpr, in_loop):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = eqn.primitive.name
            (found.in_loops if in_loop else found.outside_loops)[name] += 1
            found.shapes[name] += [v.aval.shape for v in eqn.outvars]
            found.dtypes[name] += [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    walk(value, in_loop or name in ("scan", "while"))

    walk(jaxpr, False)
    return found
