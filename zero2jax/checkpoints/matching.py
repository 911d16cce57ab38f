"""Which leaf of a checkpoint goes to which leaf of the state, by name, and a list of all that does not fit.

Pure Python over names, shapes and dtypes.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

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
    names = [leaf.name for leaf in leaves]
    check_prefixes(
        _prefixes(select), [*names, *checkpoint.leaves], f"restoring {checkpoint.folder}", "select"
    )
    check_prefixes(renamed_prefixes(rename), names, f"restoring {checkpoint.folder}", "rename")
    chosen, source_name = _predicate(select), renamer(rename)
    sources: list[SavedLeaf | None] = []
    missing, different, elsewhere, converted = [], [], [], []
    used = set()
    for leaf in leaves:
        source = checkpoint.leaves.get(source_name(leaf.name)) if chosen(leaf.name, leaf) else None
        sources.append(source)
        if source is not None:
            used.add(source.name)
            if not _fits(source, leaf):
                different.append(f"{leaf}: the checkpoint has {source}")
            elif not leaf.is_key and source.dtype != leaf.rest.dtype:
                converted.append(f"{leaf.name!r} ({source.dtype} to {leaf.rest.dtype})")
            continue
        elsewhere.append(leaf)
        frozen = leaf.trainable is False and checkpoint.info["frozen_saved"] is False
        if chosen(leaf.name, leaf) and strict and not (frozen and has_into):
            missing.append(f"{leaf} (frozen, and frozen leaves were not saved)" if frozen else str(leaf))
    left_over = []
    if strict:
        rest = [leaf for name, leaf in checkpoint.leaves.items() if name not in used]
        left_over = [str(leaf) for leaf in rest if chosen(leaf.name, leaf)]
    _refuse(checkpoint, missing, left_over, different)
    impl = default_key_impl()
    if "rng" in used and checkpoint.info["rng_impl"] != impl:
        raise CheckpointError(
            f"restoring {checkpoint.folder}: its random keys are of {checkpoint.info['rng_impl']!r} and this program's "
            f"of {impl!r}. Set jax_default_prng_impl as in the run that saved."
        )
    if elsewhere and not has_into:
        names = [leaf.name for leaf in elsewhere]
        raise CheckpointError(
            f"restoring {checkpoint.folder}: {len(names)} leaves of the state do not come from it, {names[:_SHOWN]}. "
            f"Pass the state that is to give them, restore(engine, into=engine.init(...))."
        )
    if converted:
        more = f" and {len(converted) - _SHOWN} more" if len(converted) > _SHOWN else ""
        warnings.warn(
            f"restoring {checkpoint.folder}: converted {', '.join(converted[:_SHOWN])}{more}.",
            CheckpointWarning,
            stacklevel=3,
        )
    return sources


def check_containers(checkpoint: Checkpoint, containers: Mapping[str, str], taken: Sequence[str]) -> None:
    """Raise an error if the optimizer's state was of other classes where leaves are taken from the checkpoint.

    Checkpoints of earlier versions do not say of which.

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
            f"with select=('params', 'step', 'rng') and into=, or take it as it is with strict=False."
        )


def warn_of_other_numbers(
    folder: str, numbers: Mapping[str, tuple[jax.Array, jax.Array]], taken: Collection[str]
) -> None:
    """Warn of numbers of the optimizer (a learning rate) that the checkpoint brought and the engine has otherwise.

    Args:
      folder: of the checkpoint.
      numbers: (in the restored state, in a first one), by name in `opt_state`; replicated.
      taken: names of the leaves that come from the checkpoint.
    """
    other = {
        f"opt_state/{name}": f"{np.asarray(now)}, not {np.asarray(first)}"
        for name, (now, first) in numbers.items()
        if f"opt_state/{name}" in taken
        and not np.array_equal(np.asarray(now), np.asarray(first), equal_nan=True)
    }
    if other:
        said = "; ".join(f"{name} is {values}" for name, values in list(other.items())[:_SHOWN])
        warnings.warn(
            f"restoring {folder}: optax.inject_hyperparams keeps numbers as state, so the checkpoint's count and not "
            f"this engine's: {said}. To train by the engine's, give it a constant schedule (lambda count: value), or "
            f"restore with select=lambda name, leaf: name not in {list(other)[:_SHOWN]} and into=engine.init(...).",
            CheckpointWarning,
            stacklevel=3,
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


def _fits(source: SavedLeaf, leaf: StateLeaf) -> bool:
    if leaf.is_key or source.key_impl:
        same = source.key_impl is not None and _key_dtype(source.key_impl) == leaf.rest.dtype
        return (
            same
            and source.shape[: len(leaf.shape)] == leaf.shape
            and len(source.shape) == len(leaf.shape) + 1
        )
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (source.dtype, leaf.rest.dtype))
    return source.shape == leaf.shape and (floating or source.dtype == leaf.rest.dtype)


def _key_dtype(impl: str) -> object:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _refuse(
    checkpoint: Checkpoint, missing: Sequence[str], left_over: Sequence[str], different: Sequence[str]
) -> None:
    kinds = {
        "not in the checkpoint": missing,
        "only in the checkpoint": left_over,
        "of another shape or dtype": different,
    }
    if not any(kinds.values()):
        return
    lines = [f"restoring {checkpoint.folder}: it does not fit this engine."]
    for kind, found in kinds.items():
        lines += [f"  {kind}: {line}" for line in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  {kind}: and {len(found) - _SHOWN} more")
    names = [line.strip("'") for line in (*missing, *left_over)]
    if names and all(name.startswith("opt_state/") for name in names) and not different:
        lines.append(
            "Only the optimizer's state differs: it was another optimizer, or its parts stood in another order. Take "
            "that one, or keep a fresh one: restore(engine, select=('params', 'step', 'rng'), into=engine.init(...))."
        )
    else:
        lines.append(
            "Names that changed go into rename=; select= takes a part; strict=False with into= passes over what is "
            "missing or left over."
        )
    raise CheckpointError("\n".join(lines))
