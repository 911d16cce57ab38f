"""Whether the arithmetic of a step could hide its communication, whatever the schedule; if not, what would change that.

No schedule hides more communication than there is time spent computing: the hidden share is at most

    seconds computing / seconds of collectives on their links

Per device and microbatch, products and memory-bound work grow with the examples; parameters and gradients that cross
the data axis do not. Groups of devices (a mesh axis `replica`) keep gathers and scatters on one host, and shards of
gradients alone cross.
"""

import math

from zero2jax.base.mesh import DataAxes
from zero2jax.base.tables import readable_bytes
from zero2jax.planning.report import PlanReport
from zero2jax.programs.overlap import Overlap

ENOUGH = 0.9  # of the communication hidden: nothing is said


def unhidden(report: PlanReport, axes: DataAxes) -> list[str]:
    """A note if no schedule can hide `ENOUGH` of the communication: the seconds, the bytes, and what would change it.

    Args:
      report: of the plan; nothing is said without rates.
      axes: of the mesh, which parameters and gradients cross.
    """
    timeline = report.timeline_with_memory or report.timeline
    computing_s = timeline.step_s - timeline.exposed_s
    if not report.rates_known or computing_s >= ENOUGH * timeline.communication_s:
        return []
    read, names = report.audit, set(axes.names)
    of_data = [o for o in timeline.overlaps if not names.isdisjoint(read.axis(o.collective).split("+"))]
    across = [o for o in of_data if read.across(o.collective)]
    data_s, others_s = _seconds(of_data), timeline.communication_s - _seconds(of_data)
    note = (
        f"no schedule hides {ENOUGH:.0%} of this step's communication: collectives take "
        f"{timeline.communication_s:.3g} s on their links ({readable_bytes(report.communication_bytes)}, of them "
        f"{readable_bytes(sum(o.collective.total_bytes for o in across))} across hosts), and computing, beside which "
        f"they could run, {computing_s:.3g} s: at most {computing_s / timeline.communication_s:.0%}"
    )
    ways = []
    # x times the examples: at best x computing_s, against ENOUGH (data_s + x others_s)
    left = computing_s - ENOUGH * others_s
    if left > 0 and ENOUGH * data_s > left:
        devices = math.prod(report.axes[name] for name in axes.names)
        now = report.batch_size / devices / report.num_microbatches
        more = math.ceil(ENOUGH * data_s / left * now)
        ways.append(f"it takes {more} examples per device and microbatch or more ({now:g} now)")
    if across and axes.replica is None:
        ways.append(
            f"groups of devices (a mesh axis replica) keep on one host most of what takes {_seconds(across):.3g} s "
            f"across hosts"
        )
    return [". ".join([note, *ways])]


def _seconds(overlaps: list[Overlap]) -> float:
    return sum(o.seconds * o.collective.trips for o in overlaps)
