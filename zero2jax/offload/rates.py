"""Measured bandwidths of what offloading moves, and the part of a step that it adds. Outside any program.

Two threads wait for arrays that are made anyway, and note when they are there; nothing else waits for them. A rate is
bytes over the seconds from when a transfer could begin (it was asked for, the gradients were made, and the transfer
before was over) to its end, all devices of the process together. The part that offloading adds is the time from the
last gradient until the devices have what the next step begins with, over that of the step: in it they have nothing to
compute. That is the last parameter that is up; where updates are delayed, the last one of the step before, so that an
update which is over sooner than the next gradients adds nothing.
"""

import concurrent.futures
import dataclasses
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zero2jax.offload.disk_files import Folder, Meter

_PREFIX = "offload_"
PROBE_BYTES = 2**26


@dataclasses.dataclass
class _Times:
    """Of one step, in seconds of `time.perf_counter`."""

    begun: float
    reduced: float = math.nan
    up: float = math.nan
    busy_s: dict[str, float] = dataclasses.field(default_factory=dict)
    num_bytes: dict[str, int] = dataclasses.field(default_factory=dict)


class Rates:
    """Measures the steps of one engine.

    Attributes:
      disk: meters of what is read and written, by name; none where nothing is.
    """

    def __init__(self) -> None:
        self.disk: dict[str, Meter] = {}
        self._lock = threading.Lock()
        self._threads = {
            way: concurrent.futures.ThreadPoolExecutor(1, f"zero2jax-{way}") for way in ("down", "up")
        }
        self._now = _Times(math.nan)
        self._ended = dict.fromkeys(self._threads, 0.0)
        self._last_up = self._last_ready = -math.inf
        self._last = dict.fromkeys(["down_bytes_per_s", "up_bytes_per_s", "share"], math.nan)

    def begin(self, made: jax.Array) -> None:
        """A step has begun; `made` is there when its gradients are."""
        now = self._now = _Times(time.perf_counter())

        def wait() -> None:
            jax.block_until_ready(made)
            now.reduced = time.perf_counter()

        self._threads["down"].submit(wait)

    def moving(self, way: str, before: Sequence[jax.Array], after: Sequence[jax.Array]) -> None:
        """Arrays were sent "down" or "up"; those that are where they were count nothing."""
        sent = [(x, y) for x, y in zip(before, after, strict=True) if x is not y]
        num_bytes = sum(shard.data.nbytes for _, y in sent for shard in y.addressable_shards)
        # where nothing is sent, the way is over once what is there already has been made
        arrays = [y for _, y in sent] or list(after)
        self._threads[way].submit(self._wait, way, time.perf_counter(), self._now, arrays, num_bytes)

    def _wait(self, way: str, asked: float, step: _Times, arrays: list[jax.Array], num_bytes: int) -> None:
        jax.block_until_ready(arrays)
        ended = time.perf_counter()
        could_begin = max(asked, self._ended[way], 0.0 if math.isnan(step.reduced) else step.reduced)
        self._ended[way] = ended
        with self._lock:
            step.busy_s[way] = step.busy_s.get(way, 0.0) + ended - could_begin
            step.num_bytes[way] = step.num_bytes.get(way, 0) + num_bytes
            if way == "up":
                step.up = ended

    def end(self, beside: bool = False) -> None:
        """All transfers of the step were asked for; once they are over, they are what is known.

        `beside`: the next step begins with the parameters that the step before has sent up.
        """
        noted = self._threads["down"].submit(lambda: None)
        self._threads["up"].submit(self._end, self._now, beside, noted)

    def _end(self, step: _Times, beside: bool, noted: "concurrent.futures.Future[None]") -> None:
        noted.result()  # so are its gradients, then
        with self._lock:
            for way in self._threads:
                busy_s, num_bytes = step.busy_s.get(way, 0.0), step.num_bytes.get(way, 0)
                self._last[f"{way}_bytes_per_s"] = num_bytes / busy_s if busy_s and num_bytes else math.nan
            ready = max(step.reduced, self._last_up) if beside else step.up
            # asked for while the devices wait for its parameters, a step begins when these are there
            begun = max(step.begun, self._last_ready)
            # the two threads wake in any order: what is over at once may seem to be over before the gradients
            reduced = min(max(step.reduced, begun), ready)
            self._last["share"] = (ready - reduced) / (ready - begun) if ready > begun else math.nan
            self._last_ready, self._last_up = ready, step.up

    def metrics(self) -> dict[str, Any]:
        """What is known of the last step that is over, as metrics; NaN where nothing is, or nothing moved."""
        with self._lock:
            known = dict(self._last)
        known |= {f"{name}_bytes_per_s": meter.taken() for name, meter in self.disk.items()}
        return {_PREFIX + name: np.float32(value) for name, value in known.items()}


def measured_rates(device: jax.Device, nvme_path: str | os.PathLike[str] | None = None) -> dict[str, float]:
    """Bytes per second of one transfer each way between a device and the host, and of a file, if a folder is given.

    Raises:
      OffloadFileError: the folder cannot be used.
    """
    data = np.ones(PROBE_BYTES, np.uint8)
    host = jax.devices("cpu")[0] if device.platform != "cpu" else device
    rates: dict[str, float] = {}
    for _ in range(2):  # the first one makes buffers
        here = jax.block_until_ready(jax.device_put(data, host))
        up, rates["up"] = _timed(lambda here=here: jax.device_put(here, device, may_alias=False))
        _, rates["down"] = _timed(lambda up=up: jax.device_put(up, host, may_alias=False))
    if nvme_path is not None:
        # beside those of a run, which may be using its own
        root = Path(nvme_path) / f"zero2jax-probe-{os.getpid()}"
        try:
            folder = Folder(root, jax.process_index(), jax.process_count())
            folder.read(folder.write("probe", lambda: data).result()).result()
        finally:
            shutil.rmtree(root, ignore_errors=True)
        rates |= {"write": folder.writes.taken(), "read": folder.reads.taken()}
    return rates


def _timed(move: Any) -> tuple[jax.Array, float]:
    begun = time.perf_counter()
    moved = jax.block_until_ready(move())
    return moved, PROBE_BYTES / (time.perf_counter() - begun)
