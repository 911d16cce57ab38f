"""Compile many settings of one program for a target, and say which are worth having and which is cheapest.

Each setting is a plan of its own: nothing is guessed from another one. The frontier holds the settings that no other
one beats in peak memory, communication and arithmetic per example (which grows where activations are recomputed) at
once. Cheapest is what takes the least time per example at the target's rates, matrix products and the communication
that the schedule waits for; where no rates are known, what communicates least per example.

Only settings that train the same model on examples of the same shape are compared. Where an argument of the program
changes either, each model has its own part of the frontier, and nothing is the cheapest.
"""

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from zero2jax.base.pytrees import path_string, shapes_of
from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.config.reading import DEFAULT_CONFIG, Source, read_config
from zero2jax.planning.planner import PlanSettings, Program, compile_plan, lower_plan, prepare_plan
from zero2jax.planning.report import PlanReport

STAGE, MICROBATCHES = "zero_optimization.stage", "gradient_accumulation_steps"
PROGRAM = "program."


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting: what was varied, and its plan, or why there is none.

    Attributes:
      varied: values by key path of the configuration, or by `program.NAME`.
      report: the plan; None where the setting is not allowed.
      refused: why it is not.
      model: shapes of the parameters and of one example; settings that differ in it are not compared.
    """

    varied: Mapping[str, Any]
    report: PlanReport | None
    refused: str = ""
    model: tuple[str, ...] = ()

    @property
    def costs(self) -> tuple[float, float, float]:
        """Peak bytes; communicated bytes and FLOPs per example: what the frontier weighs."""
        assert self.report is not None
        size = self.report.batch_size
        return (
            self.report.total_bytes,
            self.report.communication_bytes / size,
            self.report.timeline.flops / size,
        )

    @property
    def seconds(self) -> float | None:
        """Matrix products and exposed communication of a step at the target's rates."""
        if self.report is None or self.report.compute_s is None:
            return None
        return self.report.compute_s + self.report.timeline.exposed_s

    @property
    def seconds_per_example(self) -> float | None:
        """The same by examples of the batch, of all devices."""
        return None if self.report is None or self.seconds is None else self.seconds / self.report.batch_size

    @property
    def examples_per_s(self) -> float | None:
        """Examples per second over all devices, at most."""
        return 1 / self.seconds_per_example if self.seconds_per_example else None


@dataclasses.dataclass(frozen=True)
class SearchReport:
    """Every setting tried, in the order tried; as text, a table with the frontier and the cheapest marked.

    Attributes:
      candidates: what was varied, and its plan or why there is none.
      notes: what to know about all of them.

    Example:
      >>> refused = Candidate({"zero_optimization.stage": 4}, None, "stage is 4; ZeRO has the stages 0 to 3")
      >>> print(SearchReport((refused,)).cheapest)  # see `search_plans` for one that is planned
      None
    """

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_models(self) -> int:
        """How many different models the planned settings train."""
        return len({c.model for c in self.candidates if c.report is not None})

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """Settings that no other one of the same model beats in every cost, least memory first."""
        planned = [c for c in self.candidates if c.report is not None]
        beaten = lambda c: any(o.model == c.model and _beats(o.costs, c.costs) for o in planned)
        kept = [c for c in planned if not beaten(c)]
        return tuple(sorted(kept, key=lambda c: c.costs))

    @property
    def cheapest(self) -> Candidate | None:
        """The setting that fits (or may fit, where memory is not known) and takes the least time per example.

        None if none fits, and where the settings train different models.
        """
        if self.num_models > 1:
            return None
        fitting = [c for c in self.candidates if c.report is not None and c.report.fits is not False]
        return min(
            fitting, key=lambda c: (c.seconds_per_example or 0.0, *c.costs[1:], c.costs[0]), default=None
        )

    def as_dict(self) -> dict[str, Any]:
        """The search as plain JSON values."""
        frontier = self.frontier
        rows = [
            {
                "varied": dict(c.varied),
                "refused": c.refused,
                "frontier": c in frontier,
                "seconds": c.seconds,
                "examples_per_s": c.examples_per_s,
                "report": c.report.as_dict() if c.report else None,
            }
            for c in self.candidates
        ]
        return {
            "candidates": rows,
            "cheapest": dict(self.cheapest.varied) if self.cheapest else None,
            "num_models": self.num_models,
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The search as text: every setting, marked where it is on the frontier; then the cheapest that fits."""
        names = list(dict.fromkeys(name for c in self.candidates for name in c.varied))
        rows = [("", *names, "peak", "communication", "exposed", "PFLOP", "s at least", "examples/s", "")]
        frontier, cheapest = self.frontier, self.cheapest
        for c in self.candidates:
            values = [str(c.varied.get(name, "")) for name in names]
            mark = ("=>" if c is cheapest else "") + ("*" if c in frontier else "")
            rows.append((mark, *values, *_cells(c)))
        lines = aligned(rows, right=range(len(rows[0]) - 1))
        lines.append(
            "* no other setting of the same model needs less memory, and less communication and arithmetic per example"
        )
        if self.num_models > 1:
            lines.append(
                f"no cheapest: the settings train {self.num_models} different models, by the shapes of their "
                f"parameters or examples; vary one model's settings, or its batch"
            )
        elif cheapest is None:
            lines.append("nothing fits: more devices, a smaller batch, or a larger card")
        else:
            chosen = ", ".join(f"{name} = {value}" for name, value in cheapest.varied.items())
            per_s = cheapest.examples_per_s
            speed = f" ({per_s:,.4g} examples/s at most)" if per_s else ""
            lines.append(f"=> cheapest that fits: {chosen}{speed}")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines)

    __str__ = table


def search_plans(
    make_program: Callable[..., Program],
    config: Source | None,
    settings: PlanSettings,
    vary: Mapping[str, Sequence[Any]],
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> SearchReport:
    """Plan every combination of the values in `vary`, compiling several at a time where cores allow.

    Args:
      make_program: makes the program; called with the varied `program.NAME` values by name.
      config: DeepSpeed-style configuration that all settings share.
      settings: target, axes, memory.
      vary: values by key path of the configuration (`"zero_optimization.stage": [2, 3]`,
        `"gradient_accumulation_steps": [1, 2, 4]`: the batch of a step stays the same), or by `program.NAME`.
      advance: called with (settings done, settings in all).

    Returns:
      A candidate for each combination. Settings that the configuration or the batch does not allow are listed with the
      reason, not compiled.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from zero2jax.planning.targets import get_target
      >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> make_program = lambda: Program(loss, {"w": shape(64, 64)}, shape(8, 64), optax.adam(1e-3))
      >>> settings = PlanSettings({"data": 1}, get_target("cpu"))
      >>> search = search_plans(make_program, None, settings, {"zero_optimization.stage": [1, 2]})
      >>> [candidate.report.stage for candidate in search.candidates]
      [1, 2]
    """
    base = read_config(DEFAULT_CONFIG if config is None else config)
    combinations = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    outcomes: list[Candidate | Future[PlanReport]] = []
    models: list[tuple[str, ...]] = []
    notes: dict[str, None] = {}
    done = itertools.count(1)
    count = lambda _: advance(next(done), len(combinations))
    with ThreadPoolExecutor(max_workers=max(1, min(os.cpu_count() or 1, len(combinations)))) as pool:
        for varied in combinations:
            arguments = {k.removeprefix(PROGRAM): v for k, v in varied.items() if k.startswith(PROGRAM)}
            program = make_program(**arguments)
            models.append(_model(program))
            notes |= dict.fromkeys(program.notes)
            try:
                prepared = prepare_plan(program, config_with(base.source, varied, program), settings)
                lowered = lower_plan(prepared)
            except ValueError as error:
                # a rule of the configuration, of the batch or of the model's layers
                outcomes.append(Candidate(varied, None, " ".join(str(error).split())))
                count(None)
                continue
            # Tracing holds the interpreter and is quick; the compiler runs beside it.
            future = pool.submit(compile_plan, lowered)
            future.add_done_callback(count)
            outcomes.append(future)
    candidates = tuple(
        c if isinstance(c, Candidate) else Candidate(varied, c.result(), model=model)
        for varied, c, model in zip(combinations, outcomes, models, strict=True)
    )
    return SearchReport(candidates, tuple(notes))


def _model(program: Program) -> tuple[str, ...]:
    """What makes settings comparable: names, shapes and dtypes of the parameters and of one example."""
    leaves = lambda tree: jax.tree_util.tree_leaves_with_path(shapes_of(tree))
    params = [f"{path_string(path)} {x.dtype}{x.shape}" for path, x in leaves(program.params)]
    return *params, *(f"{path_string(path)} {x.dtype}{x.shape[1:]}" for path, x in leaves(program.batch))


def config_with(source: Mapping[str, Any], varied: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """The configuration with the values of some key paths replaced; those named `program.NAME` are left out.

    The program's batch is kept when the microbatches change.
    """
    config: dict[str, Any] = copy.deepcopy(dict(source))
    if MICROBATCHES in varied:
        config.pop("train_micro_batch_size_per_gpu", None)
        config["train_batch_size"] = program.batch_size
    for path, value in varied.items():
        if not path.startswith(PROGRAM):
            *parents, name = path.split(".")
            block = config
            for parent in parents:
                block = block.setdefault(parent, {})
            block[name] = value
    return config


def _beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _cells(candidate: Candidate) -> tuple[str, ...]:
    report = candidate.report
    if report is None:
        return ("-", "-", "-", "-", "-", "-", f"refused: {candidate.refused}")
    seconds = "-" if candidate.seconds is None else f"{candidate.seconds:.3g}"
    per_s = "-" if candidate.examples_per_s is None else f"{candidate.examples_per_s:,.4g}"
    verdict = {True: "fits", False: "does not fit", None: ""}[report.fits]
    return (
        readable_bytes(report.total_bytes),
        readable_bytes(report.communication_bytes),
        readable_bytes(report.exposed_bytes),
        f"{report.timeline.flops / 1e15:.3g}",
        seconds,
        per_s,
        verdict,
    )
