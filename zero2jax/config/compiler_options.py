"""DeepSpeed's bucket sizes and `overlap_comm` as compiler options of one step, never process-wide flags.

Used when the step is compiled: `jax.jit(step, compiler_options=compiler_options(...))`. A bucket counts
elements; the compiler combines neighbouring collectives up to a threshold in bytes: elements * bytes per
element, at most the model. Only keys written in the file reach the compiler (and `overlap_comm` at stage 3,
where DeepSpeed switches it on); everything else is left to XLA. Results do not depend on any of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zero2jax.base.compiler import GPU_PLATFORMS
from zero2jax.config.schema import Config
from zero2jax.config.values import warn

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"
_TUNED = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.overlap_comm",
)


def compiler_options(
    config: Config, platform: str, param_bytes: int, preset: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The XLA options of the train step.

    Args:
      config: the configuration.
      platform: of the devices the step is compiled for; "gpu" and "cuda" have these options.
      param_bytes: bytes of all parameters as the step communicates them: the cap of both thresholds.
      preset: options of the preset that `xla_preset` names; keys of the file go before them.

    Warns:
      ConfigWarning: the file sets these keys and the platform has no such options.
    """
    zero = config.zero_optimization
    given = [key for key in _TUNED if key in config.given]
    if platform not in GPU_PLATFORMS:
        if given:
            message = f"{', '.join(given)}: no effect on platform '{platform}', only GPUs have these options."
            warn(message)
        return dict(preset)
    options: dict[str, Any] = {}
    if zero.stage == 3:
        options[_OVERLAP] = zero.overlap_comm
    options |= preset
    compute = config.compute_dtype
    reduced = config.communication_data_type or compute
    buckets = (
        ("reduce_bucket_size", "xla_gpu_reduce_scatter_combine_threshold_bytes", reduced),
        ("allgather_bucket_size", "xla_gpu_all_gather_combine_threshold_bytes", compute),
    )
    for name, option, dtype in buckets:
        if f"zero_optimization.{name}" in given:
            options[option] = min(getattr(zero, name) * _BYTES[dtype], param_bytes)
    if "zero_optimization.overlap_comm" in given:
        options[_OVERLAP] = zero.overlap_comm
    return options
