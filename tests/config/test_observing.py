"""The keys of a configuration that only observe, as an engine made from it does what they say."""

import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.config.check import check_config
from zero2jax.config.reading import read_config

BATCH = np.ones((8, 4), np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def trained(config, num_steps=2, tx=None):
    """(engine, metrics of each step) of a configuration on two devices, everything told."""
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0, **config}
    engine = zero2jax.initialize(loss_fn, tx or optax.sgd(0.1), config, zero2jax.make_mesh(data=2))
    state, found = engine.init({"w": np.ones((4, 2), np.float32)}), []
    for _ in range(num_steps):
        state, metrics = engine.step(state, BATCH)
        found.append(metrics)
    if engine.observers is not None:
        engine.observers.close()
    return engine, found


def test_file_monitors_write_where_deepspeed_does(tmp_path):
    where = {"enabled": True, "output_path": str(tmp_path)}
    config = {"tensorboard": {**where, "job_name": "a"}, "csv_monitor": {**where, "job_name": "b"}}
    _, metrics = trained(config)
    (file,) = (tmp_path / "a").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    rows = (tmp_path / "b" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert rows == ["step,train_loss", *[f"{8 * (i + 1)},{float(m['loss'])}" for i, m in enumerate(metrics)]]


def test_services_get_the_arguments_of_their_blocks(monkeypatch):
    asked = {}
    nothing = types.SimpleNamespace(
        warn_of_failures=lambda: None, close=lambda: None, put=lambda *_: True, say_behind=lambda: None
    )
    none = lambda **options: (asked.update(options), nothing)[1]
    monkeypatch.setattr("zero2jax.config.observing.why_missing", lambda name: "")
    monkeypatch.setattr("zero2jax.config.observing.Monitors", none)
    config = {
        "wandb": {"enabled": True, "team": "t"},
        "comet": {"enabled": True, "project": "p", "online": False, "experiment_name": "e", "api_key": "k"},
    }
    trained(config, num_steps=0)
    assert asked == {}  # nothing is opened before the first step
    trained(config, num_steps=1)
    assert asked == {
        "wandb": {"project": "deepspeed", "group": None, "entity": "t"},
        "comet": {
            "project_name": "p",
            "online": False,
            "experiment_name": "e",
            "api_key": "k",
            "samples_log_interval": 100,
        },
    }


def test_what_is_not_asked_for_is_not_there():
    assert trained({"wandb": {"enabled": False, "project": "p"}}, num_steps=0)[0].observers is None


def test_a_secret_is_neither_printed_nor_recorded(monkeypatch):
    monkeypatch.setattr("zero2jax.config.observing.why_missing", lambda name: "")
    config = {"comet": {"enabled": True, "api_key": "secret", "project": "p"}}
    engine, _ = trained(config, num_steps=0)
    assert engine.config["comet"] == {"enabled": True, "project": "p"}
    assert "secret" not in json.dumps(check_config(read_config(config)).as_dict())


def test_a_monitor_whose_package_is_missing_is_named_by_initialize(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    words = r"wandb is switched on, and wandb is not installed: pip install 'zero2jax\[wandb\]'"
    with pytest.warns(zero2jax.ConfigWarning, match=words) as caught:
        _, metrics = trained({"wandb": {"enabled": True}}, num_steps=1)
    assert (len(caught), caught[0].filename, len(metrics)) == (1, __file__, 1)


def test_steps_per_print_and_wall_clock_breakdown_print_lines(capsys, tmp_path):
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "b"}
    config = {"steps_per_print": 2, "wall_clock_breakdown": True, "csv_monitor": where}
    trained(config, num_steps=4, tx=optax.inject_hyperparams(optax.sgd)(0.125))
    first, second, times = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2: loss ")
    assert re.fullmatch(
        r"step 4: loss [\d.e-]+, lr 0.125, grad norm [\d.e-]+, 0 skipped; [\d,.]+ samples/s", second
    )
    assert re.match(r"step 4: a step took [\d.]+ ms \(mean of 2\): devices", times)
    written = {path.stem for path in tmp_path.glob("b/*elapsed*")}
    phases = ("step", "input_wait", "dispatch", "transfer", "between_steps")
    assert written == {f"Train_Samples_elapsed_time_ms_{phase}" for phase in phases}


def test_dump_state_and_comms_logger_print_once_and_compile_nothing_more(capsys):
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        trained({}, num_steps=2)
        num_without, _ = len(compiled), compiled.clear()
        engine, _ = trained({"dump_state": True, "comms_logger": {"enabled": True}}, num_steps=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == num_without
    out = capsys.readouterr().out
    assert out.count("state before step 1, of the configuration {") == 1
    assert "stage = 2" in out
    assert str(engine.layout.params) in out
    assert out.count("collectives of a step, per device:") == 1
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("reduce-scatter")}
    assert rows["reduce-scatter"][-3:] == ["1", "32", "32"]  # of one leaf of 4 x 2, fp32


def test_the_profile_is_of_the_step_after_as_many_as_the_key_says(tmp_path):
    path = tmp_path / "profile.txt"
    block = {"enabled": True, "profile_step": 1, "output_file": str(path), "detailed": False}
    trained({"flops_profiler": block}, num_steps=1)
    assert not path.exists()
    trained({"flops_profiler": block}, num_steps=3)
    lines = path.read_text().splitlines()
    assert lines[0] == "profile of step 2, per device"
    assert lines[1].startswith("parameters: 8 in all, 16 B stored; mesh {'data': 2}")
    forward = 2 * 4 * 4 * 2  # two operations, rows of a device, in, out; backward is as much
    assert (
        lines[2] == f"matrix products: {2 * forward} FLOP = forward {forward} FLOP, backward {forward} FLOP"
    )


@pytest.mark.parametrize("value", [None, 0, float("inf"), "Infinity"])
def test_never_has_many_spellings(value):
    assert read_config({"train_batch_size": 8, "steps_per_print": value}).steps_per_print == 0


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (3, 2)])
def test_model_flops_are_those_of_the_global_batch(stage, num_microbatches, monkeypatch, capsys):
    monkeypatch.setattr("zero2jax.config.observing.peak_flops", lambda kind: 1e4)
    config = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": num_microbatches,
        "steps_per_print": 3,
    }
    engine, _ = trained(config, num_steps=3)
    assert engine.num_microbatches == num_microbatches
    (line,) = capsys.readouterr().out.splitlines()
    rate, share = re.search(r"([\d,.]+) samples/s, ([\d,.]+)% of peak \(model FLOPs\)", line).groups()
    forward = 2 * 8 * 4 * 2  # two operations, batch, in, out
    steps_per_s = float(rate.replace(",", "")) / 8
    assert float(share) / 100 == pytest.approx(3 * forward * steps_per_s / 2e4, rel=0.02)
