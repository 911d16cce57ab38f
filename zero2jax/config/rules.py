"""Rules that join several keys.

Everything here looks at a finished `Config`; single values were checked when they were read.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from zero2jax.config.keys import KEYS, Treatment, key_of
from zero2jax.config.params import SGDParams, WarmupCosineLRParams, WarmupDecayLRParams, WarmupLRParams
from zero2jax.config.schema import Config
from zero2jax.config.values import Report, shown


def key_values(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key path, value, default) of every key of a block, depth first, but for absent blocks."""
    for field in dataclasses.fields(value):
        if not field.metadata:
            continue
        here = f"{path}.{field.name}" if path else field.name
        item = getattr(value, field.name)
        if here in ("optimizer", "scheduler"):
            if item is not None:
                yield f"{here}.type", item.type, None
                yield from key_values(item.params, f"{here}.params")
                if here == "optimizer":
                    yield "optimizer.legacy_fusion", item.legacy_fusion, False
        elif "block" in field.metadata:
            if item is not None:
                yield from key_values(item, here)
        else:
            yield here, item, field.default


def check_rules(config: Config, report: Report) -> None:
    """Add what is wrong or worth saying about several keys together."""
    _refused(config, report)
    _precision_rules(config, report)
    _reduction_rules(config, report)
    _zero_rules(config, report)
    _quantized_rules(config, report)
    _activation_rules(config, report)
    _memory_rules(config, report)
    _optimizer_rules(config, report)
    _scheduler_notes(config, report)
    kind = None if config.optimizer is None else config.optimizer.type
    ignored = [
        key
        for key in config.given
        if key in KEYS and key_of(key, kind).treatment is Treatment.NO_EFFECT and report.sound(key)
    ]
    if ignored:
        report.notes.append(f"no effect here: {', '.join(ignored)} (`zero2jax check` says why).")
    _auto_notes(config, report)


def _auto_notes(config: Config, report: Report) -> None:
    precision = [path for path in ("fp16.enabled", "bf16.enabled") if path in config.auto]
    if config.compute_dtype != "fp32" or not report.sound("fp16.enabled", "bf16.enabled"):
        precision = []
    if precision:
        report.notes.append(
            f'{" and ".join(precision)} = "auto" is read as false, so the loss is computed in fp32. Fill it in with '
            f"resolve_auto(config, {{'bf16.enabled': True}}), or write true."
        )
    left = set(config.auto) - set(precision)
    values = {path: value for path, value, _ in key_values(config) if path in left and value is not None}
    if values:
        used = ", ".join(f"{path} = {shown(value)}" for path, value in values.items())
        report.notes.append(f'left at "auto", so the default is used: {used}.')


def _refused(config: Config, report: Report) -> None:
    for path, value, default in key_values(config):
        key = KEYS[path]
        if path.startswith("zero_optimization.offload_optimizer.") and offload_device(config) == "none":
            continue
        if key.treatment is Treatment.REFUSED and value != default:
            report.refuse(path, value, f"not supported: {key.becomes}", "Remove the key or switch it off.")


def _precision_rules(config: Config, report: Report) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        report.error("bf16.enabled", True, "fp16 and bf16 exclude each other", "Switch one of them off.")
    half = config.bf16
    if half.enabled and half.bf16_optimizer_states and not half.bf16_master_weights_and_grads:
        rule = "bf16 optimizer states need bf16 masters, as in DeepSpeed"
        way_out = "Switch bf16.bf16_master_weights_and_grads on, too."
        report.error("bf16.bf16_optimizer_states", True, rule, way_out)
    mode = config.compute_dtype
    wanted = config.data_types.param_dtype
    if wanted not in (None, mode) and report.sound("fp16.enabled", "bf16.enabled"):
        rule = f"must agree with the compute dtype, here {mode}"
        report.error(
            "data_types.param_dtype", wanted, rule, "Remove it; fp16.enabled and bf16.enabled decide."
        )
    if config.fp16.enabled and config.fp16.loss_scale == 0 and report.sound("fp16.loss_scale"):
        for name in ("loss_scale_window", "min_loss_scale", "hysteresis"):
            value = getattr(config.fp16, name)
            if value < 1:
                report.error(
                    f"fp16.{name}", value, "must be at least 1 with dynamic loss scaling", "Raise it."
                )
        power, minimum = config.fp16.initial_scale_power, config.fp16.min_loss_scale
        if power > 100:
            report.error("fp16.initial_scale_power", power, "must be at most 100", "The default is 16.")
        elif 2**power < minimum and report.sound("fp16.min_loss_scale"):
            rule = f"the first scale, 2 to the power of initial_scale_power = {power}, must not be below it"
            report.error("fp16.min_loss_scale", minimum, rule, "Lower it, or raise initial_scale_power.")
    elif config.fp16.enabled and config.fp16.loss_scale > 2.0**100:
        report.error(
            "fp16.loss_scale", config.fp16.loss_scale, "must be at most 2 ** 100", "0 is dynamic scaling."
        )


def _reduction_rules(config: Config, report: Report) -> None:
    zero = config.zero_optimization
    judged = ("zero_optimization.stage", "zero_optimization.reduce_scatter", "gradient_allreduce_op")
    if not report.sound(*judged):
        return
    if zero.stage == 3 and config.gradient_allreduce_op == "sum":
        rule = "stage 3 takes the mean"
        report.error("gradient_allreduce_op", "sum", rule, "Use a stage below 3, or scale the loss.")
    if zero.stage == 0 or not zero.reduce_scatter or config.gradient_allreduce_op == "sum":
        return
    rule = (
        f"with zero_optimization.reduce_scatter at stage {zero.stage} the mean is taken by the reduce-scatter"
    )
    way_out = "Remove it, or set zero_optimization.reduce_scatter to false."
    if config.prescale_gradients:
        report.error("prescale_gradients", True, rule, way_out)
    if config.gradient_predivide_factor != 1.0:
        report.error("gradient_predivide_factor", config.gradient_predivide_factor, rule, way_out)


def _zero_rules(config: Config, report: Report) -> None:
    zero, path = config.zero_optimization, "zero_optimization"
    if not report.sound(f"{path}.stage"):
        return
    given = [key for key in config.given if key.startswith(f"{path}.")]
    if given and f"{path}.stage" not in given:
        report.notes.append(f"{path} without a stage is stage 0, as in DeepSpeed: nothing is sharded.")
    offload = zero.offload_optimizer
    if offload is not None and offload.ratio < 1.0 and zero.stage != 3:
        report.notes.append(
            f"{path}.offload_optimizer.ratio = {offload.ratio:g} at stage {zero.stage}: in DeepSpeed it needs stage 3."
        )
    if (
        offload is not None
        and offload.device_bytes is not None
        and config.source["zero_optimization"]["offload_optimizer"].get("ratio", "auto") != "auto"
    ):
        rule = "it chooses the ratio, and the file gives one"
        report.error(
            f"{path}.offload_optimizer.device_bytes", offload.device_bytes, rule, "Keep one of the two."
        )
    if offload_device(config) == "nvme" and offload and offload.delay_after is not None:
        rule = "a step waits for its files, so its update cannot run beside the next"
        report.error(
            f"{path}.offload_optimizer.delay_after", offload.delay_after, rule, 'Use "cpu", or remove it.'
        )
    if offload_device(config) == "nvme" and not (offload and offload.nvme_path):
        rule = "it needs nvme_path, a folder of a local disk"
        report.error(f"{path}.offload_optimizer.device", "nvme", rule, 'Give nvme_path, or use "cpu".')
    if (
        param_device(config) == "cpu"
        and offload_device(config) != "none"
        and zero.zero_hpz_partition_size > 1
    ):
        rule = "beside offload_param the shards of a group lie in the hosts of its own devices"
        report.error(
            f"{path}.zero_hpz_partition_size", zero.zero_hpz_partition_size, rule, "Keep one of the two."
        )
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        rule = "it and zero_hpz_partition_size both give the size of a group"
        report.error(f"{path}.mics_shard_size", zero.mics_shard_size, rule, "Keep one of the two.")
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        rule = "must be even: DeepSpeed aligns its buckets to two elements"
        report.error(f"{path}.allgather_bucket_size", zero.allgather_bucket_size, rule, "Add 1.")
    if zero.offload_param is not None and zero.offload_param.device != "none" and zero.stage < 3:
        report.notes.append(
            f"{path}.offload_param is ignored at stage {zero.stage}, as in DeepSpeed: it needs stage 3."
        )
    if param_device(config) == "nvme":
        rule = (
            "not supported: a compiled step fetches parameters from pinned host memory, and cannot read files"
        )
        way_out = 'Use "cpu"; masters and optimizer state go to files by offload_optimizer.'
        report.refuse(f"{path}.offload_param.device", "nvme", rule, way_out)
    if param_device(config) == "cpu" and (offload is None or offload.device == "none" or offload.ratio == 0):
        report.notes.append(
            f"{path}.offload_param without offload_optimizer moves nothing: what the loss gathers are shards of the "
            f"fp32 masters, which the devices keep for the update; there are no others."
        )
    if param_device(config) == "cpu" and zero.offload_param and not zero.offload_param.pin_memory:
        report.notes.append(
            f"{path}.offload_param.pin_memory = false: the devices fetch from pinned memory alone, so parameters on "
            f"the host are pinned all the same."
        )
    if zero.elastic_checkpoint and zero.stage == 3:
        report.notes.append(f"{path}.elastic_checkpoint is not available at stage 3 in DeepSpeed either.")


def _quantized_rules(config: Config, report: Report) -> None:
    zero, path = config.zero_optimization, "zero_optimization"
    names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    asked = [f"{path}.{name}" for name in names if getattr(zero, name)]
    if not report.sound(f"{path}.stage", *asked) or not asked or zero.stage == 3:
        return
    if zero.stage == 0:
        rule = "at stage 0 nothing is gathered, and gradients are all-reduced"
        for key in asked:
            report.error(key, True, rule, "Use a stage from 1 up, or remove it.")
        return
    report.notes.append(
        f"{', '.join(asked)} at stage {zero.stage}: acts here, too; DeepSpeed quantises at stage 3 alone."
    )


def _activation_rules(config: Config, report: Report) -> None:
    block, path = config.activation_checkpointing, "activation_checkpointing"
    needed = f"{path}.partition_activations"
    if block.contiguous_memory_optimization and not block.partition_activations and report.sound(needed):
        rule = "contiguous_memory_optimization needs it, as in DeepSpeed"
        report.error(needed, False, rule, "Switch both on or both off.")


def _memory_rules(config: Config, report: Report) -> None:
    if not report.sound("memory"):
        return
    try:
        _ = config.memory.settings
    except ValueError as error:
        report.errors.append(f"memory: {error}")
        report.broken.append("memory")
    block = config.zero_optimization.offload_optimizer
    if config.memory.arena and block is not None and block.device != "none" and block.ratio > 0:
        rule = "beside offload_optimizer the host stores the state leaf by leaf"
        report.error("memory.arena", True, rule, "Leave one of the two out.")


def _optimizer_rules(config: Config, report: Report) -> None:
    params = None if config.optimizer is None else config.optimizer.params
    sound = report.sound("optimizer.params.momentum")
    if isinstance(params, SGDParams) and params.nesterov and params.momentum == 0 and sound:
        rule = "there is no momentum to look ahead with; torch refuses it as well"
        report.error("optimizer.params.nesterov", True, rule, "Give momentum, or remove it.")


def _scheduler_notes(config: Config, report: Report) -> None:
    params = None if config.scheduler is None else config.scheduler.params
    if isinstance(params, (WarmupDecayLRParams, WarmupCosineLRParams)):
        warmup, total = params.warmup_num_steps, params.total_num_steps
        if total is not None and total < warmup:
            report.notes.append(
                f"scheduler.params.total_num_steps = {total} is less than warmup_num_steps = {warmup}: "
                "after the warm-up the learning rate is at its floor."
            )
    if config.scheduler is not None and config.optimizer is None:
        report.notes.append("scheduler: it drives the optimizer block, and the file has none.")


def offload_device(config: Config) -> str:
    """Where `offload_optimizer` puts the optimizer state: "none", "cpu" or "nvme"."""
    block = config.zero_optimization.offload_optimizer
    return "none" if block is None else block.device


def param_device(config: Config) -> str:
    """Where `offload_param` puts parameters: "none" below stage 3, as in DeepSpeed, "cpu" or "nvme"."""
    zero = config.zero_optimization
    return "none" if zero.offload_param is None or zero.stage < 3 else zero.offload_param.device


def open_rates(config: Config) -> list[str]:
    """Learning rates that were left at "auto": no default is worth to be trained by."""
    params = None if config.scheduler is None else config.scheduler.params
    scheduled = not (
        params is None
        or isinstance(params, WarmupCosineLRParams)
        or (isinstance(params, WarmupLRParams) and params.warmup_max_lr is None)
    )
    names = [] if scheduled else ["optimizer.params.lr"]
    names += ["scheduler.params.warmup_max_lr"] if isinstance(params, WarmupDecayLRParams) else []
    rule = "a learning rate needs a value. Give one, or fill it with resolve_auto(config, overrides)."
    return [f"{name} = 'auto': {rule}" for name in names if name in config.auto]


def group_size(config: Config) -> tuple[str, int] | None:
    """(key path, devices of a group) where the configuration makes groups of devices, None where not."""
    zero = config.zero_optimization
    if zero.mics_shard_size > 0:
        return "zero_optimization.mics_shard_size", zero.mics_shard_size
    if zero.zero_hpz_partition_size > 1:
        return "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size
    return None


def device_problems(config: Config, num_devices: int) -> list[str]:
    """Why this configuration cannot train on so many devices, if they are all that the batch is sharded over."""
    found = group_size(config)
    if found is None or num_devices % found[1] == 0:
        return []
    path, size = found
    divisors = ", ".join(str(n) for n in range(1, min(num_devices, 4096) + 1) if num_devices % n == 0)
    return [
        f"{path} = {size}: there are {num_devices} devices, which cannot be divided into groups of {size}. Choose a "
        f"divisor of their number ({divisors}), or give it another number of devices."
    ]


def device_notes(config: Config, num_shards: int) -> list[str]:
    """What to say about this configuration on `num_shards` devices of the data axis."""
    stage = config.zero_optimization.stage
    if num_shards > 1 or stage not in (1, 2) or offload_device(config) != "none":
        return []
    return [
        f"zero_optimization.stage = {stage} on one device saves nothing: there is no other device to shard over. "
        "Use more devices, offload_optimizer to host memory, or stage 3 with offload_param."
    ]
