"""Each optimizer block against a NumPy statement of its update, five steps; the state shows the rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zero2jax.config.optimizers import make_optimizer
from zero2jax.config.reading import read_config
from zero2jax.config.values import ConfigWarning

STEPS = 5
SHAPES = {"kernel": (4, 6), "tall": (5, 3), "bias": (6,), "scale": ()}


def build(kind, scheduler=None, **params):
    raw = {"optimizer": {"type": kind, "params": params}}
    if scheduler is not None:
        raw["scheduler"] = scheduler
    config = read_config(raw)
    return make_optimizer(config.optimizer, config.scheduler)


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients():
    return [tree(seed) for seed in range(1, STEPS + 1)]


def run(tx):
    params = jax.tree.map(jnp.asarray, tree(0))
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in gradients():
        params, state = step(params, state, grads)
    return params, state


def run_numpy(update):
    """`update(param, grad, memory, t)` in float64 per leaf; `memory` is a dict of its own."""
    params = {name: value.astype(np.float64) for name, value in tree(0).items()}
    memory = {name: {} for name in params}
    for t, grads in enumerate(gradients(), start=1):
        for name in params:
            params[name] = update(params[name], grads[name].astype(np.float64), memory[name], t)
    return params


def assert_same(tx, update, rtol=1e-5):
    """float32 against float64: some 10 roundings per step of values of order 1."""
    found, _ = run(tx)
    expected = run_numpy(update)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=2e-6, err_msg=name)


def moments(grad, memory, b1, b2):
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * grad
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * grad**2
    return memory["m"], memory["v"]


@pytest.mark.parametrize(
    ("kind", "decoupled", "corrected"),
    [("Adam", True, True), ("adamw", True, False), ("Adam", False, True), ("Adam", False, False)],
)
def test_adam(kind, decoupled, corrected):
    lr, b1, b2, eps, decay = 1e-2, 0.8, 0.95, 1e-3, 0.1

    def update(p, g, memory, t):
        g = g if decoupled else g + decay * p
        m, v = moments(g, memory, b1, b2)
        if corrected:
            m, v = m / (1 - b1**t), v / (1 - b2**t)
        direction = m / (np.sqrt(v) + eps)
        return p - lr * (direction + (decay * p if decoupled else 0.0))

    tx = build(
        kind,
        lr=lr,
        betas=[b1, b2],
        eps=eps,
        weight_decay=decay,
        adam_w_mode=decoupled,
        bias_correction=corrected,
    )
    assert_same(tx, update)


@pytest.mark.parametrize("mode", [None, False, True])
def test_adamw_decouples_weight_decay_whatever_adam_w_mode_says(mode):
    """From 2.0 with a positive gradient: 2 - 0.1 * (1 + 0.5 * 2)."""
    tx = build("AdamW", lr=0.1, weight_decay=0.5, **({} if mode is None else {"adam_w_mode": mode}))
    params = {"w": jnp.full(3, 2.0)}
    updates, _ = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    np.testing.assert_allclose(params["w"] + updates["w"], 1.8, rtol=1e-6)


def test_adam_without_adam_w_mode_adds_weight_decay_to_the_gradient():
    tx = build("Adam", lr=0.1, weight_decay=0.5, adam_w_mode=False)
    params = {"w": jnp.full(3, 2.0)}
    updates, _ = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    np.testing.assert_allclose(params["w"] + updates["w"], 1.9, rtol=1e-6)


def test_adam_defaults_are_deepspeeds():
    def update(p, g, memory, t):
        m, v = moments(g, memory, 0.9, 0.999)
        return p - 1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    assert_same(build("Adam"), update)


@pytest.mark.parametrize(
    ("inside", "corrected", "low", "high"),
    [(True, True, 0.01, 10.0), (False, True, 0.5, 0.9), (True, False, 0.5, 0.9), (False, False, 0.01, 10.0)],
)
def test_lamb(inside, corrected, low, high):
    lr, b1, b2, eps, decay = 1e-2, 0.9, 0.99, 1e-3, 0.05

    def update(p, g, memory, t):
        m, v = moments(g, memory, b1, b2)
        if corrected:
            m, v = m / (1 - b1**t), v / (1 - b2**t)
        direction = m / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps) + decay * p
        sizes = np.linalg.norm(p), np.linalg.norm(direction)
        ratio = np.clip(sizes[0] / sizes[1], low, high) if min(sizes) > 0 else 1.0
        return p - lr * ratio * direction

    tx = build(
        "Lamb",
        lr=lr,
        betas=[b1, b2],
        eps=eps,
        weight_decay=decay,
        eps_inside_sqrt=inside,
        bias_correction=corrected,
        min_coeff=low,
        max_coeff=high,
    )
    assert_same(tx, update)


def test_lamb_leaves_zero_params_at_ratio_one():
    tx = build("Lamb", lr=1.0)
    params = {"w": jnp.zeros(3)}
    updates, _ = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -1.0, rtol=1e-5)


@pytest.mark.parametrize("betas", [None, [0.95, 0.98]])
def test_lion(betas):
    b1, b2 = betas or (0.9, 0.999)
    lr, decay = 1e-2, 0.1

    def update(p, g, memory, t):
        m = memory.get("m", 0.0)
        memory["m"] = b2 * m + (1 - b2) * g
        return p - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * p)

    assert_same(build("Lion", lr=lr, weight_decay=decay, **({"betas": betas} if betas else {})), update)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad(decay):
    def update(p, g, memory, t):
        g = g + decay * p
        memory["s"] = memory.get("s", 0.0) + g**2
        return p - 1e-2 * g / (np.sqrt(memory["s"]) + 1e-10)

    assert_same(build("Adagrad", weight_decay=decay), update)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(momentum, nesterov):
    def update(p, g, memory, t):
        g = g + 0.1 * p
        memory["b"] = momentum * memory.get("b", 0.0) + g
        return p - 1e-2 * (g + momentum * memory["b"] if nesterov else memory["b"])

    assert_same(build("SGD", lr=1e-2, momentum=momentum, nesterov=nesterov, weight_decay=0.1), update)


def newton_schulz(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def test_muon_on_matrices_and_adam_on_the_rest():
    def update(p, g, memory, t):
        if p.ndim != 2:
            m, v = moments(g, memory, 0.9, 0.95)
            direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-10)
            return p - 1e-3 * (direction + 0.1 * p)
        memory["m"] = 0.95 * memory.get("m", 0.0) + 0.05 * g
        direction = newton_schulz(0.05 * g + 0.95 * memory["m"]) * max(1.0, p.shape[1] / p.shape[0]) ** 0.5
        return p - 0.02 * (direction + 0.1 * p)

    # Five polynomial steps of degree five amplify the rounding of the small singular values.
    assert_same(build("Muon", adam_lr=1e-3, weight_decay=0.1), update, rtol=1e-4)


def test_muon_takes_the_leaves_it_is_told_as_stacks_of_matrices():
    config = read_config({"optimizer": {"type": "Muon", "params": {"lr": 1.0}}})
    tx = make_optimizer(config.optimizer, use_muon=lambda path, leaf: path.endswith("kernel"))
    params = {"layers": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))}}
    grads = {"layers": {"kernel": jax.random.normal(jax.random.key(0), (2, 3, 4)), "bias": jnp.ones((2, 4))}}
    updates, _ = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)
    # Nesterov on a first gradient g: 0.05 g + 0.95 * 0.05 g, a multiple of g.
    expected = np.stack([newton_schulz(np.asarray(g)) for g in grads["layers"]["kernel"]]) * (4 / 3) ** 0.5
    np.testing.assert_allclose(updates["layers"]["kernel"], -expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(updates["layers"]["bias"], -1.0, rtol=1e-5)


ALL = ["Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon"]


@pytest.mark.parametrize("kind", ALL)
def test_state_is_stable_and_shows_the_learning_rate(kind):
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    tx = build(kind, scheduler)
    params = jax.tree.map(jnp.asarray, tree(0))
    state = jax.jit(tx.init)(params)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    update, rates = jax.jit(tx.update), []
    for grads in gradients():
        _, state = update(jax.tree.map(jnp.asarray, grads), state, params)
        rates.append(float(state.hyperparams["learning_rate"]))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    # it = -1, 0, 1, 2, 3 of a warm-up over 4 steps to 0.5
    assert rates == [0.0, 0.0, 0.125, 0.25, 0.375]


def test_one_cycle_moves_b1_and_sets_b2():
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    tx = build("Adam", {"type": "OneCycle", "params": cycle}, betas=[0.5, 0.6])
    params = jax.tree.map(jnp.asarray, tree(0))
    state = jax.jit(tx.init)(params)
    update, seen = jax.jit(tx.update), []
    for _ in range(4):
        _, state = update(params, state, params)
        seen.append(float(state.hyperparams["b1"]))
    np.testing.assert_allclose(seen, [0.9, 0.875, 0.85, 0.825], rtol=1e-6)
    nu = state.inner_state[0].nu["bias"]
    np.testing.assert_allclose(nu, (1 - 0.99**4) * params["bias"] ** 2, rtol=1e-4)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Muon"])
def test_one_cycle_without_betas_warns_that_momentum_stays(kind):
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}}
    with pytest.warns(ConfigWarning, match="cycle_momentum has no effect"):
        build(kind, scheduler)


def test_adam_block_is_optax_adamw():
    reference, _ = run(optax.adamw(1e-3, weight_decay=0.01))
    found, _ = run(build("AdamW", weight_decay=0.01))
    for name in reference:
        np.testing.assert_allclose(found[name], reference[name], rtol=2e-7, atol=1e-8)
