"""Running out of device memory, explained: who holds what, the largest leaves, and the cheapest ways out in bytes.

XLA says how many bytes it wanted. Around the programs of an engine that becomes an `OutOfMemoryError`, chained to XLA's
own, with what the shard plan and the formulas of `programs.formulas` know. A way out is a change of the engine's
settings, and what it would free on each device:

    no arena           the new optimizer state, which is made beside its buffers, at most
    stage + 1          what the next stage shards: masters and optimizer state, gradients, parameters
    2 x microbatches   half of the activations: of what was wanted less gradients and parameters
    offload            masters and optimizer state, less the parameters that stay in the compute dtype

in the order of what they cost: more buffers to hand over, nothing, smaller products, half as much communication again,
a transfer per step.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from zero2jax.base.memories import PINNED_LIMIT, locked_limit_bytes, pinned_limit_bytes
from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.memory.arena import ArenaProgram
from zero2jax.memory.report import memory_report
from zero2jax.programs.formulas import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, class_formulas
from zero2jax.zero.state import TrainState
from zero2jax.zero.step import StepProgram

_EXHAUSTED = "RESOURCE_EXHAUSTED"
_WANTED = re.compile(r"allocat\w*\s+(?:\w+\s+)?([\d.,]+)\s*(TiB|GiB|MiB|KiB|bytes|B)\b", re.IGNORECASE)
_UNITS = {"tib": 2**40, "gib": 2**30, "mib": 2**20, "kib": 2**10}
_ON_HOST = re.compile(r"\b(pinned|out of) host\b", re.IGNORECASE)
_MOST_LEAVES = 5
_MOST_WAYS = 3


class OutOfMemoryError(jax.errors.JaxRuntimeError):  # type: ignore[misc]
    """A device has no room for what a program of the engine needs.

    Attributes:
      wanted_bytes: what was asked for at once; None if XLA does not say it.
    """

    def __init__(self, message: str, wanted_bytes: int | None = None):
        super().__init__(message)
        self.wanted_bytes = wanted_bytes


class WayOut(NamedTuple):
    """A change of settings, the bytes that it frees on each device, and what it costs.

    `at_most`: they are an upper bound.
    """

    change: str
    freed_bytes: int
    cost: str
    at_most: bool = False


@contextlib.contextmanager
def explained(program: Callable[[], StepProgram | None], state: TrainState | None = None) -> Iterator[None]:
    """Turn XLA's RESOURCE_EXHAUSTED inside into an `OutOfMemoryError`.

    Args:
      program: the step, as far as the engine knows one by then.
      state: what was given to it, to tell its arrays from others if they are still there.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except jax.errors.JaxRuntimeError as error:
        if _EXHAUSTED not in str(error):
            raise
        wanted = wanted_bytes(str(error))
        if _ON_HOST.search(str(error)):
            raise OutOfMemoryError(_explanation_of_host(wanted), wanted) from error
        raise OutOfMemoryError(_explanation(wanted, program(), state), wanted) from error


def wanted_bytes(text: str) -> int | None:
    """The bytes that an error of XLA says were asked for.

    Example:
      >>> wanted_bytes("Out of memory allocating 2048 bytes."), wanted_bytes("trying to allocate 1.5KiB.")
      (2048, 1536)
    """
    found = _WANTED.search(text)
    if found is None:
        return None
    return int(float(found[1].rstrip(".").replace(",", "")) * _UNITS.get(found[2].lower(), 1))


def _explanation_of_host(wanted: int | None) -> str:
    asked = "more than there is" if wanted is None else f"{readable_bytes(wanted)} at once"
    limit, locked = pinned_limit_bytes(), locked_limit_bytes()
    return (
        f"{_EXHAUSTED}: the pinned host memory has no room: a program asked for {asked}. XLA pins "
        f"{'no more than it is told' if limit is None else readable_bytes(limit)} for a process: set {PINNED_LIMIT} "
        f"to more before anything uses jax. ulimit -l is "
        f"{'unlimited' if locked is None else readable_bytes(locked)}."
    )


def _explanation(wanted: int | None, program: StepProgram | None, state: TrainState | None) -> str:
    asked = "more than there is" if wanted is None else f"{readable_bytes(wanted)} at once"
    lines = [f"{_EXHAUSTED}: the device memory has no room: a program asked for {asked}."]
    alive = state is not None and not any(
        x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array)
    )
    lines += ["", "Who holds what:", str(memory_report(state if alive else None))]
    if program is None:
        return "\n".join(lines)
    lines += [
        "",
        "By the plan, per device:",
        *_planned(program),
        "",
        "The largest leaves at rest:",
        *_largest(program),
    ]
    ways = ways_out(program, wanted)
    rows = [
        (
            f"{i}. {way.change}",
            f"frees {'up to ' if way.at_most else ''}{readable_bytes(way.freed_bytes)}",
            way.cost,
        )
        for i, way in enumerate(ways, 1)
    ]
    lines += [
        "",
        "Ways out, cheapest first:",
        *(aligned(rows, right=(1,)) if rows else ["none by settings alone"]),
    ]
    lines.append(
        "Layers that recompute instead of saving: Engine(activations=...), `zero2jax activations`. More devices: "
        "`zero2jax plan` says what fits."
    )
    return "\n".join(lines)


def _planned(program: StepProgram) -> list[str]:
    formulas = class_formulas(program.layout, program.settings, program.mesh)
    return aligned([(name, readable_bytes(f.num_bytes), f.words) for name, f in formulas.items()], right=(1,))


def _largest(program: StepProgram) -> list[str]:
    layout, mesh = program.layout, program.mesh
    plans = ((MASTER, layout.params), (OPTIMIZER, layout.opt_state))
    leaves = [
        (leaf.rest_bytes // leaf.num_model_shards(mesh), name, leaf)
        for name, plan in plans
        for leaf in plan.leaves
    ]
    leaves.sort(key=lambda row: -row[0])
    rows = [
        (
            readable_bytes(size),
            f"{leaf.dtype}{list(leaf.shape)}",
            name,
            leaf.path,
            leaf.reason and f"({leaf.reason})",
        )
        for size, name, leaf in leaves[:_MOST_LEAVES]
    ]
    return aligned(rows, right=(0,))


def ways_out(program: StepProgram, wanted: int | None) -> list[WayOut]:
    """At most three changes of settings, cheapest first, with the bytes that each frees on a device.

    Args:
      program: the step.
      wanted: bytes of the allocation that failed, which for a step is its temporary block; None if not known.
    """
    step, layout, mesh = program.settings.step, program.layout, program.mesh
    now = _sizes(program, step.stage)
    ways: list[WayOut] = []
    if isinstance(program, ArenaProgram):
        # new leaves are made apart before they are copied into their buffer; parameters one at a time
        apart = sum(b.size * b.dtype.itemsize for b in program.arena.opt_state.buffers)
        ways.append(WayOut("arena=False", apart, "a buffer per leaf to hand over in each step", at_most=True))

    def next_stage(stage: int, cost: str) -> None:
        if step.stage < stage and program.settings.plan.num_shards > 1:
            after = _sizes(program, stage)
            ways.append(WayOut(f"stage={stage}", sum(now.values()) - sum(after.values()), cost))

    next_stage(1, "no more communication")
    next_stage(2, "no more communication at one microbatch")
    activations = 0 if wanted is None else wanted - now[GRADIENTS] - now[PARAMETERS]
    if activations > 0:
        more = 2 * step.num_microbatches
        ways.append(
            WayOut(f"num_microbatches={more}", activations // 2, "smaller matrix products, the same batch")
        )
    next_stage(3, "1.5 times the communication")
    if layout.host is None:
        copies = sum(
            leaf.rest_bytes
            // leaf.num_model_shards(mesh)
            * program.settings.compute_dtype(i).itemsize
            // leaf.dtype.itemsize
            for i, leaf in enumerate(layout.params.leaves)
        )
        freed = now[MASTER] + now[OPTIMIZER] - copies
        ways.append(
            WayOut("offload=OffloadSettings()", freed, "gradients down and parameters up in each step")
        )
    ways = [way for way in ways if way.freed_bytes > 0]
    enough = [way for way in ways if wanted is not None and way.freed_bytes >= wanted]
    chosen = ways[:_MOST_WAYS]
    return chosen if not enough or enough[0] in chosen else [*ways[: _MOST_WAYS - 1], enough[0]]


def _sizes(program: StepProgram, stage: int) -> dict[str, int]:
    """Bytes per device by class, at another stage."""
    settings = dataclasses.replace(
        program.settings, step=dataclasses.replace(program.settings.step, stage=stage, gather="auto")
    )
    formulas = class_formulas(program.layout, settings, program.mesh)
    return {name: formula.num_bytes for name, formula in formulas.items()}
