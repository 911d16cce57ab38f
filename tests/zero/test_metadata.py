"""Flax's metadata places parameters beside the data axis: Linen boxes, logical names, NNX Variables."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import FP32

import zero2jax

RULES = (("batch", "data"), ("embed", "data"), ("mlp", "model"), ("mlp", "data"))
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
INIT = nn.initializers.ones


class Linen(nn.Module):
    """Two layers; `up` and `down` box their kernels, `hidden` names the dims of the activation between them."""

    up: object
    down: object
    hidden: tuple = None

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(0.1 * nn.Dense(6, kernel_init=self.up(INIT), name="up")(x))
        if self.hidden:
            x = nn.with_logical_constraint(x, self.hidden)
        return nn.Dense(4, kernel_init=self.down(INIT), name="down")(x)


def linen(wrap, *names, **fields):
    up, down = (lambda init, names=names: wrap(init, names) for names in names)
    model = Linen(up, down, **fields)
    params = model.init(jax.random.key(0), X)["params"]
    return lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), params


def of_nnx():
    boxed = lambda *names: nnx.with_partitioning(INIT, names, eager_sharding=False)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, kernel_init=boxed("data", "model"), rngs=rngs)
            self.down = nnx.Linear(6, 4, kernel_init=boxed("model", "data"), rngs=rngs)

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        model = nnx.merge(graph, params)
        return jnp.mean(model.down(jnp.tanh(0.1 * model.up(x))) ** 2)

    return loss, params


CASES = {
    "linen": lambda: linen(nn.with_partitioning, ("data", "model"), ("model", "data")),
    "linen, logical": lambda: linen(
        nn.with_logical_partitioning, ("embed", "mlp"), ("mlp", "embed"), hidden=("batch", "mlp")
    ),
    "nnx": of_nnx,
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_written_for_fsdp_and_tensor_parallelism_trains_as_it_is(name):
    loss, params = CASES[name]()
    engine = zero2jax.Engine(
        loss, optax.sgd(0.1), zero2jax.make_mesh(data=4, model=2), stage=3, precision=FP32
    )
    rules = nn.logical_axis_rules(RULES) if "logical" in name else contextlib.nullcontext()
    with (
        rules,
        pytest.warns(UserWarning, match="'data' .a data axis") if name != "nnx" else contextlib.nullcontext(),
    ):
        state = engine.init(params)
        specs = {leaf.path: leaf.spec() for leaf in engine.layout.params.leaves if leaf.path.count("kernel")}
        assert list(specs.values()) == [jax.P("model", "data"), jax.P("data", "model")]  # down, up
        state, metrics = engine.step(state, X)
    value, grads = jax.value_and_grad(loss)(params, X)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    for after, before, grad in zip(*map(jax.tree.leaves, (engine.params(state), params, grads)), strict=True):
        np.testing.assert_allclose(after, before - 0.1 * grad, rtol=1e-6, atol=1e-6)


def plan_of(params, **axes):
    engine = zero2jax.Engine(lambda p, x: 0.0, optax.sgd(0.1), zero2jax.make_mesh(**axes))
    engine.abstract_state(params)
    return {leaf.path: leaf.model_spec for leaf in engine.layout.params.leaves}


def test_names_that_are_no_axes_are_dropped_with_a_notice_and_rules_of_a_box_count():
    _, params = linen(nn.with_logical_partitioning, ("embed", "mlp"), ("mlp", None))
    with pytest.warns(UserWarning, match=r"none called 'mlp' .of 'down/kernel'., 'embed' .of 'up/kernel'"):
        assert set(plan_of(params, data=4, model=2).values()) <= {(None,), (None, None)}
    assert set(plan_of(params, data=8).values()) <= {(None,), (None, None)}  # nothing to place on
    with_rules = lambda init, names: nn.with_logical_partitioning(init, names, rules=RULES)
    _, params = linen(with_rules, ("embed", "mlp"), ("mlp", None))
    assert plan_of(params, replica=2, data=2, model=2)["up/kernel/value"] == (None, "model")


def test_metadata_that_puts_an_axis_on_two_dims_is_an_error():
    _, params = linen(nn.with_partitioning, ("model", "model"), (None, None))
    with pytest.raises(
        ValueError, match=r"'up/kernel/value' .*'model' stands in it twice.*one dim of an array"
    ):
        plan_of(params, data=4, model=2)
