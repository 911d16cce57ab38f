"""Operations of products and the dtypes of their operands, in texts and in programs compiled for CPU devices."""

import jax
import jax.numpy as jnp
import pytest

from zero2jax.programs import hlo
from zero2jax.programs.overlap import Rates, simulate
from zero2jax.programs.products import Products

# A loop over layers as the CPU's compiler writes it: the stack of bf16 weights is converted before the loop.
LOOP = """HloModule m, is_scheduled=true

%wide (w: bf16[3,8,8]) -> f32[3,8,8] {
  %w = bf16[3,8,8]{2,1,0} parameter(0)
  ROOT %w.1 = f32[3,8,8]{2,1,0} convert(%w)
}

%product (x: f32[4,8], layer: f32[1,8,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %layer = f32[1,8,8]{2,1,0} parameter(1)
  %flat = f32[8,8]{1,0} bitcast(%layer)
  ROOT %dot = f32[4,8]{1,0} dot(%x, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="d"}
}

%body (s: (s32[], f32[4,8], f32[3,8,8])) -> (s32[], f32[4,8], f32[3,8,8]) {
  %s = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x.1 = f32[4,8]{1,0} get-tuple-element(%s), index=1
  %stack = f32[3,8,8]{2,1,0} get-tuple-element(%s), index=2
  %zero = s32[] constant(0)
  %layer.1 = f32[1,8,8]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  %in = f32[4,8]{1,0} INPUT
  %y = f32[4,8]{1,0} fusion(%in, %layer.1), kind=kCustom, calls=%product
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) tuple(%i, %y, %stack)
}

%rounded (z: f32[4,8]) -> f32[4,8] {
  %z = f32[4,8]{1,0} parameter(0)
  %z.1 = bf16[4,8]{1,0} convert(%z)
  ROOT %z.2 = f32[4,8]{1,0} convert(%z.1)
}

ENTRY %main (p: bf16[3,8,8], q: f32[4,8]) -> f32[4,8] {
  %p = bf16[3,8,8]{2,1,0} parameter(0)
  %q = f32[4,8]{1,0} parameter(1)
  %n = s32[] constant(0)
  %all = f32[3,8,8]{2,1,0} fusion(%p), kind=kLoop, calls=%wide
  %init = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) tuple(%n, %q, %all)
  %l = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) while(%init), condition=%c, body=%body, TRIPS
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%l), index=1
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')


@pytest.mark.parametrize(
    ("given", "operands", "dtype"),
    [
        ("fusion(%x.1), kind=kLoop, calls=%rounded", ("bf16", "bf16"), "bf16"),
        ("negate(%x.1)", ("f32", "bf16"), "f32"),
        (
            "copy(%x.1)",
            ("f32", "bf16"),
            "f32",
        ),  # the state of the loop changes: what it began as says nothing
    ],
)
def test_operands_count_as_narrow_as_they_were(given, operands, dtype):
    module = hlo.parse(LOOP.replace("INPUT", given))
    rates = Rates(1.0, lambda c: 1.0, lambda p: {"bf16": 16.0, "f32": 2.0}[p.dtype])
    found = simulate(module, rates, as_before_conversion=True)
    (product,) = found.products
    assert (product.operand_dtypes, product.dtype, product.promotes) == (operands, dtype, dtype == "f32")
    assert (product.trips, found.flops, found.flops_by_dtype) == (3, 3 * 512, {dtype: 3 * 512})
    assert found.compute_s == 3 * 512 / (16 if dtype == "bf16" else 2)
    # a GPU multiplies what it is given
    (product,) = simulate(module, rates).products
    assert product.dtype == "f32"


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_the_precision_asked_for_is_read(precision):
    product = lambda a, b: jnp.dot(a, b, precision=precision)
    compiled = jax.jit(product).lower(jnp.ones((16, 32)), jnp.ones((32, 64))).compile()
    (found,) = simulate(hlo.parse(compiled.as_text()), Rates(1.0, lambda c: 1.0)).products
    assert (found.precision, found.dtype, found.flops) == (precision, "f32", 2 * 16 * 32 * 64)


def test_a_librarys_product_says_its_precision_in_its_configuration():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}'
    )
    call = f'custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={config}'
    module = hlo.parse(
        f"HloModule m\n\nENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8]{{1,0}} parameter(0)\n"
        f"  ROOT %r = (f32[8,8]{{1,0}}, s8[64]{{0}}) {call}\n}}\n"
    )
    (product,) = Products(module).of("main", module.instructions("main")[1])
    assert (product.precision, product.dtype, product.flops) == ("highest", "f32", 1024)
