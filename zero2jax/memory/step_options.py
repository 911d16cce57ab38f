"""XLA's options of one step: presets by name, each option checked against the compiler that is installed.

Options go to the compilation of the step alone (`compiler_options` of `jax.jit`), never to the process. A compiler that
does not have one refuses the whole program when it is compiled, so they are tried on one product of matrices first:
those of a preset that it refuses are left out and named in a warning, those that somebody has written are an error.

    latency         hide communication behind products; the defaults of stages 2 and 3 come near (`zero.schedule`)
    memory          fewer buffers at the same time, for communication that is waited for
    once            nothing is computed or communicated again that the model does not checkpoint
    deterministic   the same bits from run to run: no atomics, no choice of kernels by timing

What each does to a step is measured in `docs/memory.md`. Numbers depend on none but `deterministic`, which may choose
other kernels.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zero2jax.base.compiler import GPU_PLATFORMS, refusal
from zero2jax.zero.compiled import CompilerOptions
from zero2jax.zero.shard_plan import ShardPlan

Options = dict[str, Any]

# Two names of one thing: a compiler has the newer, or the older.
_SAME = (("xla_gpu_pipeline_reduce_scatter", "xla_gpu_enable_pipelined_reduce_scatter"),)
_ON_GPU: dict[str, Options] = {
    "latency": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # a layer's gradients are reduced beside the products of the next one; gathers are early anyway
        "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_enable_pipelined_reduce_scatter": True,
    },
    "memory": {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL",
        # no collective waits in memory for another one to be sent with
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    },
    # near its limit the compiler repeats collectives too, several times the bytes for a percent of the memory
    "once": {"xla_disable_hlo_passes": "rematerialization"},
    "deterministic": {
        "xla_gpu_enable_scatter_determinism_expander": True,
        # and kernels by a table, not by timing: refused where there is no GPU whose table that could be
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_deterministic_ops": True,
    },
}
_ON_CPU: dict[str, Options] = {
    "latency": {"xla_cpu_enable_concurrency_optimized_scheduler": True},
    "memory": {"xla_cpu_enable_concurrency_optimized_scheduler": False},
    "once": {},  # it repeats nothing
    "deterministic": {},  # its programs are
}
PRESETS = tuple(_ON_GPU)


def preset_options(preset: str, platform: str) -> Options:
    """The options of a preset for a platform, installed or not.

    Raises:
      ValueError: there is no such preset.

    Example:
      >>> preset_options("latency", "cpu")
      {'xla_cpu_enable_concurrency_optimized_scheduler': True}
    """
    if preset not in PRESETS:
        raise ValueError(
            f"reading compiler_options: there is no preset {preset!r}, only {', '.join(PRESETS)}. Give one of them, or "
            f"a mapping from options of XLA to values."
        )
    return dict(
        (_ON_GPU if platform in GPU_PLATFORMS else _ON_CPU if platform == "cpu" else {}).get(preset, {})
    )


def installed_options(preset: str, device: jax.Device) -> Options:
    """The options of a preset that the compiler for a device has; warns of the others by name."""
    options = preset_options(preset, device.platform)
    refused = refused_options(options, device)
    taken = {name: value for name, value in options.items() if name not in refused}
    lacking = set(refused)
    for names in _SAME:
        lacking -= set(names) if any(name in taken for name in names) else set()
    if lacking:
        warnings.warn(
            f"compiler_options={preset!r}: the compiler of jax {jax.__version__} does not take "
            f"{', '.join(sorted(lacking))} here, left out. The others apply: {', '.join(taken) or 'none'}.",
            stacklevel=2,
        )
    return taken


def refused_options(options: Mapping[str, Any], device: jax.Device) -> dict[str, str]:
    """Options that the compiler for a device refuses, and why, in its own words. Compiles a product."""
    if not options:
        return {}
    reason = refusal(options, device)
    if reason is None:
        return {}
    if len(options) == 1:
        return {next(iter(options)): reason}
    named = [name for name in options if re.search(rf"\b{re.escape(name)}\b", reason)]
    first = named[:1] or list(options)[:1]
    rest = {name: value for name, value in options.items() if name not in first}
    return refused_options({name: options[name] for name in first}, device) | refused_options(rest, device)


def checked_options(options: Mapping[str, Any], device: jax.Device) -> Options:
    """The options, if the compiler for a device takes them all.

    Raises:
      ValueError: it does not; names each with what the compiler says.
    """
    refused = refused_options(options, device)
    if refused:
        lines = [f"  {name} = {options[name]!r}: {reason}" for name, reason in sorted(refused.items())]
        raise ValueError(
            f"compiling the step for {device.platform}: jax {jax.__version__} refuses {len(refused)} of the "
            f"{len(options)} compiler options. Correct them, or leave them out:\n" + "\n".join(lines)
        )
    return dict(options)


def step_options(given: str | CompilerOptions, mesh: Mesh) -> Callable[[ShardPlan], Options]:
    """What an engine is told of compiler options, as a function of the plan that checks them when it is called.

    Args:
      given: the name of a preset; options; or a function that makes options from the shard plan of the parameters.
      mesh: the step's.

    Raises:
      ValueError: there is no such preset; by the function: the compiler refuses an option.
    """
    device = (mesh.local_devices or list(mesh.devices.flat))[0]
    if isinstance(given, str):
        preset_options(given, device.platform)
        return lambda plan: installed_options(given, device)
    return lambda plan: checked_options((given(plan) if callable(given) else given) or {}, device)
