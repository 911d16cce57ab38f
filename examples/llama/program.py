"""The family's published shapes as programs, to plan them: can it be fine-tuned on these GPUs, and how?

    zero2jax plan examples.llama.program:llama3_8b --config examples/llama/finetune.json --axes data=8 \\
        --target h100-80gb --set program.context=8192
    zero2jax plan examples.llama.program:llama3_70b --config examples/llama/lora.json --axes data=8 \\
        --target h100-80gb --set program.lora_rank=16

One row of `context` tokens per device and microbatch: `batch_size` is that of 8 devices with one microbatch. Rows are
packed. `--set program.attention=cudnn` compiles cuDNN's kernel in place of attention in blocks, and needs its library
beside the CUDA compiler, still no GPU: `pip install nvidia-cudnn-cu12`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zero2jax
from examples.llama.config import LlamaConfig, read_config
from examples.llama.data import FIELDS
from examples.llama.losses import make_loss
from examples.llama.model import param_shapes
from examples.llama.weights import is_adapter

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _fields(
    family: str, vocab: int, D: int, F: int, L: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        **more,
    }


_LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072}
_QWEN = {"rope_theta": 1e6, "max_position_embeddings": 32768}
_TIED = {"tie_word_embeddings": True}
# As the models' own config.json have them.
SHAPES = {
    "qwen2_5_0_5b": _fields("qwen2", 151936, 896, 4864, 24, 14, 2, **_QWEN, **_TIED),
    "llama3_2_1b": _fields("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, **_LLAMA3, **_TIED),
    "qwen2_5_1_5b": _fields("qwen2", 151936, 1536, 8960, 28, 12, 2, **_QWEN, **_TIED),
    "llama3_2_3b": _fields("llama", 128256, 3072, 8192, 28, 24, 8, head_dim=128, **_LLAMA3, **_TIED),
    "qwen3_4b": _fields("qwen3", 151936, 2560, 9728, 36, 32, 8, head_dim=128, **_QWEN, **_TIED),
    "llama2_7b": _fields("llama", 32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096),
    "mistral_7b": _fields(
        "mistral", 32000, 4096, 14336, 32, 32, 8, sliding_window=4096, max_position_embeddings=32768
    ),
    "qwen2_5_7b": _fields("qwen2", 152064, 3584, 18944, 28, 28, 4, **_QWEN),
    "llama3_8b": _fields("llama", 128256, 4096, 14336, 32, 32, 8, **_LLAMA3),
    "llama2_13b": _fields("llama", 32000, 5120, 13824, 40, 40, 40, max_position_embeddings=4096),
    "qwen3_14b": _fields("qwen3", 151936, 5120, 17408, 40, 40, 8, head_dim=128, **_QWEN),
    "qwen2_5_32b": _fields("qwen2", 152064, 5120, 27648, 64, 40, 8, **_QWEN),
    "llama3_70b": _fields("llama", 128256, 8192, 28672, 80, 64, 8, **_LLAMA3),
    "qwen2_5_72b": _fields("qwen2", 152064, 8192, 29568, 80, 64, 8, **_QWEN),
    "llama3_405b": _fields("llama", 128256, 16384, 53248, 126, 128, 8, **_LLAMA3),
}


def config_of(model: str, **changes: Any) -> LlamaConfig:
    """The configuration of a published shape, with fields of its `config.json` replaced."""
    return read_config({**SHAPES[model], **changes})


def program(
    model: str = "llama3_8b",
    batch_size: int = 8,
    context: int = 2048,
    lora_rank: int = 0,
    chunk_tokens: int = 1024,
    saved: str = "nothing_saveable",
    attention: str = "blocked",
) -> zero2jax.Program:
    """A step of fine-tuning a published shape: all parameters, or adapters of a rank beside a base in bf16."""
    config = dataclasses.replace(config_of(model), lora_rank=lora_rank, saved=saved, attention=attention)
    shapes = param_shapes(config)
    if lora_rank:
        frozen = lambda path, x: (
            x if is_adapter(_last(path), x) else jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        )
        shapes = jax.tree_util.tree_map_with_path(frozen, shapes)
    return zero2jax.Program(
        make_loss(config, chunk_tokens),
        params=shapes,
        batch={name: jax.ShapeDtypeStruct((batch_size, context), dtype) for name, dtype in FIELDS.items()},
        tx=optax.adamw(1e-5),
        trainable=is_adapter if lora_rank else None,
    )


def _last(path: Any) -> str:
    return path[-1].key


qwen2_5_0_5b = functools.partial(program, "qwen2_5_0_5b")
llama3_2_1b = functools.partial(program, "llama3_2_1b")
qwen2_5_1_5b = functools.partial(program, "qwen2_5_1_5b")
llama3_2_3b = functools.partial(program, "llama3_2_3b")
qwen3_4b = functools.partial(program, "qwen3_4b")
llama2_7b = functools.partial(program, "llama2_7b")
mistral_7b = functools.partial(program, "mistral_7b")
qwen2_5_7b = functools.partial(program, "qwen2_5_7b")
llama3_8b = functools.partial(program, "llama3_8b")
llama2_13b = functools.partial(program, "llama2_13b")
qwen3_14b = functools.partial(program, "qwen3_14b")
qwen2_5_32b = functools.partial(program, "qwen2_5_32b")
llama3_70b = functools.partial(program, "llama3_70b")
qwen2_5_72b = functools.partial(program, "qwen2_5_72b")
llama3_405b = functools.partial(program, "llama3_405b")
