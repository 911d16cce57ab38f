"""The program: full fine-tuning that resumes, adapters by a DeepSpeed file, a folder that comes out."""

import dataclasses
import json
import shutil
import types

import jax
import llama_oracle as oracle
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

import zero2jax
from examples.llama import train, weights
from examples.llama.export import Args as ExportArgs
from examples.llama.export import main as export
from examples.llama.losses import make_loss

NAME = "qwen 3: norms of q and k, rope linear"
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "then",
    "runs",
    "home",
    "to",
    "sleep",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("train") / "folder"
    out.mkdir()
    fields = oracle.CONFIGS[NAME]
    (out / "config.json").write_text(json.dumps(fields))
    save_file(oracle.random_tensors(fields), out / "model.safetensors")
    vocabulary = {word: i for i, word in enumerate(["<end>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(out / "tokenizer.json"))
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [
        {"prompt": " ".join(rng.choice(WORDS, 3)), "completion": " ".join(WORDS[:6])} for _ in range(300)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_with_its_data_and_exports_what_it_ends_with(tmp_path, folder, text, monkeypatch):
    names = ("0", "1", "2", "3", "offload")
    by_stage = {name: {"at rest": 8 - i, "during the step": 5 - i} for i, name in enumerate(names)}
    # six compilations; tests/test_example.py has them
    monkeypatch.setattr(train, "bytes_by_stage", lambda *args: by_stage)
    nothing = types.SimpleNamespace(stage=2, num_shards=2, rows=(), total_bytes=0, held=(), as_dict=dict)
    monkeypatch.setattr(zero2jax.Engine, "memory", lambda *args: nothing)
    args = train.Args(
        model=folder, data=text, context=24, steps=4, learning_rate=1e-2, axes="data=2",
        num_sample_tokens=2, prompt="the quick", out=tmp_path / "full", checkpoints=tmp_path / "checkpoints",
        save_every=2, export=tmp_path / "export", export_dtype="float32",
    )  # fmt: skip
    train.main(args)
    rows = rows_of(args.out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"] - 0.05
    report = json.loads((args.out / "report.json").read_text())
    assert (report["stage"], report["mesh"], report["bytes_by_stage"]["3"]) == (2, {"data": 2}, by_stage["3"])
    assert set(report["sample"].split()) <= {"<end>", *WORDS}
    assert (args.out / "report.png").read_bytes().startswith(b"\x89PNG")
    config, params = weights.load_folder(args.export)
    tokens = train.load_rows(args.export, text, 24).split(20)[1]  # the tokenizer went along
    loss, _ = jax.jit(make_loss(config))(params, tokens[:])
    assert float(loss) == pytest.approx(rows[-1]["held_out_loss"], rel=1e-4)

    export(ExportArgs(model=folder, checkpoints=args.checkpoints, out=tmp_path / "again", dtype="float32"))
    same = (tmp_path / "again" / "model.safetensors").read_bytes() == (
        args.export / "model.safetensors"
    ).read_bytes()
    assert same

    (tmp_path / "parts").mkdir()
    shutil.copy(args.out / "metrics.jsonl", tmp_path / "parts")
    shutil.rmtree(args.checkpoints / "4")
    changes = {"out": tmp_path / "parts", "resume": "auto", "export": None, "num_sample_tokens": 0}
    changes["report"] = False
    train.main(dataclasses.replace(args, **changes))
    losses = lambda rows: [(row["step"], row["loss"], row["held_out_loss"]) for row in rows]
    assert losses(rows_of(tmp_path / "parts")) == losses(rows)
    assert zero2jax.Checkpointer(args.checkpoints).all_steps() == [2, 4]


def test_adapters_train_by_a_deepspeed_file_at_stage_3(tmp_path, folder, text):
    seen = []

    class Loader(train.Batches):
        def __next__(self):
            seen.append(super().__next__())
            return seen[-1]

    args = train.Args(
        model=folder, data=text, context=24, steps=2, axes="data=8", lora_rank=2, out=tmp_path / "out",
        deepspeed_config=oracle.ROOT / "examples" / "llama" / "lora.json", num_sample_tokens=0,
        export=tmp_path / "export", report=False,
    )  # fmt: skip
    train.main(args, make_batches=Loader)
    assert [batch["tokens"].shape for batch in seen] == [(8, 24)] * 2
    assert [row["learning_rate"] for row in rows_of(args.out)] == pytest.approx([2e-4] * 2)
    _, before = weights.load_folder(folder)
    _, after = weights.load_folder(args.export)
    assert {x.dtype.name for x in jax.tree.leaves(after)} == {"bfloat16"}
    before, after = (dict(weights.named_leaves(params)) for params in (before, after))
    changed = {name for name in before if not np.array_equal(before[name].astype("bfloat16"), after[name])}
    assert changed == {name for name in before if name.endswith("kernel")}  # the base is frozen
