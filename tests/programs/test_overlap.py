"""Two clocks over programs whose times are known by construction."""

import jax
import jax.numpy as jnp
import pytest

from zero2jax.programs import hlo
from zero2jax.programs.overlap import Rates, simulate

# 2 * 8 * 8 * 8 = 1024 operations per product; 8 devices, so 7/8 of a value of 512 bytes = 448 bytes on the wire
HEAD = "HloModule m, is_scheduled=true\n\n"
PRODUCT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GATHER = "all-gather-start(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
START = f"%g = (bf16[4,8]{{1,0}}, bf16[32,8]{{1,0}}) {GATHER}"


def program(*lines, type_of_x="f32[8,8]"):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"{HEAD}ENTRY %main (x: {type_of_x}) -> f32[8,8] {{\n{body}\n}}\n")


def lines(*middle, sync=False):
    start = START + (', backend_config={"is_sync":true}' if sync else "")
    return (
        "%x = f32[8,8]{1,0} parameter(0)",
        "%s = bf16[4,8]{1,0} constant({...})",
        start,
        *middle,
        "%d = bf16[32,8]{1,0} all-gather-done(%g)",
        f"ROOT %r = f32[8,8]{{1,0}} {PRODUCT}",
    )


def rates(flops, bytes_per_s):
    return Rates(flops, lambda collective: bytes_per_s)


def test_work_between_start_and_done_hides_the_link():
    inside = f"%p = f32[8,8]{{1,0}} {PRODUCT}"
    found = simulate(program(*lines(inside)), rates(1024, 448))  # the product takes 1 s, the gather 1 s
    (overlap,) = found.overlaps
    assert overlap.flops_inside == 1024
    assert found.flops == 2048
    assert overlap.exposed_s == 0
    slower = simulate(program(*lines(inside)), rates(1024, 224))  # the gather takes 2 s
    assert slower.exposed_s == pytest.approx(1)
    assert slower.communication_s == pytest.approx(2)
    assert slower.overlaps[0].exposed_bytes == pytest.approx(256)  # half of 512


def test_work_outside_hides_nothing():
    found = simulate(program(*lines()), rates(1024, 448))
    assert found.overlaps[0].flops_inside == 0
    assert found.overlaps[0].exposed_bytes == 512


def test_a_pair_marked_synchronous_is_exposed_whatever_it_spans():
    found = simulate(program(*lines(f"%p = f32[8,8]{{1,0}} {PRODUCT}", sync=True)), rates(1024, 448))
    assert found.overlaps[0].exposed_bytes == 512


def test_two_collectives_in_flight_share_the_link_and_the_work():
    second = START.replace("%g", "%h")
    middle = (second, f"%p = f32[8,8]{{1,0}} {PRODUCT}", "%e = bf16[32,8]{1,0} all-gather-done(%h)")
    found = simulate(program(*lines(*middle)), rates(1024, 448))
    assert found.communication_s == pytest.approx(2)
    assert found.exposed_s == pytest.approx(1)  # 1 s of work for 2 s of the link


def test_a_small_collective_behind_large_ones_waits_for_all_of_them():
    """Two gathers of 1 s and a small one in flight, 0.5 s of work: 2.25 s on the link, of which 1.75 are waited for."""
    small = "%h = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%q), replica_groups={{0,1,2,3,4,5,6,7}}"
    middle = (
        START.replace("%g", "%f"),
        "%q = bf16[1,8]{1,0} constant({...})",
        f"{small}, dimensions={{0}}",
        f"%p = f32[8,8]{{1,0}} {PRODUCT}",
        "%e = bf16[8,8]{1,0} all-gather-done(%h)",
        "%c = bf16[32,8]{1,0} all-gather-done(%f)",
    )
    found = simulate(program(*lines(*middle)), rates(2048, 448))
    assert found.communication_s == pytest.approx(2.25)
    assert found.exposed_s == pytest.approx(1.75)
    assert [o.exposed_s for o in found.overlaps] == pytest.approx([0.5, 1, 0.25])


def test_loops_multiply_and_their_bodies_are_walked():
    text = f"""{HEAD}
%body (s: (f32[8,8])) -> (f32[8,8]) {{
  %s = (f32[8,8]{{1,0}}) parameter(0)
  %x = f32[8,8]{{1,0}} get-tuple-element(%s), index=0
  %a = f32[8,8]{{1,0}} all-reduce(%x), replica_groups={{{{0,1}}}}
  %p = f32[8,8]{{1,0}} fusion(%a), kind=kOutput, calls=%product
  ROOT %t = (f32[8,8]{{1,0}}) tuple(%p)
}}

%product (y: f32[8,8]) -> f32[8,8] {{
  %y = f32[8,8]{{1,0}} parameter(0)
  ROOT %d = f32[8,8]{{1,0}} dot(%y, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x0: f32[8,8]) -> f32[8,8] {{
  %x0 = f32[8,8]{{1,0}} parameter(0)
  %i = (f32[8,8]{{1,0}}) tuple(%x0)
  %w = (f32[8,8]{{1,0}}) while(%i), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %r = f32[8,8]{{1,0}} get-tuple-element(%w), index=0
}}
"""
    found = simulate(hlo.parse(text), rates(1024, 256))  # an all-reduce over 2 sends 256 bytes
    assert found.flops == 3 * 1024
    assert found.exposed_s == pytest.approx(3)
    assert found.overlaps[0].exposed_bytes == 3 * 256


def test_library_products_and_convolutions_count():
    call = (
        'custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )
    found = simulate(
        program("%x = f32[8,8]{1,0} parameter(0)", f"ROOT %r = (f32[8,8]{{1,0}}, s8[64]{{0}}) {call}"),
        rates(1, 1),
    )
    assert found.flops == 1024
    kernel = jnp.ones((3, 3, 4, 8))
    image = jnp.ones((1, 6, 6, 4))
    convolve = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    text = jax.jit(convolve).lower(image, kernel).compile().as_text()
    expected = 2 * (4 * 4 * 8) * (3 * 3 * 4)  # output elements times window
    assert simulate(hlo.parse(text), rates(1, 1)).flops in (0, expected)  # 0 where it became a library call


def test_operations_of_a_compiled_product_are_those_of_the_formula():
    text = jax.jit(lambda a, b: a @ b).lower(jnp.ones((16, 32)), jnp.ones((32, 64))).compile().as_text()
    assert simulate(hlo.parse(text), rates(1, 1)).flops == 2 * 16 * 32 * 64


def of_memory(flops, bytes_per_s, memory_bytes_per_s):
    return Rates(flops, lambda collective: bytes_per_s, memory_bytes_per_s=memory_bytes_per_s)


def test_memory_bound_work_hides_the_link_where_memory_has_a_rate():
    """A softmax-like row of elementwise work beside the gather: 256 bytes read, 256 written."""
    inside = "%p = f32[8,8]{1,0} exponential(%x)"
    alone = simulate(program(*lines(inside)), rates(1024, 448))
    assert (alone.exposed_s, alone.hidden_share, alone.step_s) == (1, 0, 2)  # the gather, then the product
    found = simulate(
        program(*lines(inside)), of_memory(1024, 448, 1024)
    )  # the exponential takes half a second
    assert (found.exposed_s, found.hidden_share) == (0.5, 0.5)
    assert found.step_s == 2  # half a second each, and the product's second
    assert found.compute_s == 1


def test_an_instruction_takes_the_longer_of_its_products_and_its_bytes():
    # the product reads x twice and writes 256 bytes: 768 in all
    for bandwidth, seconds in ((768, 1), (384, 2), (1e9, 1)):
        found = simulate(program(*lines()), of_memory(1024, 448, bandwidth))
        assert found.step_s == pytest.approx(1 + seconds)
        assert found.exposed_s == 1


def test_waits_are_what_is_exposed_whatever_takes_time():
    middle = (
        START.replace("%g", "%h"),
        "%p = f32[8,8]{1,0} exponential(%x)",
        "%e = bf16[32,8]{1,0} all-gather-done(%h)",
    )
    found = simulate(program(*lines(*middle)), of_memory(2048, 448, 2048))
    busy = 0.25 + 0.5  # the exponential and the product
    assert found.step_s - busy == pytest.approx(found.exposed_s) == pytest.approx(1.75)
