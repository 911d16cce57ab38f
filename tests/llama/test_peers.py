"""The usual PyTorch library's own models on the same random folders (extra: peers). Skipped where it is absent."""

import json

import jax
import jax.numpy as jnp
import llama_oracle as oracle
import numpy as np
import optax
import pytest
from helpers import FP32
from safetensors.numpy import save_file

import zero2jax
from examples.llama import model, weights
from examples.llama.losses import make_loss

torch = pytest.importorskip("torch", reason="extra peers: torch is not installed")
transformers = pytest.importorskip("transformers", reason="extra peers: transformers is not installed")

NUM_TOKENS = 14


def read_by_peer(folder):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    peer, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return peer


@pytest.mark.parametrize("name", oracle.CONFIGS)
def test_logits_and_five_steps_of_adamw_are_those_of_the_peer(tmp_path, name):
    fields = oracle.CONFIGS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(oracle.random_tensors(fields), folder / "model.safetensors", metadata={"format": "pt"})
    peer = read_by_peer(folder)
    config, params = weights.load_folder(folder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab, (8, NUM_TOKENS + 1)).astype(np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        expected = peer(torch.tensor(inputs, dtype=torch.long)).logits.numpy()
    found = jax.jit(model.apply, static_argnums=0)(config, params, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    options = {"weight_decay": 0.1, "eps": 1e-4}
    optimizer = torch.optim.AdamW(peer.parameters(), 1e-2, betas=(0.9, 0.95), **options)
    tx = optax.adamw(1e-2, b1=0.9, b2=0.95, **options)
    engine = zero2jax.Engine(make_loss(config), tx, zero2jax.make_mesh(data=8), stage=3, precision=FP32)
    batch = {"tokens": inputs, "targets": targets, "weights": np.ones(inputs.shape, np.float32)}
    state = engine.init(params, batch=batch)
    for _ in range(5):
        optimizer.zero_grad()
        logits = peer(torch.tensor(inputs, dtype=torch.long)).logits
        flat = torch.tensor(targets, dtype=torch.long).flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), flat)
        loss.backward()
        optimizer.step()
        state, metrics = engine.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=2e-4)

    weights.save_folder(tmp_path / "export", config, weights.stored_params(config, state))
    again, expected = read_by_peer(tmp_path / "export").state_dict(), peer.state_dict()
    assert again.keys() == expected.keys()
    for key, x in again.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-2, atol=2e-3, err_msg=key)
    assert jnp.isfinite(metrics["grad_norm"])
