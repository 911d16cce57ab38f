"""Memory in the metrics of each step: what is in use, and the peak so far. Asks the allocator, waits for nothing.

XLA keeps one peak per process and cannot begin it anew: that of a step is the first to show it, and a step that needs
less does not lower it.
"""

import warnings

import jax


class StepMemory:
    """The metrics of the devices of this process."""

    def __init__(self) -> None:
        self._said = False
        self._peak = 0

    def metrics(self) -> dict[str, int]:
        """`memory_in_use_bytes`, `memory_peak_bytes` and `memory_peak_growth_bytes`, of the device with the most.

        The last is by how much this step raised the peak. Without statistics there are none, which is said once.
        """
        stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
        if not stats:
            if not self._said:
                warnings.warn(
                    "memory_breakdown: this backend keeps no statistics of its memory, so that metrics have none. "
                    "zero2jax.memory_report() counts live arrays; engine.memory(state, batch) reads the compiled step.",
                    stacklevel=3,
                )
            self._said = True
            return {}
        return self.of(stats)

    def of(self, stats: list[dict[str, int]]) -> dict[str, int]:
        """The metrics of allocators that keep these statistics."""
        peak = max(int(found.get("peak_bytes_in_use", 0)) for found in stats)
        growth, self._peak = max(peak - self._peak, 0), max(peak, self._peak)
        return {
            "memory_in_use_bytes": max(int(found.get("bytes_in_use", 0)) for found in stats),
            "memory_peak_bytes": peak,
            "memory_peak_growth_bytes": growth,
        }
