"""Trip counts that a compiler dropped: the same as those it writes, and none where data end the loop."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plan_program import needs_compiler, program

import zero2jax
from zero2jax.planning.planner import PlanSettings, lower_plan, prepare_plan
from zero2jax.planning.targets import get_target
from zero2jax.programs import hlo

STATE = "(s32[], s32[], f32[64])"
LOOP = f"""HloModule m, is_scheduled=true

%fused_next (a: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %step = s32[] constant(STEP)
  ROOT %next = s32[] add(%a, %step)
}}

%body (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] get-tuple-element(%s), index=1
  %x = f32[64]{{0}} get-tuple-element(%s), index=2
  %i.1 = s32[] fusion(%i), kind=kLoop, calls=%fused_next
  %g = f32[512]{{0}} all-gather(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
  %y = f32[64]{{0}} custom-call(%g), custom_call_target="layer"
  ROOT %t = {STATE} tuple(%i.1, %end, %y)
}}

%fused_compare (b: s32[], c: s32[]) -> pred[] {{
  %b = s32[] parameter(0)
  %c = s32[] parameter(1)
  ROOT %goes_on = pred[] compare(%b, %c), direction=DIRECTION
}}

%condition (s.1: {STATE}) -> pred[] {{
  %s.1 = {STATE} parameter(0)
  %i.2 = s32[] get-tuple-element(%s.1), index=0
  %end.1 = s32[] get-tuple-element(%s.1), index=1
  ROOT %f = pred[] fusion(%i.2, %end.1), kind=kLoop, calls=%fused_compare
}}

ENTRY %main (p: f32[64], n: s32[]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] constant(START)
  %start.1 = s32[] copy(%start)
  %last = s32[] constant(LAST)
  %init = {STATE} tuple(%start.1, END, %p)
  %w = {STATE} while(%init), condition=%condition, body=%body
  ROOT %out = f32[64]{{0}} get-tuple-element(%w), index=2
}}
"""


def loop(start=0, step=1, direction="LT", last=5, end="%last"):
    words = {"START": start, "STEP": step, "DIRECTION": direction, "LAST": last, "END": end}
    return re.sub(r"\b(" + "|".join(words) + r")\b", lambda match: str(words[match.group()]), LOOP)


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 5),
        ({"start": 1}, 4),
        ({"start": 1, "step": 2, "last": 8}, 4),
        ({"direction": "LE"}, 6),
        ({"start": 7, "step": -1, "direction": "GT", "last": 0}, 7),
        ({"start": 5}, 0),
        ({"end": "%n"}, None),  # an argument
        ({"step": 0}, None),  # never ends
    ],
)
def test_the_count_is_read_from_start_body_and_condition(changes, trips):
    module = hlo.parse(loop(**changes))
    assert module.loop_trips() == {"body": trips}
    (gather,) = hlo.module_collectives(module)
    assert (gather.trips, gather.trips_known) == (1 if trips is None else trips, trips is not None)


def without_counts(text):
    stripped, count = re.subn(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert count
    return stripped


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("h100-80gb", marks=[needs_compiler, pytest.mark.cuda_compiler])]
)
def test_the_counts_of_a_step_are_found_again(target):
    """Layers in microbatches, forward and backward: loops in a loop."""
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 32, "gradient_accumulation_steps": 4}
    settings = PlanSettings({"data": 8}, get_target(target))
    text = lower_plan(prepare_plan(program(32), config, settings)).lowered.compile().as_text()
    with_counts, stripped = hlo.parse(text), hlo.parse(without_counts(text))
    assert stripped.loop_trips() == with_counts.loop_trips()
    assert max(with_counts.loop_trips().values()) >= 3
    assert hlo.module_collectives(stripped) == hlo.module_collectives(with_counts)


def test_collectives_in_a_loop_that_data_end_are_lower_bounds_and_pass_no_assertion():
    mesh = zero2jax.make_mesh(data=8)

    def local(w, x):
        layer = lambda x: jnp.tanh(
            x @ jax.lax.all_gather(w * x[0, 0], "data", tiled=True)
        )  # not to be hoisted
        return jax.lax.psum(jax.lax.while_loop(lambda x: jnp.sum(x) > 1, layer, x), "data")

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    place = lambda spec: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = jax.jit(step).lower(place(P("data")), place(P())).compile()
    gather, reduce = zero2jax.audit(compiled).rows()
    assert (gather.num_runs, gather.at_least, reduce.at_least) == (1, True, False)
    assert ">= 1" in str(zero2jax.audit(compiled))
    message = (
        r"all-gather: how often 1 of them run cannot be counted: a loop around them ends when the data say so"
    )
    with pytest.raises(AssertionError, match=message):
        zero2jax.assert_collectives(compiled, {"all-gather": 1, "all-reduce": 1}, small_bytes=0)
