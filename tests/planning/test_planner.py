"""Plans against live buffers, against bytes known by construction, and through the command line."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from plan_program import FP32, GPUS, LAYERS, WIDTH, N, P, loss_fn, needs_compiler, products_of, program
from plan_program import __file__ as program_file

import zero2jax
from zero2jax.cli.main import main
from zero2jax.planning.planner import PlanSettings, lower_plan, prepare_plan
from zero2jax.planning.targets import TARGETS


def make_plan(config=FP32, target="cpu", num_examples=16, **options):
    p = program(num_examples)
    options = {"axes": {"data": N}} | options
    return zero2jax.plan(p.loss_fn, p.params, p.batch, tx=p.tx, config=config, target=target, **options)


def by_kind(report):
    return {row.kind: row.bytes_per_step for row in report.collectives if row.largest_bytes > 64}


def test_rest_is_what_the_live_buffers_hold():
    report = make_plan(target="local")
    p = program()
    engine = zero2jax.initialize(p.loss_fn, p.tx, FP32, zero2jax.make_mesh(data=N))
    state = engine.init(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), p.params))
    rows = {row.name: row for row in report.by_class}
    assert (
        rows["master"].rest_bytes
        == rows["master"].formula_bytes
        == zero2jax.live_bytes(state.params)
        == P // N
    )
    assert rows["optimizer state"].rest_bytes == zero2jax.live_bytes(state.opt_state) == 2 * P // N + 4
    assert rows["master"].peak_bytes == P // N
    assert report.rest_bytes == zero2jax.live_bytes(state) + 16 * WIDTH * 4 // N  # and this device's batch
    assert report.alias_bytes == zero2jax.live_bytes(state)


def test_frozen_parameters_have_no_optimizer_state_and_keep_their_dtype():
    shapes = {
        "base": jax.ShapeDtypeStruct((16, 16), jnp.bfloat16),
        "adapter": jax.ShapeDtypeStruct((16, 8), jnp.float32),
    }
    loss = lambda params, batch: jnp.mean(
        (batch @ params["base"].astype(jnp.float32) @ params["adapter"]) ** 2
    )
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    report = zero2jax.plan(
        loss, shapes, batch, tx=optax.adam(1e-3), config=FP32, axes={"data": N}, target="cpu",
        trainable=lambda path, leaf: path == "adapter",
    )  # fmt: skip
    rows = {row.name: row for row in report.by_class}
    assert rows["master"].rest_bytes == (2 * 16 * 16 + 4 * 16 * 8) // N
    assert rows["optimizer state"].rest_bytes == 2 * 4 * 16 * 8 // N + 4  # and Adam's count


# reduced G and gathered P per step with K microbatches; stage 3 gathers again in backward
TABLE = [
    (0, 1, {"all-reduce": 1}),
    (1, 1, {"reduce-scatter": 1, "all-gather": 1}),
    (1, 2, {"reduce-scatter": 1, "all-gather": 1}),
    (2, 1, {"reduce-scatter": 1, "all-gather": 1}),
    (2, 2, {"reduce-scatter": 2, "all-gather": 1}),  # gathers once
    (3, 1, {"reduce-scatter": 1, "all-gather": 2}),
    (3, 2, {"reduce-scatter": 2, "all-gather": 4}),
]


@pytest.mark.parametrize(("stage", "num_microbatches", "volumes"), TABLE)
def test_collectives_of_every_stage(stage, num_microbatches, volumes):
    config = {
        "zero_optimization": {"stage": stage},
        "train_batch_size": 16,
        "gradient_accumulation_steps": num_microbatches,
    }
    report = make_plan(config)
    # the compiler combines the loss's 8 bytes with an all-reduce of gradients
    assert by_kind(report) == pytest.approx({kind: n * P for kind, n in volumes.items()}, abs=8)
    assert {row.axis for row in report.collectives} == {"data"}
    formula = {row.name: row.formula_bytes for row in report.by_class}
    is_full = stage == 0 or (stage == 1 and num_microbatches > 1)
    assert formula["gradients"] == (P if is_full else P // N)
    assert formula["parameters"] == (P if stage < 3 else P // LAYERS)


def test_json_has_the_promised_keys_and_plain_values():
    found = json.loads(json.dumps(make_plan().as_dict()))
    promised = "total_bytes rest_bytes usable_bytes fits by_class collectives exposed_bytes"
    assert set(promised.split()) <= set(found)
    # nothing is known of `cpu`
    assert found["fits"] is found["usable_bytes"] is found["exposed_bytes"] is None
    assert found["by_class"]["master"]["rest_bytes"] == P // N
    assert found["flops"] > 0


def test_the_largest_tensors_at_the_peak_are_named():
    report = make_plan(num_examples=4096)  # batches of 32 KiB on each device, layers of 1 KiB
    largest = report.lifetimes.largest_at_peak[0]
    assert (largest.class_name, largest.num_bytes % (4096 // N * WIDTH * 4)) == (
        "activations and temporaries",
        0,
    )
    assert re.search(r"largest at peak +tensor +class +computed by +in\n", str(report))
    assert re.search(
        rf"f32\[.*512,{WIDTH}\] +activations and temporaries .* tests/plan_program.py:\d+\n", str(report)
    )
    assert report.as_dict()["largest_at_peak"][0]["op_name"] == largest.op_name
    assert any(note.startswith("at peak: what lives at the one moment") for note in report.notes)


def used_twice(penalty):
    """An embedding tied to the output; with a penalty every parameter is used once more, the layers as a stack."""

    def loss(params, tokens):
        x = params["embed"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, params["layers"])
        out = x @ (params["embed"].T if penalty is not None else params["out"])
        squares = sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in jax.tree.leaves(params))
        return jnp.mean(out**2) + (1e-3 * squares if penalty else 0)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"embed": shape(56, WIDTH), "layers": shape(LAYERS, WIDTH, WIDTH)}
    params |= {"out": shape(WIDTH, 56)} if penalty is None else {}
    return loss, params, jax.ShapeDtypeStruct((16,), jnp.int32)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("stage", "penalty", "named"),
    [(3, None, None), (3, False, "embed"), (3, True, "embed, layers"), (2, False, None), (2, True, None)],
)
def test_a_parameter_that_stage_3_reduces_at_every_use_is_named(stage, penalty, named, num_microbatches):
    config = {
        # small parameters are reduced once
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_batch_size": 16,
        "gradient_accumulation_steps": num_microbatches,
    }
    loss, *shapes = used_twice(penalty)
    report = zero2jax.plan(loss, *shapes, tx=optax.sgd(0.1), config=config, axes={"data": N}, target="cpu")
    notes = [
        note for note in report.notes if "stage 3 reduces the gradient of a parameter at each place" in note
    ]
    assert len(notes) == (named is not None)
    if named:
        assert f"(by their size: {named})" in notes[0]
        embed, layers = 56 * WIDTH, LAYERS * WIDTH * WIDTH
        reduced = by_kind(report)["reduce-scatter"] / 4
        assert reduced > embed + layers
        assert notes[0].startswith(f"reduced {reduced / num_microbatches / (embed + layers):.2f} times: ")


def test_a_model_too_large_is_reported():
    small = dataclasses.replace(TARGETS["cpu"], memory_bytes=1000)
    report = make_plan(target=small, memory_fraction=0.5)
    assert report.fits is False
    assert report.usable_bytes == 500
    assert report.headroom_bytes == 500 - report.total_bytes < 0
    assert "DOES NOT FIT" in str(report)
    assert "leaves 500 B to the CUDA context, NCCL" in str(report)


def test_rates_give_exposed_bytes():
    fast = dataclasses.replace(TARGETS["cpu"], peak_flops=1e12, memory_bytes=10**9)
    report = make_plan(target=fast, in_node_bytes_per_s=1e9, across_bytes_per_s=1e8, devices_per_host=4)
    assert report.fits
    assert {row.across for row in report.collectives} == {True}
    # on a CPU collectives are synchronous: all of their bytes are waited for
    assert report.exposed_bytes == report.communication_bytes
    wire = sum(c.wire_bytes * c.trips for c in report.audit.collectives)
    assert report.timeline.exposed_s == pytest.approx(wire / 1e8)
    assert "across hosts" in str(report)
    # no schedule could hide them either: there is too little to run beside them. Examples would help, or groups
    (note,) = [note for note in report.notes if note.startswith("no schedule hides 90% of this step's")]
    needed = math.ceil(0.9 * wire / 1e8 / report.compute_s * 16 / N)
    for part in (
        f"collectives take {wire / 1e8:.3g} s on their links",
        f"computing, beside which they could run, {report.compute_s:.3g} s",
        f"it takes {needed} examples per device and microbatch or more ({16 // N} now)",
        f"keep on one host most of what takes {wire / 1e8:.3g} s across hosts",
    ):
        assert part in note
    assert report.timeline_with_memory is report.as_dict()["with_memory"] is None


def test_memory_bound_work_takes_time_where_the_memory_has_a_rate():
    slow = dataclasses.replace(TARGETS["cpu"], peak_flops=1e12, memory_bytes_per_s=1e9)
    report = make_plan(target=slow, in_node_bytes_per_s=1e9, across_bytes_per_s=1e8)
    found = report.as_dict()
    assert found["hidden_share"] == found["with_memory"]["hidden_share"] == 0  # synchronous on a CPU
    # the update alone reads and writes both moments and the masters
    assert (
        found["with_memory"]["step_s"] - found["with_memory"]["exposed_s"]
        > 6 * (P // N) / 1e9
        > found["compute_s"]
    )
    assert "with memory-bound work 0% of the time of collectives is hidden" in str(report)
    # there is work to run beside them, though
    assert not any(note.startswith("no schedule hides") for note in report.notes)


RATES = dataclasses.replace(
    TARGETS["cpu"], peak_flops=8e9, tf32_flops=4e9, in_node_bytes_per_s=1e9, across_bytes_per_s=1e9
)
# forward, and for each layer but the first one both gradients; a device has 2 of 16 rows
PRODUCT_FLOPS = (3 * LAYERS - 1) * 2 * (16 // N) * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("dtype", "xla_name", "flops_per_s"), [("bfloat16", "bf16", 8e9), ("float32", "f32", 4e9)]
)
def test_products_count_at_the_rate_of_the_dtype_that_they_are_in(dtype, xla_name, flops_per_s):
    p = products_of(dtype)
    report = zero2jax.plan(p.loss_fn, p.params, p.batch, tx=p.tx, axes={"data": N}, target=RATES)
    found = json.loads(json.dumps(report.as_dict()))
    assert (found["compute_dtype"], found["flops_by_dtype"]) == ("bfloat16", {xla_name: PRODUCT_FLOPS})
    assert found["compute_s"] == pytest.approx(PRODUCT_FLOPS / flops_per_s)
    assert f"100% in {xla_name}" in str(report)
    notes = [
        note for note in report.notes if "of the matrix products are fp32 though compute is bfloat16" in note
    ]
    if dtype == "bfloat16":
        assert not notes
        assert found["first_widened"] is None
        return
    (note,) = notes
    lines = Path(program_file).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith("x = jnp.tanh(x @ w)"))
    assert note.startswith(
        "100% of the matrix products are fp32 though compute is bfloat16 (about 0.004 in place of 0.008"
    )
    assert re.search(rf"The first: jit\(step\)/.*dot_general of f32 x bf16, .*plan_program\.py:{line}$", note)
    assert found["widened_flops"] == PRODUCT_FLOPS
    assert found["first_widened"]["source"].endswith(f"plan_program.py:{line}")


def test_fp32_is_no_surprise_where_compute_is_fp32():
    p = products_of("float32")
    report = zero2jax.plan(p.loss_fn, p.params, p.batch, tx=p.tx, config=FP32, axes={"data": N}, target=RATES)
    assert report.timeline.flops_by_dtype == {"f32": PRODUCT_FLOPS}
    assert report.widened_flops == 0
    assert not any("though compute is" in note for note in report.notes)


def test_tensor_parallel_bytes_are_those_of_one_model_shard():
    spec = {"w": jax.sharding.PartitionSpec(None, None, "model")}
    report = make_plan(axes={"data": 4, "model": 2}, param_specs=spec)
    assert report.by_class[0].rest_bytes == report.by_class[0].formula_bytes == P // 8


def test_notes_say_what_was_ignored_and_what_is_not_known():
    report = make_plan({**FP32, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert any("['optimizer'] are not used" in note for note in report.notes)
    assert any("are the CPU compiler's; sizes of the state are exact" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h300"}, "there is no target 'h300'"),
        ({"num_examples": 12}, r"cutting a batch of 12 examples over 8 devices x 1 microbatches"),
        (
            {"config": {**FP32, "train_batch_size": 24}},
            "it has 16 examples, and the batch size was set to 24",
        ),
        ({"memory_fraction": 1.5}, "planning with memory_fraction=1.5"),
        (
            {"target": dataclasses.replace(TARGETS["cpu"], name="old", has_bf16=False), "config": None},
            r"planning for old: it has no bf16 arithmetic, .* Compute in fp16 or fp32 there \(the `fp16` block",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**options)


def test_command_prints_json(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FP32 | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}))
    command = "plan plan_program:program --axes data=8 --target cpu --json --config"
    assert main([*command.split(), str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    # one moment and some counters: the file's Lion, not the program's Adam
    assert P // N <= found["by_class"]["optimizer state"]["rest_bytes"] <= P // N + 16
    assert found["axes"] == {"data": 8}


def test_command_sets_arguments_of_the_program_and_keys_of_the_configuration(capsys):
    command = ["plan", "plan_program:program", "--axes", "data=8", "--target", "local", "--json"]
    assert main([*command, "--set", "program.num_examples=32", "--set", "gradient_accumulation_steps=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["num_microbatches"], found["stage"]) == (32, 2, 2)


def test_command_says_whose_optimizer_is_planned(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FP32 | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}))
    command = ["plan_program:program", "--axes", "data=8", "--target", "local", "--config", str(path)]
    said = "optimizer: the configuration's 'lion' in place of the program's tx. zero2jax.initialize(tx=...) does the"
    for more in (["plan"], ["plan", "--search", "--vary", "gradient_accumulation_steps=1"]):
        assert main([more[0], *command, *more[1:]]) == 0
        assert said in capsys.readouterr().out
    assert main(["activations", *command, "--policies", "dots"]) == 0
    assert said in capsys.readouterr().out


def test_command_simulates_as_many_devices_as_the_axes_need():
    command = "-m zero2jax plan plan_program:program --axes data=16 --target cpu --json"
    done = subprocess.run(
        [sys.executable, *command.split()],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["by_class"]["master"]["rest_bytes"] == P // 16


def test_command_prints_the_table_and_draws_the_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert (
        main(["plan", "plan_program:program", "--axes", "data=8", "--target", "cpu", "--png", str(path)]) == 0
    )
    captured = capsys.readouterr()
    assert "activations and temporaries" in captured.out
    assert f"wrote {path}" in captured.err
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan_program"], "write MODULE:FUNCTION"),
        (["no_such_module:f"], "there is no module 'no_such_module'"),
        (["plan_program:programm"], r"module 'plan_program' has no function 'programm'\. It has .*program"),
        (["plan_program:not_a_program"], "it returned a int, and must return a zero2jax.Program"),
        (["plan_program:program", "--axes", "8"], "reading --axes '8': write NAME=SIZE"),
        (["plan_program:program", "--target", "h300"], "there is no target 'h300'. There are v100-32gb"),
        (["plan_program:program", "--axes", "data=5"], "cutting a batch of 16 examples over 5 devices"),
        (["plan_program:program", "--axes", "data=64"], "it needs 64 devices"),
        (
            ["plan_program:program", "--axes", "data=99999999999", "--target", "cpu"],
            "at most 65536 are planned for",
        ),
        (
            ["plan_program:program", "--axes", "data=64"],
            "there are 8. Choose the target that is meant: --target h100-80gb for instance",
        ),
        (
            ["plan_program:program", "--axes", "data=64", "--search"],
            "Choose the target that is meant: --target",
        ),
        (
            ["plan_program:program", "--set", "program.batch"],
            "reading --set 'program.batch': write KEY=VALUE",
        ),
        (
            ["plan_program:program", "--set", "program.batch=32"],
            "'program' has no argument of that name. It has num_",
        ),
        (["plan_program:program", "--set", "zero_optimization.stage=5"], "zero_optimization.stage"),
        (["plan_program:program", "--set", "zero_optimisation.stage=3"], "zero_optimisation"),
        (
            ["plan_program:program", "--config", "run:1.json"],
            "run:1.json.* the file cannot be read: No such file",
        ),
        (["plan_program:program", "--axes", "data=8,data=4"], "reading --axes: 'data' is given twice"),
        (
            ["plan_program:program", "--in-node-gb-per-s", "-1"],
            "in-node rate of -1 GB/s: it must be positive",
        ),
        (
            ["plan_program:program", "--across-gb-per-s", "nan"],
            "across rate of nan GB/s: it must be positive",
        ),
        (["plan_program:loss_fn"], "arguments params, batch have no value. .*--set program.params=VALUE"),
        (["./plan_program:program"], r"'\./plan_program' is no module's name.* as in plan_program:program"),
        (["plan_program.py:program"], "no module's name.* as in plan_program:program"),
        ([".x:program"], "'.x' is no module's name"),
        (
            ["plan_program:program", "--set", "nokey=9"],
            "has no key 'nokey'. An argument of the program is written",
        ),
        (["plan_program:program", "--set", "batch=9"], "no key 'batch'"),
        (
            ["plan_program:program", "--set", "zero_optimization.stage=1", "zero_optimization.stage=2"],
            "reading --set: 'zero_optimization.stage' is given twice",
        ),
        (
            ["plan_program:program", "--png", "/no/such/x.png"],
            "--png /no/such/x.png: .*matplotlib|'/no/such' is not",
        ),
        (["plan_program:program", "--vary", "zero_optimization.stage=1"], "--vary is for --search"),
        (["plan_program:program", "--search", "--png", "x.png"], "--png draws one plan"),
        (
            ["plan_program:program", "--search", "--vary", "stage"],
            "reading --vary 'stage': write KEY=VALUE,VALUE",
        ),
    ],
)
def test_wrong_usage_exits_2_and_says_why(arguments, message, capsys):
    options = ["--axes", "data=8"] * ("--axes" not in arguments) + ["--target", "local"] * (
        "--target" not in arguments
    )
    assert main(["plan", *arguments, *options]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_estimate_command(capsys):
    assert main(["estimate", "7.5e9", "--shards", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][2]["total_bytes"] == 16.640625e9
    assert main(["estimate", "7.5e9", "--shards", "64", "--memory-gb", "32"]) == 0
    assert "states of 14.42e9 parameters fill 32 GB at stage 2" in capsys.readouterr().out
    assert main(["estimate", "7.5e9", "--shards", "0"]) == 2
    assert "counts must be positive" in capsys.readouterr().err
    assert main(["estimate", "7e9", "--shards", "8", "--memory-gb", "-3"]) == 2
    assert "largest model of -3e+09 bytes per device" in capsys.readouterr().err


@needs_compiler
@pytest.mark.cuda_compiler
def test_the_step_that_is_lowered_for_64_devices_is_as_long_as_that_for_8():
    """Sizes divide by both, so that nothing is padded at one of them alone."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    wide = zero2jax.Program(loss_fn, {"w": shape(LAYERS, 64, 64)}, shape(128, 64), optax.adam(1e-2))
    lines = []
    for data in (8, 64):
        settings = PlanSettings({"data": data}, TARGETS["h200"])
        lowered = lower_plan(prepare_plan(wide, {"zero_optimization": {"stage": 3}}, settings)).lowered
        lines.append(len(lowered.as_text().splitlines()))
    assert lines[0] == lines[1] > 100


@needs_compiler
@pytest.mark.cuda_compiler
def test_fp32_products_cost_twice_those_of_bf16_on_an_h100():
    seconds = {}
    for dtype, xla_name in (("bfloat16", "bf16"), ("float32", "f32")):
        p = products_of(dtype, batch=1024)
        report = zero2jax.plan(p.loss_fn, p.params, p.batch, tx=p.tx, axes={"data": N}, target="h100-80gb")
        assert report.timeline.flops_by_dtype == {xla_name: 1024 // 16 * PRODUCT_FLOPS}
        assert any("are fp32 though compute is bfloat16" in note for note in report.notes) == (
            xla_name == "f32"
        )
        seconds[dtype] = report.compute_s
    assert seconds["float32"] == pytest.approx(2 * seconds["bfloat16"])


@needs_compiler
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("name", GPUS)
def test_every_target_compiles_the_tiny_example(name):
    pytest.importorskip("flax")
    from examples.gpt.program import program as example

    p = example("tiny", num_layers=1, hidden=32, num_heads=2, context=16)
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": TARGETS[name].has_bf16}}
    report = zero2jax.plan(
        p.loss_fn, p.params, p.batch, tx=optax.sgd(0.1), config=config, axes={"data": 8}, target=name
    )
    assert report.fits
    assert report.usable_bytes == int(0.94 * TARGETS[name].memory_bytes)
    assert report.by_class[0].rest_bytes == pytest.approx(4 * report.num_params / 8, rel=0.01)
    whole = (2 if TARGETS[name].has_bf16 else 4) * report.num_params
    assert sum(by_kind(report).values()) == pytest.approx(2 * whole, rel=0.02)  # gathered once, reduced once
    assert 0 < report.exposed_bytes <= report.communication_bytes
    # cuBLAS's workspace on the oldest card is large beside this model
    assert report.lifetimes.peak.total_bytes == pytest.approx(report.total_bytes, rel=0.15)


def test_notes_name_the_parameters_that_stage_3_holds_until_backward():
    """A loop that saves the transpose of a large parameter for backward, and the same loop in a jax.checkpoint."""

    def transposes(w, x):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w.T), None), x, length=2)[0]

    def notes(apply):
        loss = lambda p, x: jnp.mean(apply(p["w"], x))
        params, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(320, 320), (16, 320)])
        config = FP32 | {"zero_optimization": {"stage": 3}}
        report = zero2jax.plan(
            loss, {"w": params}, x, tx=optax.sgd(0.1), config=config, axes={"data": N}, target="cpu"
        )
        return [note for note in report.notes if "stage 3 holds parameter 'w' until backward" in note]

    (note,) = notes(transposes)
    assert note.endswith("Put a jax.checkpoint around that operation, whose backward pass then repeats it.")
    assert not notes(jax.checkpoint(transposes))


@needs_compiler
@pytest.mark.cuda_compiler
def test_gathers_start_early_on_gpus_unless_overlap_is_switched_off():
    """Three products a layer, which can be gathered beside those of the layer before: nothing more is moved."""

    @jax.checkpoint
    def layer(x, w):
        for i in range(3):
            x = jnp.tanh(x @ w[i])
        return x, None

    loss = lambda p, x: jnp.mean(
        jax.lax.scan(layer, x.astype(jnp.bfloat16), p["layers"])[0].astype(jnp.float32)
    )
    params = {"layers": jax.ShapeDtypeStruct((4, 3, 1024, 1024), jnp.float32)}
    batch, config = jax.ShapeDtypeStruct((8 * 4096, 1024), jnp.float32), {"bf16": {"enabled": True}}
    found = {}
    for overlap in (True, False):
        zero = {"stage": 3, "overlap_comm": overlap}
        report = zero2jax.plan(
            loss,
            params,
            batch,
            tx=optax.sgd(0.1),
            config=config | {"zero_optimization": zero},
            axes={"data": 8},
            target="h200",
        )
        found[overlap] = report
    early, late = found[True], found[False]
    assert by_kind(early) == by_kind(late)
    assert early.timeline.exposed_s < 0.7 * late.timeline.exposed_s
