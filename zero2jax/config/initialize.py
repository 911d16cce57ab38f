"""`initialize`: from a DeepSpeed-style configuration to an engine: the mesh, the settings, the optimizer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zero2jax.activations.layers import ActivationSettings
from zero2jax.base.compiler import GPU_PLATFORMS
from zero2jax.base.losses import LossFn
from zero2jax.base.mesh import DATA_AXIS, MODEL_AXIS, REPLICA_AXIS, DataAxes, axis_size, data_axes, make_mesh
from zero2jax.base.pytrees import LeafPredicate, PyTree
from zero2jax.config.keys import SECRETS
from zero2jax.config.observing import observers_of
from zero2jax.config.optimizers import make_optimizer
from zero2jax.config.reading import DEFAULT_CONFIG, Source, load_config
from zero2jax.config.rules import device_notes, device_problems, group_size, open_rates
from zero2jax.config.schema import Config
from zero2jax.config.source import without
from zero2jax.config.translate import EngineSettings, translate
from zero2jax.config.values import ConfigError, warn
from zero2jax.engine import Engine
from zero2jax.memory.configure import write_memory
from zero2jax.offload.settings import OffloadSettings
from zero2jax.processes.agreement import expect_same
from zero2jax.zero.shard_plan import ShardPlan


def initialize(
    loss_fn: LossFn,
    tx: optax.GradientTransformation | None = None,
    config: Source | None = None,
    mesh: Mesh | None = None,
    *,
    trainable: PyTree | LeafPredicate | None = None,
    param_specs: PyTree | None = None,
    keep_fp32: LeafPredicate | None = None,
    layer_dims: PyTree | None = None,
    use_muon: LeafPredicate | None = None,
    gather: str = "auto",
    seed: int = 0,
    axis_name: str = DATA_AXIS,
    shard_over_replicas: bool = False,
    activations: ActivationSettings | None = None,
    offload: OffloadSettings | None = None,
) -> Engine:
    """An engine that trains `loss_fn` as a DeepSpeed-style configuration says.

    Args:
      loss_fn: as for `Engine`.
      tx: optax transformation; None builds the one of the configuration's `optimizer` and `scheduler` blocks.
      config: path of a JSON file, its text, a dict, or a `Config`. None means stage 2 with bf16 compute; a
        configuration with neither a `bf16` nor an `fp16` block means fp32, as in DeepSpeed.
      mesh: device mesh; None puts all devices on the data axis, or makes groups (an axis `replica`) of the size that
        `mics_shard_size` or `zero_hpz_partition_size` says.
      trainable: as for `Engine`, like the arguments below.
      param_specs: PartitionSpecs for the mesh axes other than the data axis.
      keep_fp32: predicate for leaves that are computed in fp32 (norms, say).
      layer_dims: leading layer dims per parameter.
      use_muon: predicate for the leaves that get Muon's matrix update, if the `optimizer` block says Muon; by
        default those with two dims.
      gather: "use", "once" or "auto".
      seed: seed of the keys that `loss_fn` gets.
      axis_name: mesh axis that state is sharded over.
      shard_over_replicas: as for `Engine`; `zero_hpz_partition_size` means it.
      activations: what is saved of the layers for backward; by default what the `activation_checkpointing` block
        says, if any of its keys is on.
      offload: as for `Engine`; by default what `offload_optimizer` and `offload_param` say.

    Raises:
      ConfigError: the configuration breaks a rule, asks for what is refused, or has no optimizer
        while `tx` is None.
      ValueError: processes were given different configurations (named), or the mesh cannot be used.

    Example:
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> initialize(loss, optax.sgd(0.1), {"zero_optimization": {"stage": 3}}, make_mesh(data=1)).stage
      3
    """
    loaded = _load(config)
    _configure_memory(loaded, mesh)
    mesh = _mesh(loaded, mesh, axis_name)
    axes = data_axes(mesh, axis_name, rest_over_replicas=shard_over_replicas)
    _warn_of_devices(loaded, int(mesh.shape[axis_name]), offload)
    expect_same("the configuration and the mesh", [loaded.source, dict(mesh.shape)])
    settings = _translate(loaded, mesh, axes, keep_fp32=keep_fp32, gather=gather, seed=seed)
    engine = Engine(
        loss_fn,
        _optimizer(loaded, tx, use_muon),
        mesh,
        **settings.keywords,
        axis_name=axis_name,
        trainable=trainable,
        param_specs=param_specs,
        layer_dims=layer_dims,
        activations=activations or _activations(settings, mesh),
        offload=offload or settings.offload,
        compiler_options=_options(settings, mesh),
        arena=loaded.memory.arena,
        memory_breakdown=loaded.memory_breakdown,
    )
    return _known_by(engine, loaded)


def _warn_of_devices(config: Config, num_shards: int, offload: OffloadSettings | None) -> None:
    """Say what the devices leave of the configuration, which knows nothing of offloading that is asked for beside."""
    for note in device_notes(config, num_shards) if offload is None else ():
        warn(note)


def _known_by(engine: Engine, config: Config) -> Engine:
    """The engine, with the configuration on record and told to those who observe."""
    engine.config = without(config.source, SECRETS)
    engine.observers = observers_of(config, engine)
    return engine


def _load(source: Source | None) -> Config:
    """The configuration, the default one for None."""
    config = load_config(DEFAULT_CONFIG if source is None else source)
    if source is not None and "gradient_clipping" not in config.given and not config.gradient_clipping:
        warn(
            f"{config.name}: gradient_clipping is absent, so nothing is clipped; DeepSpeed since 0.19.3 clips at 1.0 "
            f"then. Write 1.0 or 0.0."
        )
    return config


def _configure_memory(config: Config, mesh: Mesh | None) -> None:
    """Apply the `memory` block while there is time; of devices that are only compiled for, it says nothing."""
    settings = config.memory.settings
    if not settings.given or (mesh is not None and not set(mesh.devices.flat) <= set(jax.devices())):
        return
    problem = ""
    try:
        write_memory(settings)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    platform = jax.default_backend()
    if platform not in GPU_PLATFORMS:
        names = ", ".join(f"memory.{name}" for name in settings.given)
        warn(
            f"{config.name}: {names}: no effect on platform {platform!r}, only the clients of GPUs have a pool."
        )
    elif problem:
        raise ConfigError(f"cannot train by {config.name}", [f"memory: {problem}"])


def _mesh(config: Config, mesh: Mesh | None, axis_name: str) -> Mesh:
    """The given mesh, or one of all devices, with groups of the size that the configuration says."""
    group, num_devices = group_size(config), len(jax.devices())
    problems = _tensor_parallel_problems(config, mesh)
    if mesh is None and group is not None:
        problems += device_problems(config, num_devices)
    elif mesh is not None and group is not None and mesh.shape.get(axis_name) != group[1]:
        path, size = group
        way_out = (
            f"Pass such a mesh, make_mesh({REPLICA_AXIS}=..., {axis_name}={size}), or choose another size."
        )
        there = f"the mesh has axes {dict(mesh.shape)}, and the axis {axis_name!r} must have this size"
        problems.append(f"{path} = {size}: {there}. {way_out}")
    if problems:
        raise ConfigError(f"cannot train by {config.name}", problems)
    if mesh is not None:
        return mesh
    if group is None:
        return make_mesh()
    sizes: Any = {REPLICA_AXIS: num_devices // group[1], axis_name: group[1]}
    return make_mesh(**sizes)


def _tensor_parallel_problems(config: Config, mesh: Mesh | None) -> list[str]:
    size = config.tensor_parallel
    if size < 2 or (mesh is not None and mesh.shape.get(MODEL_AXIS) == size):
        return []
    there = "no mesh was given" if mesh is None else f"the mesh has axes {dict(mesh.shape)}"
    return [
        f"tensor_parallel = {size}: {there}, and the axis {MODEL_AXIS!r} must have this size. Pass "
        f"mesh=make_mesh(data=..., {MODEL_AXIS}={size}) and param_specs, or remove the key."
    ]


def _translate(config: Config, mesh: Mesh, axes: DataAxes, **arguments: Any) -> EngineSettings:
    """`translate` for the devices of a mesh."""
    names = " x ".join(map(repr, axes.names))
    num_batch_shards = axis_size(mesh, axes.batch)
    return translate(
        config, num_batch_shards, shards_from=f"axis {names} of the mesh", axes=axes, **arguments
    )


def _optimizer(
    config: Config, tx: optax.GradientTransformation | None, use_muon: LeafPredicate | None
) -> optax.GradientTransformation:
    if tx is not None:
        unused = [name for name in ("optimizer", "scheduler") if getattr(config, name) is not None]
        if unused:
            warn(
                f"{config.name}: the blocks {unused} are not used, since `tx` was given; an optax transformation "
                f"carries its own learning rate. Remove them, or pass no `tx`."
            )
        return tx
    if config.optimizer is None:
        way_out = "Pass tx=optax.adamw(...), or add the block."
        raise ConfigError(
            f"cannot train by {config.name}",
            [f"optimizer: the file has no such block and `tx` is None. {way_out}"],
        )
    if open_rates(config):
        raise ConfigError(f"cannot train by {config.name}", open_rates(config))
    return make_optimizer(config.optimizer, config.scheduler, use_muon=use_muon)


def _activations(settings: EngineSettings, mesh: Mesh) -> ActivationSettings | None:
    """What the block asks for, as far as the mesh has the axis for it."""
    asked = settings.activations
    if asked is None or asked.partition_axis is None or asked.partition_axis in mesh.shape:
        return asked
    warn(
        f"activation_checkpointing.partition_activations has nothing to save: the mesh has the axes "
        f"{dict(mesh.shape)}, and no other device holds a copy of an activation but along an axis "
        f"{asked.partition_axis!r}."
    )
    return dataclasses.replace(asked, partition_axis=None)


def _options(settings: EngineSettings, mesh: Mesh) -> Callable[[ShardPlan], Mapping[str, Any]]:
    """Compiler options as a function of the plan: thresholds are capped by the model's bytes."""
    device = (mesh.local_devices or list(mesh.devices.flat))[0]
    size = lambda plan: sum(math.prod(x.shape) for x in plan.leaves)
    return lambda plan: settings.compiler_options(device.platform, size(plan), device)
