"""Names of leaves, choices of leaves, and the first place where two trees differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero2jax.base.pytrees import (
    check_same_structure,
    is_function,
    leaf_paths,
    path_names,
    path_string,
    select_leaves,
    shapes_of,
)

TREE = {"blocks": [{"w": 1, "b": (2, None)}], "head": 3}


def test_paths_are_written_with_slashes():
    assert leaf_paths(TREE) == ["blocks/0/b/0", "blocks/0/w", "head"]
    assert leaf_paths(3.0) == [""]
    assert leaf_paths({}) == []


def test_names_tell_leaves_apart_that_print_alike():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path({"a/b": [1], "a": {"b": (2,)}})]
    assert [path_string(path) for path in paths] == ["a/b/0", "a/b/0"]
    assert [path_names(path) for path in paths] == [("a", "b", "0"), ("a/b", "0")]


def test_leaves_are_chosen_by_predicate_by_tree_or_by_default():
    choose = lambda choice: select_leaves(TREE, choice, default=True, name="trainable")
    assert choose(None) == [True, True, True]
    assert choose(lambda path, leaf: path.endswith("w") or leaf == 3) == [False, True, True]
    assert choose({"blocks": [{"w": True, "b": (False, None)}], "head": np.bool_(False)}) == [
        False,
        True,
        False,
    ]
    assert select_leaves(TREE, None, default=False, name="x") == [False] * 3
    with pytest.raises(ValueError, match="`trainable` has no leaf 'head'"):
        choose({"blocks": [{"w": True, "b": (False, None)}]})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": 1}, "the state has no leaf 'b'"),
        ({"a": 1, "b": 2, "c": 3}, "the state has a leaf 'c' that the model does not have"),
        ({"a": 1, "b": [2]}, "the state has no leaf 'b'"),
    ],
)
def test_the_first_path_that_differs_is_named(found, words):
    with pytest.raises(ValueError, match=f"comparing the model with the state: {words}"):
        check_same_structure({"a": 1, "b": 2}, found, "the model", "the state")


def test_other_containers_with_the_same_paths_are_another_structure():
    check_same_structure([1, 2], [3, 4], "a", "b")
    with pytest.raises(ValueError, match="the containers differ"):
        check_same_structure([1, 2], (1, 2), "a", "b")


def test_shapes_of_takes_anything_that_can_be_a_parameter():
    tree = {
        "a": jnp.ones((2, 3), jnp.bfloat16),
        "b": np.ones(4),
        "c": 1.5,
        "d": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    found = {name: (x.shape, x.dtype) for name, x in shapes_of(tree).items()}
    assert found == {
        "a": ((2, 3), jnp.bfloat16),
        "b": ((4,), np.float32),  # what jax makes of it
        "c": ((), np.float32),
        "d": ((1,), np.int32),
    }
    key = jax.random.key(0)
    assert shapes_of(key).dtype == key.dtype


@jax.tree_util.register_pytree_node_class
class CallableTree:
    def __init__(self, x):
        self.x = x

    def __call__(self):
        raise AssertionError("called")

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_a_pytree_that_can_be_called_is_no_function():
    assert is_function(lambda: None)
    assert not is_function(CallableTree(1))
    assert not is_function({"w": 1})
    assert select_leaves(CallableTree(1), CallableTree(False), default=True, name="trainable") == [False]
