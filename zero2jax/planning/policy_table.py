"""`zero2jax activations`: what each remat policy keeps in memory and recomputes, from compiled programs.

Every policy is a plan of its own (see `search`): the step compiled for the target. Recomputed arithmetic is what a
policy's program does more than the one that does least; `dots`, which saves every matrix product, is always among them.
(Not `everything`: where memory gets scarce, the compiler recomputes on its own account.)
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.config.reading import Source
from zero2jax.planning.planner import PlanSettings, Program
from zero2jax.planning.report import PlanReport
from zero2jax.planning.search import Candidate, search_plans
from zero2jax.programs.formulas import OTHER

POLICY = "activation_checkpointing.policy"
REFERENCE = "dots"
POLICIES = (
    "nothing",
    "nested",
    "save_attention_output",
    "save_qkv",
    "save_projections",
    "save_attention_and_projections",
    "offload_projections",
    "dots_no_batch",
    REFERENCE,
    "everything",
)


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """One policy, per device and step.

    Attributes:
      policy: its word.
      report: the plan; None where the configuration or the model does not allow the policy.
      recomputed_flops: matrix products that it does more than the policy with the fewest.
      refused: why there is no plan.
    """

    policy: str
    report: PlanReport | None
    recomputed_flops: float | None
    refused: str = ""

    @property
    def activation_bytes(self) -> int | None:
        """The most that activations and temporaries take at any point of the schedule."""
        if self.report is None:
            return None
        return max(point.by_class[OTHER] for point in self.report.lifetimes.points)

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        report = self.report
        return {
            "policy": self.policy,
            "activation_bytes": self.activation_bytes,
            "host_bytes": report and report.host_bytes,
            "total_bytes": report and report.total_bytes,
            "flops": report and report.timeline.flops,
            "recomputed_flops": self.recomputed_flops,
            "refused": self.refused,
        }


@dataclasses.dataclass(frozen=True)
class PolicyTable:
    """A row per policy, in the order asked for, and notes about all of them."""

    rows: tuple[PolicyRow, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The table as plain JSON values."""
        return {"policies": [row.as_dict() for row in self.rows], "notes": list(self.notes)}

    def table(self) -> str:
        """The table as text."""
        cells = [("policy", "activations", "on the host", "peak of the step", "PFLOP", "recomputed", "")]
        for row in self.rows:
            if row.report is None:
                cells.append((row.policy, "-", "-", "-", "-", "-", "refused"))
                continue
            flops, extra = row.report.timeline.flops, row.recomputed_flops or 0.0
            share = f"{extra / 1e15:.4f} ({extra / (flops - extra):.1%})" if flops > extra else "-"
            sizes = (row.activation_bytes, row.report.host_bytes, row.report.total_bytes)
            bytes_cells = tuple(map(readable_bytes, sizes))
            fits = "" if row.report.fits is not False else "does not fit"
            cells.append((row.policy, *bytes_cells, f"{flops / 1e15:.4f}", share, fits))  # type: ignore[arg-type]
        lines = aligned(cells, right=(1, 2, 3, 4, 5))
        lines.append(
            "per device and step, from the compiled programs; activations: the most that they and temporaries take at "
            "any point; recomputed: matrix products beyond those of the policy with the fewest"
        )
        for policies, reason in self._refused():
            lines.append(f"- refused: {', '.join(policies)}: {reason}")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines)

    __str__ = table

    def _refused(self) -> list[tuple[list[str], str]]:
        """(policies, reason): those whose reasons differ in the names quoted alone share that of the first."""
        groups: dict[str, list[PolicyRow]] = {}
        for row in self.rows:
            if row.report is None:
                groups.setdefault(re.sub(r"'[^']*'", "", row.refused), []).append(row)
        return [([row.policy for row in rows], rows[0].refused) for rows in groups.values()]


def tabulate_policies(
    make_program: Callable[..., Program],
    config: Source | None,
    settings: PlanSettings,
    policies: Sequence[str] = POLICIES,
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> PolicyTable:
    """Compile the step under each policy, and under `dots` to compare with.

    Args:
      make_program: makes the program.
      config: DeepSpeed-style configuration that all policies share.
      settings: target, axes, memory.
      policies: words of `zero2jax.remat_policy`, or `nested`.
      advance: called with (policies done, policies in all).
    """
    wanted = list(dict.fromkeys([*policies, REFERENCE]))
    search = search_plans(make_program, config, settings, {POLICY: wanted}, advance=advance)
    by_policy = dict(zip(wanted, search.candidates, strict=True))
    fewest = min((c.report.timeline.flops for c in search.candidates if c.report is not None), default=0.0)
    rows = tuple(_row(policy, by_policy[policy], fewest) for policy in policies)
    return PolicyTable(rows, search.notes)


def _row(policy: str, candidate: Candidate, fewest_flops: float) -> PolicyRow:
    if candidate.report is None:
        return PolicyRow(policy, None, None, candidate.refused)
    return PolicyRow(policy, candidate.report, candidate.report.timeline.flops - fewest_flops)
