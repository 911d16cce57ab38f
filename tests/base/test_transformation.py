"""Which arguments the update of an optax transformation gets: against plain optax on one device.

Tolerances: fp32 sums over 12 examples and 3 devices in another order, a few units of 2**-24 of addends below 10; a line
search, a sign and a normalized direction pass them on. RTOL and ATOL leave room for three steps of about 0.1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_close, make_engine, train

RTOL = ATOL = 5e-6
PARAMS = {
    "w": jnp.linspace(-1, 1, 10, dtype=jnp.float32).reshape(5, 2),
    "b": jnp.ones(2),
}
BATCHES = list(np.random.default_rng(0).normal(size=(3, 12, 5)).astype(np.float32))


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) + params["b"][None] - 0.5) ** 2)


def _sam(**settings):
    normalized = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), normalized, sync_period=2, **settings)


ASKING = {  # and the arguments that each has in plain optax
    "sam": (_sam, ()),
    "chain of sam": (lambda: optax.chain(optax.clip(1.0), _sam()), ()),
    "sam, opaque": (lambda: _sam(opaque_mode=True), ("grad_fn",)),
    "lbfgs": (optax.lbfgs, ("value", "grad", "value_fn")),
    "backtracking": (
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
        ("value", "grad", "value_fn"),
    ),
    "polyak": (optax.polyak_sgd, ("value",)),
    "sophia": (lambda: optax.chain(optax.clip(1.0), optax.contrib.sophia(1e-2)), ("obj_fn",)),
}


def _plain_steps(tx, asked, batches, times=1):
    """Final parameters and losses on one device, `tx.update` called as its documentation says."""

    @jax.jit
    def step(params, opt_state, batch):
        loss = functools.partial(loss_fn, batch=batch)
        value, grad = jax.value_and_grad(loss)(params)
        grad_fn = lambda params, i: jax.grad(loss)(params)
        known = {"value": value, "grad": grad, "value_fn": loss, "obj_fn": loss, "grad_fn": grad_fn}
        grads, args = optax.tree.scale(times, grad), {name: known[name] for name in asked}
        updates, opt_state = tx.update(grads, opt_state, params, **args)
        return optax.apply_updates(params, updates), opt_state, value

    params, losses = PARAMS, []
    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return params, losses


@functools.cache
def _asked(name):
    make, asked = ASKING[name]
    return _plain_steps(make(), asked, BATCHES)


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (1, 2), (2, 2), (3, 1)])
def test_an_optimizer_gets_the_arguments_that_it_takes_and_no_others(
    name, stage, num_shards, num_microbatches
):
    """Functions of the parameters too: the loss of the same batch, its gradient made as the stage makes it."""
    engine = make_engine(
        num_shards, loss_fn=loss_fn, tx=ASKING[name][0](), stage=stage, num_microbatches=num_microbatches
    )
    state, metrics = train(engine, engine.init(PARAMS), BATCHES)
    params, losses = _asked(name)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)


def test_a_line_search_sees_the_mean_loss_where_gradients_are_summed():
    """The direction is N times the gradient; value, gradient and function that the search looks at are of the mean."""
    search = lambda: optax.chain(optax.scale(-1.0), optax.scale_by_zoom_linesearch(15))
    engine = make_engine(2, loss_fn=loss_fn, tx=search(), reduction="sum")
    state, metrics = train(engine, engine.init(PARAMS), BATCHES)
    params, losses = _plain_steps(search(), ("value", "grad", "value_fn"), BATCHES, times=2)
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=RTOL)
    assert_trees_close(engine.params(state), params, rtol=RTOL, atol=ATOL)


def test_an_argument_that_nobody_has_is_asked_for_by_name():
    def update(updates, state, params=None, *, curvature, **extra_args):
        return jax.tree.map(lambda g: -curvature * g, updates), state

    tx = optax.chain(
        optax.clip(1.0), optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    )
    engine = make_engine(2, loss_fn=loss_fn, tx=tx)
    state = engine.init(PARAMS)
    match = r"needs the arguments 'curvature'.*step\(state, batch, name=array\).*zero2jax\.shard_optimizer"
    with pytest.raises(ValueError, match=match):
        engine.step(state, BATCHES[0])
    engine.step(state, BATCHES[0], curvature=jnp.float32(1))  # nothing was donated
