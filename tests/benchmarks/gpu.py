"""One GPU: step time, memory beside the plan, offload, largest model, settings and fragmentation, in eight minutes.

    python tests/benchmarks/gpu.py [--out out/gpu] [--seconds 480] [--only steps offload]
    python tests/benchmarks/gpu.py --tiny     # the same on a CPU, of a model of no use, in two minutes

Needs jax with a GPU, this library and flax; with matplotlib it draws, too. Each measurement is a process of its own
(`gpu_case.py`), one at a time. `gpu.json` and the pictures are written anew after each, so that a run that is cut off
leaves what it has; what fails, is refused or has no time left says so there, and the next one goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CASE = Path(__file__).parent / "gpu_case.py"
GPT2 = ("small", "1.5b")  # of 124e6 and 1.56e9 parameters
TINY = {"num_layers": 2, "hidden": 32, "num_heads": 2, "context": 32, "vocab": 256}
TARGETS = {"V100": "v100-32gb", "A100": "a100-80gb", "H100 80GB": "h100-80gb", "H200": "h200", "B200": "b200"}

Results = dict[str, Any]
Measure = Callable[..., Results]


@dataclasses.dataclass
class Bench:
    """Runs cases within the time that is left, and writes down what they say."""

    out: Path
    end_s: float
    is_tiny: bool
    results: Results = dataclasses.field(default_factory=dict)

    def measure(self, part: str, name: str, most_s: float = 120, **case: Any) -> Results:
        """Run a case, for `most_s` seconds at most, and keep its result as `results[part][name]`."""
        if self.is_tiny:
            case |= {"changes": TINY | case.get("changes", {}), "batch_size": 2, "limit_bytes": 10**6}
            case["steps"] = min(case.get("steps", 3), 4)
        command = [sys.executable, str(CASE), json.dumps(case)]
        result = self._run(command, min(most_s, self.end_s - time.monotonic()))
        self.note(part, name, result)
        return result

    def _run(self, command: list[str], timeout_s: float) -> Results:
        if timeout_s < 1:
            return {"skipped": "no time was left"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, env=self._environment()
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {timeout_s:.0f} s"}
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return {"failed": f"ended with {done.returncode}: {done.stderr[-1500:]}"}
        return json.loads(lines[-1])

    def _environment(self) -> dict[str, str]:
        """With a cache: what one case has compiled, the next one of the same program need not."""
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.out / "cache")}
        platform = {"JAX_PLATFORMS": "cpu"} if self.is_tiny else {}
        return os.environ | {"PYTHONPATH": str(REPOSITORY)} | cache | platform

    def note(self, part: str, name: str, result: Any) -> None:
        """Keep a result, write all of them, and say it in a line."""
        self.results.setdefault(part, {})[name] = result
        path = self.out / "gpu.json"
        path.with_suffix(".part").write_text(json.dumps(self.results, indent=1))
        path.with_suffix(".part").replace(path)
        left_s = max(0.0, self.end_s - time.monotonic())
        print(f"[{left_s:4.0f} s left] {part}, {name}: {summary(result)}", flush=True)


def environment(bench: Bench) -> None:
    """The card, the versions, and how XLA describes the card to its compiler."""
    code = (
        "import jax, json, flax, optax, zero2jax; d = jax.devices()[0];"
        "print(json.dumps({'card': d.device_kind, 'platform': d.platform, 'jax': jax.__version__, 'flax':"
        "flax.__version__, 'optax': optax.__version__, 'zero2jax': zero2jax.__version__,"
        "'limit_bytes': (d.memory_stats() or {}).get('bytes_limit')}))"
    )
    bench.note("environment", "versions", bench._run([sys.executable, "-c", code], 60))
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi says nothing: {error}"
    bench.note("environment", "driver", said)
    with tempfile.TemporaryDirectory() as folder:
        code = "import jax; jax.jit(lambda x: x @ x).lower(jax.numpy.ones((8, 8))).compile(); print('{}')"
        flags = f"XLA_FLAGS=--xla_dump_to={folder}"
        bench._run(["env", flags, "JAX_ENABLE_COMPILATION_CACHE=0", sys.executable, "-c", code], 60)
        found = sorted(Path(folder).glob("*target_config*"))
        for path in found[:1]:
            (bench.out / "target.txtpb").write_text(path.read_text())
    bench.note(
        "environment", "target", "target.txtpb" if found else "XLA wrote no description: it does for GPUs"
    )


def steps(bench: Bench) -> None:
    """A plain jitted step, stages 0 to 3 on one device, and the plain step again: how much two runs differ."""
    card = bench.results.get("environment", {}).get("versions", {}).get("card", "")
    target = next((name for part, name in TARGETS.items() if part in card), "local")
    for preset in GPT2:
        batch_size = 16 if preset == "small" else 4
        case = {"preset": preset, "batch_size": batch_size}
        bench.measure(preset, "plain", program="plain", **case)
        for stage in (2, 0, 3, 1) if preset == "small" else (2, 3):
            bench.measure(preset, f"stage {stage}", stage=stage, **case)
        bench.measure(preset, "plan", program="plan", target=target, **case)
        bench.measure(preset, "plain again", program="plain", **case)


def offload(bench: Bench) -> None:
    """The optimizer on the host, or streamed from it, and activations there: time, bandwidths, and equal losses."""
    case = {"preset": "small", "batch_size": 16}
    kept = bench.results.get("small", {}).get("stage 2") or bench.measure("small", "stage 2", **case)
    for name, changes in {
        "update on the host": {"offload": "host"},
        "update on the device": {"offload": "device"},
        "activations": {"offload_activations": True},
    }.items():
        result = bench.measure("offload", name, **case, **changes)
        if "losses" in result and "losses" in kept:
            apart = max(abs(a - b) for a, b in zip(result["losses"], kept["losses"], strict=True))
            bench.note("offload", f"{name}, losses apart", apart)


def settings(bench: Bench) -> None:
    """XLA's presets, and ways to allocate."""
    case = {"preset": "small", "batch_size": 16}
    for name in ("latency", "memory", "deterministic"):
        bench.measure("settings", name, options=name, **case)
    for name, memory in {
        "pool of 0.9": {"fraction": 0.9},
        "a pool that grows": {"preallocate": False},
        "cuda_async": {"allocator": "cuda_async"},
        "platform": {"allocator": "platform"},
    }.items():
        bench.measure("settings", name, memory=memory, **case)


def fragmentation(bench: Bench) -> None:
    """200 steps of sequences of four lengths in turn, in a pool that grows, leaves apart or in an arena."""
    for name, arena in (("leaves", False), ("arena", True)):
        bench.measure(
            "fragmentation", name, lengths=True, steps=200, arena=arena, memory={"preallocate": False}
        )


def largest(bench: Bench) -> None:
    """The most layers of GPT-3's width that fit by the compiler's bytes; a step of nearly so many, and one of more."""
    for name, way in (("all on the device", None), ("update on the device, state on the host", "device")):
        case = {"preset": "6.7b", "batch_size": 1, "offload": way}
        room = bench.measure("largest", f"{name}, layers", program="sizes", **case)
        if "layers" not in room:
            continue
        for share, steps in ((0.95, 2), (1.15, 1)):
            most = {"num_layers": max(1, int(room["layers"] * share))}
            label = f"{name}, {share:.0%} of {room['layers']} layers"
            bench.measure("largest", label, steps=steps, changes=most, **case)


PARTS = {part.__name__: part for part in (environment, steps, offload, settings, fragmentation, largest)}


def summary(result: Any) -> str:
    """A result in a line."""
    if not isinstance(result, dict):
        return str(result)
    if "step_s" not in result:
        return ", ".join(f"{k} {v}" for k, v in result.items())[:200]
    gib = lambda n: "-" if n is None else f"{n / 2**30:.2f} GiB"
    use = result["model_flops_utilization"]
    share = "" if use is None else f", {use:.1%} of peak (model FLOPs)"
    return (
        f"{result['step_s'] * 1e3:.1f} ms, {result['tokens_per_s']:,.0f} tokens/s{share}, predicted "
        f"{gib(result['predicted_bytes'])}, measured {gib(result['peak_bytes'])}"
    )


def rows(results: Results) -> Iterator[tuple[str, Results]]:
    """All that was trained, by part and name."""
    for part, cases in results.items():
        for name, result in cases.items():
            if isinstance(result, dict) and "step_s" in result:
                yield f"{part}, {name}", result


def draw(bench: Bench) -> None:
    """`gpu.png`: step times, bytes beside the plan, and fragmentation over the steps; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        bench.note("pictures", "gpu.png", "matplotlib is not installed: pip install matplotlib")
        return
    trained = dict(rows(bench.results))
    figure = Figure(figsize=(14, 1.5 + 0.25 * max(4, len(trained))), layout="constrained")
    times, memory, crumbs = figure.subplots(1, 3)
    names = list(trained)[::-1]
    times.barh(names, [1e3 * trained[name]["step_s"] for name in names])
    times.set_xlabel("ms per step")
    known = lambda name, key: (trained[name][key] or 0) / 2**30
    memory.barh(names, [known(name, "peak_bytes") for name in names], label="measured")
    memory.plot([known(name, "predicted_bytes") for name in names], names, "k|", ms=9, label="predicted")
    memory.set_xlabel("GiB at peak")
    memory.set_yticks([])
    memory.legend()
    for name, result in trained.items():
        if result["by_step"]:
            crumbs.plot([share or 0 for _, _, share in result["by_step"]], label=name)
    crumbs.set(xlabel="step", ylabel="fragmentation of the pool")
    if crumbs.lines:
        crumbs.legend()
    figure.savefig(bench.out / "gpu.png", dpi=80)


def main(argv: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="of a tiny model, on a CPU")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.out.resolve(), time.monotonic() + args.seconds, args.tiny)
    for name in args.only:
        PARTS[name](bench)
        draw(bench)
    return bench.results


if __name__ == "__main__":
    main()
