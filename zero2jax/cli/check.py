"""`zero2jax check` as tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero2jax.config.check import CheckReport
from zero2jax.config.values import shown

_MIN_WIDTH = 120


def print_report(report: CheckReport, console: Console | None = None) -> None:
    """Write the report as tables and lists."""
    console = console or Console()
    # A pipe counts as 80 columns, too few for a key path and its explanation.
    console.width = max(console.width, _MIN_WIDTH)
    if not report.trains:
        console.print(f"{escape(report.config)}: does not train as it is, see below", style="bold")
    effective = Table(
        "setting", "value", title=escape(f"{report.config}: effective settings"), title_justify="left"
    )
    for name, value in report.effective.items():
        effective.add_row(name, escape(value))
    console.print(effective)
    keys = Table(title="keys", title_justify="left")
    keys.add_column("key", no_wrap=True)
    for name in ("value", "treatment", "what it became"):
        keys.add_column(name, overflow="fold")
    for row in report.keys:
        origin = " (auto)" if row.auto else "" if row.given else " (default)"
        value = escape(shown(row.value)) + origin
        keys.add_row(row.key, value, row.treatment, escape(row.becomes))
    if report.keys:
        console.print(keys)
    for title, lines in {"notes": report.notes, **_reasons(report)}.items():
        if lines:
            console.print(f"{title}:", style="bold")
        for line in lines:
            console.print(f"  - {line}", markup=False, highlight=False)


def problems(report: CheckReport) -> str:
    """Every reason why a file that is wrong does not train, as text."""
    parts = {"wrong": report.errors, **_reasons(report)}
    lines = [
        f"{title}:\n" + "\n".join(f"  - {line}" for line in part) for title, part in parts.items() if part
    ]
    return "\n".join([f"cannot use the configuration {report.config}", *lines])


def why_not(report: CheckReport) -> str:
    """Why a file that is right does not train, as text; nothing where it does, and where it is wrong."""
    return "" if report.errors or report.trains else problems(report)


def _reasons(report: CheckReport) -> dict[str, tuple[str, ...]]:
    return {
        "refused": report.refused,
        'to be filled, left at "auto" without a default (--set KEY=VALUE tries one)': report.to_fill,
    }
