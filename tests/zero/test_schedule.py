"""Options of the compiler that hide communication: asked for where it has them, never over the user's own."""

import jax
import pytest

import zero2jax
from zero2jax.base.compiler import refusal
from zero2jax.zero import schedule
from zero2jax.zero.schedule import with_pipelined_gathers

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
    assert options in (schedule._PIPELINED_GATHERS if at_use else ({},))
    assert with_pipelined_gathers(OFF, at_use, on_a_gpu) == OFF  # overlap_comm: false


def test_the_users_option_wins(on_a_gpu):
    (name,) = with_pipelined_gathers({}, True, on_a_gpu)
    assert with_pipelined_gathers({name: "mine"}, True, on_a_gpu) == {name: "mine"}


def test_a_compiler_that_knows_none_of_the_names_is_said_once_and_ends_no_run(on_a_gpu, monkeypatch):
    monkeypatch.setattr(schedule, "_PIPELINED_GATHERS", ({"xla_no_such_option": True},))
    with pytest.warns(UserWarning, match="knows none of the options .*'xla_no_such_option'"):
        assert with_pipelined_gathers({}, True, on_a_gpu) == {}
    assert with_pipelined_gathers({}, True, on_a_gpu) == {}  # a second warning would be an error
