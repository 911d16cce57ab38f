"""What somebody who wrote an unknown key may have meant: the same name elsewhere, a known confusion, a near name."""

import functools
from collections.abc import Iterable, Mapping

from zero2jax.base.names import nearest
from zero2jax.config.keys import KEYS, Treatment

# Names of other libraries, and of one key in the place of another, for the key that is meant.
_CONFUSED = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "batch_size": "train_batch_size",
    "bf16_enabled": "bf16.enabled",
    "clip_grad_norm": "gradient_clipping",
    "cpu_offload_pin_memory": "zero_optimization.cpu_offload_use_pin_memory",
    "fp16_enabled": "fp16.enabled",
    "grad_clip": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "max_grad_norm": "gradient_clipping",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "model_parallel_size": "tensor_parallel",
    "zero_stage": "zero_optimization.stage",
}
# Blocks whose words (`project`, `output_path`) people use for much else.
_COMMON_WORDS = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "timers", "checkpoint")
# Below this, difflib offers `amp` for `warmup`, and `offload_param` for half of all keys with an underscore.
_NEAR = 0.75
_LONGEST = 80


def suggestion(path: str, key: str, known: Iterable[str]) -> str:
    """The key that an unknown one is likely to mean, with its path where that is another; "" if none is.

    Args:
      path: the block that the unknown key stands in; "" at the top.
      key: its name.
      known: the names that the block has.

    >>> suggestion("", "offload_optimizer", ["optimizer"]), suggestion("fp16", "enable", ["enabled"])
    ('zero_optimization.offload_optimizer', 'enabled')
    """
    if len(key) > _LONGEST or key.startswith(("_", "comment")):
        return ""
    inside = f"{path}." if path else ""
    if key in _CONFUSED:
        return _CONFUSED[key].removeprefix(inside)
    elsewhere = [other for other in _paths_by_name().get(key, ()) if other != inside + key]
    if len(elsewhere) == 1:
        return elsewhere[0]
    near = nearest(key, [*known, *_old_names(path)], cutoff=_NEAR)
    return near[0] if near else ""


def _old_names(path: str) -> list[str]:
    """Names of a block that are replaced before it is read."""
    converted = [other.rpartition(".") for other, key in KEYS.items() if key.treatment is Treatment.CONVERTED]
    return [name for block, _, name in converted if block == path]


@functools.cache
def _paths_by_name() -> Mapping[str, tuple[str, ...]]:
    """Key paths below the top by their last name, blocks included."""
    names: dict[str, dict[str, None]] = {}
    for path in KEYS:
        parts = path.split(".")
        if parts[0] not in _COMMON_WORDS:
            for depth in range(1, len(parts)):
                names.setdefault(parts[depth], {})[".".join(parts[: depth + 1])] = None
    return {name: tuple(paths) for name, paths in names.items()}
