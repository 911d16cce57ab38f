"""Settings compiled side by side: what is varied, what is refused, the frontier and the cheapest that fits."""

import dataclasses
import json

import pytest
from plan_program import FP32, LAYERS, WIDTH, N, program

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


def test_command(capsys):
    command = ["plan", "plan_program:program", "--axes", "data=8", "--target", "local", "--search", "--json"]
    for repeated in ([], ["--vary"]):  # once with two values, or twice
        assert main([*command, "--vary", f"{STAGE}=2", *repeated, f"{MICROBATCHES}=1,2"]) == 0
        rows = json.loads(capsys.readouterr().out)["candidates"]
        assert [(row["varied"][STAGE], row["varied"][MICROBATCHES]) for row in rows] == [(2, 1), (2, 2)]
    assert main([*command, "--vary", "program.nothing=1"]) == 2
    assert "has no argument of that name" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "--vary", "zero_optimization.stages=1"]) == 0  # refused, and said so
    assert "zero_optimization.stage" in capsys.readouterr().out


def test_microbatches_are_bounded_by_the_examples_of_a_device_of_any_group():
    of = lambda **axes: plan_command._bounds(program(16), PlanSettings(axes, CPU))
    assert of(data=4)[MICROBATCHES] == [1, 2, 4]
    assert of(replica=2, data=4)[MICROBATCHES] == [1, 2]
    assert of(replica=4, data=4)[MICROBATCHES] == [1]
