"""The decoder against NumPy in fp64; what a configuration file may say."""

import json

import jax
import jax.numpy as jnp
import llama_oracle as oracle
import numpy as np
import pytest

from examples import attention, cross_entropy
from examples.llama import model, program, weights
from examples.llama.config import ConfigError, config_json, read_config
from examples.llama.weights import NAMES, load_folder, path_name

NUM_TOKENS = 14


def params_of(config, tensors):
    """The example's parameters from tensors by their names on disk, as its table says."""

    def leaf(path, shape):
        name = path_name(path)
        values = [tensors[NAMES[name].format(i)] for i in range(config.num_layers)]
        values = [x.T if name.endswith("kernel") else x for x in values]
        return np.stack(values) if name.startswith("layers") else values[0]

    return jax.tree_util.tree_map_with_path(leaf, model.param_shapes(config))


@pytest.mark.parametrize("name", oracle.CONFIGS)
def test_logits_equal_those_of_numpy(name, monkeypatch):
    fields = oracle.CONFIGS[name]
    config, tensors = read_config(fields), oracle.random_tensors(fields)
    params = params_of(config, tensors)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, config.vocab, (2, NUM_TOKENS)).astype(np.int32)
    packing = {}
    if "packed" in name:  # documents of 3, 6 and 5 tokens; then of 14
        segments = np.array([[1] * 3 + [2] * 6 + [3] * 5, [1] * 14], np.int32)
        positions = np.array([[*range(3), *range(6), *range(5)], [*range(14)]], np.int32)
        packing = {"segments": segments, "positions": positions}
    expected = [
        oracle.logits(fields, tensors, tokens[i], *(x[i] for x in packing.values()))
        for i in range(len(tokens))
    ]
    # 4 blocks of 4 queries, the last of 2
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 4 * NUM_TOKENS * config.num_heads * 2)
    found = jax.jit(lambda p: model.apply(config, p, tokens, **packing))(params)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_attention_in_blocks_equals_that_of_jax_and_so_do_its_gradients(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 11, heads, 8)) for key, heads in zip(keys, (6, 2, 2)))
    segments = jnp.array([[1] * 4 + [2] * 7, [1] * 11])
    # 3 blocks of 4 queries, the last of 3
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 5 * 11 * 6 * 2)

    def run(implementation):
        how = {"segments": segments, "window": 5, "implementation": implementation}
        f = lambda *qkv: jnp.sum(jnp.sin(attention.attention(*qkv, **how)))
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v)

    found, expected = run("blocked"), run("xla")
    # fp32 sums over at most 11 keys, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_chunked_cross_entropy_equals_the_plain_one_and_so_do_its_gradients(chunk_tokens):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (2, 7, 6)), jax.random.normal(keys[1], (19, 6))
    targets = jax.random.randint(keys[2], (2, 7), 0, 19)
    weights = jax.random.uniform(keys[3], (2, 7)) * (targets % 3 > 0)

    def plain(hidden, head):
        logs = jax.nn.log_softmax(hidden @ head.T)
        return -(weights * jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]).sum() * 3

    def chunked(hidden, head):
        return cross_entropy.chunked_cross_entropy(hidden, head, targets, weights, chunk_tokens) * 3

    found, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, head) for f in (chunked, plain))
    # fp32 sums over 19 logits and 14 tokens
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


def test_logits_of_chunked_cross_entropy_never_exist_whole():
    hidden, head = jax.ShapeDtypeStruct((4, 64, 8), jnp.float32), jax.ShapeDtypeStruct((512, 8), jnp.float32)
    targets, weights = (jax.ShapeDtypeStruct((4, 64), dtype) for dtype in (jnp.int32, jnp.float32))
    step = jax.jit(jax.grad(lambda *args: cross_entropy.chunked_cross_entropy(*args, 16), argnums=(0, 1)))
    largest = max(x.size for x in _values(jax.make_jaxpr(step)(hidden, head, targets, weights).jaxpr))
    assert largest == 16 * 512  # one chunk's logits; all of them would be 131,072


def _values(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            sub = getattr(sub, "jaxpr", sub)
            if hasattr(sub, "eqns"):
                yield from _values(sub)


LLAMA = oracle.CONFIGS["llama 3: grouped, rope llama3, packed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'; it must be one of"),
        ({"num_experts": 8, "logit_scale": 2}, r"does not understand: \['logit_scale', 'num_experts'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and this model does 'silu' only"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"vocab_size": None}, "vocab_size is None; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which must divide num_attention_heads, 4"),
        ({"head_dim": 5}, "the size of a head is 5"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope'; known are"),
        (
            {"rope_scaling": {"rope_type": "linear", "low": 1}},
            r"missing are \['factor'\], not understood \['low'\]",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "{'factor': '8'} must be numbers"),
        ({"layer_types": ["full_attention"]}, "layer_types must hold"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window is in use"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_a_configuration_may_not_say_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config({**LLAMA, **changes})


def test_a_configuration_is_written_back_as_it_was_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = read_config(tmp_path)
    assert json.loads(config_json(config, "bfloat16")) == {
        **LLAMA,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="it is no JSON"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="A model folder holds a"):
        load_folder(tmp_path / "nowhere")


def test_windows_of_files_with_layer_types_are_per_layer():
    fields = {
        **oracle.CONFIGS["qwen 3: norms of q and k, rope linear"],
        "sliding_window": 4,
        "use_sliding_window": True,
    }
    assert read_config({**fields, "layer_types": ["sliding_attention", "full_attention"]}).windows == (
        4,
        None,
    )
    assert read_config({**fields, "use_sliding_window": False}).windows == (None, None)


# Parameters as the models' cards have them, in exact numbers.
@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("qwen2_5_0_5b", 494_032_768),
        ("llama3_2_1b", 1_235_814_400),
        ("llama2_7b", 6_738_415_616),
        ("mistral_7b", 7_241_732_096),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_published_shapes_have_these_parameters(name, num_params):
    p = getattr(program, name)(lora_rank=4)
    leaves = weights.named_leaves(p.params)
    assert sum(x.size for path, x in leaves if not p.trainable(path, x)) == num_params
    assert {x.dtype.name for path, x in leaves if not p.trainable(path, x)} == {"bfloat16"}


def test_every_published_shape_has_a_program():
    assert all(getattr(program, name).args == (name,) for name in program.SHAPES)
