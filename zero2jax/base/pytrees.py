"""Names, shapes and choices of the leaves of a pytree, and the first place where two pytrees differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.base.checks import misfit

PyTree = Any
LeafPredicate = Callable[[str, Any], bool]
"""`(path, leaf) -> bool`, with `path` as `path_string` writes it: `"blocks/attn/kernel"`."""


def path_string(path: Any) -> str:
    """A key path as people write it in a predicate: `"blocks/attn/kernel"`; empty for a bare array."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_names(path: Any) -> tuple[str, ...]:
    """The names along a key path: they tell leaves apart, as `path_string` need not (`{"a/b": 0, "a": {"b": 0}}`).

    Two leaves of the same names are the same parameter, in whatever containers their trees hold them.
    """
    return tuple(path_string((key,)) for key in path)


def is_function(x: Any) -> bool:
    """Whether `x` is a function, and not a pytree that can be called, as an Equinox module is."""
    return callable(x) and jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def leaf_paths(tree: PyTree) -> list[str]:
    """The path of every leaf, in the order of `jax.tree.leaves`."""
    return [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def shapes_of(tree: PyTree) -> PyTree:
    """Shapes, and dtypes as jax will hold them, of a tree of arrays, NumPy arrays, Python numbers or shapes.

    Raises:
      TypeError: a leaf is none of these (names up to five).
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    numeric = (bool, int, float, complex)
    wrong = [(path, x) for path, x in leaves if not (hasattr(x, "dtype") or isinstance(x, numeric))]
    if wrong:
        named = ", ".join(f"{path_string(path)!r} ({type(x).__name__})" for path, x in wrong[:5])
        raise TypeError(
            f"reading a tree of arrays: leaves that are not arrays: {named}. Keep such leaves out of the tree: close "
            f"over them in the loss function, as with equinox.partition(model, equinox.is_array) or nnx.split."
        )

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        extended = jnp.issubdtype(dtype, jax.dtypes.extended)
        return jax.ShapeDtypeStruct(np.shape(x), dtype if extended else jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(shape, tree)


def live_arrays(leaves: list[Any]) -> list[Any]:
    """Those of some leaves that are arrays of JAX, and no tracers. Asked of each class once: a state has thousands."""
    kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
    return [x for x in leaves if type(x) in kinds]


def are_arrays(leaves: list[Any]) -> bool:
    """Whether all leaves are arrays of JAX, and no tracers."""
    return all(issubclass(kind, jax.Array) for kind in set(map(type, leaves)))


def check_alive(tree: PyTree, reading: str, way_out: str) -> None:
    """Raise a ValueError if a leaf is an array whose buffers are gone, which jax 0.10 does not survive in a program;
    or stands for one and is gone.
    """
    leaves = jax.tree.leaves(tree)
    has_buffers = lambda kind: hasattr(kind, "is_deleted") and not issubclass(kind, jax.core.Tracer)
    kinds = {kind for kind in set(map(type, leaves)) if has_buffers(kind)}
    if not any(type(x) in kinds and x.is_deleted() for x in leaves):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if type(x) in kinds and x.is_deleted():
            raise ValueError(f"reading {reading}: leaf {path_string(path)!r} is gone. {way_out}")


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf belongs to a program that is being traced, the user's `jit` or `scan`."""
    return has_tracers(jax.tree.leaves(tree))


def has_tracers(leaves: list[Any]) -> bool:
    """Whether one of some leaves does."""
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))


def select_leaves(
    tree: PyTree, choice: PyTree | LeafPredicate | None, *, default: bool, name: str
) -> list[bool]:
    """One boolean per leaf, from a predicate over (path, leaf), a tree of booleans, or None (`default`).

    Raises:
      TypeError: a predicate that takes other arguments.
      ValueError: a tree of booleans has another structure than `tree` (names the first path that differs).
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if choice is None:
        return [default] * len(leaves)
    if is_function(choice):
        if problem := misfit(choice, "", None):
            raise TypeError(
                f"asking `{name}` of each leaf: {' '.join(problem)}. It is called as {name}(path, leaf), with a path "
                f"such as 'blocks/attn/kernel', and says True or False."
            )
        return [bool(choice(path_string(path), leaf)) for path, leaf in leaves]
    check_same_structure(tree, choice, "the parameters", f"`{name}`")
    return [bool(x) for x in jax.tree.leaves(choice)]


def check_same_structure(expected: PyTree, given: PyTree, expected_name: str, given_name: str) -> None:
    """Raise a ValueError that names the first leaf at which two trees differ in structure."""
    if jax.tree.structure(expected) == jax.tree.structure(given):  # type: ignore[operator]
        return
    a, b = leaf_paths(expected), leaf_paths(given)
    missing = [p for p in a if p not in set(b)]
    extra = [p for p in b if p not in set(a)]
    if missing:
        detail = f"{given_name} has no leaf {missing[0]!r}"
    elif extra:
        detail = f"{given_name} has a leaf {extra[0]!r} that {expected_name} does not have"
    else:
        detail = f"the containers differ: {jax.tree.structure(expected)} and {jax.tree.structure(given)}"
    raise ValueError(
        f"comparing {expected_name} with {given_name}: {detail}. Both must be trees of the same structure; "
        f"pass the tree that `engine.init` was given, unchanged in its containers and names."
    )
