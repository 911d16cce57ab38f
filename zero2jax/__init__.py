"""ZeRO for JAX: optimizer state, gradients and parameters sharded over the data-parallel devices of a mesh.

Everything public is here. Module paths below `zero2jax` are internal and may change; these names do not.
"""

import importlib.metadata as _metadata

# The engine
from zero2jax.engine import Engine
from zero2jax.config.initialize import initialize

# ZeRO
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan, make_shard_plan
from zero2jax.zero.state import TrainState
from zero2jax.zero.settings import StepSettings
from zero2jax.zero.precision import Precision
from zero2jax.zero.quantized import QuantizeSettings
from zero2jax.zero.loss_scale import LossScale, LossScaleError, LossScaleState
from zero2jax.zero.shard_optimizer import shard_optimizer

# Masters and optimizer state in host memory
from zero2jax.offload.disk_files import OffloadFileError
from zero2jax.offload.settings import OffloadSettings

# Device memory
from zero2jax.memory.configure import configure_memory
from zero2jax.memory.host_arena import ArenaFullError, HostArena
from zero2jax.memory.out_of_memory import OutOfMemoryError
from zero2jax.memory.picture import draw_memory
from zero2jax.memory.report import DeviceMemory, MemoryUse, memory_report, see_memory_usage

# What backward keeps of the layers
from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.policies import remat_policy
from zero2jax.activations.remat import layer, remat

# A compiled step, read
from zero2jax.programs.audit import Audit, assert_collectives, audit
from zero2jax.programs.memory import MemoryReport, live_bytes

# What watches a run
from zero2jax.monitors.monitors import Monitors

# Several processes
from zero2jax.processes.agreement import expect_same
from zero2jax.processes.preemption import PREEMPTED_EXIT_CODE, Preemption
from zero2jax.processes.roll_call import StartError
from zero2jax.processes.start import Startup, init_distributed
from zero2jax.processes.step_clock import StepClock, StepTimes

# DeepSpeed-style configurations
from zero2jax.config.check import CheckReport, check_config
from zero2jax.config.reading import (
    Config,
    ConfigError,
    ConfigWarning,
    add_config_arguments,
    load_config,
    resolve_auto,
)

# The state on disk
from zero2jax.checkpoints.checkpointer import Checkpointer
from zero2jax.checkpoints.export import export_checkpoint, load_exported
from zero2jax.checkpoints.format import CheckpointError, DamagedError
from zero2jax.checkpoints.matching import CheckpointWarning
from zero2jax.checkpoints.reopen import reopen_state

# Will it fit?
from zero2jax.planning.estimate import Estimate, estimate
from zero2jax.planning.planner import PlanSettings, Program, plan
from zero2jax.planning.report import PlanReport
from zero2jax.planning.search import SearchReport, search_plans
from zero2jax.planning.targets import Target, get_target

# Meshes and batches
from zero2jax.base.batches import BatchOrder, global_batch, local_rows
from zero2jax.base.mesh import make_mesh

__all__ = [
    # The engine
    "Engine",
    "initialize",
    # ZeRO
    "LeafPlan",
    "ShardPlan",
    "make_shard_plan",
    "TrainState",
    "StepSettings",
    "Precision",
    "QuantizeSettings",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "shard_optimizer",
    # Masters and optimizer state in host memory
    "OffloadFileError",
    "OffloadSettings",
    # Device memory
    "configure_memory",
    "OutOfMemoryError",
    "DeviceMemory",
    "MemoryUse",
    "memory_report",
    "see_memory_usage",
    "draw_memory",
    "HostArena",
    "ArenaFullError",
    # What backward keeps of the layers
    "ActivationSettings",
    "remat_layers",
    "remat_policy",
    "layer",
    "remat",
    # A compiled step, read
    "Audit",
    "assert_collectives",
    "audit",
    "MemoryReport",
    "live_bytes",
    # What watches a run
    "Monitors",
    # Several processes
    "expect_same",
    "PREEMPTED_EXIT_CODE",
    "Preemption",
    "StartError",
    "Startup",
    "init_distributed",
    "StepClock",
    "StepTimes",
    # DeepSpeed-style configurations
    "CheckReport",
    "check_config",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "add_config_arguments",
    "load_config",
    "resolve_auto",
    # The state on disk
    "Checkpointer",
    "export_checkpoint",
    "load_exported",
    "reopen_state",
    "CheckpointError",
    "CheckpointWarning",
    "DamagedError",
    # Will it fit?
    "Estimate",
    "estimate",
    "PlanSettings",
    "Program",
    "plan",
    "PlanReport",
    "SearchReport",
    "search_plans",
    "Target",
    "get_target",
    # Meshes and batches
    "BatchOrder",
    "global_batch",
    "local_rows",
    "make_mesh",
]

try:
    __version__ = _metadata.version("zero2jax")
except _metadata.PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

# Tracebacks and filters of warnings then say `zero2jax.ConfigError`. Other classes and functions keep their module, by
# which `inspect.getsource`, and so an editor or IPython's `??`, get to their source.
for _name in __all__:
    if isinstance(_value := globals()[_name], type) and issubclass(_value, Exception):
        _value.__module__ = __name__
