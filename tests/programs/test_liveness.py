"""Live bytes of programs whose buffers are known by construction, and of compiled steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from zero2jax.programs import hlo
from zero2jax.programs.formulas import CLASSES, GRADIENTS, MASTER, OTHER, PARAMETERS
from zero2jax.programs.liveness import walk

HEAD = "HloModule m, is_scheduled=true"


def lifetimes(text, argument_class=lambda name: MASTER if name.startswith("w") else OTHER):
    return walk(hlo.parse(text), argument_class, lambda c: c.group_size == 8, small_bytes=64)


def point(found, name):
    return next(p for p in found.points if p.name == name)


STRAIGHT = f"""{HEAD}, input_output_alias={{ {{}}: (0, {{}}, may-alias) }}

ENTRY %main (p: f32[100]) -> f32[100] {{
  %p = f32[100]{{0}} parameter(0), metadata={{op_name="w"}}
  %a = f32[200]{{0}} custom-call(%p), custom_call_target="one"
  %b = f32[50]{{0}} custom-call(%a), custom_call_target="two"
  %v = f32[5,10]{{1,0}} bitcast(%b)
  %c = f32[300]{{0}} custom-call(%v), custom_call_target="three"
  ROOT %d = f32[100]{{0}} custom-call(%c), custom_call_target="four"
}}
"""


def test_a_buffer_lives_from_its_definition_to_its_last_use():
    found = lifetimes(STRAIGHT)
    total = {p.name: p.total_bytes for p in found.points}
    # the argument's 400 bytes are always there, and hold the result, too
    assert total == {"a": 1200, "b": 1400, "v": 600, "c": 1800, "d": 1600}
    assert found.peak.name == "c"
    assert found.rest_by_class[MASTER] == 400


def test_a_result_that_no_argument_was_donated_for_takes_room():
    found = lifetimes(STRAIGHT.replace(", input_output_alias={ {}: (0, {}, may-alias) }", ""))
    assert point(found, "d").total_bytes == 2000


LOOP = f"""{HEAD}

%update (stack: f32[10,100], i: s32[], x: f32[100]) -> f32[10,100] {{
  %stack = f32[10,100]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[100]{{0}} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,100]{{1,0}} bitcast(%x)
  ROOT %dus = f32[10,100]{{1,0}} dynamic-update-slice(%stack, %row, %i, %zero)
}}

%body (s: (s32[], f32[10,100], f32[2,100])) -> (s32[], f32[10,100], f32[2,100]) {{
  %s = (s32[], f32[10,100]{{1,0}}, f32[2,100]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %old = f32[10,100]{{1,0}} get-tuple-element(%s), index=1
  %in = f32[2,100]{{1,0}} get-tuple-element(%s), index=2
  %grad = f32[800]{{0}} custom-call(%in), custom_call_target="backward"
  %rs = f32[100]{{0}} reduce-scatter(%grad), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
  %new = f32[10,100]{{1,0}} fusion(%old, %n, %rs), kind=kLoop, calls=%update
  ROOT %t = (s32[], f32[10,100]{{1,0}}, f32[2,100]{{1,0}}) tuple(%n, %new, %in)
}}

ENTRY %main (p: f32[2,100]) -> f32[10] {{
  %p = f32[2,100]{{1,0}} parameter(0), metadata={{op_name="w"}}
  %n0 = s32[] constant(0)
  %whole = f32[16,100]{{1,0}} all-gather(%p), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
  %acts = f32[500]{{0}} custom-call(%whole), custom_call_target="forward"
  %zeros = f32[10,100]{{1,0}} broadcast(%n0), dimensions={{}}
  %init = (s32[], f32[10,100]{{1,0}}, f32[2,100]{{1,0}}) tuple(%n0, %zeros, %p)
  %w = (s32[], f32[10,100]{{1,0}}, f32[2,100]{{1,0}}) while(%init), condition=%c, body=%body
  %out = f32[10,100]{{1,0}} get-tuple-element(%w), index=1
  ROOT %r = f32[10]{{0}} custom-call(%out, %acts), custom_call_target="last"
}}
"""


def test_a_loop_works_in_place_on_its_state_and_adds_what_its_body_makes():
    found = lifetimes(LOOP)
    inside = point(found, "rs")
    assert inside.loops == ("body",)
    # argument 800, activations 2000, accumulator 4000; in the body 3200 going in and 400 coming out
    assert inside.total_bytes == 800 + 2000 + 4000 + 3200 + 400
    assert found.peak is inside
    assert point(found, "new").total_bytes == 800 + 2000 + 4000 + 400  # written in place


BRANCHES = f"""{HEAD}

%one (x: f32[100]) -> f32[50] {{
  %x = f32[100]{{0}} parameter(0)
  %t = f32[300]{{0}} custom-call(%x), custom_call_target="one"
  ROOT %u = f32[50]{{0}} custom-call(%t), custom_call_target="two"
}}

%other (y: f32[10]) -> f32[50] {{
  %y = f32[10]{{0}} parameter(0)
  ROOT %v = f32[50]{{0}} custom-call(%y), custom_call_target="three"
}}

ENTRY %main (p: f32[100], i: s32[], q: f32[10]) -> f32[100] {{
  %p = f32[100]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %q = f32[10]{{0}} parameter(2)
  %c = f32[50]{{0}} CALLED
  ROOT %d = f32[100]{{0}} custom-call(%c), custom_call_target="four"
}}
"""
ARGUMENTS = 400 + 4 + 40


@pytest.mark.parametrize(
    ("called", "names"),
    [
        ("call(%p), to_apply=%one", ["t", "u", "d"]),
        ("conditional(%i, %p, %q), branch_computations={%one, %other}", ["t", "u", "v", "d"]),
    ],
)
def test_what_a_called_computation_makes_dies_in_it_but_for_its_result(called, names):
    found = lifetimes(BRANCHES.replace("CALLED", called))
    # the result has its place from the start
    expected = {"t": 200 + 1200, "u": 200 + 1200, "v": 200, "d": 200 + 400}
    assert {p.name: p.total_bytes - ARGUMENTS for p in found.points} == {n: expected[n] for n in names}


def test_classes_follow_the_data_from_collectives_over_the_data_axis():
    found = lifetimes(LOOP)
    assert set(found.peak.by_class) == set(CLASSES)
    assert point(found, "whole").by_class[PARAMETERS] == 6400
    assert point(found, "rs").by_class == {
        MASTER: 800,
        "optimizer state": 0,
        PARAMETERS: 0,
        GRADIENTS: 4000 + 3200 + 400,  # the accumulator through the update in place
        OTHER: 2000,
    }


def test_other_collectives_classify_nothing():
    found = walk(hlo.parse(LOOP), lambda name: OTHER, lambda c: False)
    assert found.peak.by_class[OTHER] == found.peak.total_bytes


def test_host_buffers_are_counted_apart():
    found = lifetimes(STRAIGHT.replace("%p = f32[100]{0}", "%p = f32[100]{0:S(5)}"))
    assert found.host_bytes == 400
    assert found.rest_by_class[MASTER] == 0


def test_what_takes_most_at_the_peak_is_named_with_its_operation_and_class():
    text = LOOP.replace(
        'custom_call_target="backward"', 'custom_call_target="b", metadata={op_name="jit(step)/dot"}'
    )
    found = lifetimes(text)
    named = [(t.num_bytes, t.dtype, t.shape, t.class_name, t.op_name) for t in found.largest_at_peak]
    assert named == [
        # gradients: the stack written into in each iteration, named after what is written; then what a layer makes
        (4000, "f32", (10, 100), GRADIENTS, ""),
        (3200, "f32", (800,), GRADIENTS, "jit(step)/dot"),
        (2000, "f32", (500,), OTHER, ""),
        (400, "f32", (100,), GRADIENTS, ""),
    ]
    assert sum(t.num_bytes for t in found.largest_at_peak) == found.peak.total_bytes - 800  # the argument


def test_alike_tensors_are_one_line_and_come_with_the_source_line():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)  # this line
        return x.sum()

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    found = walk(hlo.parse(text), lambda name: OTHER, lambda c: False)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith("# this line"))
    largest = found.largest_at_peak[0]
    assert (largest.dtype, largest.shape, largest.num_bytes) == (
        "f32",
        (4096, 64),
        4096 * 64 * 4 * largest.count,
    )
    assert largest.count >= 2  # of the four layers' activations
    assert largest.op_name.endswith(("tanh", "dot_general"))
    assert largest.source == f"{__file__}:{line}"


STACK = f"""{HEAD}

%write (old: f32[4,256], n: s32[], y: bf16[256]) -> f32[4,256] {{
  %old = f32[4,256]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %y = bf16[256]{{0}} parameter(2)
  %wide = f32[256]{{0}} convert(%y)
  %row = f32[1,256]{{1,0}} bitcast(%wide)
  %zero = s32[] constant(0)
  ROOT %dus = f32[4,256]{{1,0}} dynamic-update-slice(%old, %row, %n, %zero)
}}

%body (s: (s32[], f32[4,256], bf16[256])) -> (s32[], f32[4,256], bf16[256]) {{
  %s = (s32[], f32[4,256]{{1,0}}, bf16[256]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[4,256]{{1,0}} get-tuple-element(%s), index=1
  %x = bf16[256]{{0}} get-tuple-element(%s), index=2
  %layer = bf16[256]{{0}} custom-call(%x), custom_call_target="layer", metadata={{op_name="jit(step)/layer"}}
  %new = f32[4,256]{{1,0}} fusion(%stack, %i, %layer), kind=kLoop, calls=%write, metadata={{op_name="dus"}}
  ROOT %t = (s32[], f32[4,256]{{1,0}}, bf16[256]{{0}}) tuple(%i, %new, %layer)
}}

ENTRY %main (p: bf16[256]) -> f32[4,256] {{
  %p = bf16[256]{{0}} parameter(0)
  %n0 = s32[] constant(0)
  %zeros = f32[4,256]{{1,0}} broadcast(%n0), dimensions={{}}, metadata={{op_name="broadcast"}}
  %init = (s32[], f32[4,256]{{1,0}}, bf16[256]{{0}}) tuple(%n0, %zeros, %p)
  %w = (s32[], f32[4,256]{{1,0}}, bf16[256]{{0}}) while(%init), condition=%c, body=%body
  ROOT %out = f32[4,256]{{1,0}} get-tuple-element(%w), index=1
}}
"""


@pytest.mark.parametrize("written", ["%layer", "%x"])  # what this iteration makes, or what it was given
def test_a_stack_is_named_after_what_a_loop_writes_into_it(written):
    text = STACK.replace("fusion(%stack, %i, %layer)", f"fusion(%stack, %i, {written})")
    stack = lifetimes(text).largest_at_peak[0]
    assert (stack.shape, stack.op_name) == ((4, 256), "jit(step)/layer")


def test_peak_of_a_compiled_step_is_near_the_compilers_allocation():
    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(jax.checkpoint(layer), x, params)[0].mean()

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    m = compiled.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    found = walk(hlo.parse(compiled.as_text()), lambda name: OTHER, lambda c: False)
    assert sum(found.rest_by_class.values()) == m.argument_size_in_bytes
    # the CPU compiler shares more than is imitated
    assert found.peak.total_bytes == pytest.approx(total, rel=0.15)
