"""What a `jax.checkpoint` saves, by name: a policy from a word, a mapping of tensor names, or several of them.

Pure functions over primitives; no array is touched. A policy is what `jax.checkpoint(policy=...)` takes: a function
of a primitive and its parameters that says save, recompute or offload. Words:

  jax's own      every name in `jax.checkpoint_policies` that needs no argument, and short ones: `nothing`,
                 `everything`, `dots`, `dots_no_batch`, `offload_dots` (to pinned host memory)
  trainers'      `full` recomputes everything; `minimal` recomputes all but products of activations with weights;
                 `save_attention_output`, `save_qkv`, `save_projections`, `save_attention_and_projections` and
                 `offload_projections` name tensors of `TENSORS`
  `nested`       square root of L segments of layers, each layer recomputed once more inside its segment; it needs to
                 see the layers, so only `remat_layers` (and `Engine`) can act on it

A tensor has a name if the model says `jax.ad_checkpoint.checkpoint_name(x, "attention")`. `TENSORS` are the names that
the example model uses; other models choose their own and pass a mapping `{"name": "save" | "recompute" | "offload"}`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from zero2jax.base.names import did_you_mean

Policy = Callable[..., Any]
PolicyLike = str | Mapping[str, str] | Sequence["PolicyLike"] | Policy
"""A word, a mapping of tensor names to actions, several policies of which any may save, or a policy of jax's kind."""

NESTED = "nested"
ACTIONS = ("save", "recompute", "offload")
TENSORS = {
    "qkv_proj": "queries, keys and values, as projected",
    "attention": "what attention returns, before the output projection",
    "out_proj": "the output projection of attention",
    "up_proj": "the hidden units of the MLP, before the nonlinearity",
    "down_proj": "what the MLP adds to the residual",
}
"""Tensor names of the example model, and what they hold."""

_PROJECTIONS = ("qkv_proj", "out_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class TensorPolicy:
    """Save or offload tensors by their `checkpoint_name`, recompute all others. Hashable, as jax needs it.

    Attributes:
      saved: names of tensors to keep on the device.
      offloaded: names of tensors to keep in pinned host memory.
      recomputed: names that are recomputed, as all others are; named to be checked.
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every name that must be in the model."""
        return (*self.saved, *self.offloaded, *self.recomputed)

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """What jax does with the result of a primitive."""
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return policy(primitive, *args, **params)


@dataclasses.dataclass(frozen=True)
class Either:
    """The first of several policies that does not recompute decides. Takes offload policies, too.

    (`jax.checkpoint_policies.save_from_both_policies` takes policies that answer with a boolean only.)
    """

    policies: tuple[Policy, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every name that must be in the model."""
        return tuple(name for policy in self.policies for name in tensors_of(policy))

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """What jax does with the result of a primitive."""
        answers = (policy(primitive, *args, **params) for policy in self.policies)
        return next((a for a in answers if not _recomputes(a)), False)


_RECOMPUTE = TensorPolicy()(None)  # jax's own word for it


def _recomputes(answer: Any) -> bool:
    return answer is False or answer is None or isinstance(answer, type(_RECOMPUTE))


def _words() -> dict[str, Policy]:
    own = jax.checkpoint_policies
    words: dict[str, Policy] = {
        "nothing": own.nothing_saveable,
        "full": own.nothing_saveable,
        "everything": own.everything_saveable,
        "dots": own.dots_saveable,
        "dots_no_batch": own.dots_with_no_batch_dims_saveable,
        "minimal": own.dots_with_no_batch_dims_saveable,
        "offload_dots": own.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "save_attention_output": TensorPolicy(saved=("attention",)),
        "save_qkv": TensorPolicy(saved=("qkv_proj",)),
        "save_projections": TensorPolicy(saved=_PROJECTIONS),
        "save_attention_and_projections": TensorPolicy(saved=("attention", *_PROJECTIONS)),
        "offload_projections": TensorPolicy(offloaded=_PROJECTIONS),
    }
    for name in ("nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots"):
        words[name] = getattr(own, name)
    for name in ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"):
        words[name] = getattr(own, name)
    return words


WORDS: Mapping[str, Policy] = _words()
"""Every word but `nested`, and its policy."""


def remat_policy(policy: PolicyLike) -> Policy:
    """The policy for `jax.checkpoint` (and `nnx.remat`, `nn.remat`) that a word or a mapping stands for.

    Args:
      policy: one of `WORDS`; a mapping from tensor names to "save", "recompute" or "offload"; a sequence of policies,
        of which the first that does not recompute decides; or a policy of jax's kind, which is returned as it is.

    Raises:
      ValueError: unknown word or action, with the nearest known one; `nested`, which needs to see the layers.

    Example:
      >>> remat_policy("dots") is jax.checkpoint_policies.dots_saveable
      True
      >>> remat_policy(["dots_no_batch", {"attention": "offload"}]).tensors
      ('attention',)
    """
    if isinstance(policy, str):
        if policy == NESTED:
            raise ValueError(
                "looking up the remat policy 'nested': it cuts a stack of layers into segments, so it needs the "
                "loss function. Use zero2jax.remat_layers or Engine(activations=...), or another policy here."
            )
        if policy not in WORDS:
            raise ValueError(
                f"looking up the remat policy {policy!r}: there is none of that name. "
                f"{did_you_mean(policy, known_words())} "
                f'A tensor is named in a mapping, as in {{"{policy}": "save"}}.'
            )
        return WORDS[policy]
    if isinstance(policy, Mapping):
        return _tensor_policy(policy)
    if callable(policy):
        return policy
    if not isinstance(policy, Sequence):
        raise ValueError(
            f"reading a remat policy: {policy!r} is none. Write a word ({', '.join(known_words()[:6])}, ...), a "
            f"mapping of tensor names, a sequence of these, or a policy of jax.checkpoint_policies."
        )
    if not policy:
        raise ValueError(
            "reading a remat policy: an empty sequence. Write 'nothing' to recompute everything."
        )
    return Either(tuple(remat_policy(p) for p in policy))


def known_words() -> tuple[str, ...]:
    """Every word that names a policy."""
    return (*WORDS, NESTED)


def _tensor_policy(actions: Mapping[str, str]) -> TensorPolicy:
    for name, action in actions.items():
        if action not in ACTIONS:
            raise ValueError(
                f"reading a remat policy: tensor {name!r} has the action {action!r}. "
                f"{did_you_mean(str(action), ACTIONS)}"
            )
    named = lambda wanted: tuple(name for name, action in actions.items() if action == wanted)
    return TensorPolicy(named("save"), named("offload"), named("recompute"))


def tensors_of(policy: Policy | None) -> tuple[str, ...]:
    """The tensor names that a policy counts on; none for a policy of jax's own."""
    return tuple(getattr(policy, "tensors", ()))


def check_tensors(policy: Policy | None, known: Iterable[str], where: str) -> None:
    """Raise an error if a policy names a tensor that is not among `known`, those of the function `where`.

    Raises:
      ValueError: names the nearest known tensor.
    """
    names = sorted(set(known))
    for name in tensors_of(policy):
        if name not in names:
            raise ValueError(
                f"applying a remat policy to {where}: it names the tensor {name!r}, and there is none of that name. "
                f"{did_you_mean(name, names)} Tensors are named by jax.ad_checkpoint.checkpoint_name(x, name)."
            )
