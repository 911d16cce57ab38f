"""The devices a step can be planned for: GPUs that are not here, the devices that are, or simulated CPU devices.

XLA's CUDA compiler needs no GPU, only a description of one. The facts below are those of XLA's own target
descriptions; `Target.config_text` writes them as the `GpuTargetConfigProto` text that jax 0.10.2 and 0.12 both read.
Bandwidths are what one device can move: in-node 0.8 of NVLink's rate in one direction (362 of 450 GB/s measured with
reduce-scatter and all-gather on 8 H200), across nodes 0.8 of the device's share of the usual network cards. Matrix
products reach 0.8 of the dense 16-bit peak (790 of 989 TFLOP/s measured on H100 and H200); the same share is taken of
the other peaks. fp32 products are TF32 ones where the card has them and jax's default precision is asked for: half of
the 16-bit peak. Else they run on the fp32 units, two operations per unit and clock, and fp64 ones at half of that.
Work that is bound by memory reaches 0.83 of the memory's rate (an assumption: 4.0 of an H200's 4.8 TB/s).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from zero2jax.base.mesh import make_mesh
from zero2jax.base.peaks import memory_bytes, peak_flops
from zero2jax.base.versions import installed_version

MEMORY_FRACTION = 0.94  # the rest is left to the CUDA context, NCCL, cuDNN and cuBLAS
DEVICES_PER_HOST = 8
EFFICIENCY = 0.8  # of peak and of link rate, as measured; see above
MEMORY_EFFICIENCY = 0.83  # of the memory's rate
_MOST_IN_DOMAIN = 32
CUDA_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The facts of a card that the compiler asks for, in its own units."""

    device_name: str
    capability: tuple[int, int]
    suffix: str  # of the architecture: 9.0a
    memory_bandwidth: int
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    pcie_bandwidth: int
    nvlink_links: int

    @property
    def memory_bytes(self) -> int:
        """Of the card, as a running program knows it by its name."""
        size = memory_bytes(self.device_name)
        assert size is not None
        return size


@dataclasses.dataclass(frozen=True)
class Target:
    """What a step is compiled for, and the figures its bytes are compared with.

    `zero2jax.plan` takes the known ones by name. One of your own is a known one with other figures, a smaller memory
    say, or an unknown accelerator, for which the CPU's compiler stands in (`gpu=None`).

    Attributes:
      name: `h200`, ..., `local` or `cpu`.
      memory_bytes: memory of one device; None where it is not known.
      peak_flops: dense 16-bit floating-point operations per second; None where it is not known.
      tf32_flops: the same of fp32 products at jax's default precision; None means as `fp32_flops`.
      fp32_flops: the same of fp32 products at any precision; None means as `peak_flops`.
      in_node_bytes_per_s: what one device can send to others of its host; None where it is not known.
      across_bytes_per_s: the same to devices of other hosts.
      all_reduce_bytes_per_s: in-node rate of all-reduces, where switches sum; None means as the others.
      memory_bytes_per_s: what one device reads and writes in its own memory; None where it is not known.
      has_bf16: whether the card computes in bf16.
      gpu: what the compiler is told; None for `local` and `cpu`.

    Example:
      >>> small = dataclasses.replace(get_target("cpu"), name="small", memory_bytes=10**9)
      >>> small.usable_bytes(0.5)
      500000000
    """

    name: str
    memory_bytes: int | None = None
    peak_flops: float | None = None
    in_node_bytes_per_s: float | None = None
    across_bytes_per_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    has_bf16: bool = True
    gpu: Gpu | None = None
    tf32_flops: float | None = None
    fp32_flops: float | None = None
    memory_bytes_per_s: float | None = None

    def usable_bytes(self, memory_fraction: float = MEMORY_FRACTION) -> int | None:
        """Memory that the program may use; what is left over is for what lies outside of XLA's pool."""
        return None if self.memory_bytes is None else int(self.memory_bytes * memory_fraction)

    @property
    def host_bytes_per_s(self) -> float | None:
        """The rate at which a device and its host exchange bytes, in one direction; None where it is not known."""
        return None if self.gpu is None else EFFICIENCY * self.gpu.pcie_bandwidth

    def with_rates(self, in_node: float | None, across: float | None) -> "Target":
        """This target with other links, in bytes per second and device; None keeps its own.

        Raises:
          ValueError: a rate is not a positive number.
        """
        for name, rate in (("in-node", in_node), ("across", across)):
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(
                    f"planning with an {name} rate of {rate / 1e9:g} GB/s: it must be positive and finite. Correct "
                    f"--{name}-gb-per-s, or leave it out for the target's own."
                )
        target = self
        if in_node is not None:  # an all-reduce's own rate belongs to the links it was measured on
            target = dataclasses.replace(target, in_node_bytes_per_s=in_node, all_reduce_bytes_per_s=None)
        return target if across is None else dataclasses.replace(target, across_bytes_per_s=across)

    def product_flops(self, dtype: str, precision: str = "default") -> float | None:
        """Operations per second of matrix products.

        Args:
          dtype: what is multiplied in, by XLA's name: `bf16`, `f32`, ... 8-bit products count as 16-bit ones.
          precision: what jax asks for: `default`, `high` or `highest`.
        """
        fp32 = self.peak_flops if self.fp32_flops is None else self.fp32_flops
        if dtype == "f64":
            return None if fp32 is None else fp32 / 2
        if dtype == "f32":
            return self.tf32_flops if precision == "default" and self.tf32_flops is not None else fp32
        return self.peak_flops

    def config_text(self) -> str:
        """The card as a `GpuTargetConfigProto` in text form."""
        if self.gpu is None:
            raise ValueError(
                f"describing target {self.name!r} to the CUDA compiler: it is no GPU. Use {_names()}."
            )
        return _config_text(self.gpu)

    def bytes_per_s(self, kind: str, across: bool) -> float | None:
        """The rate at which a device sends bytes of a collective of this kind."""
        if across:
            return self.across_bytes_per_s
        if kind == "all-reduce" and self.all_reduce_bytes_per_s is not None:
            return self.all_reduce_bytes_per_s
        return self.in_node_bytes_per_s


_GPUS = {
    "v100-32gb": Gpu(
        "Tesla V100-SXM3-32GB", (7, 0), "", 898048000000, 80, 64, 1.53, 6291456, 98304, 98304,
        17179869184, 6,
    ),
    "a100-80gb": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), "", 2039040000000, 108, 64, 1.41, 41943040, 167936, 166912,
        34359738368, 12,
    ),
    "h100-80gb": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), "a", 3352320000000, 132, 128, 1.98, 52428800, 233472, 232448,
        34359738368, 18,
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e", (9, 0), "a", 4800000000000, 132, 128, 1.98, 52428800, 233472,
        232448, 34359738368, 18,
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), "a", 7672320000000, 148, 128, 1.965, 132644864, 233472, 232448,
        68719476736, 18,
    ),
}  # fmt: skip
# NVLink bytes/s in one direction, network bytes/s per device, in-node all-reduce
_RATES = {
    "v100-32gb": (150e9, 6.25e9, None),  # 100 Gb/s per two cards
    "a100-80gb": (300e9, 25e9, None),  # 200 Gb/s per card
    "h100-80gb": (450e9, 50e9, 480e9),  # 400 Gb/s per card; NVLink switches sum
    "h200": (450e9, 50e9, 480e9),
    "b200": (900e9, 50e9, 960e9),
}


def _gpu_target(name: str) -> Target:
    gpu, (in_node, across, all_reduce) = _GPUS[name], _RATES[name]
    peak = peak_flops(gpu.device_name)
    assert peak is not None
    fp32 = 2 * gpu.core_count * gpu.fpus_per_core * gpu.clock_rate_ghz * 1e9
    return Target(
        name,
        memory_bytes=gpu.memory_bytes,
        peak_flops=EFFICIENCY * peak,
        in_node_bytes_per_s=EFFICIENCY * in_node,
        across_bytes_per_s=EFFICIENCY * across,
        all_reduce_bytes_per_s=all_reduce,
        has_bf16=name != "v100-32gb",
        gpu=gpu,
        tf32_flops=EFFICIENCY * peak / 2 if gpu.capability >= (8, 0) else None,
        fp32_flops=EFFICIENCY * fp32,
        memory_bytes_per_s=MEMORY_EFFICIENCY * gpu.memory_bandwidth,
    )


TARGETS: Mapping[str, Target] = {
    **{name: _gpu_target(name) for name in _GPUS},
    "local": Target("local"),
    "cpu": Target("cpu"),
}


def get_target(target: str | Target) -> Target:
    """A target by name, or the one given.

    Raises:
      ValueError: there is no target of that name.

    Example:
      >>> get_target("h100-80gb").memory_bytes
      84942979072
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise ValueError(f"choosing what to plan for: there is no target {target!r}. There are {_names()}.")
    return TARGETS[target]


def target_mesh(target: Target, axes: Mapping[str, int], devices_per_host: int = DEVICES_PER_HOST) -> Mesh:
    """A mesh over the devices of a target, which for a GPU are compile-only.

    Args:
      target: see `Target`.
      axes: size of each mesh axis, all positive; the last one changes fastest over the devices.
      devices_per_host: devices of one host; fewer devices than that are one host.

    Raises:
      ValueError: the axes cannot be laid out; there are not enough local or simulated devices; the packages of the
        CUDA compiler are missing.
    """
    sizes = dict(axes)
    if not sizes or any(size < 1 for size in sizes.values()):
        raise ValueError(
            f"laying out the devices of target {target.name!r}: the axes are {sizes}, and every size must be a "
            f"positive number. Say how many devices you mean, data=8 for instance."
        )
    if target.name == "local":
        num_devices = math.prod(sizes.values())
        if num_devices > len(jax.devices()):
            axes_text = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"planning {axes_text} for target 'local', the devices here: it needs {num_devices} devices, and there "
                f"are {len(jax.devices())}. Choose the target that is meant: --target h100-80gb for instance "
                f'(target="h100-80gb" in Python), or cpu for simulated devices. There are {_names()}.'
            )
        return make_mesh(devices=None, **sizes)
    if target.gpu is None:
        return make_mesh(devices=jax.devices("cpu"), **sizes)
    count = math.prod(sizes.values())
    devices = _compile_only_devices(target, count, devices_per_host)
    return make_mesh(devices=devices, **sizes)


def _compile_only_devices(target: Target, count: int, devices_per_host: int) -> list[jax.Device]:
    missing = [name for name in CUDA_PACKAGES if installed_version(name) is None]
    if missing:
        raise ValueError(
            f"compiling for {target.name} without one: {', '.join(missing)} of XLA's CUDA compiler (no GPU and no "
            f"driver needed) cannot be found. Install it with: pip install 'zero2jax[plan]' (the jax- packages in "
            f"jax's own version, {jax.__version__}). Without it, target 'cpu' still gives exact sizes of the state."
        )
    if count < devices_per_host:
        devices_per_host = count
    elif count % devices_per_host:
        raise ValueError(
            f"laying out {count} devices of target {target.name!r} over hosts of {devices_per_host}: they do not "
            f"fill all of their hosts. Choose axes whose product is a multiple of {devices_per_host}, or other hosts."
        )
    # NVLink domains x hosts of one x devices. In a domain XLA sums scalars by a kernel of its own, which its compiler
    # aborts on from 64 devices on: a larger host is told to it as several.
    domain = max(n for n in range(1, _MOST_IN_DOMAIN + 1) if devices_per_host % n == 0)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.config_text(), topology=f"{count // domain}x1x{domain}"
    )
    return list(topology.devices)


def _names() -> str:
    return ", ".join(TARGETS)


def _config_text(gpu: Gpu) -> str:
    major, minor = gpu.capability
    info: dict[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared_memory_per_core,
        "threads_per_core_limit": 2048,
        "core_count": gpu.core_count,
        "fpus_per_core": gpu.fpus_per_core,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.memory_bandwidth,
        "l2_cache_size": gpu.l2_cache_bytes,
        "clock_rate_ghz": gpu.clock_rate_ghz,
        "device_memory_size": gpu.memory_bytes,
        "shared_memory_per_block_optin": gpu.shared_memory_per_block_optin,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_vendor": "NVIDIA Corporation",
        "platform_version": f"Compute Capability {major}.{minor}{gpu.suffix}",
        "model_str": f"sm_{major}.{minor}{gpu.suffix} with {gpu.memory_bytes}B RAM, {gpu.core_count} cores",
        "device_address_bits": 64,
        "pcie_bandwidth": gpu.pcie_bandwidth,
        "ecc_enabled": True,
        "name": gpu.device_name,
        "driver_version": "13.0.0",
        "runtime_version": "12.9.0",
        "compile_time_toolkit_version": "12.9.0",
        "dnn_version": "9.10.0",
    }
    lines = [f"  {key}: {_value(value)}" for key, value in info.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    lines.append(f"  device_interconnect_info {{ active_links: {gpu.nvlink_links} }}")
    body = "\n".join(lines)
    return (
        f"gpu_device_info {{\n{body}\n}}\n"
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: 9 minor: 10 patch: 0 }}\n"
        f'device_description_str: "{gpu.device_name}"\n'
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
