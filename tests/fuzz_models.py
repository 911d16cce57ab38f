"""The models of the random combinations: loss functions of few parameters, and what may be set for each of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import loss_cases
from flax import nnx
from flax_models import LinenModel, NnxModel
from jax.sharding import PartitionSpec as P

import zero2jax

WIDTH, LAYERS, HIDDEN = loss_cases.WIDTH, 3, 6


class Model(NamedTuple):
    """A loss function `(params, batch) -> scalar` or `(scalar, aux)` of rows `batch["x"]` or tokens `batch["tokens"]`.

    Fields:
      loss: the loss function.
      make_params: makes its parameters.
      is_mean: a mean over examples, so that the mean over equal slices of a batch is that of the batch.
      layers: how many layers an activation setting finds; 0 if none.
      specs: where its parameters may lie on a model axis of size 2.
      rounding: relative error of a gradient's addends: fp32, or fp16 where the loss casts to it.
    """

    loss: Callable[..., Any]
    make_params: Callable[[], Any]
    is_mean: bool = True
    layers: int = 0
    specs: Any = None
    rounding: float = 2**-24


def _keys(seed):
    return iter(jax.random.split(jax.random.key(seed), 100))


def _gated_params():
    keys = _keys(5)
    return {
        "down": 0.4 * jax.random.normal(next(keys), (LAYERS, HIDDEN, WIDTH)),
        "gate": 1 + 0.1 * jax.random.normal(next(keys), (LAYERS, HIDDEN)),
        "scale": jnp.ones(WIDTH),
        "up": 0.4 * jax.random.normal(next(keys), (LAYERS, WIDTH, HIDDEN)),
    }


def _gated(params, batch):
    def block(x, layer):
        return x + (jnp.tanh(x @ layer["up"]) * layer["gate"][None]) @ layer["down"], None

    stack = {name: params[name] for name in ("down", "gate", "up")}
    x, _ = jax.lax.scan(jax.checkpoint(block), batch["x"], stack)
    return ((x * params["scale"][None]) ** 2).mean()


_GATED_SPECS = {
    "down": P(None, "model"),
    "gate": P(None, "model"),
    "scale": None,
    "up": P(None, None, "model"),
}


def _unrolled_params():
    keys = _keys(6)
    return [
        (0.5 * jax.random.normal(next(keys), (WIDTH, WIDTH)), jnp.full(WIDTH, 0.1)) for _ in range(LAYERS)
    ]


def _unrolled(params, batch, wrap):
    x = batch["x"]
    for layer in params:
        x = wrap(lambda layer, x: x + jnp.tanh(x @ layer[0] + layer[1][None]))(layer, x)
    return (x**2).mean()


def _linen(scanned, remat):
    model = LinenModel(scanned, remat)
    loss = lambda params, batch: ((model.apply({"params": params}, batch["x"]) - 0.3) ** 2).mean()
    make = lambda: model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    return Model(loss, make, layers=LAYERS if scanned or remat else 0)


def _nnx(scanned, remat):
    split = lambda: nnx.split(NnxModel(scanned, remat, nnx.Rngs(0)), nnx.Param)
    graph, _ = split()
    loss = lambda params, batch: ((nnx.merge(graph, params)(batch["x"]) - 0.3) ** 2).mean()
    return Model(loss, lambda: split()[1], layers=LAYERS if scanned or remat else 0)


def _tokens(loss):
    return lambda params, batch: loss(params, batch["tokens"])


def _case(name):
    loss, params = loss_cases.CASES[name]
    return Model(
        lambda params, batch: loss(params, batch["x"]),
        lambda: params,
        is_mean=name
        not in ("scan_outputs", "index_from_the_batch", "cond", "checkpoint_in_cond", "mask_and_indices"),
        layers=_LAYERS_OF_CASES.get(name, 0),
        rounding=2**-11 if name in ("cast_before_scan", "deferred_into_checkpoint") else 2**-24,
    )


_LAYERS_OF_CASES = dict.fromkeys(
    [
        "scan",
        "scan_reverse_unrolled",
        "scan_of_checkpoint",
        "scan_of_checkpoint_saving_dots",
        "checkpoint_of_scan",
        "scan_const",
        "scan_over_several",
    ],
    loss_cases.LAYERS,
)

MODELS: dict[str, Callable[[], Model]] = {
    name: functools.partial(_case, name)
    for name in loss_cases.CASES
    if name != "reshaped"  # which wants two rows
} | {
    "network": lambda: Model(_tokens(helpers.mean_loss), helpers.make_params, layers=helpers.LAYERS),
    "weighted_network": lambda: Model(
        _tokens(helpers.weighted_loss), helpers.make_params, layers=helpers.LAYERS
    ),
    "gated": lambda: Model(_gated, _gated_params, layers=LAYERS, specs=_GATED_SPECS),
    "marked": lambda: Model(
        functools.partial(_unrolled, wrap=zero2jax.layer), _unrolled_params, layers=LAYERS
    ),
    "unrolled": lambda: Model(functools.partial(_unrolled, wrap=lambda f: f), _unrolled_params),
    "linen": lambda: _linen(False, False),
    "linen_remat": lambda: _linen(False, True),
    "linen_scanned": lambda: _linen(True, True),
    "nnx_remat": lambda: _nnx(False, True),
    "nnx_scanned": lambda: _nnx(True, False),
}
