"""The GPT example: its model, its data, and short runs of its programs."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import FP32, assert_trees_close
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

import data  # noqa: E402
import model  # noqa: E402
import resume  # noqa: E402
import train  # noqa: E402

import zero2jax  # noqa: E402

CONFIG = model.GPTConfig(num_layers=3, hidden=8, num_heads=2, context=12, vocab=251)  # 256 rows


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(1), (2, CONFIG.context + 1), 0, CONFIG.vocab)


@pytest.fixture
def text(tmp_path):
    """A file of 20 kB that is easy to learn."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 460)
    return path


# Embedding V D + positions T D + L (12 D^2 + 2 D) + D, by hand.
@pytest.mark.parametrize(
    ("preset", "num_params"), [("tiny", 443_008), ("small", 124_373_760), ("6.7b", 6_657_150_976)]
)
def test_presets_have_these_parameters_and_need_no_memory_to_say_so(preset, num_params):
    init_fn, _ = model.make_loss(model.PRESETS[preset])
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == num_params
    assert {x.shape[0] for x in jax.tree.leaves(shapes["blocks"])} == {model.PRESETS[preset].num_layers}


def test_the_loss_equals_that_of_full_logits_and_scores_and_layers_in_a_python_loop(tokens):
    init_fn, loss_fn = model.make_loss(dataclasses.replace(CONFIG, chunk_tokens=7))  # 24 tokens in 4 chunks
    plain = dataclasses.replace(CONFIG, attention="xla")

    def unrolled(params, tokens):
        gpt = nnx.merge(nnx.graphdef(model.shapes_of(plain)), params)
        block_def, stacked = nnx.split(gpt.blocks)
        x = (gpt.embed[tokens[:, :-1]] + gpt.position[None]).swapaxes(0, 1)  # T comes first
        for i in range(CONFIG.num_layers):
            x = nnx.merge(block_def, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))(x)
        logits = gpt.norm(x).swapaxes(0, 1) @ gpt.embed[: CONFIG.vocab].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    params = jax.jit(init_fn)(jax.random.key(0))
    value_and_grad = lambda f: jax.jit(jax.value_and_grad(f))(params, tokens)
    (value, grads), (expected, expected_grads) = map(value_and_grad, (loss_fn, unrolled))
    # A few fp32 roundings: the programs fuse differently.
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_trees_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_metadata_shard_the_vocabulary_the_heads_and_the_mlp_and_the_step_is_that_of_one_device(tokens):
    specs = model.tensor_parallel_specs(CONFIG)
    assert (specs["embed"], specs["position"], specs["norm"]["scale"]) == (P("model", None), P(), P())
    kernels = {name: specs["blocks"][name]["kernel"] for name in ("qkv", "out", "up", "down")}
    assert kernels == dict.fromkeys(kernels, P(None, None, "model"))

    def losses(config, specs=None, **axes):
        init_fn, loss_fn = model.make_loss(config)
        mesh = zero2jax.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
        engine = zero2jax.Engine(loss_fn, optax.adam(1e-2), mesh, stage=2, precision=FP32, param_specs=specs)
        state, metrics = engine.init(init_fn, jax.random.key(0)), []
        for _ in range(3):
            state, last = engine.step(state, tokens)
            metrics.append((float(last["loss"]), float(last["grad_norm"])))
        return metrics

    config = dataclasses.replace(CONFIG, sequence_axis="model", chunk_tokens=7)
    # fp32 sums in another order
    np.testing.assert_allclose(losses(config, specs, data=2, model=2), losses(CONFIG, data=1), rtol=1e-4)


def test_what_layers_save_changes_their_memory_and_no_gradient(tokens):
    found, temporary = {}, {}
    for saved in ("nothing_saveable", "dots_saveable", "everything_saveable"):
        init_fn, loss_fn = model.make_loss(dataclasses.replace(CONFIG, saved=saved))
        params = jax.jit(init_fn)(jax.random.key(0))
        compiled = jax.jit(jax.grad(loss_fn)).lower(params, tokens).compile()
        found[saved] = compiled(params, tokens)
        temporary[saved] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["nothing_saveable"] < temporary["dots_saveable"] < temporary["everything_saveable"]
    for grads in found.values():
        assert_trees_close(grads, found["nothing_saveable"], rtol=1e-5, atol=1e-6)


def test_bf16_parameters_mean_bf16_matrix_products(tokens):
    init_fn, loss_fn = model.make_loss(CONFIG)
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    params["norm"] = shapes["norm"]  # norms may stay in fp32
    products = _products(jax.make_jaxpr(loss_fn)(params, tokens).jaxpr)
    operands = {v.aval.dtype for product in products for v in product.invars}
    assert operands == {jnp.dtype(jnp.bfloat16)}


def _products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            sub = getattr(sub, "jaxpr", sub)
            if hasattr(sub, "eqns"):
                yield from _products(sub)


def test_no_byte_sees_a_later_one(tokens):
    init_fn, apply_fn = model.make_apply(CONFIG)
    params = jax.jit(init_fn)(jax.random.key(0))
    apply_fn = jax.jit(apply_fn)
    changed = tokens.at[:, 6].add(1)
    first, second = (apply_fn(params, t[:, :-1]) for t in (tokens, changed))
    np.testing.assert_array_equal(first[:, :6], second[:, :6])
    assert not np.array_equal(first[:, 6:], second[:, 6:])


def test_every_20th_file_of_a_folder_is_held_out(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i}>")
    train_text, held_out = (bytes(x).decode() for x in data.load_text(tmp_path))
    assert held_out == "<0>\n<20>"
    assert train_text.split("\n") == [f"<{i}>" for i in range(40) if i % 20]


def test_the_end_of_a_single_file_is_held_out(text):
    train_text, held_out = data.load_text(text)
    assert bytes(train_text) + bytes(held_out) == text.read_bytes()
    assert len(held_out) == len(text.read_bytes()) // 20


def test_the_standard_library_is_text_enough():
    train_text, held_out = data.load_text()
    assert len(train_text) > 4_000_000
    assert len(held_out) > 100_000
    assert np.isin(train_text, np.frombuffer(b"\n" + bytes(range(32, 127)), np.uint8)).mean() > 0.99


def test_batches_are_windows_of_the_text_and_follow_from_the_seed():
    text = np.arange(100, dtype=np.uint8)
    batch, again, other = (next(data.make_batches(text, 5, 7, seed=s)) for s in (0, 0, 1))
    assert batch.shape == (5, 8)
    assert batch.dtype == np.uint8
    np.testing.assert_array_equal(np.diff(batch, axis=1), 1)
    np.testing.assert_array_equal(batch, again)
    assert not np.array_equal(batch, other)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"cannot cut windows of 9 bytes from a text of 8 bytes.*--text"):
        data.make_batches(np.zeros(8, np.uint8), 1, 8, seed=0)


def test_axes_are_read_or_refused():
    assert train.parse_axes("data=4,model=2") == {"data": 4, "model": 2}
    with pytest.raises(ValueError, match=r"reading --axes 'data': write NAME=SIZE"):
        train.parse_axes("data")


def run_script(name, *args):
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "gpt" / name), *args],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_train_writes_metrics_report_and_figure(tmp_path, text):
    out = tmp_path / "out"
    args = ["--devices", "8", "--axes", "data=8", "--steps", "4", "--text", str(text), "--out", str(out)]
    done = run_script("train.py", *args)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["applied"] and row["grad_norm_clipped"] <= 1.001 for row in rows)
    report = json.loads((out / "report.json").read_text())
    assert report["mesh"] == {"data": 8}
    assert report["tokens_per_step"] == 8 * 2 * 128
    assert 5.4 < report["held_out_loss_before"] < 5.7  # ln 256 = 5.55
    assert report["held_out_loss"] < report["held_out_loss_before"] - 0.5
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    memory = report["memory"]["by_class"]
    assert memory["master"]["measured_bytes"] == 4 * 443_008 // 8
    stages = report["bytes_by_stage"]
    assert stages["0"]["at rest"] > 7 * stages["2"]["at rest"]
    assert stages["1"]["during the step"] == stages["2"]["during the step"] > stages["3"]["during the step"]
    assert stages["offload"]["at rest"] < stages["2"]["at rest"] / 2
    assert "bytes per device, ZeRO stage 2" in done.stdout
    assert "total with offload" in done.stdout


def test_train_follows_a_deepspeed_file_on_two_mesh_axes(tmp_path, text):
    config = json.loads((ROOT / "configs" / "stage3_offload_param.json").read_text())
    del config["train_micro_batch_size_per_gpu"]
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    config["optimizer"]["params"]["lr"] = 3e-3
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = train.Args(
        steps=2,
        deepspeed_config=tmp_path / "config.json",
        axes="data=4,model=2",
        text=text,
        out=tmp_path / "out",
    )
    train.main(args)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["stage"], report["batch_size"], report["config"]) == (3, 8, config)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["learning_rate"] == pytest.approx(3e-3)
    assert rows[1]["held_out_loss"] < rows[0]["held_out_loss"] < report["held_out_loss_before"]


def test_train_on_data_x_model_learns_the_same_in_fp32_and_bf16(tmp_path, text, monkeypatch):
    small = dataclasses.replace(model.PRESETS["tiny"], hidden=16, num_heads=2, context=16, vocab=250)
    monkeypatch.setitem(train.PRESETS, "tiny", small)
    losses = {}
    for dtype in ("fp32", "bf16"):
        config = tmp_path / f"{dtype}.json"
        config.write_text(json.dumps(train.CONFIG | {"bf16": {"enabled": dtype == "bf16"}}))
        out, axes = tmp_path / dtype, "data=4,model=2"
        train.main(train.Args(steps=3, deepspeed_config=config, axes=axes, text=text, report=False, out=out))
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses[dtype] = [(row["loss"], row["held_out_loss"]) for row in rows]
    assert losses["fp32"] != losses["bf16"]
    # a mean over 256 predictions, of values of about 5 rounded by 2**-9
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=2**-9)
    assert losses["fp32"][-1][1] < losses["fp32"][0][1]


@pytest.mark.filterwarnings("ignore:.*pin_memory:zero2jax.ConfigWarning")
def test_train_on_one_device_with_its_optimizer_on_the_host(tmp_path, text):
    config = ROOT / "configs" / "stage2_offload_optimizer.json"
    args = train.Args(
        steps=2, deepspeed_config=config, axes="data=1", text=text, report=False, out=tmp_path / "out"
    )
    train.main(args)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["learning_rate"] == pytest.approx(3e-4)
    assert rows[1]["held_out_loss"] < rows[0]["held_out_loss"]


def test_train_stops_on_request_and_resumes_bitwise_with_its_data(tmp_path, text, monkeypatch):
    """In float16 by the file that asks for it: steps that overflow, and the loss scale, are resumed too."""

    def args(name, **changes):
        folder = tmp_path / name
        paths = {
            "out": folder,
            "checkpoints": folder / "checkpoints",
            "deepspeed_config": ROOT / "configs" / "stage2_fp16_loss_scale.json",
        }
        return train.Args(
            steps=4, axes="data=4", text=text, report=False, save_every=2, **{**paths, **changes}
        )

    def losses(name):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: (row["loss"], row["held_out_loss"], row["applied"]) for row in rows}

    train.main(args("whole"))
    *_, before, (_, after, applied) = losses("whole").values()
    assert applied
    assert after < before[1]
    assert zero2jax.Checkpointer(tmp_path / "whole" / "checkpoints").all_steps() == [2, 4]
    with monkeypatch.context() as patch:
        patch.setattr(zero2jax.Preemption, "should_stop", lambda self, step: step == 3)
        with pytest.raises(SystemExit) as stopped:
            train.main(args("parts"))
    assert stopped.value.code == zero2jax.PREEMPTED_EXIT_CODE == 75
    assert zero2jax.Checkpointer(tmp_path / "parts" / "checkpoints").all_steps() == [2, 3]
    train.main(args("parts", resume="auto"))
    assert losses("parts") == losses("whole")
    train.main(args("parts", resume="auto"))  # nothing is left to do
    with pytest.raises(zero2jax.CheckpointError, match="looking for step 7"):
        train.main(args("parts", resume="7"))
    with pytest.raises(ValueError, match="without --checkpoints FOLDER"):
        train.main(args("parts", resume="auto", checkpoints=None))
    with pytest.raises(ValueError, match="write auto, or the step"):
        train.main(args("parts", resume="latest"))


def test_the_figure_of_a_run_in_parts_shows_steps_taken_again_and_the_largest_difference(tmp_path):
    row = lambda step, loss, part: {"step": step, "loss": loss, "elapsed_s": part + step / 10}
    whole = [row(step, 5 - step / 10, 0) for step in range(1, 9)]
    killed = [row(step, 5 - step / 10, 1) for step in range(1, 6)]
    resumed = killed[:3] + [row(step, 5 - step / 10 + (0.01 if step == 4 else 0), 2) for step in range(4, 9)]
    parts = [(resume.Part(8, 2, signal.SIGKILL, 5), killed), (resume.Part(1, 3), resumed)]
    assert parts[0][0].label == "8 devices, stage 2, SIGKILL after step 5"
    assert parts[1][0].label == "1 device, stage 3"
    assert resume.save_figure(tmp_path / "x.png", whole, parts) == pytest.approx(0.01)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    metrics = tmp_path / "metrics.jsonl"
    assert resume.steps_done(metrics) == 0
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')  # killed while writing
    assert resume.steps_done(metrics) == 1


def test_positions_of_the_data_are_plain_values_and_bring_the_same_batches():
    batches, other = (data.make_batches(np.arange(200, dtype=np.uint8), 4, 7, seed=0) for _ in range(2))
    next(batches)
    position = json.loads(json.dumps(batches.position))
    expected = [next(batches) for _ in range(3)]
    other.position = position
    np.testing.assert_array_equal([next(other) for _ in range(3)], expected)


def test_the_linen_loop_learns():
    done = run_script("train_linen.py", "--devices", "8", "--steps", "8")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("held out ")[1].split()[0]) for line in done.stdout.splitlines()]
    assert losses[1] < losses[0] - 0.5


@pytest.mark.parametrize("num_steps", [4, 2])
def test_a_trace_holds_the_steps_asked_for_or_those_that_a_run_had(tmp_path, num_steps):
    step, written = (
        jax.jit(lambda x: x + 1),
        lambda: bool(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))),
    )
    with train.Trace(tmp_path, first_step=2, num_steps=2) as trace:
        for i in range(1, num_steps + 1):
            trace.before(i)
            trace.after(i, step(jnp.float32(i)))
            assert written() == (i >= 3)
    assert written()
