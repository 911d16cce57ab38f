"""What `zero2jax check CONFIG` prints: the effective settings, what every key became, what is ignored, what is wrong.

`check_config` is a pure function from a `Config` to a report, `examine` one from a file; `zero2jax check` prints it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from zero2jax.activations.layers import ActivationSettings
from zero2jax.base.mesh import MODEL_AXIS
from zero2jax.base.tables import readable_bytes
from zero2jax.config.keys import KEYS, SECRETS, Treatment, key_of
from zero2jax.config.reading import Source, read
from zero2jax.config.rules import device_notes, device_problems, key_values, open_rates
from zero2jax.config.schema import FP16, ActivationCheckpointing, Config, Memory
from zero2jax.config.translate import DTYPES, EngineSettings, activations_of, batch_of, translate
from zero2jax.config.values import ConfigError, Report, shown
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.precision import Precision

# Wider than any model: shows the bucket sizes as the file has them.
_NO_CAP = 1 << 62
_LONGEST_NAME = 200
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
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

    `effective` maps a setting to what it is in words; `keys` has the keys of the file, or every key; `notes` what was
    converted, ignored or needs saying. Why it does not train: `errors` is what is wrong in the file, `refused` what is
    right by DeepSpeed and refused here or by the number of devices, `to_fill` what was left at "auto" and has no
    default.
    """

    config: str
    num_devices: int | None
    effective: Mapping[str, str]
    keys: tuple[Row, ...]
    notes: tuple[str, ...]
    errors: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    to_fill: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether `initialize` takes it, as far as that can be said without mesh and model."""
        return not (self.errors or self.refused or self.to_fill)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self) | {"trains": self.trains}


def check_config(config: Config, num_devices: int | None = None, *, every_key: bool = False) -> CheckReport:
    """What becomes of a configuration on `num_devices` devices of the data axis.

    Args:
      config: the configuration.
      num_devices: needed to finish the batch sizes; None leaves them as written.
      every_key: rows for the keys the file does not have, too.

    Raises:
      ConfigError: the batch sizes or groups of devices do not fit `num_devices`; a remat policy is none.
    """
    report = _report(config, Report(), num_devices, every_key)
    if report.errors or report.refused:
        raise ConfigError(f"cannot train by {config.name}", (*report.errors, *report.refused))
    return report


def examine(
    source: Source,
    num_devices: int | None = None,
    *,
    every_key: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> CheckReport:
    """As `check_config`, for anything that `load_config` takes: what is wrong stands in the report, all of it.

    Args:
      source: path, text or dict.
      num_devices: as for `check_config`, like `every_key`.
      every_key: see there.
      overrides: values for keys at "auto", as for `resolve_auto`.
    """
    try:
        config, found = read(source, overrides)
    except ConfigError as error:
        return CheckReport(str(source)[:_LONGEST_NAME], num_devices, {}, (), error.notes, errors=error.errors)
    return _report(config, found, num_devices, every_key)


def _report(config: Config, found: Report, num_devices: int | None, every_key: bool) -> CheckReport:
    """The report of a configuration that was read with these findings."""
    settings, errors, refused = _settings(config, found, num_devices)
    errors = [*found.errors, *errors]
    notes = [*config.notes, *_notes(config)]
    if num_devices is not None and num_devices > 0:
        notes += device_notes(config, num_devices)
    return CheckReport(
        config=config.name,
        num_devices=num_devices,
        effective={} if errors else _effective(settings, num_devices),
        keys=tuple(row for row in _rows(config) if (every_key or row.given) and found.sound(row.key)),
        notes=tuple(notes),
        errors=tuple(errors),
        refused=(*found.refused, *refused),
        to_fill=(*found.open, *open_rates(config)),
    )


def _settings(
    config: Config, found: Report, num_devices: int | None
) -> tuple[EngineSettings, list[str], list[str]]:
    """(the translation as far as it goes, errors of a policy, reasons why the devices do not fit)."""
    errors: list[str] = []
    refused: list[str] = []
    try:
        activations_of(config)
    except ConfigError as error:
        errors += error.errors
        config = replace(config, activation_checkpointing=ActivationCheckpointing())
    if not found.sound(*(f"fp16.{field.name}" for field in fields(FP16))):
        config = replace(config, fp16=FP16())
    if not found.sound("memory"):
        config = replace(config, memory=Memory())
    if num_devices is not None:
        if num_devices < 1:
            raise ConfigError(
                f"cannot check {config.name}", [f"num_devices = {num_devices}: must be at least 1. Raise it."]
            )
        refused += device_problems(config, num_devices)
        try:
            batch_of(config, num_devices, "--devices")
        except ConfigError as error:
            refused += error.errors if found.sound(*_BATCH) else []
            num_devices = None
    return translate(config, num_devices, shards_from="--devices"), errors, refused


def _notes(config: Config) -> Iterator[str]:
    """What is worth saying beside the notes of reading."""
    for path in config.unused:
        yield f"override {path}: the file has no such key, so it fills nothing."
    if config.tensor_parallel > 1:
        size = config.tensor_parallel
        yield f"tensor_parallel = {size}: initialize needs a mesh whose axis {MODEL_AXIS!r} has this size."


def _rows(config: Config) -> Iterator[Row]:
    given = set(config.given)
    kind = None if config.optimizer is None else config.optimizer.type
    for path, value, _ in key_values(config):
        key = key_of(path, kind)
        value = "(hidden)" if path in SECRETS and value is not None else value
        yield Row(path, value, path in given, path in config.auto, key.treatment, key.becomes)
    for path, value in _leaves(config.source):
        old = "bfloat16" if path.startswith("bfloat16.") else path
        if old in KEYS and KEYS[old].treatment is Treatment.CONVERTED:
            yield Row(path, value, True, False, KEYS[old].treatment, KEYS[old].becomes)


def _leaves(source: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        here = f"{path}.{key}" if path else str(key)
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
    if step.precision.master_dtype != jnp.float32:
        effective["masters"] = _stored(step.precision, "master_dtype")
        effective["optimizer state"] = _stored(step.precision, "state_dtype")
    if step.precision.quantize is not None:
        effective["quantised between devices"] = ", ".join(step.precision.quantize.plain)
    if settings.offload is not None:
        path = settings.offload.nvme_path
        where = "host memory" if path is None else f"files below {path}"
        effective["masters and optimizer state"] = (
            f"{_ratio(settings.offload)} in {where}, updated on the host's CPU"
        )
        if settings.offload.params:
            effective["parameters"] = f"{compute}, in pinned host memory, fetched where they are used"
    if config.memory.arena:
        effective["state between steps"] = "an arena: masters and optimizer state in one buffer per dtype"
    if "gradient_clipping" not in config.given:
        effective["gradient clipping"] += " (the key is absent; DeepSpeed since 0.19.3 would clip at 1.0)"
    if config.bf16.enabled:
        applied = "the step is skipped" if step.skip_nonfinite else "the step is applied"
        effective["non-finite gradients"] = applied
    if step.loss_scale is not None:
        effective["loss scale"] = step.loss_scale.words
        effective["non-finite gradients"] = "the step is skipped"
    for name, value in settings.compiler_options("gpu", _NO_CAP).items():
        at_most = "at most the model, " if name.endswith("_bytes") else ""
        effective[f"on GPUs: {name}"] = f"{at_most}{shown(value)}"
    return effective


def _stored(precision: Precision, name: str) -> str:
    dtype = _WORDS[getattr(precision, name).name]
    return f"{dtype}, rounded stochastically" if dtype == "bf16" and precision.rounds_at_random else dtype


def _ratio(offload: OffloadSettings) -> str:
    if isinstance(offload.ratio, str):
        return f"so much that a device stores {readable_bytes(offload.device_bytes or 0)} between steps"
    return f"{offload.ratio:.0%}"


def _batch(settings: EngineSettings, num_devices: int | None) -> str:
    config, step = settings.config, settings.step
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total is None and micro is None:
        return f"from the data; {step.num_microbatches} microbatches per step"
    if num_devices is not None and step.batch_size is not None:
        size, steps = step.batch_size, step.num_microbatches
        each = size // steps // num_devices
        if size == each * steps * num_devices:
            return f"{size} examples = {each} per device x {steps} microbatches x {num_devices} devices"
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
