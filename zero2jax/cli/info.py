"""What `zero2jax info` prints: versions and devices of this process. The report starts the backend."""

import platform
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero2jax.base.versions import installed_version
from zero2jax.memory.step_options import PRESETS, preset_options, refused_options
from zero2jax.planning.targets import CUDA_PACKAGES

_PACKAGES = ("zero2jax", "jax", "jaxlib", "optax", "orbax-checkpoint", "flax", "numpy")


def environment_report() -> dict[str, Any]:
    """Versions, devices, and whether CUDA compiles here without a GPU; plain JSON types."""
    cuda = {name: installed_version(name) for name in CUDA_PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "cuda_compiler": {"available": None not in cuda.values(), "packages": cuda},
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
    }


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
    table.add_row("backend", f"{report['backend']}, {report['num_processes']} process(es)")
    kinds = sorted({(d["platform"], d["kind"], ", ".join(d["memory_kinds"])) for d in report["devices"]})
    for name, kind, memories in kinds:
        count = sum((d["platform"], d["kind"]) == (name, kind) for d in report["devices"])
        table.add_row("devices", f"{count} x {name} ({kind}), memory kinds: {memories or 'unknown'}")
    console.print(table)


def _memory_kinds(device: jax.Device) -> list[str]:
    if device.process_index != jax.process_index():
        return []
    return sorted(memory.kind for memory in device.addressable_memories())
