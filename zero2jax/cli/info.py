"""What `zero2jax info` prints: versions, devices, memory, and what is wrong here. The report starts the backend."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero2jax.base.versions import installed_version
from zero2jax.cli.doctor import System, problems
from zero2jax.memory.configure import client_options
from zero2jax.memory.step_options import PRESETS, preset_options, refused_options
from zero2jax.offload.rates import measured_rates
from zero2jax.planning.targets import CUDA_PACKAGES

_ALLOCATOR = ("allocator", "memory_fraction", "preallocate", "collective_memory_size")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PACKAGES = ("zero2jax", "jax", "jaxlib", "optax", "orbax-checkpoint", "flax", "numpy")
_RATES = {
    "up": "host to device, measured",
    "down": "device to host, measured",
    "write": "disk, written",
    "read": "disk, read (from the page cache, if it fits)",
}


def environment_report(*, measure: bool = False, nvme_path: str | None = None) -> dict[str, Any]:
    """Versions, devices, and whether CUDA compiles here without a GPU; plain JSON types.

    Args:
      measure: add `bytes_per_s`, measured between the first device and the host.
      nvme_path: and of a file in this folder.
    """
    measured = measure or nvme_path is not None
    rates = measured_rates(jax.local_devices()[0], nvme_path) if measured else {}
    cuda = {name: installed_version(name) for name in CUDA_PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "cuda_compiler": {"available": None not in cuda.values(), "packages": cuda},
        "driver": _driver(),
        "nccl": next(filter(None, map(installed_version, _NCCL)), None),
        "allocator": _allocator(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "problems": [problem._asdict() for problem in problems(os.environ, System.here())],
        "xla_presets": {name: _preset(name) for name in PRESETS},
        "backend": jax.default_backend(),
        "num_processes": jax.process_count(),
        "devices": [
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "process_index": device.process_index,
                "memory_kinds": _memory_kinds(device),
            }
            for device in jax.devices()
        ],
        **({"bytes_per_s": rates} if rates else {}),
    }


def _driver() -> str | None:
    """The line of the NVIDIA driver."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return None


def _allocator() -> dict[str, Any]:
    """What the client of a GPU is told, as the installed jaxlib reads the environment; what it refuses is a problem."""
    try:
        return client_options() or {}
    except ValueError:
        return {}


def _preset(name: str) -> dict[str, Any]:
    """What a preset amounts to on the devices here."""
    device = jax.local_devices()[0]
    wanted = preset_options(name, device.platform)
    refused = refused_options(wanted, device)
    return {
        "options": {option: value for option, value in wanted.items() if option not in refused},
        "not_installed": sorted(refused),
    }


def print_environment(report: dict[str, Any], console: Console | None = None) -> None:
    """Write the report as a table."""
    console = console or Console()
    table = Table("what", "value", title="environment", title_justify="left")
    table.add_row("python", report["python"])
    packages = report["packages"] | report["cuda_compiler"]["packages"]
    for name, version in packages.items():
        table.add_row(name, version or "not installed")
    ready = "yes" if report["cuda_compiler"]["available"] else escape("no (pip install 'zero2jax[plan]')")
    table.add_row("compiles for CUDA without a GPU", ready)
    for name, preset in report["xla_presets"].items():
        options = (
            ", ".join(f"{option}={value}" for option, value in preset["options"].items()) or "none needed"
        )
        lacking = "".join(f", not here: {option}" for option in preset["not_installed"])
        table.add_row(f"compiler_options={name!r}", options + lacking)
    table.add_row("NVIDIA driver, NCCL", f"{report['driver'] or 'none'}, {report['nccl'] or 'none'}")
    told = {name: value for name, value in report["allocator"].items() if name in _ALLOCATOR}
    table.add_row(
        "allocator of GPUs", ", ".join(f"{name} {value}" for name, value in told.items()) or "unknown"
    )
    table.add_row("XLA_FLAGS", escape(report["xla_flags"]) or "none")
    table.add_row("backend", f"{report['backend']}, {report['num_processes']} process(es)")
    kinds = sorted({(d["platform"], d["kind"], ", ".join(d["memory_kinds"])) for d in report["devices"]})
    for name, kind, memories in kinds:
        count = sum((d["platform"], d["kind"]) == (name, kind) for d in report["devices"])
        table.add_row("devices", f"{count} x {name} ({kind}), memory kinds: {memories or 'unknown'}")
    for name, rate in report.get("bytes_per_s", {}).items():
        table.add_row(_RATES[name], f"{rate / 1e9:.2f} GB/s")
    console.print(table)
    for problem in report["problems"]:
        console.print(
            f"problem: {escape(problem['what'])}\n         {escape(problem['remedy'])}", highlight=False
        )
    if not report["problems"]:
        console.print("no problems seen in the environment")


def _memory_kinds(device: jax.Device) -> list[str]:
    if device.process_index != jax.process_index():
        return []
    return sorted(memory.kind for memory in device.addressable_memories())
