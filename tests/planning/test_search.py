"""Settings compiled side by side: what is varied, what is refused, the frontier and the cheapest that fits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from plan_program import FP32, LAYERS, WIDTH, N, loss_fn, program

import zero2jax
from zero2jax.cli import plan as plan_command
from zero2jax.cli.main import main
from zero2jax.planning.planner import PlanSettings
from zero2jax.planning.search import MICROBATCHES, STAGE, Candidate, SearchReport, search_plans
from zero2jax.planning.targets import TARGETS

CPU = dataclasses.replace(TARGETS["cpu"], peak_flops=1e9, in_node_bytes_per_s=1e6, across_bytes_per_s=1e6)


def settings(memory_bytes=10**9):
    return PlanSettings({"data": N}, dataclasses.replace(CPU, memory_bytes=memory_bytes))


@pytest.fixture(scope="module")
def found():
    done = []
    report = search_plans(
        lambda num_examples=32: program(num_examples),
        {**FP32, "train_micro_batch_size_per_gpu": 4},
        settings(),
        {STAGE: [2, 3], MICROBATCHES: [1, 2, 3]},
        advance=lambda *counts: done.append(counts),
    )
    assert sorted(done) == [(n, 6) for n in range(1, 7)]
    return report


def test_every_combination_is_planned_at_the_same_batch(found):
    assert len(found.candidates) == 6
    for c in found.candidates:
        if c.report:
            assert c.report.batch_size == 32
            assert (c.report.stage, c.report.num_microbatches) == tuple(c.varied.values())


def test_what_does_not_divide_is_refused_with_the_reason(found):
    refused = [c for c in found.candidates if c.report is None]
    assert [tuple(c.varied.values()) for c in refused] == [(2, 3), (3, 3)]
    assert "train_batch_size" in refused[0].refused
    assert "refused: " in str(found)


def test_frontier_and_cheapest(found):
    volumes = {tuple(c.varied.values()): c.costs[1] for c in found.candidates if c.report}
    assert volumes[2, 1] < volumes[2, 2] < volumes[3, 2]
    frontier = found.frontier
    assert frontier
    for c in frontier:
        assert not any(
            all(a <= b for a, b in zip(o.costs, c.costs, strict=True)) and o.costs != c.costs
            for o in found.candidates
            if o.report
        )
    # least time: on a slow link, what communicates least
    assert found.cheapest.varied == {STAGE: 2, MICROBATCHES: 1}
    assert "=> cheapest that fits: zero_optimization.stage = 2" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["cheapest"] == {STAGE: 2, MICROBATCHES: 1}


def test_nothing_fits(found):
    small = [
        Candidate(c.varied, dataclasses.replace(c.report, usable_bytes=10))
        for c in found.candidates
        if c.report
    ]
    report = SearchReport(tuple(small))
    assert report.cheapest is None
    assert "nothing fits: more devices, a smaller batch, or a larger card" in str(report)


def test_arguments_of_the_program_can_be_varied():
    report = search_plans(program, FP32, settings(), {"program.num_examples": [8, 16]})
    assert [c.report.batch_size for c in report.candidates] == [8, 16]
    state = 3 * 4 * LAYERS * WIDTH * WIDTH // N
    assert all(c.report.rest_bytes > state for c in report.candidates)


def test_steps_of_different_sizes_are_compared_per_example():
    """A larger batch takes longer for a step, and on a slow link less time per example: parameters move once a step."""
    report = search_plans(program, FP32, settings(), {"program.num_examples": [16, 256]})
    small, large = report.candidates
    assert large.seconds > small.seconds
    assert large.examples_per_s > 8 * small.examples_per_s
    assert large.examples_per_s == pytest.approx(256 / large.seconds)
    assert report.cheapest is large
    # less memory, or less communication per example: each has its use
    assert report.frontier == (small, large)
    assert f"({large.examples_per_s:,.4g} examples/s at most)" in str(report)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["cheapest"] == {"program.num_examples": 256}
    assert [row["examples_per_s"] for row in found["candidates"]] == [
        small.examples_per_s,
        large.examples_per_s,
    ]


@pytest.mark.parametrize("argument", ["num_layers", "width"])  # of the parameters; of the examples, too
def test_different_models_have_no_cheapest_and_a_frontier_each(argument):
    def make(num_examples=16, num_layers=LAYERS, width=WIDTH):
        shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        params = {"w": shape(num_layers, width, width)}
        return zero2jax.Program(loss_fn, params, shape(num_examples, width), optax.adam(1e-2))

    vary = {f"program.{argument}": [16, 32], STAGE: [1, 3]}
    report = search_plans(make, FP32, settings(), vary)
    assert report.num_models == 2
    assert report.cheapest is None
    # the larger model is beaten in everything by the smaller one, and is no worse a setting for that
    sizes = {c.varied[f"program.{argument}"] for c in report.frontier}
    assert sizes == {16, 32}
    assert "no cheapest: the settings train 2 different models" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["cheapest"] is None


def test_command_with_a_value_set(capsys):
    command = ["plan", "plan_program:program", "--axes", "data=8", "--target", "local", "--search", "--json"]
    assert main([*command, "--set", "program.num_examples=64", "--set", f"{STAGE}=3"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert [(row["report"]["stage"], row["report"]["batch_size"]) for row in rows] == [(3, 64)] * 3
    assert [row["varied"] for row in rows] == [{MICROBATCHES: k} for k in (1, 2, 4)]
    assert main([*command, "--set", f"{STAGE}=3", "--vary", f"{STAGE}=1,2"]) == 2
    assert "a value is either set or varied" in capsys.readouterr().err


def test_command(capsys):
    command = ["plan", "plan_program:program", "--axes", "data=8", "--target", "local", "--search", "--json"]
    for repeated in ([], ["--vary"]):  # once with two values, or twice
        assert main([*command, "--vary", f"{STAGE}=2", *repeated, f"{MICROBATCHES}=1,2"]) == 0
        rows = json.loads(capsys.readouterr().out)["candidates"]
        assert [(row["varied"][STAGE], row["varied"][MICROBATCHES]) for row in rows] == [(2, 1), (2, 2)]
    assert main([*command, "--vary", "program.nothing=1"]) == 2
    assert "has no argument of that name" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "--vary", "zero_optimization.stages=1"]) == 2
    assert "zero_optimization.stage" in capsys.readouterr().err


PLAN = ["plan", "plan_program:program", "--axes", "data=8", "--target"]


def test_the_cheapest_setting_is_written_as_a_file_that_trains(tmp_path, capsys):
    path = tmp_path / "best.json"
    words = ["--search", "--vary", f"{STAGE}=3", "--set", "program.num_examples=32", "--write", str(path)]
    assert main([*PLAN, "local", *words, "--vary", f"{MICROBATCHES}=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cheapest"] == {STAGE: 3, MICROBATCHES: 2}
    assert "it goes with program.num_examples = 32" in err
    p = program(32)
    engine = zero2jax.initialize(p.loss_fn, p.tx, path, zero2jax.make_mesh(data=N))
    assert (engine.stage, engine.num_microbatches, engine.batch_size) == (3, 2, 32)
    state = engine.init({"w": jnp.ones((LAYERS, WIDTH, WIDTH))})
    state, metrics = engine.step(state, jnp.ones((32, WIDTH)))
    assert metrics["applied"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--write", "best.json"], 2, "--write is for --search"),
        (["--search", "--write", "no/such/best.json"], 2, "the folder 'no/such' is not there"),
        (["--set", "program.num_examples=x"], 2, "calling 'program' with num_examples = 'x': TypeError"),
        (["--config", '{"amp": {"enabled": true}}'], 1, "amp = true: not supported"),
        (
            ["--config", '{"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}}'],
            1,
            "use zero_quantized_gradients_bits: 8",
        ),
        (["--config", '{"zero_optimization": {"stage": 9}}'], 2, "zero_optimization.stage = 9"),
    ],
)
def test_exit_codes_are_those_of_check(words, code, said, tmp_path, monkeypatch, capsys):
    if words[0] == "--config":
        (tmp_path / "ds.json").write_text(words[1])
        words = ["--config", str(tmp_path / "ds.json")]
    assert main([*PLAN, "cpu", *words]) == code
    assert said in capsys.readouterr().err


def test_what_does_not_fit_has_exit_code_1(monkeypatch, capsys):
    small = dataclasses.replace(TARGETS["cpu"], memory_bytes=1000)
    monkeypatch.setattr("zero2jax.cli.plan.get_target", lambda name: small)
    assert main([*PLAN, "cpu"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_microbatches_are_bounded_by_the_examples_of_a_device_of_any_group():
    of = lambda **axes: plan_command._bounds(program(16), PlanSettings(axes, CPU))
    assert of(data=4)[MICROBATCHES] == [1, 2, 4]
    assert of(replica=2, data=4)[MICROBATCHES] == [1, 2]
    assert of(replica=4, data=4)[MICROBATCHES] == [1]
