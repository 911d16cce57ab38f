"""ZeRO for JAX: optimizer state, gradients and parameters sharded over a data-parallel mesh."""

from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.policies import remat_policy
from zero2jax.activations.remat import layer, remat
from zero2jax.base.batches import BatchOrder, global_batch, local_rows
from zero2jax.base.mesh import make_mesh
from zero2jax.checkpoints.checkpointer import Checkpointer
from zero2jax.checkpoints.export import export_checkpoint, load_exported
from zero2jax.checkpoints.format import CheckpointError
from zero2jax.config.initialize import initialize
from zero2jax.config.reading import (
    Config,
    ConfigError,
    ConfigWarning,
    add_config_arguments,
    load_config,
    resolve_auto,
)
from zero2jax.engine import Engine
from zero2jax.planning.estimate import Estimate, estimate
from zero2jax.planning.planner import Program, plan
from zero2jax.planning.report import PlanReport
from zero2jax.processes.agreement import expect_same
from zero2jax.processes.preemption import PREEMPTED_EXIT_CODE, Preemption
from zero2jax.processes.roll_call import StartError
from zero2jax.processes.start import Startup, init_distributed
from zero2jax.processes.step_clock import StepClock, StepTimes
from zero2jax.programs.audit import Audit, assert_collectives, audit
from zero2jax.programs.memory import MemoryReport, live_bytes
from zero2jax.zero.precision import Precision
from zero2jax.zero.shard_optimizer import shard_optimizer
from zero2jax.zero.shard_plan import LeafPlan, ShardPlan, make_shard_plan
from zero2jax.zero.state import TrainState

__all__ = [
    "PREEMPTED_EXIT_CODE",
    "ActivationSettings",
    "Audit",
    "BatchOrder",
    "CheckpointError",
    "Checkpointer",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "Engine",
    "Estimate",
    "LeafPlan",
    "MemoryReport",
    "PlanReport",
    "Precision",
    "Preemption",
    "Program",
    "ShardPlan",
    "StartError",
    "Startup",
    "StepClock",
    "StepTimes",
    "TrainState",
    "add_config_arguments",
    "assert_collectives",
    "audit",
    "estimate",
    "expect_same",
    "export_checkpoint",
    "global_batch",
    "init_distributed",
    "initialize",
    "layer",
    "live_bytes",
    "load_config",
    "load_exported",
    "local_rows",
    "make_mesh",
    "make_shard_plan",
    "plan",
    "remat",
    "remat_layers",
    "remat_policy",
    "resolve_auto",
    "shard_optimizer",
]
