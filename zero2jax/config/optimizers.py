"""The `optimizer` block as an optax transformation, with DeepSpeed's defaults and placement of eps.

Outside `shard_map`, on global arrays, like any optax optimizer. Built with `optax.inject_hyperparams`, so the
state's `hyperparams["learning_rate"]` is the rate the last update used; a skipped step keeps the old state
and so does not advance the schedule. A restored state gets the numbers of the block (`ConfiguredTransformation`), not
those of the run that saved it. Where optax has the update it is optax's (Adam, Lion, SGD); Lamb's
clamped trust ratio, Adagrad's eps outside the root, Adam without bias correction and Muon, whose momentum
optax corrects and DeepSpeed does not, are written here. Muon: Keller Jordan 2024, five Newton-Schulz steps,
in the dtype of the gradient (DeepSpeed runs them in 16 bits).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero2jax.base.pytrees import LeafPredicate, PyTree, select_leaves
from zero2jax.base.transformation import ConfiguredTransformation
from zero2jax.config.params import AdagradParams, AdamParams, LambParams, LionParams, MuonParams, SGDParams
from zero2jax.config.schedules import make_momentum_schedule, make_schedule
from zero2jax.config.schema import OptimizerBlock, SchedulerBlock
from zero2jax.config.values import warn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MUON_LR, _MUON_ADAM_LR = 0.02, 3e-4
_Maker = Callable[..., optax.GradientTransformation]
# DeepSpeed's OneCycle sets the second beta too.
_CYCLED_B2 = 0.99


def make_optimizer(
    optimizer: OptimizerBlock,
    scheduler: SchedulerBlock | None = None,
    *,
    use_muon: LeafPredicate | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optax transformation of an `optimizer` block, driven by the `scheduler` block.

    Args:
      optimizer: type and parameters.
      scheduler: sets the learning rate, and for OneCycle the momentum of Adam, Lamb and Lion.
      use_muon: which leaves get Muon's matrix update, `(path, leaf) -> bool`; the others get Adam. All dims but
        the last two are a batch of matrices, as in a scanned stack. Default: the leaves with two dims.

    Returns:
      `update` needs `params`. State: `optax.InjectStatefulHyperparamsState`.

    >>> from zero2jax.config.reading import load_config
    >>> config = load_config({"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})
    >>> state = make_optimizer(config.optimizer).init({"w": jnp.ones(2)})
    >>> float(state.hyperparams["learning_rate"])
    0.25
    """
    params = optimizer.params
    if isinstance(params, MuonParams):
        return _make_muon(params, scheduler, use_muon)
    learning_rate = make_schedule(scheduler, params.lr)
    momentum = make_momentum_schedule(scheduler)
    make = next(make for cls, make in _MAKERS.items() if isinstance(params, cls))
    if isinstance(params, (AdagradParams, SGDParams)):
        _note_constant_momentum(optimizer.type, momentum)
        return _inject(lambda learning_rate: make(params, learning_rate))(learning_rate=learning_rate)
    b1, b2 = params.betas
    if momentum is None:
        return _inject(lambda learning_rate: make(params, learning_rate, b1, b2))(learning_rate=learning_rate)
    cycled = _inject(lambda learning_rate, b1: make(params, learning_rate, b1, _CYCLED_B2))
    return cycled(learning_rate=learning_rate, b1=momentum)


def _inject(factory: Callable[..., Any]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    injected = optax.inject_hyperparams(factory)
    return lambda **hyperparams: ConfiguredTransformation(*injected(**hyperparams))


def _note_constant_momentum(kind: str, momentum: optax.Schedule | None) -> None:
    if momentum is not None:
        message = f"scheduler.params.cycle_momentum has no effect: {kind} has no betas to cycle."
        warn(message)


def _decay(weight_decay: float) -> optax.GradientTransformation:
    return optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()


def _adam(params: AdamParams, learning_rate: Any, b1: Any, b2: float) -> optax.GradientTransformation:
    if params.bias_correction:
        moments = optax.scale_by_adam(b1, b2, params.eps)
    else:
        moments = _scale_by_uncorrected_adam(b1, b2, params.eps, inside_sqrt=False)
    decay = _decay(params.weight_decay)
    parts = (moments, decay) if params.decoupled else (decay, moments)
    return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))


def _lamb(params: LambParams, learning_rate: Any, b1: Any, b2: float) -> optax.GradientTransformation:
    inside = params.eps_inside_sqrt
    if not params.bias_correction:
        moments = _scale_by_uncorrected_adam(b1, b2, params.eps, inside_sqrt=inside)
    elif inside:
        moments = optax.scale_by_adam(b1, b2, eps=0.0, eps_root=params.eps)
    else:
        moments = optax.scale_by_adam(b1, b2, params.eps)
    ratio = _scale_by_clamped_trust_ratio(params.min_coeff, params.max_coeff)
    return optax.chain(
        moments, _decay(params.weight_decay), ratio, optax.scale_by_learning_rate(learning_rate)
    )


def _lion(params: LionParams, learning_rate: Any, b1: Any, b2: float) -> optax.GradientTransformation:
    return optax.lion(learning_rate, b1, b2, weight_decay=params.weight_decay)


def _adagrad(params: AdagradParams, learning_rate: Any) -> optax.GradientTransformation:
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(_decay(params.weight_decay), _scale_by_adagrad(params.eps), rate)


def _sgd(params: SGDParams, learning_rate: Any) -> optax.GradientTransformation:
    momentum = params.momentum if params.momentum else None
    sgd = optax.sgd(learning_rate, momentum, params.nesterov)
    return optax.chain(_decay(params.weight_decay), sgd)


_MAKERS: dict[type, _Maker] = {
    AdamParams: _adam,
    LambParams: _lamb,
    LionParams: _lion,
    AdagradParams: _adagrad,
    SGDParams: _sgd,
}


def _scale_by_uncorrected_adam(
    b1: Any, b2: float, eps: float, *, inside_sqrt: bool
) -> optax.GradientTransformation:
    """Adam's direction without the correction for moments that start at zero."""

    def init(params: PyTree) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, optax.tree.zeros_like(params))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, optax.ScaleByAdamState]:
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1.0 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1.0 - b2) * g * g, state.nu, grads)
        inner, outer = (eps, 0.0) if inside_sqrt else (0.0, eps)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + inner) + outer), mu, nu)
        return updates, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)


def _scale_by_clamped_trust_ratio(low: float, high: float) -> optax.GradientTransformation:
    """Multiply each leaf by |param| / |update| clamped to [low, high]; by 1 where either norm is 0."""

    def scaled(update: jax.Array, param: jax.Array) -> jax.Array:
        param_norm = jnp.sqrt(jnp.sum(param * param))
        update_norm = jnp.sqrt(jnp.sum(update * update))
        both = (param_norm > 0) & (update_norm > 0)
        ratio = jnp.clip(param_norm / jnp.where(both, update_norm, 1.0), low, high)
        return update * jnp.where(both, ratio, 1.0)

    return optax.stateless(lambda updates, params: jax.tree.map(scaled, updates, params))


class AdagradState(NamedTuple):
    """`sum_of_squares`: like params, sum of the squared gradients so far."""

    sum_of_squares: PyTree


def _scale_by_adagrad(eps: float) -> optax.GradientTransformation:
    def init(params: PyTree) -> AdagradState:
        return AdagradState(optax.tree.zeros_like(params))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, AdagradState]:
        del params
        total = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, grads)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), grads, total), AdagradState(total)

    return optax.GradientTransformation(init, update)


class MuonState(NamedTuple):
    """`momentum`: like params, running mean of the gradients."""

    momentum: PyTree


def _scale_by_muon(beta: float) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised; kernels are (in, out), so out > in scales up by sqrt(out / in)."""

    def init(params: PyTree) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        momentum = jax.tree.map(lambda m, g: beta * m + (1.0 - beta) * g, state.momentum, grads)
        ahead = jax.tree.map(lambda m, g: beta * m + (1.0 - beta) * g, momentum, grads)
        scale = lambda x: orthogonalize(x) * max(1.0, x.shape[-1] / x.shape[-2]) ** 0.5
        return jax.tree.map(scale, ahead), MuonState(momentum)

    return optax.GradientTransformation(init, update)


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """The matrices (..., m, n) with singular values pushed towards 1 by five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT  # (..., k, k) with k = min(m, n)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _make_muon(
    params: MuonParams, scheduler: SchedulerBlock | None, use_muon: LeafPredicate | None
) -> optax.GradientTransformationExtraArgs:
    _note_constant_momentum("muon", make_momentum_schedule(scheduler))
    chosen = use_muon or (lambda path, leaf: leaf.ndim == 2)

    def labels(tree: PyTree) -> PyTree:
        flags = select_leaves(tree, chosen, default=False, name="use_muon")
        return jax.tree.unflatten(jax.tree.structure(tree), ["muon" if flag else "adam" for flag in flags])

    def factory(learning_rate: Any, adam_learning_rate: Any) -> optax.GradientTransformation:
        decay = _decay(params.weight_decay)
        rate = optax.scale_by_learning_rate(learning_rate)
        adam = AdamParams(betas=params.betas, eps=params.eps, weight_decay=params.weight_decay)
        others = _adam(adam, adam_learning_rate, *params.betas)
        return optax.partition(
            {"muon": optax.chain(_scale_by_muon(params.momentum), decay, rate), "adam": others}, labels
        )

    first = next(lr for lr in (params.muon_lr, params.lr, _MUON_LR) if lr is not None)
    second = next(lr for lr in (params.adam_lr, params.lr, _MUON_ADAM_LR) if lr is not None)
    return _inject(factory)(
        learning_rate=make_schedule(scheduler, first), adam_learning_rate=make_schedule(scheduler, second)
    )
