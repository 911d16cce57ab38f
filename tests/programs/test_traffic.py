"""Bytes that instructions touch, known by construction: arrays of 8 x 8 fp32, 256 bytes each, stacks of 4 of them."""

import pytest

from zero2jax.programs.hlo import parse
from zero2jax.programs.traffic import Traffic

LAYER, STACK, INDEX = 256, 4 * 256, 4
SLICE = "dynamic-slice(%stack, %n, %n, %n), dynamic_slice_sizes={1,8,8}"
FUSIONS = {
    "elementwise": ("%r = f32[4,8,8]{2,1,0} negate(%stack)", 2 * STACK),
    "a layer read": (f"%r = f32[1,8,8]{{2,1,0}} {SLICE}", 2 * LAYER + INDEX),
    "a layer written": (
        "%r = f32[4,8,8]{2,1,0} dynamic-update-slice(%stack, %layer, %n, %n, %n)",
        2 * LAYER + INDEX,
    ),
    "a layer read through a renaming": (
        "%b = f32[4,64]{1,0} bitcast(%stack)\n"
        "  %r = f32[1,64]{1,0} dynamic-slice(%b, %n, %n), dynamic_slice_sizes={1,64}",
        2 * LAYER + INDEX,
    ),
    "all of it read, too": (
        f"%s = f32[1,8,8]{{2,1,0}} {SLICE}\n"
        "  %m = f32[8,8]{1,0} reduce(%stack, %zero), dimensions={0}, to_apply=%add\n"
        "  %r = f32[1,8,8]{2,1,0} add(%s, %m)",
        STACK + LAYER + INDEX,
    ),
}
PARAMETERS = {"%stack": "f32[4,8,8]{2,1,0}", "%layer": "f32[1,8,8]{2,1,0}", "%n": "s32[]"}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_counts_what_it_reads_and_writes(name):
    body, expected = FUSIONS[name]
    used = [(given, kind) for given, kind in PARAMETERS.items() if given in body]
    inputs = "\n".join(f"  {given} = {kind} parameter({n})" for n, (given, kind) in enumerate(used))
    text = f"HloModule m\n\n%fused (a: f32[8]) -> f32[8] {{\n{inputs}\n  {body.replace('%r =', 'ROOT %r =')}\n}}\n"
    fusion = "  ROOT %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused"
    module = parse(
        f"{text}\nENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{fusion}\n}}\n"
    )
    assert Traffic(module).of(module.instructions("main")[-1], {}) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[8,8]{1,0} add(%x, %y)", 3 * LAYER),
        ("%r = f32[8,8]{1,0} copy(%x)", 2 * LAYER),
        ("%r = f32[8,8]{1,0} bitcast(%x)", 0),
        ("%r = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%x, %y)", 0),
        ("%r = f32[1,8]{1,0} dynamic-slice(%x, %n, %n), dynamic_slice_sizes={1,8}", 2 * 32),
        ("%r = f32[8,8]{1,0} dynamic-update-slice(%x, %row, %n, %n)", 2 * 32),
        ("%r = (f32[8,8]{1,0:S(5)}, f32[8,8]{1,0}, u32[]) copy-start(%x)", LAYER),  # to the host: read here
        ("%r = f32[8,8]{1,0:S(5)} copy-done(%x)", 0),
    ],
)
def test_an_instruction_counts_its_operands_and_its_result_on_the_device(line, expected):
    head = "\n".join(
        f"  %{name} = f32[{shape}]{{1,0}} parameter({n})"
        for n, (name, shape) in enumerate([("x", "8,8"), ("y", "8,8"), ("row", "1,8")])
    )
    module = parse(f"HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n{head}\n  ROOT {line}\n}}\n")
    instructions = module.instructions("main")
    types = {i.name: i.type for i in instructions}
    assert Traffic(module).of(instructions[-1], types) == expected
