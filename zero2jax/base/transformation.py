"""What the engine asks of an optax transformation. Nothing here knows which optimizer it is."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero2jax.base.pytrees import PyTree, path_string


def checked_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` with support for extra arguments.

    Raises:
      TypeError: it is not an optax transformation.
      ValueError: it is `optax.MultiSteps`, which would run the optimizer, and gather, on every microbatch.
    """
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(_MULTI_STEPS)
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"reading the optimizer: found {type(tx).__name__}, expected an optax.GradientTransformation such as "
            f"optax.adamw(3e-4)."
        )
    return optax.with_extra_args_support(tx)


def refuse_multi_steps(opt_state: PyTree) -> None:
    """Raise a ValueError if an optimizer state (shapes are enough) holds one of `optax.MultiSteps`."""
    is_multi = lambda x: isinstance(x, optax.MultiStepsState)
    if any(is_multi(x) for x in jax.tree.leaves(opt_state, is_leaf=is_multi)):
        raise ValueError(_MULTI_STEPS)


_MULTI_STEPS = (
    "reading the optimizer: it contains optax.MultiSteps, which updates on every microbatch and keeps full "
    "accumulators. The step accumulates by itself, in shards: pass the inner transformation, and set "
    "num_microbatches (`gradient_accumulation_steps` in a DeepSpeed JSON) with the batch of the step. Around "
    "zero2jax.shard_optimizer, optax.MultiSteps may go on the outside."
)


class MissingArgumentsError(ValueError):
    """An optimizer needs arguments that nobody has given.

    Attributes:
      names: of these arguments.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


def update(
    tx: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """`tx.update` with the arguments that the caller has given, and those of the offered ones that it takes. Traced.

    A transformation does not tell which arguments it takes: a chain takes any and hands them to each of its parts, and
    a line search refuses what it does not know. So it is asked: first with `value` alone, as most that look at anything
    look at the loss, then without what its error refuses, and with what its error asks for.

    Args:
      tx: the transformation.
      grads: gradients; as `opt_state` and `params`, global arrays of true shape.
      opt_state: its state.
      params: trainable parameters.
      given: arguments for it, by name.
      offered: what else it may have: `value`, the loss; `grad`, its gradient; `value_fn`, `obj_fn`: the loss of other
        parameters; `grad_fn`, its gradient.

    Raises:
      MissingArgumentsError: it needs an argument that nobody has given.
    """
    chosen = {"value"} & offered.keys()
    for _ in range(2 * len(offered)):
        args = {name: offered[name] for name in chosen} | dict(given)
        try:
            return tx.update(grads, opt_state, params, **args)
        except (TypeError, ValueError) as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is not None:
                changed = chosen - {refused[1]}
            else:
                wanted = re.search(r"missing|must be provided|required", str(error)) is not None
                asked = [name for name in offered if re.search(rf"\b{name}\b", str(error))]
                changed = chosen | {*asked} if wanted else chosen
            missing = re.search(
                r"missing \d+ required (?:keyword-only|positional) arguments?: (.*)", str(error)
            )
            if changed == chosen and missing is not None:
                raise MissingArgumentsError(
                    f"updating by the optimizer: it needs the arguments {missing[1]}, and the step has "
                    f"{sorted({*offered, *given})}. Pass arrays by engine.step(state, batch, name=array). A function "
                    f"of your own cannot be passed: keep your own jitted step, and shard the state of the optimizer by "
                    f"zero2jax.shard_optimizer.",
                    tuple(re.findall(r"\w+(?=')", missing[1])),
                ) from error
            if changed == chosen:
                raise
            chosen = changed
    raise AssertionError("each turn takes or leaves an argument")


def takes_gradients(tx: optax.GradientTransformationExtraArgs, opt_state: PyTree, params: PyTree) -> bool:
    """Whether an update takes gradients at other parameters than its own, as line searches do; from shapes.

    False where it cannot be told, since the update asks for what only a step is given.
    """
    taken = []

    @jax.custom_vjp
    def value_fn(params: PyTree) -> jax.Array:
        return jnp.float32(0)

    def forward(params: PyTree) -> tuple[jax.Array, PyTree]:
        taken.append(True)
        return jnp.float32(0), params

    value_fn.defvjp(forward, lambda params, _: (jax.tree.map(jnp.zeros_like, params),))

    def traced(opt_state: PyTree, params: PyTree) -> PyTree:
        grad_fn = lambda params, *_: jax.grad(value_fn)(params)
        functions = {"value_fn": value_fn, "obj_fn": value_fn, "grad_fn": grad_fn}
        offered = {"value": jnp.float32(0), "grad": params, **functions}
        return update(tx, params, opt_state, params, given={}, offered=offered)

    with contextlib.suppress(KeyError, TypeError, ValueError):  # the step says what it lacks
        jax.eval_shape(traced, opt_state, params)
    return bool(taken)


def learning_rate(opt_state: PyTree) -> jax.Array | None:
    """The learning rate that the optimizer's state shows (`optax.inject_hyperparams`), float32 scalar; None if none.

    Where several are shown (one per group), the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if path_string(path).endswith("hyperparams/learning_rate"):
            return jnp.asarray(leaf, jnp.float32)
    return None


class ConfiguredTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A transformation whose numbers (a learning rate) stand in a configuration: they count after a restore."""


def kept_numbers(opt_state: PyTree) -> dict[str, jax.Array]:
    """The numbers that `optax.inject_hyperparams` keeps as state, by name; not those that follow a schedule."""
    leaves = {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)}
    kept = {}
    for name, leaf in leaves.items():
        before, found, number = f"/{name}".rpartition("/hyperparams/")
        schedule = f"{before}/hyperparams_states/{number}".lstrip("/")
        if found and not any(other == schedule or other.startswith(f"{schedule}/") for other in leaves):
            kept[name] = leaf
    return kept
