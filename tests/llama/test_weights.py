"""Model folders: into shards, and back bit for bit; what does not fit is named."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import llama_oracle as oracle
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import FP32
from safetensors import safe_open
from safetensors.numpy import save_file

import zero2jax
from examples.llama import model, weights
from examples.llama.losses import make_loss
from zero2jax.zero import placement

TX = optax.adam(1e-2, eps=1e-3)  # a gradient near 0 is no coin toss
NAME = "qwen 3: norms of q and k, rope linear"  # tied


def write_folder(folder, name=NAME, dtype=np.float32, **changes):
    """A folder as hubs hold it, written by the format's own library."""
    fields = {**oracle.CONFIGS[name], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        oracle.random_tensors(fields, dtype=dtype), folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert (x.dtype, x.shape) == (expected[name].dtype, expected[name].shape), name
        assert x.tobytes() == expected[name].tobytes(), name


def batch_of(config, rows=24, context=6):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, config.vocab, (2, rows, context)).astype(np.int32)
    weights = rng.integers(0, 2, (rows, context)).astype(np.float32)
    weights[:, 0] = 1
    segments = np.repeat([[1] * 2 + [2] * (context - 2)], rows, 0).astype(np.int32)
    positions = np.repeat([[*range(2), *range(context - 2)]], rows, 0).astype(np.int32)
    packing = {"segments": segments, "positions": positions}
    return {"tokens": tokens, "targets": targets, "weights": weights, **packing}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model") / "folder")


@pytest.fixture(scope="module")
def trained(folder):
    """Two steps of unsharded optax on the folder."""
    config, params = weights.load_folder(folder)
    batch, tx, loss_fn = batch_of(config), TX, make_loss(config, chunk_tokens=8)

    @jax.jit
    def step(params, opt_state):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = jax.jit(tx.init)(params), []
    for _ in range(2):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    return batch, params, losses


# on 8 devices with the vocabulary, the heads and the MLP sharded over two of them
@pytest.mark.parametrize(
    ("axes", "stage"), [({"data": 4, "model": 2}, 2), ({"data": 3}, 3), ({"data": 1}, 1)], ids=["8", "3", "1"]
)
def test_a_folder_trains_as_unsharded_optax_does_and_comes_back(tmp_path, folder, trained, axes, stage):
    batch, params, losses = trained
    config, lazy = weights.open_folder(folder)
    mesh = zero2jax.make_mesh(**axes)
    specs = model.tensor_parallel_specs(model.param_shapes(config)) if "model" in axes else None
    loss_fn = make_loss(config, chunk_tokens=8)
    engine = zero2jax.Engine(loss_fn, TX, mesh, stage=stage, precision=FP32, param_specs=specs)
    state = engine.init(lazy, batch=batch)

    weights.save_folder(tmp_path / "before", config, weights.stored_params(config, state))
    assert_same_bits(tensors_of(tmp_path / "before"), tensors_of(folder))
    for expected in losses:
        state, metrics = engine.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)

    stored = weights.stored_params(config, state)
    weights.save_folder(tmp_path / "after", config, stored, max_file_bytes=2000)
    again, loaded = weights.load_folder(tmp_path / "after")
    assert dict(vars(again), source="") == dict(vars(config), source="")
    assert len(list((tmp_path / "after").glob("model-*-of-*.safetensors"))) > 3
    found = jax.tree.map(lambda leaf: leaf[tuple(slice(0, n) for n in leaf.shape)], stored)
    jax.tree.map(np.testing.assert_array_equal, loaded, found)
    # steps of 1e-2 from gradients that are fp32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), loaded, params)


def test_16_bit_folders_come_back_bit_for_bit_and_are_written_from_fp32(tmp_path):
    source = write_folder(tmp_path / "bf16", dtype=ml_dtypes.bfloat16)
    config, params = weights.load_folder(source)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    weights.save_folder(tmp_path / "copy", config, params)
    assert_same_bits(tensors_of(tmp_path / "copy"), tensors_of(source))
    masters = jax.tree.map(lambda x: x.astype(np.float32), params)
    weights.save_folder(tmp_path / "rounded", config, masters, "bfloat16")
    assert_same_bits(tensors_of(tmp_path / "rounded"), tensors_of(source))
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(weights.WeightsError, match=r"holds model\.safetensors already"):
        weights.save_folder(tmp_path / "copy", config, params)
    del params["norm"]
    with pytest.raises(weights.WeightsError, match=r"norm/scale: missing, expected \(12,\)"):
        weights.save_folder(tmp_path / "other", config, params)


def test_host_memory_above_the_shards_stays_below_one_layer(tmp_path, monkeypatch):
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
        "head_dim": 16,
    }
    source = write_folder(tmp_path / "deep", **sizes)
    config, lazy = weights.open_folder(source)
    shapes = model.param_shapes(config)
    num_bytes = sum(4 * x.size for x in jax.tree.leaves(shapes))
    layer_bytes = sum(4 * x.size for x in jax.tree.leaves(shapes["layers"])) // config.num_layers
    monkeypatch.setattr(placement, "PIECE_BYTES", layer_bytes // 8)
    engine = zero2jax.Engine(make_loss(config), optax.sgd(0.1), zero2jax.make_mesh(data=2), precision=FP32)
    engine.init(lazy)  # compiles
    tracemalloc.start()
    try:
        state = engine.init(lazy)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert zero2jax.live_bytes(state.params) * 2 == num_bytes > 9 * layer_bytes
    assert 0 < peak_bytes < layer_bytes  # NumPy's arrays, and not the shards, which jax allocates


def test_lora_merged_equals_lora_applied(tmp_path, folder):
    config, lazy = weights.open_folder(folder)
    config = dataclasses.replace(config, lora_rank=2, lora_alpha=6.0)
    rng = np.random.default_rng(1)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            rng.normal(scale=0.3, size=x.shape).astype(np.float32)
            if weights.is_adapter(weights.path_name(path), x)
            else x[tuple(slice(0, n) for n in x.shape)]
        ),
        weights.add_adapters(config, lazy, base_dtype=np.float32),
    )
    weights.save_folder(tmp_path / "merged", config, params)
    base, merged = tensors_of(folder), tensors_of(tmp_path / "merged")
    assert {name for name in base if not np.array_equal(base[name], merged[name])} == {
        name for name in base if "_proj.weight" in name
    }
    plain, merged = weights.load_folder(tmp_path / "merged")
    tokens = batch_of(config)["tokens"]
    logits = jax.jit(model.apply, static_argnums=0)
    # one product in fp32 in place of three
    np.testing.assert_allclose(
        logits(plain, merged, tokens), logits(config, params, tokens), rtol=1e-4, atol=1e-4
    )


def test_a_frozen_base_is_stored_in_bf16_and_its_shards_are(folder):
    config, lazy = weights.open_folder(folder)
    config = dataclasses.replace(config, lora_rank=2)
    params = weights.add_adapters(config, lazy)
    engine = zero2jax.Engine(
        make_loss(config), optax.adam(1e-2), zero2jax.make_mesh(data=8), trainable=weights.is_adapter
    )
    abstract = engine.abstract_state(params).params
    dtypes = {weights.path_name(p): x.dtype.name for p, x in jax.tree_util.tree_leaves_with_path(abstract)}
    assert {dtype for name, dtype in dtypes.items() if not weights.is_adapter(name, None)} == {"bfloat16"}
    assert {dtype for name, dtype in dtypes.items() if weights.is_adapter(name, None)} == {"float32"}
    kernel = abstract["layers"]["gate"]["kernel"]
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) * 8 == np.prod(kernel.shape)


def damaged(tmp_path, folder, change):
    out = tmp_path / "damaged"
    shutil.copytree(folder, out)
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: missing, expected \[12\]"),
        (
            lambda t: t.update({"model.layers.2.x": t["model.norm.weight"]}),
            r"model\.layers\.2\.x: not of this model",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((12, 10), np.float32)}),
            r"layers\.1\.mlp\.up_proj\.weight: has shape \[12, 10\], expected \[10, 12\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(12, np.int32)}),
            r"model\.norm\.weight: has dtype int32, expected a floating one",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            r"tie_word_embeddings, and lm_head\.weight differs",
        ),
        (
            lambda t: t.update({n: t[n].astype(np.float16) for n in ["model.layers.0.mlp.up_proj.weight"]}),
            r"the layers of model\.layers\.\{\}\.mlp\.up_proj\.weight have different dtypes",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, folder, change, message):
    with pytest.raises(weights.WeightsError, match=message):
        weights.open_folder(damaged(tmp_path, folder, change))


def test_old_buffers_and_equal_tied_heads_are_no_error(tmp_path, folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    weights.open_folder(damaged(tmp_path, folder, change))


def test_files_that_are_cut_short_or_missing_are_named(tmp_path, folder):
    config, params = weights.load_folder(folder)
    out = tmp_path / "parts"
    weights.save_folder(out, config, params, max_file_bytes=3000)
    files = sorted(out.glob("model-*.safetensors"))
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-10])
    with pytest.raises(zero2jax.CheckpointError, match=rf"{files[1].name}: it has {len(content) - 10} bytes"):
        weights.open_folder(out)
    files[1].unlink()
    with pytest.raises(zero2jax.CheckpointError, match=rf"{files[1].name}: No such file"):
        weights.open_folder(out)
    (out / weights.INDEX).unlink()
    with pytest.raises(zero2jax.CheckpointError, match=r"model\.safetensors"):
        weights.open_folder(out)


def test_adapters_train_alike_on_one_device_and_at_stages_2_and_3(folder):
    config, lazy = weights.open_folder(folder)
    config = dataclasses.replace(config, lora_rank=2)
    params = weights.add_adapters(config, lazy, base_dtype=np.float32)
    batch, loss_fn = batch_of(config), make_loss(config, chunk_tokens=8)
    losses = {}
    for stage in (0, 2, 3):
        mesh = zero2jax.make_mesh(data=2 if stage else 1)
        engine = zero2jax.Engine(loss_fn, TX, mesh, stage=stage, precision=FP32, trainable=weights.is_adapter)
        state, losses[stage] = engine.init(params, batch=batch), []
        for _ in range(2):
            state, metrics = engine.step(state, batch)
            losses[stage].append(float(metrics["loss"]))
    assert losses[0][1] < losses[0][0] - 0.01
    for found in losses.values():
        assert found == pytest.approx(losses[0], rel=1e-5)
