"""Sums in bf16 beside an automatic axis: traced in fp32 where the compiler for CPUs would end the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero2jax
from zero2jax.base.wide_sums import needs_wide_sums, with_wide_sums


def summed(mesh, manual):
    """A function with a sum in a loop, and one in the backward pass of a `shard_map`."""

    def local(w, x):  # (2,), (4, 8 / N, 2)
        def step(total, row):
            return total + jax.lax.psum((row * w[None]).sum(0), "data"), jax.lax.pmax(row, "data")

        return jax.lax.scan(step, jnp.zeros_like(w), x)[0]

    specs = {"in_specs": (jax.P(), jax.P(None, "data")), "out_specs": jax.P()}
    mapped = jax.shard_map(local, mesh=mesh, axis_names=manual, check_vma=False, **specs)
    return jax.value_and_grad(lambda w, x: jnp.tanh(mapped(w, x).astype(jnp.float32)).sum())


def dtypes_of_sums(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found += [v.aval.dtype for v in eqn.invars if eqn.primitive.name in ("psum", "pmax")]
        for inner in eqn.params.values():
            if hasattr(inner, "eqns"):
                found += dtypes_of_sums(getattr(inner, "jaxpr", inner))
    return found


W = jnp.ones((2,), jnp.bfloat16)
X = jnp.linspace(-1, 1, 64).reshape(4, 8, 2).astype(jnp.bfloat16)


def test_sums_beside_an_automatic_axis_are_in_fp32_and_no_others():
    mesh = zero2jax.make_mesh(data=4, model=2)
    for manual, dtype in ({"data"}, jnp.float32), ({"data", "model"}, jnp.bfloat16):
        fun = summed(mesh, manual)
        assert set(dtypes_of_sums(jax.make_jaxpr(fun)(W, X).jaxpr)) == {jnp.dtype(jnp.bfloat16)}
        assert set(dtypes_of_sums(jax.make_jaxpr(with_wide_sums(fun))(W, X).jaxpr)) == {jnp.dtype(dtype)}
    wide = jax.jit(with_wide_sums(summed(mesh, {"data"})))(W, X)
    alone = jax.jit(summed(zero2jax.make_mesh(data=4, devices=jax.devices()[:4]), {"data"}))(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), wide, alone)
    assert [x.dtype for x in wide] == [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize(("axes", "manual", "needs"), [
    ({"data": 4, "model": 2}, {"data"}, True),
    ({"replica": 2, "data": 4}, {"replica", "data"}, False),
])  # fmt: skip
def test_only_programs_beside_automatic_axes_need_it(axes, manual, needs):
    assert needs_wide_sums(zero2jax.make_mesh(**axes), manual) == needs
