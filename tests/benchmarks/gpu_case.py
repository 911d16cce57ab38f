"""One measurement of `gpu.py`, in a process of its own, whose peak of memory is then this case's alone.

    python tests/benchmarks/gpu_case.py '{"preset": "small", "program": "engine", "stage": 2}'

The last line that it prints is the result, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero2jax
from zero2jax.base import peaks
from zero2jax.programs.audit import audit

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.gpt.model import PRESETS, GPTConfig, make_loss

NUM_WARM_UP = 2
NUM_LOSSES = 5  # of the first steps, to compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Attributes:
      preset: of `examples/gpt/model.py`; `changes` replaces fields of it.
      program: "plain", a jitted step of optax; "engine"; "plan", compiled for `target` and not run; "sizes", how many
        layers a device has room for, reckoned from two compiled steps.
      offload: "host" or "device", where the update runs.
      offload_activations: what layers save for backward lies on the host.
      lengths: sequences of another length every step, four of them in turn.
      options: a preset of XLA's options.
      memory: arguments of `zero2jax.configure_memory`.
      limit_bytes: a device's memory, where its allocator does not say.
    """

    preset: str = "small"
    changes: dict[str, int] = dataclasses.field(default_factory=dict)
    program: str = "engine"
    stage: int = 2
    batch_size: int = 8
    steps: int = 10
    offload: str | None = None
    offload_activations: bool = False
    arena: bool = False
    lengths: bool = False
    options: str | None = None
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    target: str = "local"
    limit_bytes: int | None = None

    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(PRESETS[self.preset], **self.changes)

    @property
    def offload_settings(self) -> zero2jax.OffloadSettings | None:
        if self.offload is None:
            return None
        # what streams to the devices is one program, of which nothing is measured apart
        return zero2jax.OffloadSettings(update_on=self.offload, measure=self.offload == "host")

    def batch(self, step: int) -> np.ndarray:
        """(batch_size, T + 1) tokens, the same for every program."""
        config = self.config
        length = config.context - (step % 4) * (config.context // 8) if self.lengths else config.context
        rng = np.random.default_rng(step)
        return rng.integers(0, config.vocab, (self.batch_size, length + 1), np.int32)

    def engine(self, **changes: int) -> tuple[zero2jax.Engine, Callable]:
        """The engine, and the function that makes its parameters."""
        init_fn, loss_fn = make_loss(dataclasses.replace(self.config, **changes))
        engine = zero2jax.Engine(
            loss_fn,
            optax.adamw(1e-4),
            zero2jax.make_mesh(data=1, devices=jax.devices()[:1]),
            stage=self.stage,
            arena=self.arena,
            compiler_options=self.options,
            activations=zero2jax.ActivationSettings(offload=True) if self.offload_activations else None,
            offload=self.offload_settings,
        )
        return engine, init_fn


def trained(case: Case) -> dict[str, Any]:
    """Losses, seconds per step, and bytes, of a plain step or of the engine."""
    started_s = time.perf_counter()
    run, predicted_bytes = (plain if case.program == "plain" else in_shards)(case)
    losses, seconds, crumbs = [], [], []
    for step in range(case.steps + NUM_WARM_UP):
        begun_s = time.perf_counter()
        metrics = run(case.batch(step))
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - begun_s)
        losses.append(loss)
        if case.lengths:
            device = zero2jax.memory_report().fullest
            crumbs.append([device.in_use_bytes, device.pool_bytes, device.fragmentation])
        if step == 0:
            first_s = time.perf_counter() - started_s
    step_s = statistics.median(seconds[NUM_WARM_UP:])
    config, stats = case.config, jax.devices()[0].memory_stats() or {}
    tokens = case.batch_size * config.context
    # the usual count: 6 per parameter and token, and causal attention's products as if nothing were masked
    num_params = sum(x.size for x in jax.tree.leaves(jax.eval_shape(make_loss(config)[0], jax.random.key(0))))
    flops = tokens * (6 * num_params + 12 * config.num_layers * config.hidden * config.context)
    peak_flops = peaks.peak_flops(jax.devices()[0].device_kind)
    return {
        "parameters": num_params,
        "losses": losses[:NUM_LOSSES],
        "step_s": step_s,
        "step_s_range": [min(seconds[NUM_WARM_UP:]), max(seconds[NUM_WARM_UP:])],
        "until_first_step_s": first_s,
        "tokens_per_s": tokens / step_s,
        "model_flops_utilization": peak_flops and flops / step_s / peak_flops,
        "predicted_bytes": predicted_bytes,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        # the rates are of the last step that was over, NaN before one was
        "offload": {k: float(v) for k, v in metrics.items() if k.startswith("offload_") and np.isfinite(v)},
        "by_step": crumbs,
    }


def plain(case: Case) -> tuple[Callable, int]:
    """bf16 compute on fp32 parameters, optimizer state and all on one device: the step without the library."""
    init_fn, loss_fn = make_loss(case.config)
    tx = optax.adamw(1e-4)
    params = jax.jit(init_fn)(jax.random.key(0))
    state = params, jax.jit(tx.init)(params)

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        loss, grads = jax.value_and_grad(loss_fn)(low, batch)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(state, case.batch(0)).compile()

    def run(batch: np.ndarray) -> dict[str, Any]:
        nonlocal state
        state, loss = compiled(state, batch)
        return {"loss": loss}

    return run, audit(compiled).memory.total_bytes


def in_shards(case: Case) -> tuple[Callable, int]:
    engine, init_fn = case.engine()
    state = engine.init(init_fn, jax.random.key(0))
    predicted = audit(engine.lower(case.batch(0)).compile()).memory.total_bytes

    def run(batch: np.ndarray) -> dict[str, Any]:
        nonlocal state
        state, metrics = engine.step(state, batch)
        return metrics

    return run, predicted


def planned(case: Case) -> dict[str, Any]:
    """The plan of this step for a card, by the compiler that knows it and without using one."""
    init_fn, loss_fn = make_loss(case.config)
    report = zero2jax.plan(
        loss_fn,
        jax.eval_shape(init_fn, jax.random.key(0)),
        jax.eval_shape(lambda: case.batch(0)),
        tx=optax.adamw(1e-4),
        config={"zero_optimization": {"stage": case.stage}, "bf16": {"enabled": True}},
        axes={"data": 1},
        target=case.target,
    )
    return {"predicted_bytes": report.total_bytes, "usable_bytes": report.usable_bytes}


def room(case: Case) -> dict[str, Any]:
    """The most layers whose step fits, from steps of 2 and 4 layers: memory is linear in them."""
    totals = []
    for num_layers in (2, 4):
        engine, init_fn = case.engine(num_layers=num_layers)
        engine.abstract_state(jax.eval_shape(init_fn, jax.random.key(0)))
        totals.append(audit(engine.lower(case.batch(0)).compile()).memory.total_bytes)
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit") or case.limit_bytes
    per_layer = (totals[1] - totals[0]) / 2
    return {
        "bytes_per_layer": per_layer,
        "limit_bytes": limit,
        "layers": int(2 + (limit - totals[0]) / per_layer),
    }


def measured(case: Case) -> dict[str, Any]:
    """The result of a case; what the card, the compiler or the library refuses is one, too."""
    try:
        if case.memory:
            zero2jax.configure_memory(**case.memory)
        return {"plan": planned, "sizes": room}.get(case.program, trained)(case)
    except (zero2jax.OutOfMemoryError, jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    print(json.dumps(measured(Case(**json.loads(sys.argv[1])))))
