"""ZeRO for JAX: optimizer state, gradients and parameters sharded over a data-parallel mesh."""

from zero2jax.audit import Audit, assert_collectives, audit
from zero2jax.checkpoint import Checkpointer
from zero2jax.checkpoint_format import CheckpointError
from zero2jax.config import (
    Config,
    ConfigError,
    ConfigWarning,
    add_config_arguments,
    load_config,
    resolve_auto,
)
from zero2jax.engine import Engine
from zero2jax.estimate import Estimate, estimate
from zero2jax.export import export_checkpoint, load_exported
from zero2jax.initialize import initialize
from zero2jax.memory import MemoryReport, live_bytes
from zero2jax.mesh import make_mesh
from zero2jax.plan_report import PlanReport
from zero2jax.planner import Program, plan
from zero2jax.precision import Precision
from zero2jax.preemption import PREEMPTED_EXIT_CODE, Preemption
from zero2jax.shard_optimizer import shard_optimizer
from zero2jax.shard_plan import LeafPlan, ShardPlan, make_shard_plan
from zero2jax.state import TrainState

__all__ = [
    "PREEMPTED_EXIT_CODE",
    "Audit",
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
    "TrainState",
    "add_config_arguments",
    "assert_collectives",
    "audit",
    "estimate",
    "export_checkpoint",
    "initialize",
    "live_bytes",
    "load_config",
    "load_exported",
    "make_mesh",
    "make_shard_plan",
    "plan",
    "resolve_auto",
    "shard_optimizer",
]
