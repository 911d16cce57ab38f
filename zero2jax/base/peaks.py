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
    "V100-SXM3-32GB": 33871364096,
    "A100-SXM4-80GB": 85100068864,
    "H100 80GB": 84942979072,
    "H200": 151397597184,
    "B200": 191514411008,
}


def memory_bytes(device_kind: str) -> int | None:
    """Memory of a device by the name it gives itself; None where it is not known.

    Example:
      >>> memory_bytes("NVIDIA H100 80GB HBM3"), memory_bytes("cpu")
      (84942979072, None)
    """
    return next((size for name, size in _MEMORY_BYTES.items() if name in device_kind), None)
