# ruff: noqa: E501 (lines of a program's text)
"""Reading a compiled program's text: types, attributes, collectives; and the text of both jax versions for GPUs."""

import pytest

from zero2jax.programs import hlo

# Shortened from what XLA prints for GPUs: tuples in tuples, async pairs, a host buffer, a loop with a trip count.
TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1, 2}: (3, {}, must-alias) }, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[16,4])) -> (s32[], bf16[16,4]) {
  %state = (s32[], bf16[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = bf16[16,4]{1,0} get-tuple-element(%state), index=1
  %start = ((bf16[16,4]{1,0}, bf16[16,4]{1,0}), (bf16[2,4]{1,0}, bf16[2,4]{1,0})) reduce-scatter-start(%w, /*index=1*/%w), replica_groups=mesh['data'=8] {'data'}, to_apply=%add, metadata={op_name="jit(step)/reduce_scatter"}
  %done = (bf16[2,4]{1,0}, bf16[2,4]{1,0}) reduce-scatter-done(%start)
  ROOT %next = (s32[], bf16[16,4]{1,0}) tuple(%i, %w)
}

%condition (state.1: (s32[], bf16[16,4])) -> pred[] {
  %state.1 = (s32[], bf16[16,4]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p0: f32[8], p1: bf16[2,4]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %p1 = bf16[2,4]{1,0:S(5)} parameter(1)
  %zero = s32[] constant(0)
  %ag = (bf16[2,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%p1), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}
  %agd = bf16[16,4]{1,0} all-gather-done(%ag)
  %init = (s32[], bf16[16,4]{1,0}) tuple(%zero, %agd)
  %loop = (s32[], bf16[16,4]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %ar = f32[8]{0} all-reduce(%p0), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
}
"""


@pytest.fixture(scope="module")
def module():
    return hlo.parse(TEXT)


def by_name(module, name):
    return next(i for instructions in module.computations.values() for i in instructions if i.name == name)


def test_computations_entry_and_aliases(module):
    assert module.entry == "main"
    assert set(module.computations) == {"add", "body", "condition", "main"}
    assert module.aliases == {(0,): 0, (1, 2): 3}


def test_instructions(module):
    start = by_name(module, "start")
    assert start.operands == ("w", "w")
    assert hlo.type_bytes(start.type) == 2 * 16 * 4 * 2 + 2 * 2 * 4 * 2
    assert start.called == ("add",)
    assert start.op_name == "jit(step)/reduce_scatter"
    assert by_name(module, "p0").op_name == "state.params['w']"
    assert by_name(module, "p1").type == hlo.Array("bf16", (2, 4), on_host=True)
    assert by_name(module, "loop").known_trips == 5
    assert by_name(module, "loop").body == "body"
    assert by_name(module, "next").is_root
    assert by_name(module, "w").index == 1


def test_collectives_are_those_of_the_text(module):
    gather, scatter, reduce = hlo.module_collectives(module)
    assert (gather.kind, gather.num_bytes, gather.trips, gather.is_async) == ("all-gather", 128, 1, False)
    assert (scatter.kind, scatter.num_bytes, scatter.trips) == ("reduce-scatter", 256, 5)
    assert scatter.loops == ("body",)
    assert scatter.is_async
    assert scatter.total_bytes == 1280
    assert (reduce.kind, reduce.num_bytes, reduce.group_size) == ("all-reduce", 32, 4)


def test_bytes_on_the_wire_are_those_of_a_ring(module):
    gather, scatter, reduce = hlo.module_collectives(module)
    assert gather.wire_bytes == 128 * 7 / 8
    assert scatter.wire_bytes == 256 * 7 / 8
    assert reduce.wire_bytes == 2 * 32 * 3 / 4


FRAMES = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/site-packages/flax/linear.py"
2 "/home/me/model.py"

FunctionNames
1 "Linear.__call__"
2 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=300 end_line=300 column=8 end_column=9}
2 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=8 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}


ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=2}
  ROOT %z = f32[8]{0} negate(%y), metadata={op_name="jit(step)/neg"}
}
"""


def test_sources_are_lines_of_the_users_own_where_there_are_some():
    module = hlo.parse(FRAMES)
    x, y, z = module.instructions("main")
    assert module.source(y) == "/home/me/model.py:12"
    assert module.source(x) == module.source(z) == ""
    installed = hlo.parse(FRAMES.replace("/home/me/model.py", "/site-packages/optax/sgd.py"))
    assert installed.source(installed.instructions("main")[1]) == "/site-packages/flax/linear.py:300"
