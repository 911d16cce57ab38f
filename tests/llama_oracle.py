"""The Llama family's forward pass in NumPy fp64, a token, a head and a layer at a time, and small configurations.

It reads the tensors by their names on disk, and `config.json` by its own fields: it shares nothing with the example.
"""

import math
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]

SHARED = {
    "vocab_size": 26,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
CONFIGS = {
    "llama 2: as many kv heads, biases": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 4,
    },
    "llama 3: grouped, rope llama3, packed": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "head_dim": 8,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral: a window, rope dynamic": {
        "model_type": "mistral",
        "sliding_window": 5,
        "head_dim": 4,
        "max_position_embeddings": 8,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "qwen 2.5: biases of q, k, v, tied, windows of some layers, rope yarn": {
        "model_type": "qwen2",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
        "max_position_embeddings": 128,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen 3: norms of q and k, rope linear": {
        "model_type": "qwen3",
        "head_dim": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    },
}
CONFIGS = {name: {**SHARED, **fields} for name, fields in CONFIGS.items()}


def tensor_shapes(config):
    """The shapes of a folder's tensors, by their names on disk."""
    D, F, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    family = config["model_type"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], D)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
        rows = {"q_proj": heads * H, "k_proj": kv_heads * H, "v_proj": kv_heads * H}
        shapes |= {f"{at}self_attn.{name}.weight": (n, D) for name, n in rows.items()}
        shapes[at + "self_attn.o_proj.weight"] = (D, heads * H)
        shapes |= {f"{at}mlp.{name}.weight": (F, D) for name in ("gate_proj", "up_proj")}
        shapes[at + "mlp.down_proj.weight"] = (D, F)
        if family == "qwen2" or config.get("attention_bias"):
            shapes |= {f"{at}self_attn.{name}.bias": (n,) for name, n in rows.items()}
        if config.get("attention_bias"):
            shapes[at + "self_attn.o_proj.bias"] = (D,)
        if config.get("mlp_bias"):
            shapes |= {f"{at}mlp.{name}.bias": (F,) for name in ("gate_proj", "up_proj")}
            shapes[at + "mlp.down_proj.bias"] = (D,)
        if family == "qwen3":
            shapes |= {f"{at}self_attn.{name}.weight": (H,) for name in ("q_norm", "k_norm")}
    return shapes


def random_tensors(config, seed=0, dtype=np.float32):
    """Tensors by name, large enough that every part of the model shows in the logits; norms near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.normal(size=shape) * (0.3 if len(shape) == 2 else 0.1)
        tensors[name] = (values + (1.0 if "norm" in name else 0.0)).astype(dtype)
    return tensors


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean() + eps) * weight


def angle(config, i, position, num_tokens):
    """The angle of pair i of a head at a position, and the factor of what is turned."""
    H = config["head_dim"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config["rope_theta"])
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind == "dynamic":
        most = config["max_position_embeddings"]
        if num_tokens > most:
            theta *= (factor * num_tokens / most - (factor - 1)) ** (H / (H - 2))
    turn = theta ** (-2 * i / H)
    if kind == "linear":
        return position * turn / factor, 1.0
    if kind == "llama3":
        wavelength = 2 * math.pi / turn
        context = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength > context / low:
            turn /= factor
        elif wavelength > context / high:
            smooth = (context / wavelength - low) / (high - low)
            turn = (1 - smooth) * turn / factor + smooth * turn
    if kind == "yarn":
        context = rope["original_max_position_embeddings"]
        index = lambda rotations: H * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), H - 1)
        ramp = min(max((i - low) / (high - low if high > low else 1e-3), 0), 1)
        return position * (turn / factor * ramp + turn * (1 - ramp)), 0.1 * math.log(factor) + 1
    return position * turn, 1.0


def turned(config, x, position, num_tokens):
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        a, scale = angle(config, i, position, num_tokens)
        out[i] = scale * (x[i] * math.cos(a) - x[i + half] * math.sin(a))
        out[i + half] = scale * (x[i + half] * math.cos(a) + x[i] * math.sin(a))
    return out


def window_of_layer(config, i):
    window = config.get("sliding_window")
    if config["model_type"].startswith("qwen"):
        slides = config.get("use_sliding_window") and i >= config.get("max_window_layers", 28)
        return window if slides else None
    return window


def logits(config, tensors, tokens, segments=None, positions=None):
    """(T, V) fp64 of one row of tokens (T,)."""
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    T, H = len(tokens), config["head_dim"]
    heads, kv_heads, eps = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["rms_norm_eps"],
    )
    segments = np.zeros(T, int) if segments is None else segments
    positions = np.arange(T) if positions is None else positions

    def linear(name, x):
        return tensors[name + ".weight"] @ x + tensors.get(name + ".bias", 0.0)

    x = [tensors["model.embed_tokens.weight"][t] for t in tokens]
    for layer in range(config["num_hidden_layers"]):
        at, window = f"model.layers.{layer}.", window_of_layer(config, layer)
        q, k, v = ([], [], [])
        for t in range(T):
            y = norm(x[t], tensors[at + "input_layernorm.weight"], eps)
            q_t, k_t, v_t = (
                linear(f"{at}self_attn.{c}_proj", y).reshape(n, H)
                for c, n in zip("qkv", (heads, kv_heads, kv_heads))
            )
            if config["model_type"] == "qwen3":
                q_t = [norm(head, tensors[at + "self_attn.q_norm.weight"], eps) for head in q_t]
                k_t = [norm(head, tensors[at + "self_attn.k_norm.weight"], eps) for head in k_t]
            q.append([turned(config, head, positions[t], T) for head in q_t])
            k.append([turned(config, head, positions[t], T) for head in k_t])
            v.append(v_t)
        for t in range(T):
            seen = [
                s for s in range(t + 1) if segments[s] == segments[t] and (window is None or t - s < window)
            ]
            out = []
            for head in range(heads):
                of = head * kv_heads // heads
                scores = np.array([q[t][head] @ k[s][of] / math.sqrt(H) for s in seen])
                weights = np.exp(scores - scores.max())
                out.append(sum(w * v[s][of] for w, s in zip(weights / weights.sum(), seen)))
            x[t] = x[t] + linear(at + "self_attn.o_proj", np.concatenate(out))
            y = norm(x[t], tensors[at + "post_attention_layernorm.weight"], eps)
            gate = linear(at + "mlp.gate_proj", y)
            x[t] = x[t] + linear(
                at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(at + "mlp.up_proj", y)
            )
    head = tensors["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    return np.stack([head @ norm(x[t], tensors["model.norm.weight"], eps) for t in range(T)])
