"""What `zero2jax info` prints: versions and devices of this process. The report starts the backend."""

import platform
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero2jax.base.versions import installed_version
from zero2jax.offload.rates import measured_rates
from zero2jax.planning.targets import CUDA_PACKAGES

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
    table.add_row("backend", f"{report['backend']}, {report['num_processes']} process(es)")
    kinds = sorted({(d["platform"], d["kind"], ", ".join(d["memory_kinds"])) for d in report["devices"]})
    for name, kind, memories in kinds:
        count = sum((d["platform"], d["kind"]) == (name, kind) for d in report["devices"])
        table.add_row("devices", f"{count} x {name} ({kind}), memory kinds: {memories or 'unknown'}")
    for name, rate in report.get("bytes_per_s", {}).items():
        table.add_row(_RATES[name], f"{rate / 1e9:.2f} GB/s")
    console.print(table)


def _memory_kinds(device: jax.Device) -> list[str]:
    if device.process_index != jax.process_index():
        return []
    return sorted(memory.kind for memory in device.addressable_memories())
