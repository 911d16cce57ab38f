"""`zero2jax check` and `info`: what they print, and exit code 2 with every error on stderr."""

import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from zero2jax.cli.check import print_report
from zero2jax.cli.main import main
from zero2jax.config.check import check_config, examine
from zero2jax.config.keys import KEYS
from zero2jax.config.reading import ConfigError, read_config

RAW = {
    "train_batch_size": 32,
    "experiment": "run 7",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "cpu_offload": True,
    },
}


ON_DEVICES = RAW | {"zero_optimization": {"stage": 2}}


def rows(report):
    return {row.key: (row.value, row.treatment) for row in report.keys}


def test_report_says_what_every_key_of_the_file_became():
    report = check_config(read_config(RAW), 8)
    assert rows(report) == {
        "train_batch_size": (32, "implemented"),
        "bf16.enabled": (True, "implemented"),
        "optimizer.type": ("adamw", "implemented"),
        "optimizer.params.lr": (1e-4, "implemented"),
        "optimizer.params.betas": ((0.9, 0.95), "implemented"),
        "zero_optimization.stage": (2, "implemented"),
        "zero_optimization.contiguous_gradients": (True, "no effect"),
        "zero_optimization.reduce_bucket_size": (500_000_000, "implemented"),
        "zero_optimization.overlap_comm": (True, "implemented"),
        "zero_optimization.offload_optimizer.device": ("cpu", "implemented"),
        "zero_optimization.cpu_offload": (True, "converted"),
    }
    assert report.trains
    assert "in host memory" in report.effective["masters and optimizer state"]
    assert any("experiment: unknown key" in note for note in report.notes)


def test_effective_settings():
    effective = check_config(read_config(RAW), 8).effective
    assert effective["batch"] == "32 examples = 4 per device x 1 microbatches x 8 devices"
    assert effective["compute dtype"] == "bf16"
    assert effective["gradient accumulation dtype"] == "fp32"
    assert effective["gradient clipping"].startswith(
        "none (the key is absent; DeepSpeed since 0.19.3 would clip"
    )
    assert effective["optimizer"] == "adamw (lr 0.0001, betas [0.9, 0.95])"
    threshold = effective["on GPUs: xla_gpu_reduce_scatter_combine_threshold_bytes"]
    assert threshold == "at most the model, 1000000000"
    assert effective["on GPUs: xla_gpu_enable_latency_hiding_scheduler"] == "true"


def test_adam_w_mode_has_an_effect_for_adam_only():
    for kind, treatment, noted in (("Adam", "implemented", False), ("AdamW", "no effect", True)):
        config = read_config({"optimizer": {"type": kind, "params": {"adam_w_mode": False}}})
        assert rows(check_config(config))["optimizer.params.adam_w_mode"] == (False, treatment)
        assert any("no effect here: optimizer.params.adam_w_mode" in note for note in config.notes) is noted


def test_without_devices_the_batch_stays_as_written():
    assert check_config(read_config(RAW)).effective["batch"] == "32 examples per step"
    alone = read_config({"gradient_accumulation_steps": 4})
    assert check_config(alone, 8).effective["batch"] == "from the data; 4 microbatches per step"


def test_every_key_adds_the_defaults():
    report = check_config(read_config({}), every_key=True)
    assert not any(row.given for row in report.keys)
    assert {row.key for row in report.keys} <= set(KEYS)
    assert len(report.keys) > 100


def test_one_device_is_noted():
    assert any("saves nothing" in note for note in check_config(read_config(ON_DEVICES), 1).notes)
    assert not any("saves nothing" in note for note in check_config(read_config(RAW), 1).notes)


def test_batch_sizes_that_do_not_fit_are_an_error():
    with pytest.raises(ConfigError, match=r"shards = 5 \(from --devices\)"):
        check_config(read_config(RAW), 5)


def test_printed_report_never_cuts_a_key(capsys):
    print_report(check_config(read_config(RAW), 8), Console(width=40))
    printed = capsys.readouterr().out
    for key in rows(check_config(read_config(RAW), 8)):
        assert key in printed
    assert "[0.9, 0.95]" in printed


def run(args, capsys):
    """(exit code, stdout, stderr) of the command line in this process."""
    try:
        code = main(args)
    except SystemExit as exit_:
        code = exit_.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def ds_config(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(RAW))
    return str(path)


def test_check_prints_tables(ds_config, capsys):
    code, out, err = run(["check", ds_config, "--devices", "8"], capsys)
    assert (code, err) == (0, "")
    assert "does not train as it is" not in out
    assert "zero_optimization.contiguous_gradients" in out


def test_check_prints_json(ds_config, capsys):
    code, out, _ = run(["check", ds_config, "--json"], capsys)
    report = json.loads(out)
    assert (code, report["trains"]) == (0, True)
    assert report["keys"][0] == {
        "key": "train_batch_size",
        "value": 32,
        "given": True,
        "auto": False,
        "treatment": "implemented",
        "becomes": KEYS["train_batch_size"].becomes,
    }


def test_check_of_a_bad_file_exits_2_with_all_errors_on_stderr(tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text('{"train_batch_size": -1, "zero_optimization": {"stage": 9}}')
    code, out, err = run(["check", str(path)], capsys)
    assert (code, out) == (2, "")
    assert "train_batch_size = -1" in err
    assert "zero_optimization.stage = 9" in err


TRAINS = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def checked(tmp_path, capsys, raw, *args):
    """(exit code, stdout, stderr) of `check` for a file of this content."""
    path = tmp_path / "run:1.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return run(["check", str(path), *args], capsys)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (TRAINS, 0),
        ({**TRAINS, "tensorboard": {"enabled": True}}, 0),
        ({**TRAINS, "fp16": {"enabled": True}, "bf16": {}}, 0),
        ({**TRAINS, "amp": {"enabled": True}}, 1),
        ({**TRAINS, "optimizer": {"type": "OneBitAdam"}}, 1),
        ({**TRAINS, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, 1),
        ({**TRAINS, "train_batch_size": 17}, 1),
        ({**TRAINS, "zero_optimization": {"stage": 3, "mics_shard_size": 64}}, 1),
        ({**TRAINS, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}, 1),
        ({**TRAINS, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}, 1),
        ({**TRAINS, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}, 0),
        ({**TRAINS, "zero_optimization": {"stage": 4}}, 2),
        ({**TRAINS, "activation_checkpointing": {"policy": "nonesuch"}}, 2),
        ({**TRAINS, "activation_checkpointing": {"policy": {"a": 5}}}, 2),
        ("", 2),
        ("{ /*", 2),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_says_whether_the_file_trains(tmp_path, capsys, raw, code, as_json):
    found, out, err = checked(tmp_path, capsys, raw, "--devices", "8", *(["--json"] if as_json else []))
    assert found == code
    assert bool(err) == (code == 2 and not as_json)
    if as_json:
        report = json.loads(out)
        reasons = [report[name] for name in ("errors", "refused", "to_fill")]
        assert (report["trains"], any(reasons), bool(report["errors"])) == (code == 0, code > 0, code == 2)
    else:
        assert bool(out) == (code < 2)
        assert ("does not train as it is" in out) == (code == 1)


EVERYTHING = {
    "train_batch_size": 17,
    "fp16": {"enabled": True, "foo": 1},
    "amp": {"enabled": True},
    "prescale_gradients": True,
    "activation_checkpointing": {"policy": "nonesuch"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "super_offload": True},
        "mics_shard_size": 3,
    },
    "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
}


def test_everything_that_is_wrong_comes_in_one_round(tmp_path, capsys):
    code, out, err = checked(tmp_path, capsys, EVERYTHING, "--devices", "8")
    assert (code, out) == (2, "")
    _, out, _ = checked(tmp_path, capsys, EVERYTHING, "--devices", "8", "--json")
    report = json.loads(out)
    keys = {name: [line.split(" = ")[0].split(":")[0] for line in report[name]] for name in REASONS}
    assert keys == REASONS
    for name in REASONS:
        assert all(line in err for line in report[name])


REASONS = {
    "errors": ["fp16.foo", "prescale_gradients", "activation_checkpointing.policy"],
    "refused": [
        "zero_optimization.offload_optimizer.super_offload",
        "amp",
        "zero_optimization.mics_shard_size",
        "train_batch_size",
    ],
    "to_fill": ["scheduler.params.total_num_steps"],
}


def test_the_tables_of_a_trainers_template_are_seen_before_it_is_filled(tmp_path, capsys):
    template = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3},
    }
    code, out, _ = checked(tmp_path, capsys, template, "--devices", "8")
    assert code == 1
    assert "3, sharded: optimizer state, gradients and parameters" in out
    assert (
        "scheduler.params.total_num_steps = 'auto': must be an integer of at least 1 and has no default"
        in out
    )
    assert "optimizer.params.lr = 'auto': a learning rate needs a value" in out
    values = ["optimizer.params.lr=3e-4", "scheduler.params.total_num_steps=100", "bfloat16.enabled=true"]
    words = [word for value in [*values, "fp16.enabled=false"] for word in ("--set", value)]
    code, out, _ = checked(tmp_path, capsys, template, *words)
    assert code == 0
    assert "override fp16.enabled: the file has no such key, so it fills nothing" in out
    assert "adamw (lr 0.0003)" in out
    code, _, err = checked(tmp_path, capsys, template, "--set", "zero_optimization.stage=2")
    assert code == 2
    assert "override zero_optimization.stage = 2: the file says 3" in err
    code, _, err = checked(tmp_path, capsys, template, "--set", "bf16")
    assert code == 2
    assert "--set bf16: write KEY=VALUE" in err
    code, _, err = checked(tmp_path, capsys, template, *["--set", "optimizer.params.lr=1"] * 2)
    assert code == 2
    assert "--set optimizer.params.lr=1: optimizer.params.lr is given twice. Give one value." in err


def test_a_batch_that_does_not_fit_is_shown_as_written():
    report = examine({**TRAINS, "train_batch_size": 17}, 8)
    assert report.effective["batch"] == "17 examples per step"
    assert [line.split(",")[0] for line in report.refused] == ["train_batch_size = 17"]
    wrong = examine({"train_batch_size": 17, "gradient_accumulation_steps": 0}, 8)
    assert (len(wrong.errors), wrong.refused) == (1, ()), "which of the two is meant is not known"


def test_a_model_axis_that_the_file_asks_for_is_noted():
    report = check_config(read_config({"tensor_parallel": {"autotp_size": 2}}))
    assert any("initialize needs a mesh whose axis 'model' has this size" in note for note in report.notes)


def test_check_of_odd_input():
    with pytest.raises(ConfigError, match="num_devices = 0: must be at least 1"):
        check_config(read_config({"train_batch_size": 8}), 0)
    report = check_config(read_config({1: 2}))
    assert report.notes == ("1: unknown key. It is ignored.",)
    with pytest.raises(ConfigError, match="8 devices, which cannot be divided into groups of 3"):
        check_config(read_config({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}), 8)
    with pytest.raises(
        ConfigError, match=r"Choose a divisor of their number \(1, 2, 4, 5, 8, .*, 4000, 4096\)"
    ):
        check_config(read_config({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}), 10**18)
    aliases = read_config({"bfloat16": {"enabled": True, "immediate_grad_update": True}})
    assert rows(check_config(aliases))["bf16.immediate_grad_update"] == (True, "no effect")


@pytest.mark.parametrize(
    "args",
    [["check"], ["check", "/no/such/file"], ["nonsense"], ["check", "x.json", "--devices", "many"], []],
)
def test_wrong_usage_exits_2(args, capsys):
    code, out, err = run(args, capsys)
    assert code == 2
    assert err
    assert "Traceback" not in err + out


def test_devices_must_be_positive(ds_config, capsys):
    code, _, err = run(["check", ds_config, "--devices", "0"], capsys)
    assert code == 2
    assert "--devices = 0: must be at least 1" in err


def test_info_reports_versions_and_devices(capsys):
    code, out, _ = run(["info", "--json"], capsys)
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["jax"]
    assert set(report["cuda_compiler"]["packages"]) == {
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
    }
    assert report["devices"][0]["platform"] == "cpu"
    assert report["devices"][0]["memory_kinds"]
    code, out, _ = run(["info"], capsys)
    assert code == 0
    assert "jaxlib" in out
    assert "measured" not in out


def test_info_measures_the_ways_of_offload(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("zero2jax.offload.rates.PROBE_BYTES", 1000)
    code, out, _ = run(["info", "--measure", "--nvme-path", str(tmp_path), "--json"], capsys)
    assert {name for name, rate in json.loads(out)["bytes_per_s"].items() if rate > 0} == {
        "up",
        "down",
        "write",
        "read",
    }
    assert not list(tmp_path.iterdir())
    code, out, _ = run(["info", "--measure"], capsys)
    assert re.search(r"host to device, measured[\s│]+[\d.]+ GB/s", out)
    assert re.search(r"device to host, measured[\s│]+[\d.]+ GB/s", out)
    code, _, err = run(["info", "--nvme-path", "/proc/nowhere"], capsys)
    assert code == 2
    assert re.search(r"making /proc/nowhere/zero2jax-probe-\d+/process-0-of-1", err)


def test_module_runs_without_starting_a_backend(ds_config):
    """One real process: `python -m zero2jax check`, under a platform that does not exist."""
    command = [sys.executable, "-m", "zero2jax", "check", ds_config, "--devices", "8"]
    environment = {"JAX_PLATFORMS": "nonsense", "PATH": "", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    # Where CUDA packages are installed and no GPU is, importing jax 0.10 itself logs lines about the driver.
    said = [line for line in done.stderr.splitlines() if "cudart_stub" not in line and "absl::" not in line]
    assert (done.returncode, said) == (0, [])
    assert "32 examples = 4 per device" in done.stdout


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"initial_scale_power": 200}, "initial_scale_power = 200: must be at most 100"),
        ({"min_loss_scale": 1e30}, "min_loss_scale = 1000000000000000019884624838656: the first scale"),
        ({"loss_scale": 1e38}, "loss_scale = 1e+38: must be at most 2 ** 100"),
        ({"hysteresis": 2**31}, "hysteresis = 2147483648: must be at most 1073741823"),
        ({"loss_scale_window": 10**12}, "loss_scale_window = 1000000000000: must be at most 1073741823"),
    ],
)
def test_a_loss_scale_that_cannot_be_is_reported_with_the_rest(keys, said):
    report = examine({"fp16": {"enabled": True, **keys}, "train_batch_size": 17}, 8)
    (error,) = report.errors
    assert error.startswith(f"fp16.{said}")
    assert report.refused, "the batch, too"
