"""Which leaf of a checkpoint goes to which leaf of the state, by name, and a list of all that does not fit.

Pure Python over names, shapes and dtypes.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.base.names import nearest
from zero2jax.base.pytrees import LeafPredicate
from zero2jax.checkpoints.format import Checkpoint, CheckpointError, SavedLeaf
from zero2jax.checkpoints.state_leaves import StateLeaf, default_key_impl

Selection = str | Sequence[str] | LeafPredicate
"""Prefixes of leaf names (`"params"`, `"params/blocks"`), or a predicate `(name, leaf) -> bool`."""

_SHOWN = 8  # leaves named per kind of difference


class CheckpointWarning(UserWarning):
    """A leaf was converted on its way from a checkpoint, or brought another learning rate than the engine's."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a checkpoint has for one leaf of the state.

    Attributes:
      leaf: the leaf of the state.
      is_selected: whether it is to come from the checkpoint; the others come from `into`.
      source: the leaf of the checkpoint that goes there, if it is selected and there is one.
    """

    leaf: StateLeaf
    is_selected: bool
    source: SavedLeaf | None

    @property
    def agrees(self) -> bool:
        """Whether shapes agree, and dtypes do or can be converted; True without a source."""
        if self.source is None:
            return True
        source, leaf = self.source, self.leaf
        if leaf.is_key or source.key_impl:  # the dims of the key data are the last
            kind = source.key_impl is not None and _key_dtype(source.key_impl) == leaf.rest.dtype
            dims = len(leaf.shape)
            return kind and source.shape[:dims] == leaf.shape and len(source.shape) == dims + 1
        floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (source.dtype, leaf.rest.dtype))
        return source.shape == leaf.shape and (floating or source.dtype == leaf.rest.dtype)

    @property
    def conversion(self) -> str:
        """`'params/w' (float32 to bfloat16)`, or nothing."""
        source, leaf = self.source, self.leaf
        if source is None or leaf.is_key or source.dtype == leaf.rest.dtype:
            return ""
        return f"{leaf.name!r} ({source.dtype} to {leaf.rest.dtype})"


def match_leaves(
    checkpoint: Checkpoint,
    leaves: Sequence[StateLeaf],
    *,
    select: Selection | None,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    strict: bool,
    has_into: bool,
) -> list[SavedLeaf | None]:
    """Per leaf of the state, the leaf of the checkpoint that goes there; None for one that is taken from `into`.

    Raises:
      CheckpointError: leaves are missing, left over, or of another shape or kind; lists them with shapes and dtypes.
        A prefix in `select` or `rename` matches no leaf.
    """
    doing = f"restoring {checkpoint.folder}"
    names = [leaf.name for leaf in leaves]
    check_prefixes(_prefixes(select), [*names, *checkpoint.leaves], doing, "select")
    check_prefixes(renamed_prefixes(rename), names, doing, "rename")
    chosen, source_name = _predicate(select), renamer(rename)

    def fit(leaf: StateLeaf) -> Fit:
        is_selected = bool(chosen(leaf.name, leaf))
        return Fit(leaf, is_selected, checkpoint.leaves.get(source_name(leaf.name)) if is_selected else None)

    fits = [fit(leaf) for leaf in leaves]
    used = {fit.source.name for fit in fits if fit.source is not None}
    unused = [leaf for name, leaf in checkpoint.leaves.items() if name not in used]
    left_over = [leaf for leaf in unused if strict and chosen(leaf.name, leaf)]
    _refuse(checkpoint, _missing(checkpoint, fits, has_into) if strict else [], left_over, fits)
    _check_keys(checkpoint, used)
    elsewhere = [fit.leaf.name for fit in fits if fit.source is None]
    if elsewhere and not has_into:
        raise CheckpointError(
            f"{doing}: {len(elsewhere)} leaves of the state do not come from it, {elsewhere[:_SHOWN]}. Pass the state "
            f"that is to give them, checkpointer.restore(engine, into=engine.init(...))."
        )
    converted = [fit.conversion for fit in fits if fit.conversion]
    if converted:
        more = f" and {len(converted) - _SHOWN} more" if len(converted) > _SHOWN else ""
        warnings.warn(
            f"{doing}: converted {', '.join(converted[:_SHOWN])}{more}.", CheckpointWarning, stacklevel=3
        )
    return [fit.source for fit in fits]


def _missing(checkpoint: Checkpoint, fits: Sequence[Fit], has_into: bool) -> list[str]:
    """The selected leaves that the checkpoint lacks, but for frozen ones that were left out and come from `into`."""
    missing = []
    for fit in fits:
        if fit.is_selected and fit.source is None:
            left_out = fit.leaf.trainable is False and checkpoint.info["frozen_saved"] is False
            if not left_out:
                missing.append(str(fit.leaf))
            elif not has_into:
                missing.append(f"{fit.leaf} (frozen, and frozen leaves were not saved)")
    return missing


def _refuse(
    checkpoint: Checkpoint, missing: Sequence[str], left_over: Sequence[SavedLeaf], fits: Sequence[Fit]
) -> None:
    """Raise an error that lists all that does not fit, and says what can be done about it."""
    different = [f"{fit.leaf}: the checkpoint has {fit.source}" for fit in fits if not fit.agrees]
    kinds = {
        "not in the checkpoint": missing,
        "only in the checkpoint": [str(leaf) for leaf in left_over],
        "of another shape or dtype": different,
    }
    if not any(kinds.values()):
        return
    lines = [f"restoring {checkpoint.folder}: it does not fit this engine."]
    for kind, described in kinds.items():
        lines += [f"  {kind}: {line}" for line in described[:_SHOWN]]
        if len(described) > _SHOWN:
            lines.append(f"  {kind}: and {len(described) - _SHOWN} more")
    raise CheckpointError("\n".join([*lines, _way_out(kinds)]))


def _way_out(kinds: Mapping[str, Sequence[str]]) -> str:
    missing, left_over, different = kinds.values()
    names = [line.strip("'") for line in (*missing, *left_over)]
    if not names:
        return (
            "The names agree, so these are other parameters: take what fits with select=, and the others from into=, "
            "as in checkpointer.restore(engine, into=engine.init(...), select=lambda name, leaf: ...)."
        )
    if different or not all(name.startswith("opt_state/") for name in names):
        return (
            "Names that changed go into rename=; select= takes a part; strict=False with into= passes over what is "
            "missing or left over."
        )
    if not left_over:
        return (
            "Only the optimizer's state lacks leaves, as for parameters that were frozen: "
            "checkpointer.restore(engine, strict=False, into=engine.init(...)) takes fresh ones there and keeps the "
            "others. If it was another optimizer, keep no state of it: select=('params', 'step', 'rng') and into=."
        )
    return (
        "Only the optimizer's state differs: it was another optimizer, or its parts stood in another order. Take that "
        "one, or keep a fresh one: checkpointer.restore(engine, select=('params', 'step', 'rng'), "
        "into=engine.init(...))."
    )


def _check_keys(checkpoint: Checkpoint, used: set[str]) -> None:
    impl = default_key_impl()
    if "rng" in used and checkpoint.info["rng_impl"] != impl:
        raise CheckpointError(
            f"restoring {checkpoint.folder}: its random keys are of {checkpoint.info['rng_impl']!r} and this program's "
            f"of {impl!r}. Set jax_default_prng_impl as in the run that saved."
        )


def check_containers(checkpoint: Checkpoint, containers: Mapping[str, str], taken: Sequence[str]) -> None:
    """Raise an error if the optimizer's state had other classes where leaves are taken from the checkpoint.

    Checkpoints of earlier versions do not record the classes.

    Raises:
      CheckpointError: names the classes that differ.
    """
    saved = checkpoint.info["containers"] or {}
    different = [
        f"{path!r} is {name} in this engine, {saved[path]} in the checkpoint"
        for path, name in containers.items()
        if saved.get(path, name) != name and any(_below(leaf, path) for leaf in taken)
    ]
    if different:
        raise CheckpointError(
            f"restoring {checkpoint.folder}: it was saved with another optimizer. Its state has the same names and "
            f"shapes, and another meaning: {'; '.join(different[:_SHOWN])}. Take that optimizer, keep a fresh state "
            f"with select=('params', 'step', 'rng') and into=, or restore it as it is with strict=False."
        )


def warn_of_other_numbers(
    folder: str, restored: Mapping[str, jax.Array], own: Mapping[str, jax.Array]
) -> None:
    """Warn of numbers of the optimizer (a learning rate) that the checkpoint brought and the engine has otherwise.

    Args:
      folder: of the checkpoint.
      restored: those that came from the checkpoint, by the name of the leaf; replicated, like `own`.
      own: those of the engine, by the same names.
    """
    pairs = {name: (np.asarray(x), np.asarray(own[name])) for name, x in restored.items()}
    other = [name for name, (x, mine) in pairs.items() if not np.array_equal(x, mine, equal_nan=True)]
    if other:
        said = "; ".join(f"{name} is {pairs[name][0]}, not {pairs[name][1]}" for name in other[:_SHOWN])
        warnings.warn(
            f"restoring {folder}: optax.inject_hyperparams keeps numbers as state, so the checkpoint's count and not "
            f"this engine's: {said}. To train by the engine's, give it a constant schedule (lambda count: value), or "
            f"restore with select=lambda name, leaf: name not in {other[:_SHOWN]} and into=engine.init(...).",
            CheckpointWarning,
            stacklevel=4,
        )


def _predicate(select: Selection | None) -> LeafPredicate:
    if select is None:
        return lambda name, leaf: True
    if callable(select):
        return select
    prefixes = _prefixes(select)
    return lambda name, leaf: any(_below(name, prefix) for prefix in prefixes)


def _prefixes(select: Selection | None) -> list[str]:
    if select is None or callable(select):
        return []
    return [select] if isinstance(select, str) else list(select)


def renamed_prefixes(rename: Mapping[str, str] | Callable[[str], str] | None) -> list[str]:
    """The prefixes of a mapping; none for a function."""
    return list(rename) if isinstance(rename, Mapping) else []


def check_prefixes(prefixes: Sequence[str], names: Sequence[str], doing: str, argument: str) -> None:
    """Raise an error if a prefix is above none of the names: it is misspelt, and would silently do nothing.

    Raises:
      CheckpointError: names the prefix, and the nearest names.
    """
    for prefix in prefixes:
        if not any(_below(name, prefix) for name in names):
            tops = sorted({"/".join(name.split("/")[: prefix.count("/") + 1]) for name in names})
            near = nearest(prefix, tops, count=3, cutoff=0.4) or tops[:_SHOWN]
            raise CheckpointError(
                f"{doing}: {argument} has {prefix!r}, and no leaf has this name or lies below it. Names begin with "
                f"their top, as in {near}."
            )


def renamer(rename: Mapping[str, str] | Callable[[str], str] | None) -> Callable[[str], str]:
    """A function of names, from a function, None (no change), or a mapping of names and of prefixes before a slash.

    Example:
      >>> renamer({"params/layers": "params/blocks"})("params/layers/w")
      'params/blocks/w'
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    prefixes = sorted(rename, key=len, reverse=True)

    def renamed(name: str) -> str:
        for prefix in prefixes:
            if _below(name, prefix):
                return rename[prefix] + name[len(prefix) :]
        return name

    return renamed


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip("/") + "/")


def _key_dtype(impl: str) -> object:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
