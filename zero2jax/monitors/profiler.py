"""One profiled step: where its operations, bytes and time go, as a text. From the compiled program, and a clock."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zero2jax.base.tables import aligned, readable_bytes
from zero2jax.monitors.observers import StepRecord, Upcoming
from zero2jax.programs.audit import Audit
from zero2jax.programs.scopes import PHASES, Scoped, flops_by, scoped_products

_NO_SCOPE = "(no scope)"
_NO_LOOP = "in no loop"
_MOST_LINES = 10


class Profiler:
    """Profiles one step: `before` reads its program, `after` writes the report once it is done.

    Args:
      step: number of the step.
      read: the audit of the program of a step to come.
      describe: lines on top, about model and mesh.
      module_depth: how deep scopes are broken up; -1 as deep as they are.
      top_modules: scopes that are named for each depth.
      detailed: whether scopes, source lines, loops and collectives have tables.
      output: path of the report; None prints it.
      peak_flops: of one device, per second; None where it is not known.
      as_before_conversion: for programs of the CPU's compiler, see `programs.products`.
    """

    def __init__(
        self,
        step: int,
        read: Callable[[Upcoming], Audit],
        describe: Callable[[], list[str]],
        *,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output: str | None = None,
        peak_flops: float | None = None,
        as_before_conversion: bool = False,
    ):
        self._step, self._read, self._describe = step, read, describe
        self._depth, self._top, self._detailed = module_depth, top_modules, detailed
        self._output, self._peak = output, peak_flops
        self._as_before_conversion = as_before_conversion
        self._found: tuple[Audit, list[Scoped]] | None = None

    def before(self, upcoming: Upcoming) -> None:
        """Read the program of the step, if this is the one."""
        if upcoming.step == self._step:
            audit = self._read(upcoming)
            products = scoped_products(audit.module, as_before_conversion=self._as_before_conversion)
            self._found = audit, products

    def after(self, record: StepRecord) -> None:
        """Write the report of the step, if this is the one."""
        if record.step != self._step or self._found is None:
            return
        text = "\n".join(self.lines(record, *self._found))
        self._found = None
        if self._output is None:
            print(text, flush=True)
        else:
            Path(self._output).write_text(text + "\n")

    def lines(self, record: StepRecord, audit: Audit, products: list[Scoped]) -> list[str]:
        """The report."""
        flops = sum(one.product.total_flops for one in products)
        lines = [f"profile of step {record.step}, per device", *self._describe()]
        lines += [f"matrix products: {_flops(flops)} = {_shares(products)}", f"  {_dtypes(products)}"]
        lines += [self._time(record, flops), *_top(products, self._depth, self._top)]
        if self._detailed:
            tables = _by_scope(products, self._depth), _by_line(products), _by_loop(products), [audit.table()]
            lines += [line for table in tables for line in ("", *table)]
        return lines

    def _time(self, record: StepRecord, flops: float) -> str:
        text = f"time: {1e3 * record.device_s:.2f} ms on the devices"
        if record.device_s:
            rate = flops / record.device_s
            share = f", {rate / self._peak:.1%} of its 16-bit peak" if self._peak else ""
            text += f", {rate / 1e12:.3g} TFLOP/s per device{share}"
        return f"{text}; dispatch {1e3 * record.dispatch_s:.2f} ms, waiting for the loop {1e3 * record.idle_s:.2f} ms"


def model_lines(num_params: int, stored_bytes: int, mesh: object) -> list[str]:
    """Lines about the model."""
    return [f"parameters: {num_params:,} in all, {readable_bytes(stored_bytes)} stored; mesh {mesh}"]


def _shares(products: list[Scoped]) -> str:
    sums = flops_by(products, lambda one: one.phase)
    return ", ".join(f"{phase} {_flops(sums[phase])}" for phase in PHASES if phase in sums) or "nothing"


def _dtypes(products: list[Scoped]) -> str:
    sums = flops_by(products, lambda one: one.product.dtype)
    return "multiplied in " + (", ".join(f"{dtype} {_flops(n)}" for dtype, n in sums.items()) or "nothing")


def _top(products: list[Scoped], depth: int, count: int) -> list[str]:
    """The scopes with the most operations at each depth."""
    total = sum(one.product.total_flops for one in products) or 1.0
    deepest = max((len(one.scope) for one in products), default=0)
    lines = []
    for level in range(1, (deepest if depth < 0 else min(depth, deepest)) + 1):
        inside = [one for one in products if len(one.scope) >= level]
        sums = list(flops_by(inside, lambda one, level=level: "/".join(one.scope[:level])).items())[:count]  # type: ignore[misc]
        lines.append(f"most at depth {level}: " + ", ".join(f"{name} {n / total:.0%}" for name, n in sums))
    return lines


def _by_scope(products: list[Scoped], depth: int) -> list[str]:
    """A table of scopes: the operations of each, with all that is in it."""
    sums: _Sums = {}
    for one in products:
        scope = one.scope or (_NO_SCOPE,)
        for level in range(1, (len(scope) if depth < 0 else min(depth, len(scope))) + 1):
            _add(sums, scope[:level], one)
    named = {"  " * len(scope) + scope[-1]: phases for scope, phases in sorted(sums.items())}
    return _table("matrix products by scope", list(named.items()), products)


def _by_line(products: list[Scoped]) -> list[str]:
    """A table of the source lines with the most operations."""
    sums: _Sums = {}
    for one in products:
        _add(sums, (one.product.source or "(unknown)",), one)
    most = sorted(sums.items(), key=lambda item: -sum(item[1].values()))[:_MOST_LINES]
    return _table("matrix products by line", [(f"  {line}", phases) for (line,), phases in most], products)


def _by_loop(products: list[Scoped]) -> list[str]:
    """A table of loops, one in another by the product of their runs."""
    sums: _Sums = {}
    for one in products:
        runs = " x ".join("?" if trips is None else str(trips) for trips in one.loops)
        _add(sums, (runs or _NO_LOOP,), one)
    rows = [(f"  {runs}", phases) for (runs,), phases in sums.items()]
    return _table("matrix products by loop", rows, products)


_Sums = dict[tuple[str, ...], dict[str, float]]
"""Operations by phase, of each row of a table."""


def _add(sums: _Sums, key: tuple[str, ...], one: Scoped) -> None:
    phases = sums.setdefault(key, {})
    phases[one.phase] = phases.get(one.phase, 0.0) + one.product.total_flops


def _table(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], products: list[Scoped]) -> list[str]:
    """A row of operations by phase for each name."""
    total = sum(one.product.total_flops for one in products) or 1.0
    cells: list[tuple[str, ...]] = [(title, *PHASES, "all", "share")]
    for name, phases in rows:
        whole = sum(phases.values())
        by_phase = [_flops(phases[phase]) if phase in phases else "-" for phase in PHASES]
        cells.append((name, *by_phase, _flops(whole), f"{whole / total:.0%}"))
    return aligned(cells, right=range(1, len(cells[0])))


def _flops(number: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}FLOP"
    return f"{number:.0f} FLOP"
