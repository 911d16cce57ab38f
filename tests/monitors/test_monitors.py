"""Metrics as each library reads them back; writers that fail, once and for all, without an end of the run."""

import csv
import struct
import sys
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import zero2jax
from zero2jax.monitors.monitors import numbers

METRICS = {
    "loss": jnp.float32(0.5),
    "learning_rate": jnp.float32(0.25),
    "aux": {"accuracy": jnp.float32(1.0)},
}
NAMED = {"Train/Samples/train_loss": 0.5, "Train/Samples/lr": 0.25, "Train/Samples/aux/accuracy": 1.0}


class Notebook:
    """A writer of the user's own."""

    def __init__(self):
        self.pages, self.threads, self.is_closed = [], set(), False

    def write(self, samples, values):
        self.pages.append((samples, dict(values)))
        self.threads.add(threading.current_thread())

    def close(self):
        self.is_closed = True


def record_two(**where):
    with zero2jax.Monitors(**where) as monitors:
        monitors.record(8, METRICS)
        monitors.record(16, METRICS)


def record_all(monitors, all_samples, close=True):
    for samples in all_samples:
        monitors.record(samples, METRICS)
    if close:
        monitors.close()


def events(folder):
    """(tag, samples, value) of each event of the one file in a folder, by tensorboardX's own messages."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    content, at, found = path.read_bytes(), 0, []
    while at < len(content):
        (length,) = struct.unpack_from(
            "<Q", content, at
        )  # 8 bytes length, 4 of a checksum, the event, 4 more
        event = Event.FromString(content[at + 12 : at + 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        at += length + 16
    return found


def test_tensorboard_reads_back_what_was_recorded(tmp_path):
    record_two(tensorboard=tmp_path / "run")
    expected = [(name, samples, value) for samples in (8, 16) for name, value in NAMED.items()]
    assert sorted(events(tmp_path / "run")) == sorted(expected)


def test_csv_files_have_one_header_also_after_a_second_run(tmp_path):
    record_two(csv=tmp_path)
    with zero2jax.Monitors(csv=tmp_path) as monitors:
        monitors.record(24, METRICS)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name.replace('/', '_')}.csv" for name in NAMED}
    with open(tmp_path / "Train_Samples_lr.csv") as file:
        assert list(csv.reader(file)) == [["step", "lr"], ["8", "0.25"], ["16", "0.25"], ["24", "0.25"]]


def fake_library(monkeypatch, name, **attributes):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))


def test_wandb_is_told_of_samples_and_names(monkeypatch):
    run, opened = Notebook(), {}
    run.log = lambda values, step: run.write(step, values)
    run.finish = run.close
    fake_library(monkeypatch, "wandb", init=lambda **options: (opened.update(options), run)[1])
    record_two(wandb={"project": "mine"})
    assert (opened, run.pages, run.is_closed) == ({"project": "mine"}, [(8, NAMED), (16, NAMED)], True)


def test_comet_is_told_in_intervals(monkeypatch):
    run, opened, names = Notebook(), {}, []
    run.log_metrics = lambda values, step: run.write(step, values)
    run.end, run.set_name = run.close, names.append
    fake_library(monkeypatch, "comet_ml", start=lambda **options: (opened.update(options), run)[1])
    comet = {"workspace": "w", "experiment_name": "first", "samples_log_interval": 9}
    with zero2jax.Monitors(comet=comet) as monitors:
        for samples in (8, 16, 24):
            monitors.record(samples, METRICS)
    assert (opened, names) == ({"workspace": "w"}, ["first"])
    assert ([samples for samples, _ in run.pages], run.is_closed) == ([8, 24], True)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    own = Notebook()
    words = r"monitor wandb failed.*wandb is not installed: pip install 'zero2jax\[wandb\]'"
    with pytest.warns(UserWarning, match=words) as caught:
        monitors = zero2jax.Monitors(own, wandb={})
    assert (len(caught), caught[0].filename) == (1, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        monitors.record(8, METRICS)
        monitors.close()
    assert own.pages == [(8, NAMED)]


def full_disk(tmp_path, monkeypatch):
    from tensorboardX import record_writer

    (tmp_path / "Train_Samples_lr.csv").symlink_to("/dev/full")
    monkeypatch.setattr(record_writer, "open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115


def test_a_full_disk_is_said_once_per_monitor_and_the_others_go_on(tmp_path, monkeypatch):
    full_disk(tmp_path, monkeypatch)
    own = Notebook()
    monitors = zero2jax.Monitors(own, tensorboard=tmp_path, csv=tmp_path)
    with pytest.warns(UserWarning, match="No space left") as caught:
        record_all(monitors, (8, 16, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitors.close()
    said = sorted(str(warning.message).split(" failed")[0] for warning in caught)
    assert said == ["monitor csv", "monitor tensorboard"]
    assert [samples for samples, _ in own.pages] == [8, 16, 24]


def test_metrics_are_read_in_another_thread_and_failed_steps_are_left_out():
    own, gone = Notebook(), jnp.float32(1.0)
    gone.delete()
    with zero2jax.Monitors(own) as monitors:
        monitors.record(8, {"loss": gone})
        monitors.record(16, METRICS)
    assert own.pages == [(16, NAMED)]
    assert own.is_closed
    assert threading.current_thread() not in own.threads


def test_a_slow_writer_loses_metrics_and_keeps_no_step(monkeypatch):
    from zero2jax.monitors import background

    go_on, own = threading.Event(), Notebook()
    write = own.write
    own.write = lambda *args: (go_on.wait(10), write(*args))
    monkeypatch.setattr(background.Background.__init__, "__defaults__", (lambda: None, 2))
    monitors = zero2jax.Monitors(own)
    with pytest.warns(UserWarning, match="the monitors are a thousand steps behind") as caught:
        record_all(monitors, range(10), close=False)
    go_on.set()
    monitors.close()
    assert len(caught) == 1
    assert 2 <= len(own.pages) <= 3


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    own = Notebook()
    with zero2jax.Monitors(own, csv=tmp_path) as monitors:
        monitors.record(8, METRICS)
    assert (own.pages, list(tmp_path.iterdir())) == ([], [])


def test_scalars_of_any_kind_are_numbers_and_nothing_else_is():
    metrics = {
        "applied": jnp.array(True),
        "count": 3,
        "learning_rate": jnp.float32(jnp.nan),  # the optimizer's state does not show it
        "aux": {"vector": jnp.ones(2), "key": jax.random.key(0), "none": None, "text": "a"},
        "activation_profile": {"segments": 1},
    }
    assert numbers(metrics) == {"applied": 1.0, "count": 3.0}
