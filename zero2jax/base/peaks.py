"""Peaks of accelerators: dense 16-bit floating-point operations per second, as their makers give them."""

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
