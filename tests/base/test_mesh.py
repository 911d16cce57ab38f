"""Meshes of simulated devices; what is refused is tested in test_errors."""

import jax
import pytest
from jax.sharding import AxisType

import zero2jax
from zero2jax.base.mesh import check_mesh, replicated


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"data": 3}, {"data": 3}),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"data": -1, "model": 2}, {"data": 4, "model": 2}),
        ({"pipe": 2, "data": -1, "model": 2}, {"pipe": 2, "data": 2, "model": 2}),
    ],
)
def test_axes_have_the_sizes_and_order_asked_for_and_are_auto(axes, shape):
    mesh = zero2jax.make_mesh(**axes)
    assert dict(mesh.shape) == shape
    assert tuple(mesh.axis_names) == tuple(shape)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert check_mesh(mesh) == shape["data"]


def test_fewer_devices_are_the_first_ones_and_a_list_is_taken_as_it_is():
    assert list(zero2jax.make_mesh(data=3).devices.ravel()) == jax.devices()[:3]
    chosen = jax.devices()[::-2]
    assert list(zero2jax.make_mesh(data=4, devices=chosen).devices.ravel()) == chosen
    assert list(zero2jax.make_mesh(devices=chosen).devices.ravel()) == chosen


def test_replicated_values_are_whole_everywhere():
    x = jax.device_put(jax.numpy.arange(3), replicated(zero2jax.make_mesh()))
    assert {shard.data.shape for shard in x.addressable_shards} == {(3,)}
    assert len(x.addressable_shards) == 8
