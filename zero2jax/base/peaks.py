"""Accelerators by name: their makers' dense 16-bit floating-point operations per second, and their memory."""

_PEAKS = {
    "V100-SXM": 125e12,
    "A100": 312e12,
    "H100 80GB": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Of a device by the name it gives itself (`jax.Device.device_kind`); None where it is not known.

    Example:
      >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
      (989000000000000.0, None)
    """
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)


_MEMORY_BYTES = {
    "V100-SXM3-32GB": 33.9e9,
    "A100-SXM4-80GB": 85.1e9,
    "H100 80GB": 84.9e9,
    "H200": 151.4e9,
    "B200": 191.5e9,
}


def memory_bytes(device_kind: str) -> float | None:
    """Memory of a device, as `peak_flops`."""
    return next((size for name, size in _MEMORY_BYTES.items() if name in device_kind), None)
