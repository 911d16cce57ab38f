"""ZeRO for JAX: optimizer state, gradients and parameters sharded over a data-parallel mesh."""

from zero2jax.audit import Audit, assert_collectives, audit
from zero2jax.batch_order import BatchOrder
from zero2jax.batches import global_batch, local_rows
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
from zero2jax.distributed import Startup, expect_same, init_distributed
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
from zero2jax.remat import layer, remat
from zero2jax.remat_layers import ActivationSettings, remat_layers
from zero2jax.remat_policies import remat_policy
from zero2jax.roll_call import StartError
from zero2jax.shard_optimizer import shard_optimizer
from zero2jax.shard_plan import LeafPlan, ShardPlan, make_shard_plan
from zero2jax.state import TrainState
from zero2jax.step_times import StepClock, StepTimes

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
