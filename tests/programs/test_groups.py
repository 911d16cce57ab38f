"""Groups of devices in every way to write them, and the axes of a mesh that they lie along."""

import pytest

from zero2jax.programs.groups import axis_groups, axis_names, replica_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['data'=2,'model'=2] {'data'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['data'=2,'model'=2] {'data','model'}, x", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("dimensions={0}", ()),
    ],
)
def test_replica_groups(text, groups):
    assert replica_groups(text) == groups


def test_axes_of_groups():
    shape = {"data": 4, "one": 1, "model": 2}
    groups = lambda *axes: axis_groups([4, 2], list(axes))
    assert axis_names(groups(0), shape) == ("data",)
    assert axis_names(groups(1), shape) == ("model",)
    assert axis_names(groups(0, 1), shape) == ("data", "model")
    assert axis_names(((0, 3), (1, 2)), shape) == ()
