"""ZeRO for JAX: optimizer state, gradients and parameters sharded over a data-parallel mesh."""

from zero2jax.engine import Engine
from zero2jax.mesh import make_mesh
from zero2jax.precision import Precision
from zero2jax.shard_plan import LeafPlan, ShardPlan, make_shard_plan
from zero2jax.state import TrainState

__all__ = [
    "Engine",
    "LeafPlan",
    "Precision",
    "ShardPlan",
    "TrainState",
    "make_mesh",
    "make_shard_plan",
]
