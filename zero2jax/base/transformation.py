"""What the engine asks of an optax transformation. Nothing here knows which optimizer it is."""

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
