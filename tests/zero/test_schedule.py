"""Options of the compiler that hide communication: asked for where it has them, never over the user's own."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.base.compiler import refusal
from zero2jax.zero import schedule
from zero2jax.zero.schedule import with_pipelined_gathers, with_room_for_layers

LIMIT = "xla_gpu_memory_limit_slop_factor"
OFF = {"xla_gpu_enable_latency_hiding_scheduler": False}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU's compiler parses the options of GPUs as well, and has no use for them."""
    monkeypatch.setattr(schedule, "GPU_PLATFORMS", ("cpu",))
    schedule._spelled.cache_clear()
    yield zero2jax.make_mesh(data=2)
    schedule._spelled.cache_clear()


def test_the_compiler_is_asked_for_an_option_and_its_value():
    (device, *_) = jax.devices()
    assert refusal({"xla_cpu_enable_fast_math": True}, device) is None
    assert "xla_no_such_option" in refusal({"xla_no_such_option": True}, device)
    assert "xla_cpu_enable_fast_math" in refusal({"xla_cpu_enable_fast_math": "perhaps"}, device)


def test_only_gpus_are_given_options():
    assert with_pipelined_gathers({"xla_cpu_enable_fast_math": True}, True, zero2jax.make_mesh(data=2)) == {
        "xla_cpu_enable_fast_math": True
    }


@pytest.mark.parametrize("at_use", [True, False])
def test_gathers_are_pipelined_where_they_are_in_the_loop_over_layers(on_a_gpu, at_use):
    options = with_pipelined_gathers({"xla_other": 1}, at_use, on_a_gpu)
    assert options.pop("xla_other") == 1
    both = [early | two for early in schedule._EARLY_GATHERS for two in schedule._TWO_LAYERS]
    assert options in (both if at_use else [{}])
    several = with_pipelined_gathers({}, at_use, on_a_gpu, in_twos=False)
    assert several in (schedule._EARLY_GATHERS if at_use else [{}])
    assert with_pipelined_gathers(OFF, at_use, on_a_gpu) == OFF  # overlap_comm: false


def test_the_users_option_wins(on_a_gpu):
    name, other = options = with_pipelined_gathers({}, True, on_a_gpu)
    assert with_pipelined_gathers({name: "mine"}, True, on_a_gpu) == {name: "mine", other: options[other]}


def test_a_compiler_that_knows_none_of_the_names_is_said_once_and_ends_no_run(on_a_gpu, monkeypatch):
    monkeypatch.setattr(schedule, "_EARLY_GATHERS", ({"xla_no_such_option": True},))
    with pytest.warns(UserWarning, match="knows none of the options .*'xla_no_such_option'"):
        left = with_pipelined_gathers({}, True, on_a_gpu)
    assert left in schedule._TWO_LAYERS
    assert with_pipelined_gathers({}, True, on_a_gpu) == left  # a second warning would be an error


def test_the_limit_of_memory_is_raised_by_the_layers_that_the_compiler_counts_again(on_a_gpu, monkeypatch):
    room = lambda held, stored=20, options={}: with_room_for_layers(options, held, stored, on_a_gpu)
    assert room(10) == {}  # a device whose memory is not known
    monkeypatch.setattr(schedule, "memory_bytes", lambda kind: 100.0)
    assert room(30) == {LIMIT: round(95 * (1 + 30 / (0.8 * 100 - 20)))} == {LIMIT: 142}
    assert refusal(room(30), on_a_gpu.devices.flat[0]) is None
    assert room(0) == room(61) == room(1, stored=90) == {}  # nothing held; it does not fit, with or without
    assert room(30, options={LIMIT: 90}) == {LIMIT: 90}
    (two,) = schedule._TWO_LAYERS
    assert room(30, options=two) == {LIMIT: 190, **two}  # once more for each layer of an iteration


@pytest.mark.parametrize(
    ("axes", "num_microbatches", "in_twos"),
    [({"data": 2}, 1, True), ({"data": 2}, 2, False), ({"data": 1, "model": 2}, 1, False)],
)
def test_two_layers_share_an_iteration_without_other_loops_and_axes(
    on_a_gpu, axes, num_microbatches, in_twos
):
    loss = lambda params, batch: (batch @ params["w"]).sum()
    engine = zero2jax.Engine(
        loss, optax.sgd(0.1), zero2jax.make_mesh(**axes), num_microbatches=num_microbatches
    )
    engine.abstract_state({"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)})
    (two,) = schedule._TWO_LAYERS
    assert (two.items() <= engine.compiler_options.items()) == in_twos


@pytest.mark.parametrize(("stage", "held"), [(1, True), (2, True), (3, False)])
def test_layers_are_held_in_full_where_the_stage_says(on_a_gpu, monkeypatch, stage, held):
    monkeypatch.setattr(schedule, "memory_bytes", lambda kind: 1e3)
    loss = lambda params, batch: jax.lax.scan(lambda x, w: (x @ w, None), batch, params["w"])[0].sum()
    engine = zero2jax.Engine(loss, optax.sgd(0.1), on_a_gpu, stage=stage)
    x = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
    engine.abstract_state({"w": jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)}, batch=x)
    stored = 3 * 4 * 4 * 4 // 2 + 4 + 8  # half of the master; the step, the key
    expected = {LIMIT: round(95 * (1 + 2 * 3 * 4 * 4 * 2 / (0.8 * 1e3 - stored)))} if held else {}
    assert {k: v for k, v in engine.compiler_options.items() if k == LIMIT} == expected
