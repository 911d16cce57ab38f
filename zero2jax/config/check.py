"""What `zero2jax check CONFIG` prints: the effective settings, what every key became, what is ignored.

`check_config` is a pure function from a `Config` to a report; `zero2jax check` prints it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zero2jax.config.compiler_options import compiler_options
from zero2jax.config.keys import KEYS, Treatment
from zero2jax.config.rules import device_notes, not_yet, settings
from zero2jax.config.schema import Config
from zero2jax.config.values import shown

# Wider than any model: shows the bucket sizes as the file has them.
_NO_CAP = 1 << 62
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
      ConfigError: the batch sizes do not fit `num_devices`.
    """
    notes = config.notes + (() if num_devices is None else tuple(device_notes(config, num_devices)))
    rows = tuple(row for row in _rows(config) if every_key or row.given)
    return CheckReport(
        config.name, num_devices, _effective(config, num_devices), rows, notes, tuple(not_yet(config))
    )


def _rows(config: Config) -> Iterator[Row]:
    given = set(config.given)
    for path, value, _ in settings(config):
        key = KEYS[path]
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


def _effective(config: Config, num_devices: int | None) -> dict[str, str]:
    zero = config.zero_optimization
    compute = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    clip = config.gradient_clipping
    effective = {
        "ZeRO stage": f"{zero.stage}, sharded: {_SHARDED[zero.stage]}",
        "batch": _batch(config, num_devices),
        "compute dtype": compute,
        "gradient accumulation dtype": config.data_types.grad_accum_dtype or "fp32",
        "gradient reduction dtype": config.communication_data_type or compute,
        "gradient clipping": f"global norm {clip}" if clip else "none",
        "optimizer": _block(config.optimizer, "none in the file: pass tx to initialize"),
        "learning rate": _block(config.scheduler, "constant"),
    }
    if "gradient_clipping" not in config.given:
        effective["gradient clipping"] += " (the key is absent; DeepSpeed since 0.19.3 would clip at 1.0)"
    if config.bf16.enabled:
        effective["non-finite gradients"] = (
            "the step is skipped" if config.bf16.check_grad_overflow else "the step is applied"
        )
    options = compiler_options(config, "gpu", _NO_CAP)
    for name, value in options.items():
        at_most = "at most the model, " if name.endswith("_bytes") else ""
        effective[f"on GPUs: {name}"] = f"{at_most}{shown(value)}"
    return effective


def _batch(config: Config, num_devices: int | None) -> str:
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None and micro is None:
        return f"from the data; {steps or 1} microbatches per step"
    if num_devices is not None:
        total, micro, steps = config.batch_sizes(num_devices, shards_from="--devices")
        return f"{total} examples = {micro} per device x {steps} microbatches x {num_devices} devices"
    parts = ((total, "examples per step"), (micro, "per device and microbatch"), (steps, "microbatches"))
    return ", ".join(f"{value} {what}" for value, what in parts if value is not None)


def _block(block: Any, otherwise: str) -> str:
    if block is None:
        return otherwise
    values = {name: value for name, value, default in settings(block.params) if value != default}
    text = ", ".join(f"{name} {shown(value)}" for name, value in values.items())
    return f"{block.type} ({text})" if text else f"{block.type} with its defaults"
