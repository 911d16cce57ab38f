"""Parameters out of checkpoints into safetensors files and back into shards; `safetensors` itself is the judge."""

import errno
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_engine, make_params

from zero2jax import Checkpointer, CheckpointError, export_checkpoint, load_exported
from zero2jax.checkpoints import export, safetensors_file
from zero2jax.checkpoints.export import parse_bytes
from zero2jax.checkpoints.matching import CheckpointWarning
from zero2jax.checkpoints.safetensors_file import FileError, Tensor, read_header
from zero2jax.cli.main import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Steps 1 and 2, saved on 3 devices."""
    directory = tmp_path_factory.mktemp("checkpoints")
    engine = make_engine(3)
    with Checkpointer(directory, engine) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, engine.init(make_params(seed=step)), {"position": np.arange(3)})
    return directory


def by_name(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype), name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_one_file_in_fp32_by_default(checkpoint, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    out = tmp_path / "model.safetensors"
    assert export_checkpoint(checkpoint, out) == [out]
    expected = by_name(make_params(seed=2))
    assert_equal(numpy.load_file(out), expected)
    assert_equal(load_exported(out), expected)
    assert_equal(load_exported(tmp_path), expected)
    export_checkpoint(checkpoint / "1", tmp_path / "first.safetensors")
    export_checkpoint(checkpoint, tmp_path / "again.safetensors", step=1)
    for name in ("first", "again"):
        assert_equal(load_exported(tmp_path / f"{name}.safetensors"), by_name(make_params(seed=1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit(checkpoint, tmp_path, dtype):
    out = tmp_path / "model.safetensors"
    export_checkpoint(checkpoint, out, dtype=dtype)
    assert_equal(
        load_exported(out), {n: x.astype(jnp.dtype(dtype)) for n, x in by_name(make_params(seed=2)).items()}
    )


def test_several_files_with_an_index(checkpoint, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    out = tmp_path / "model.safetensors"
    index, *files = export_checkpoint(checkpoint, out, max_file_bytes=200)
    expected = by_name(make_params(seed=2))
    assert [p.name for p in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
    for name, file in content["weight_map"].items():
        np.testing.assert_array_equal(numpy.load_file(tmp_path / file)[name], expected[name])
    for path in (index, out, tmp_path):  # the file's name stands for its index
        assert_equal(load_exported(path), expected)
    for file in files:
        large = max(t.num_bytes for t in read_header(file)[0].values())
        assert sum(t.num_bytes for t in read_header(file)[0].values()) <= max(200, large)


def test_pieces_smaller_than_a_tensor_make_the_same_file(checkpoint, tmp_path, monkeypatch):
    export_checkpoint(checkpoint, tmp_path / "whole.safetensors")
    monkeypatch.setattr("zero2jax.checkpoints.export.PIECE_BYTES", 16)
    export_checkpoint(checkpoint, tmp_path / "pieces.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "pieces.safetensors").read_bytes()


def test_tied_parameters_are_written_once(checkpoint, tmp_path):
    out = tmp_path / "model.safetensors"
    export_checkpoint(checkpoint, out, aliases={"head/kernel": "embed"})
    assert "head/kernel" not in read_header(out)[0]
    assert json.loads(read_header(out)[1]["aliases"]) == {"head/kernel": "embed"}
    found = load_exported(out)
    np.testing.assert_array_equal(found["head/kernel"], found["embed"])
    export_checkpoint(checkpoint, tmp_path / "cut.safetensors", aliases={"head": "embed"}, max_file_bytes=1)
    assert "head" in load_exported(tmp_path / "cut.safetensors")

    engine = make_engine(2, loss_fn=lambda p, b: p["a"].sum(), tx=optax.sgd(0.1))
    with Checkpointer(tmp_path / "tied", engine) as checkpointer:
        checkpointer.save(0, engine.init({"a": jnp.arange(4.0), "b": jnp.arange(4.0), "c": jnp.ones(4)}))
    export_checkpoint(tmp_path / "tied", tmp_path / "tied.safetensors", aliases={"b": "a"})
    assert set(read_header(tmp_path / "tied.safetensors")[0]) == {"a", "c"}
    with pytest.raises(CheckpointError, match="'c' is said to be tied to 'a', and their values differ"):
        export_checkpoint(tmp_path / "tied", tmp_path / "no.safetensors", aliases={"c": "a"})
    with pytest.raises(CheckpointError, match="alias 'x' stands for 'y', which is no parameter"):
        export_checkpoint(tmp_path / "tied", tmp_path / "no.safetensors", aliases={"x": "y"})
    assert not (tmp_path / "no.safetensors").exists()


def test_exported_parameters_go_into_shards_without_a_whole_copy(checkpoint, tmp_path):
    out = tmp_path / "model.safetensors"
    export_checkpoint(checkpoint, out)
    shapes = jax.eval_shape(make_params)
    params = load_exported(out, shapes)
    assert all(isinstance(x, np.memmap) for x in jax.tree.leaves(params))
    engine = make_engine(8)
    expected = make_engine(8).init(make_params(seed=2))
    for x, y in zip(jax.tree.leaves(engine.init(params)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    renamed = {"layers": shapes["blocks"], **{k: v for k, v in shapes.items() if k != "blocks"}}
    for rename in (lambda n: n.replace("layers", "blocks"), {"layers": "blocks"}):
        found = load_exported(out, renamed, rename=rename)
        np.testing.assert_array_equal(found["layers"]["w"], params["blocks"]["w"])
    wrong = {**renamed, "norm": jax.ShapeDtypeStruct((6,), jnp.float32)}
    with pytest.raises(CheckpointError) as error:
        load_exported(out, wrong)
    assert "3 parameters do not fit" in str(error.value)
    assert "'layers/w' float32[3, 5, 5]: no tensor 'layers/w'" in str(error.value)
    assert "'norm' float32[6]: the file has float32[5]" in str(error.value)
    assert "Tensors that no parameter took: ['blocks/b', 'blocks/w']" in str(error.value)


def test_files_of_the_safetensors_package_are_read(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((), np.int64),
        "c": np.zeros((0, 2), np.float16),
    }
    numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"k": "v"})
    assert_equal(load_exported(tmp_path / "x.safetensors"), arrays)
    assert read_header(tmp_path / "x.safetensors")[1] == {"k": "v"}


def test_every_dtype_is_written_as_the_format_says(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    names = [
        n for n in safetensors_file._NAMES if not n.startswith("float8")
    ]  # which that reader does not know
    values = {n: np.arange(6).reshape(2, 3).astype(safetensors_file.dtype_from_name(n)) for n in names}
    tensors = [Tensor(n, x.dtype, x.shape) for n, x in values.items()]
    safetensors_file.write(tmp_path / "x", tensors, lambda i: list(values.values())[i])
    assert_equal(numpy.load_file(tmp_path / "x"), values)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it does not start with the header"),
        (b"\xff" * 100, "it does not start with the header"),
        (b"\x02\0\0\0\0\0\0\0{}x", "it has 11 bytes and its header says 10"),
        (b"\x02\0\0\0\0\0\0\0[]", "it does not start with the header"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"x.safetensors: {words}"):
        read_header(path)
    with pytest.raises(CheckpointError, match=words):
        load_exported(path)


def test_wrong_paths_are_refused(checkpoint, tmp_path):
    out = tmp_path / "model.safetensors"
    export_checkpoint(checkpoint, out)
    with pytest.raises(CheckpointError, match=r"model.safetensors exists\. Remove it"):
        export_checkpoint(checkpoint, out)
    with pytest.raises(CheckpointError, match=r"a path that ends in \.safetensors"):
        export_checkpoint(checkpoint, tmp_path / "model.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"looking for a checkpoint in .*it holds nothing"):
        export_checkpoint(tmp_path / "empty", tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        load_exported(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match=r"it holds \[\]"):
        load_exported(tmp_path / "empty")


@pytest.mark.parametrize("failing", ["write", "write_text"])
def test_an_export_that_fails_leaves_nothing_behind_and_may_be_tried_again(
    checkpoint, tmp_path, monkeypatch, failing
):
    real, calls = getattr(export, failing), []

    def full(*args, **kwargs):
        calls.append(args)
        if failing == "write_text" or len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    out = tmp_path / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(export, failing, full)
        words = r"exporting .* to .*model.safetensors: No space left on device\. Nothing is left .* Make room"
        with pytest.raises(CheckpointError, match=words):
            export_checkpoint(checkpoint, out, max_file_bytes=200)
    assert list(tmp_path.iterdir()) == []
    assert len(export_checkpoint(checkpoint, out, max_file_bytes=200)) > 2


def test_exports_that_would_lose_numbers_or_a_directory(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="dtype is int8; parameters are exported as floating"):
        export_checkpoint(checkpoint, tmp_path / "m.safetensors", dtype=jnp.int8)
    for folder in (checkpoint, checkpoint / "2" / "new"):
        with pytest.raises(CheckpointError, match="that folder is for checkpoints only"):
            export_checkpoint(checkpoint, folder / "m.safetensors")
    Checkpointer(checkpoint)
    engine = make_engine(1)
    state = engine.init(jax.tree.map(lambda x: x * 0 + 1e6, make_params()))
    with Checkpointer(tmp_path / "saved", engine) as checkpointer:
        checkpointer.save(0, state)
    with pytest.warns(CheckpointWarning, match=r"'embed': 35.* do not fit into float16"):
        export_checkpoint(
            tmp_path / "saved", tmp_path / "new" / "folder" / "m.safetensors", dtype=jnp.float16
        )
    assert np.isinf(load_exported(tmp_path / "new" / "folder")["embed"]).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"weight_map": {}}, "it names no file"),
        ({"weight_map": {"a": "../m.safetensors"}}, "no index of safetensors files beside it"),
        ({"weight_map": ["m.safetensors"]}, "no index of safetensors files"),
        ({"weight_map": {"zz": "m.safetensors"}}, r"tensors that its files do not have, \['zz'\]"),
    ],
)
def test_bad_indices_are_refused(checkpoint, tmp_path, content, words):
    export_checkpoint(checkpoint, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        load_exported(tmp_path)


def test_numbers_of_another_kind_are_refused(tmp_path):
    values = np.ones(2, np.uint8)
    safetensors_file.write(tmp_path / "m.safetensors", [Tensor("a", values.dtype, (2,))], lambda i: values)
    with pytest.raises(CheckpointError, match=r"'a' float32\[2\]: the file has uint8\[2\]"):
        load_exported(tmp_path, {"a": jnp.ones(2)})


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5e9), ("1.5 kb", 1500), ("3MiB", 3 * 2**20), ("7", 7), ("2tb", 2e12)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "0"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="Write a number and a unit"):
        parse_bytes(text)


def test_the_command_exports_and_says_what_it_wrote(checkpoint, tmp_path, capsys):
    out = tmp_path / "model.safetensors"
    args = ["export", str(checkpoint), str(out), "--dtype", "bfloat16", "--alias", "head=embed", "--json"]
    assert main([*args, "--max-shard-size", "100B"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files[0]["path"].endswith("index.json")
    assert all(os.path.getsize(f["path"]) == f["bytes"] for f in files)
    assert load_exported(out)["head"].dtype == jnp.bfloat16
    assert main(["export", str(checkpoint), str(tmp_path / "x.safetensors"), "--step", "1"]) == 0
    assert "x.safetensors" in capsys.readouterr().out
    for extra, words in (
        (["--step", "7"], "it holds the steps [1, 2]"),
        (["--alias", "a"], "--alias a: write ALIAS=NAME"),
        (["--max-shard-size", "big"], "--max-shard-size: reading a size"),
    ):
        assert main(["export", str(checkpoint), str(tmp_path / "y.safetensors"), *extra]) == 2
        assert words in capsys.readouterr().err


def test_the_command_starts_no_backend_and_imports_no_orbax(checkpoint, tmp_path):
    code = """
import sys
from zero2jax.cli.main import main
assert main(["export", sys.argv[1], sys.argv[2]]) == 0
assert "orbax" not in sys.modules
import jax
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend runs
"""
    out = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint), str(out)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert set(load_exported(out)) == set(by_name(make_params()))


def test_parameters_of_one_name_are_not_both_given_its_tensor(tmp_path):
    out = tmp_path / "m.safetensors"
    with Checkpointer(tmp_path / "c", engine := make_engine(2), asynchronous=False) as checkpointer:
        checkpointer.save(0, engine.init(make_params()))
    export_checkpoint(tmp_path / "c", out)
    vector = make_params()["norm"]
    with pytest.raises(CheckpointError, match=r"\['a/b'\] would each be the name of two parameters"):
        load_exported(out, {"a/b": vector, "a": {"b": vector}})


def test_exporting_a_large_model_takes_a_few_pieces_of_memory(tmp_path):
    """256 MiB of parameters, one block of 32 MiB and one piece of 4 MiB at a time (36 MiB were seen)."""
    engine = make_engine(2, loss_fn=lambda p, b: p["a"].sum(), tx=optax.sgd(0.1))
    params = {"a": jax.ShapeDtypeStruct((64, 1024, 1024), jnp.float32)}
    state = engine.init(lambda: {"a": jnp.ones(params["a"].shape)})
    with Checkpointer(tmp_path / "c", engine, asynchronous=False) as checkpointer:
        checkpointer.save(0, state)
    code = """
import sys, zero2jax, zero2jax.checkpoints.export
zero2jax.checkpoints.export.PIECE_BYTES = 4 * 2**20
def memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
zero2jax.export_checkpoint(sys.argv[1], sys.argv[2])
print(memory("VmHWM") - before)
"""
    args = [sys.executable, "-c", code, str(tmp_path / "c"), str(tmp_path / "m.safetensors")]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 2**20
    assert os.path.getsize(tmp_path / "m.safetensors") > 256 * 2**20
