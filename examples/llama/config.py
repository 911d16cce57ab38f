"""`config.json` of a model folder as a `LlamaConfig`; any field that is not understood is an error by name.

Families: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. They differ in biases, in a norm of queries and keys, in sliding
windows and in how rotary embeddings are stretched to a longer context; each of these is a field here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a family's files may leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
    "mistral": {"rms_norm_eps": 1e-6, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "attention_bias": False,
    },
}
# Fields that change nothing of what the model computes: kept, and written back.
CARRIED = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
# Fields that have a meaning here in one value alone.
ONLY = {"hidden_act": "silu", "attention_dropout": 0, "pretraining_tp": 1, "rope_interleaved": False}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
READ = {
    *SIZES, "attention_bias", "head_dim", "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias",
    "model_type", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "tie_word_embeddings", "use_sliding_window",
}  # fmt: skip
ROPE_FIELDS = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor"},
        {
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        },
    ),
}  # needed and optional fields by type


class ConfigError(ValueError):
    """A `config.json` holds something that this model does not do."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embeddings: `kind` is a key of `ROPE_FIELDS`, `fields` its numbers by name, in a fixed order."""

    theta: float
    kind: str = "default"
    fields: tuple[tuple[str, float | bool], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.fields).get(name, default)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shapes and choices of a model. The last fields are this example's own and stand in no file.

    Attributes:
      windows: per layer, how many tokens back a token sees, itself included; None for all of them.
      source: the `config.json` that this was read from, as text.
      lora_rank: rank of the adapters; 0 for none.
      lora_alpha: an adapter's product is multiplied by `lora_alpha / lora_rank`.
      attention: `blocked`, `cudnn` or `xla`: see `examples/attention.py`.
      saved: what a layer saves for backward, a name in `jax.checkpoint_policies`; all else is recomputed.
    """

    family: str
    vocab: int
    hidden: int
    mlp: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    source: str = ""
    lora_rank: int = 0
    lora_alpha: float = 16.0
    attention: str = "blocked"
    saved: str = "nothing_saveable"


def read_config(source: Path | str | Mapping[str, Any]) -> LlamaConfig:
    """A `config.json`, by its path, its folder's path, or as a dict.

    Raises:
      ConfigError: it is missing or no JSON; a field is unknown, missing, or has a value that the model does not do.
    """
    where = "config.json" if isinstance(source, Mapping) else str(source)
    given = _load(Path(source)) if not isinstance(source, Mapping) else dict(source)
    family = given.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"reading {where}: model_type is {family!r}; it must be one of {sorted(ARCHITECTURES)}."
        )
    fields = {**DEFAULTS[family], **given}
    unknown = sorted(set(fields) - READ - CARRIED - set(ONLY))
    if unknown:
        raise ConfigError(
            f"reading {where}: fields that this model does not understand: {unknown}. Each may change what the model "
            f"computes. If one does not, add it to CARRIED in examples/llama/config.py."
        )
    for name in SIZES:
        if not _is_count(fields.get(name)):
            raise ConfigError(
                f"reading {where}: {name} is {fields.get(name)!r}; it must be a positive integer."
            )
    for name, value in ONLY.items():
        if fields.get(name, value) != value:
            raise ConfigError(
                f"reading {where}: {name} is {fields[name]!r}, and this model does {value!r} only."
            )
    num_heads = fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    head_dim = fields.get("head_dim") or fields["hidden_size"] // num_heads
    if not _is_count(num_kv_heads) or num_heads % num_kv_heads:
        raise ConfigError(
            f"reading {where}: num_key_value_heads is {num_kv_heads!r}, which must divide num_attention_heads, "
            f"{num_heads}."
        )
    if not _is_count(head_dim) or head_dim % 2:
        raise ConfigError(f"reading {where}: the size of a head is {head_dim!r}; it must be even.")
    bias = bool(fields.get("attention_bias", False))
    if family == "qwen2" and "attention_bias" in fields:
        raise ConfigError(f"reading {where}: attention_bias is no field of qwen2, whose q, k and v have one.")
    max_positions = fields.get("max_position_embeddings") or 2048
    return LlamaConfig(
        family=family,
        vocab=fields["vocab_size"],
        hidden=fields["hidden_size"],
        mlp=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(fields["rms_norm_eps"]),
        max_positions=max_positions,
        rope=_rope(where, fields),
        tied=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(where, fields),
        source=json.dumps(given),
    )


def config_json(config: LlamaConfig, dtype: str) -> str:
    """The text of `config.json` for a model whose weights are stored in `dtype`, as it was read otherwise."""
    fields = json.loads(config.source)
    fields.setdefault("architectures", [ARCHITECTURES[config.family]])
    fields["dtype" if "dtype" in fields else "torch_dtype"] = dtype
    return json.dumps(fields, indent=2) + "\n"


def _load(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"reading {path}: {error.strerror}. A model folder holds a config.json.") from error
    except ValueError as error:
        raise ConfigError(f"reading {path}: it is no JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"reading {path}: it holds {type(fields).__name__}; it must be an object.")
    return fields


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _rope(where: str, fields: Mapping[str, Any]) -> Rope:
    """Newer files hold `rope_parameters`, with the base in it; older ones `rope_theta` and `rope_scaling`."""
    scaling = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0)
    old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new or old or "default"
    if kind not in ROPE_FIELDS:
        raise ConfigError(
            f"reading {where}: rotary embeddings of type {kind!r}; known are {sorted(ROPE_FIELDS)}."
        )
    needed, optional = ROPE_FIELDS[kind]
    missing, unknown = sorted(needed - set(scaling)), sorted(set(scaling) - needed - optional)
    if missing or unknown:
        raise ConfigError(
            f"reading {where}: rotary embeddings of type {kind!r} need {sorted(needed)} and may have "
            f"{sorted(optional)}; missing are {missing}, not understood {unknown}."
        )
    numbers = {name: value for name, value in scaling.items() if value is not None}
    wrong = {name: value for name, value in numbers.items() if not isinstance(value, int | float)}
    if wrong:
        raise ConfigError(f"reading {where}: rotary embeddings: {wrong} must be numbers.")
    return Rope(theta, kind, tuple(sorted(numbers.items())))


def _windows(where: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if window is not None and not _is_count(window):
        raise ConfigError(
            f"reading {where}: sliding_window is {window!r}; it must be a positive integer or null."
        )
    if fields.get("use_sliding_window") is False:
        window = None
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers", 0) if window is not None else num_layers
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"reading {where}: layer_types must hold full_attention or sliding_attention for each of {num_layers} "
            f"layers, and is {types}."
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError(
            f"reading {where}: layer_types name sliding_attention, and no sliding_window is in use."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
