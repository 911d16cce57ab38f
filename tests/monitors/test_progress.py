"""The lines of progress: rates from the times of the steps, without the first two."""

import dataclasses

import pytest

from zero2jax.monitors.observers import StepRecord, Upcoming
from zero2jax.monitors.progress import Progress, Utilization

METRICS = {"loss": 2.0, "learning_rate": 1e-3, "grad_norm": 0.5, "applied": 1.0}


def record(step, seconds=0.1, **metrics):
    return StepRecord(
        step=step,
        samples=8 * step,
        num_examples=8,
        num_tokens=80,
        metrics=METRICS | metrics,
        between_s=0.25 * seconds,
        dispatch_s=0.125 * seconds,
        idle_s=0.25 * seconds,
        device_s=0.75 * seconds,
    )


def printed(progress, records, capsys):
    for r in records:
        progress(r)
    return capsys.readouterr().out.splitlines()


def test_a_line_every_so_many_steps_with_rates_of_those_since_the_last(capsys):
    records = [record(step, seconds=5.0 if step <= 2 else 0.1) for step in range(1, 5)]
    records += [record(5, applied=0.0), record(6, seconds=0.3)]
    assert printed(Progress(2), records, capsys) == [
        "step 2: loss 2, lr 0.001, grad norm 0.5, 0 skipped",  # the first two steps compile
        "step 4: loss 2, lr 0.001, grad norm 0.5, 0 skipped; 80.0 samples/s, 800 tokens/s",
        "step 6: loss 2, lr 0.001, grad norm 0.5, 1 skipped; 40.0 samples/s, 400 tokens/s",
    ]


def test_throughput_can_be_left_out(capsys):
    lines = printed(Progress(3, throughput=False), map(record, range(1, 4)), capsys)
    assert lines == ["step 3: loss 2, lr 0.001, grad norm 0.5, 0 skipped"]


def test_a_loss_scale_brings_its_own_count_of_skipped_steps(capsys):
    lines = printed(Progress(3), [record(i, loss_scale=8.0, num_skipped=4.0) for i in (1, 2, 3)], capsys)
    assert "loss scale 8, 4 skipped" in lines[0]


def test_the_breakdown_says_where_the_time_goes(capsys):
    records = [record(step) for step in range(1, 4)]
    line = (
        "step 3: a step took 100.00 ms (mean of 1): devices 75.00 ms, waiting for the loop 25.00 ms; the loop: "
        "between steps 25.00 ms, dispatch 12.50 ms"
    )
    assert printed(Progress(3, metrics=False, breakdown=True), records, capsys) == [line]
    records = [dataclasses.replace(r, transfer_s=0.004) for r in records]
    lines = printed(Progress(3, metrics=False, breakdown=True), records, capsys)
    assert lines == [f"{line}; the batch was there after 4.00 ms"]


def test_the_breakdown_says_what_offloading_adds_and_moves(capsys):
    measured = {
        "offload_share": 0.25,
        "offload_down_bytes_per_s": 2e9,
        "offload_up_bytes_per_s": float("nan"),
    }
    unknown = dict.fromkeys(measured, float("nan"))  # of the first step that is over nothing is known yet
    records = [record(i, **(unknown if i < 4 else measured)) for i in range(1, 5)]
    (line,) = printed(Progress(4, metrics=False, breakdown=True), records, capsys)
    assert line.endswith("dispatch 12.50 ms; offload adds 25.0% of a step, down 2 GB/s")


def test_utilization_is_three_forward_passes_against_the_peak(capsys):
    counted = []
    utilization = Utilization(lambda upcoming: counted.append(upcoming) or 1e12, peak_flops=1e14)
    for step in range(3):
        utilization.note(Upcoming(step=step, batch=(), loss_args=None))
    assert len(counted) == 1  # the shapes are the same
    assert utilization.of(10.0) == pytest.approx(0.3)
    lines = printed(Progress(3, utilization=utilization), map(record, range(1, 4)), capsys)
    assert lines[0].endswith("30.0% of peak (model FLOPs)")
