"""What the memory of the devices and of the host holds now, by class: from live buffers and the allocator's statistics.

Between programs; reads, and changes nothing. The client of a GPU keeps statistics: bytes in use and their peak, the
pool and its largest free block. Other backends keep none, and then live arrays are all there is to count; the report
says so. What no array holds is the programs' own: temporary blocks, constants, buffers of collectives.

    fragmentation = 1 - largest free block / free bytes of the pool
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from zero2jax.base.pytrees import PyTree, check_alive
from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.programs.formulas import MASTER, OPTIMIZER
from zero2jax.zero.state import TrainState

OTHER_ARRAYS = "other arrays"
NO_ARRAY = "not in an array"
NO_STATISTICS = "this backend keeps no statistics: bytes are those of live arrays, without what programs take"

_HOST_KINDS = ("pinned_host", "unpinned_host")
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one device, in bytes; None is what the backend does not say.

    Attributes:
      device: its name.
      by_class: what holds it: `master` and `optimizer state` of a state that was given, `other arrays`, and, with
        statistics, `not in an array`.
      in_use_bytes: allocated now; without statistics those of live arrays.
      peak_bytes: the most that was, since the process began.
      limit_bytes: what the allocator may take.
      pool_bytes: what it has taken from the device.
      largest_free_bytes: the largest block of it that is free.
    """

    device: str
    by_class: Mapping[str, int]
    in_use_bytes: int
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    pool_bytes: int | None = None
    peak_pool_bytes: int | None = None
    largest_free_bytes: int | None = None

    @classmethod
    def of(cls, device: str, arrays: Mapping[str, int], stats: Mapping[str, Any] | None) -> "DeviceMemory":
        """From the bytes of live arrays by class, and the backend's statistics, if it has some."""
        held = sum(arrays.values())
        if not stats or "bytes_in_use" not in stats:
            return cls(device=device, by_class=dict(arrays), in_use_bytes=held)
        in_use = int(stats["bytes_in_use"])
        known = lambda name: int(stats[name]) if stats.get(name) else None
        return cls(
            device=device,
            by_class={**arrays, NO_ARRAY: max(in_use - held, 0)},
            in_use_bytes=in_use,
            peak_bytes=known("peak_bytes_in_use"),
            limit_bytes=known("bytes_limit"),
            pool_bytes=known("pool_bytes"),
            peak_pool_bytes=known("peak_pool_bytes"),
            largest_free_bytes=known("largest_free_block_bytes"),
        )

    @property
    def free_bytes(self) -> int | None:
        """Bytes of the pool, or up to the limit, that are not in use."""
        total = self.pool_bytes or self.limit_bytes
        return None if total is None else max(total - self.in_use_bytes, 0)

    @property
    def fragmentation(self) -> float | None:
        """The part of the free bytes that no single block has: 0 is one block, near 1 is crumbs."""
        free, largest = self.free_bytes, self.largest_free_bytes
        if free is None or largest is None:
            return None
        return 0.0 if free == 0 else max(0.0, 1 - largest / free)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What `memory_report` returns; `print` it.

    Attributes:
      devices: of this process.
      host_by_class: bytes of arrays in host memory, by class as on the devices.
      process_bytes: of this process on the host, resident.
      host_used_bytes: of the host, by all its processes; None where nobody says.
      host_total_bytes: of the host.
      has_statistics: whether the devices' allocators keep any.
    """

    devices: tuple[DeviceMemory, ...]
    host_by_class: Mapping[str, int]
    process_bytes: int | None
    host_used_bytes: int | None
    host_total_bytes: int | None
    has_statistics: bool

    @property
    def fullest(self) -> DeviceMemory:
        """The device that most is in use of."""
        return max(self.devices, key=lambda device: device.in_use_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        extra = lambda d: {"free_bytes": d.free_bytes, "fragmentation": d.fragmentation}
        return {
            **dataclasses.asdict(self),
            "devices": [dataclasses.asdict(d) | extra(d) for d in self.devices],
        }

    def table(self) -> str:
        """The report as text: a column for the fullest device, and one for the host."""
        fullest = self.fullest
        names = dict.fromkeys([*fullest.by_class, *self.host_by_class])
        rows = [("bytes", fullest.device, "host")]
        of = lambda held, name: readable_bytes(held[name]) if name in held else "-"
        rows += [(name, of(fullest.by_class, name), of(self.host_by_class, name)) for name in names]
        rows += [
            ("in use", readable_bytes(fullest.in_use_bytes), readable_bytes(self.host_used_bytes)),
            ("peak", readable_bytes(fullest.peak_bytes), "-"),
            ("limit", readable_bytes(fullest.limit_bytes), readable_bytes(self.host_total_bytes)),
            ("pool", readable_bytes(fullest.pool_bytes), "-"),
            ("largest free block", readable_bytes(fullest.largest_free_bytes), "-"),
            ("this process", "-", readable_bytes(self.process_bytes)),
        ]
        lines = aligned(rows, right=(1, 2))
        if fullest.fragmentation is not None:
            lines.append(
                f"fragmentation {fullest.fragmentation:.1%} of {readable_bytes(fullest.free_bytes)} free"
            )
        others = len(self.devices) - 1
        if others:
            least = min(device.in_use_bytes for device in self.devices)
            lines.append(
                f"the fullest of {others + 1} devices; the emptiest has {readable_bytes(least)} in use"
            )
        return "\n".join([*lines, *([] if self.has_statistics else [NO_STATISTICS])])

    __str__ = table


def memory_report(state: TrainState | None = None) -> MemoryUse:
    """Bytes on this process's devices and its host by class, the pool, and how fragmented it is, as they are now.

    Args:
      state: the training state, whose arrays are told from others; None counts all arrays alike.

    Example:
      >>> report = memory_report()
      >>> print(report)  # doctest: +SKIP
    """
    parts: dict[str, PyTree] = {}
    if state is not None:
        check_alive(state, "the state", "It was donated: pass the one that engine.step returned last.")
        parts = {MASTER: state.params, OPTIMIZER: state.opt_state}
    on_devices, on_host = _live_bytes(parts)
    devices = jax.local_devices()
    stats = {device: device.memory_stats() for device in devices}
    used, total = _host_bytes()
    return MemoryUse(
        devices=tuple(DeviceMemory.of(str(d), on_devices.get(d, {}), stats[d]) for d in devices),
        host_by_class=on_host,
        process_bytes=_process_bytes(),
        host_used_bytes=used,
        host_total_bytes=total,
        has_statistics=any(map(bool, stats.values())),
    )


def see_memory_usage(message: str, force: bool = True) -> None:
    """Print the lines that DeepSpeed's function of this name prints: of the fullest device here, and of the host.

    MA is memory allocated, CA that of the pool, in GiB. XLA's peaks are those since the process began, where
    DeepSpeed's begin anew at each call. One process prints, the first; with `force=False` none does, as there.
    """
    if not force or jax.process_index() != 0:
        return
    report = memory_report()
    device = report.fullest
    gib = lambda x: "unknown" if x is None else f"{x / _GIB:.2f} GB"
    print(message)
    print(
        f"MA {gib(device.in_use_bytes)}         Max_MA {gib(device.peak_bytes)}         "
        f"CA {gib(device.pool_bytes)}         Max_CA {gib(device.peak_pool_bytes)}"
    )
    used, total = report.host_used_bytes, report.host_total_bytes
    percent = "unknown" if used is None or not total else f"{100 * used / total:.1f}%"
    print(f"CPU Virtual Memory:  used = {gib(used)}, percent = {percent}", flush=True)
    if not report.has_statistics:
        print(f"({NO_STATISTICS})", flush=True)


def _live_bytes(parts: Mapping[str, PyTree]) -> tuple[dict[jax.Device, dict[str, int]], dict[str, int]]:
    """(bytes by class per device, bytes by class in host memory) of all live arrays, each buffer counted once."""
    on_devices: dict[jax.Device, dict[str, int]] = {}
    on_host = dict.fromkeys(parts, 0)
    seen: set[tuple[Any, int]] = set()

    def count(arrays: Iterable[jax.Array], name: str) -> None:
        for x in arrays:
            if x.is_deleted():
                continue
            for shard in x.addressable_shards:
                key = shard.device, _address(shard.data)
                if key in seen:
                    continue
                seen.add(key)
                at_host = x.sharding.memory_kind in _HOST_KINDS
                held = on_host if at_host else on_devices.setdefault(shard.device, {})
                held[name] = held.get(name, 0) + shard.data.nbytes

    for name, tree in parts.items():
        for device in jax.local_devices():
            on_devices.setdefault(device, {})[name] = 0
        count((_plain(x) for x in jax.tree.leaves(tree)), name)
    count(jax.live_arrays(), OTHER_ARRAYS)
    return on_devices, {name: size for name, size in on_host.items() if size}


def _plain(x: jax.Array) -> jax.Array:
    """The array under random keys."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x


def _address(buffer: jax.Array) -> int:
    """What tells a buffer from others; an empty one has no memory that could."""
    return buffer.unsafe_buffer_pointer() if math.prod(buffer.shape) else id(buffer)


def _process_bytes(path: Path = Path("/proc/self/statm")) -> int | None:
    """Resident bytes of this process."""
    try:
        return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _host_bytes(path: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """(used, total) bytes of the host's memory."""
    try:
        rows = dict(line.split(":", 1) for line in path.read_text().splitlines())
        total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError, IndexError):
        return None, None
    return total - available, total
