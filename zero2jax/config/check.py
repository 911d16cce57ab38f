"""What `zero2jax check CONFIG` prints: the effective settings, what every key became, what is ignored.

`check_config` is a pure function from a `Config` to a report; `zero2jax check` prints it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax.numpy as jnp

from zero2jax.activations.layers import ActivationSettings
from zero2jax.config.keys import KEYS, Treatment, key_of
from zero2jax.config.rules import device_notes, key_values, not_yet
from zero2jax.config.schema import Config
from zero2jax.config.translate import DTYPES, EngineSettings, translate
from zero2jax.config.values import shown

# Wider than any model: shows the bucket sizes as the file has them.
_NO_CAP = 1 << 62
_WORDS = {jnp.dtype(dtype).name: word for word, dtype in DTYPES.items()}
_SHARDED = (
    "nothing",
    "optimizer state",
    "optimizer state and gradients",
    "optimizer state, gradients and parameters",
)


@dataclass(frozen=True)
class Row:
    """One key: its value, whether the file has it, there left at "auto", and what becomes of it."""

    key: str
    value: Any
    given: bool
    auto: bool
    treatment: str
    becomes: str


@dataclass(frozen=True)
class CheckReport:
    """What a configuration amounts to.

    `effective` maps a setting to what it is in words; `keys` has the keys of the file, or every key;
    `notes` what was converted, ignored or needs saying; `not_yet` what `initialize` would refuse.
    """

    config: str
    num_devices: int | None
    effective: Mapping[str, str]
    keys: tuple[Row, ...]
    notes: tuple[str, ...]
    not_yet: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self)


def check_config(config: Config, num_devices: int | None = None, *, every_key: bool = False) -> CheckReport:
    """What becomes of a configuration on `num_devices` devices of the data axis.

    Args:
      config: the configuration.
      num_devices: needed to finish the batch sizes; None leaves them as written.
      every_key: rows for the keys the file does not have, too.

    Raises:
      ConfigError: the batch sizes do not fit `num_devices`; a remat policy is none.
    """
    translated = translate(config, num_devices, shards_from="--devices")
    return CheckReport(
        config=config.name,
        num_devices=num_devices,
        effective=_effective(translated, num_devices),
        keys=tuple(row for row in _rows(config) if every_key or row.given),
        notes=config.notes + (() if num_devices is None else tuple(device_notes(config, num_devices))),
        not_yet=tuple(not_yet(config)),
    )


def _rows(config: Config) -> Iterator[Row]:
    given = set(config.given)
    kind = None if config.optimizer is None else config.optimizer.type
    for path, value, _ in key_values(config):
        key = key_of(path, kind)
        yield Row(path, value, path in given, path in config.auto, key.treatment, key.becomes)
    for path, value in _leaves(config.source):
        old = "bfloat16" if path.startswith("bfloat16.") else path
        if old in KEYS and KEYS[old].treatment is Treatment.CONVERTED:
            yield Row(path, value, True, False, KEYS[old].treatment, KEYS[old].becomes)


def _leaves(source: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _leaves(value, here)
        else:
            yield here, value


def _effective(settings: EngineSettings, num_devices: int | None) -> dict[str, str]:
    """What the engine would be told, in words."""
    config, step = settings.config, settings.step
    compute, reduced, accumulated = (name and _WORDS[name] for name in step.precision.names)
    effective = {
        "ZeRO stage": f"{step.stage}, sharded: {_SHARDED[step.stage]}",
        "batch": _batch(settings, num_devices),
        "compute dtype": f"{compute}",
        "gradient accumulation dtype": f"{accumulated}",
        "gradient reduction dtype": f"{reduced or compute}",
        "gradient clipping": "none" if step.clip_norm is None else f"global norm {step.clip_norm}",
        "optimizer": _block(config.optimizer, "none in the file: pass tx to initialize"),
        "learning rate": _block(config.scheduler, "constant"),
        "activations": _activations(settings.activations),
    }
    if "gradient_clipping" not in config.given:
        effective["gradient clipping"] += " (the key is absent; DeepSpeed since 0.19.3 would clip at 1.0)"
    if config.bf16.enabled:
        applied = "the step is skipped" if step.skip_nonfinite else "the step is applied"
        effective["non-finite gradients"] = applied
    for name, value in settings.compiler_options("gpu", _NO_CAP).items():
        at_most = "at most the model, " if name.endswith("_bytes") else ""
        effective[f"on GPUs: {name}"] = f"{at_most}{shown(value)}"
    return effective


def _batch(settings: EngineSettings, num_devices: int | None) -> str:
    config, step = settings.config, settings.step
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total is None and micro is None:
        return f"from the data; {step.num_microbatches} microbatches per step"
    if num_devices is not None and step.batch_size is not None:
        total, steps = step.batch_size, step.num_microbatches
        micro = total // steps // num_devices
        return f"{total} examples = {micro} per device x {steps} microbatches x {num_devices} devices"
    given = config.gradient_accumulation_steps
    parts = ((total, "examples per step"), (micro, "per device and microbatch"), (given, "microbatches"))
    return ", ".join(f"{value} {what}" for value, what in parts if value is not None)


def _activations(settings: ActivationSettings | None) -> str:
    if settings is None:
        return "saved as the loss function says"
    values = {
        f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default
    }
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())


def _block(block: Any, otherwise: str) -> str:
    if block is None:
        return otherwise
    values = {name: value for name, value, default in key_values(block.params) if value != default}
    text = ", ".join(f"{name} {shown(value)}" for name, value in values.items())
    return f"{block.type} ({text})" if text else f"{block.type} with its defaults"
