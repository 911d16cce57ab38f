"""What a compiled step takes and communicates: `audit(compiled)`, and `assert_collectives` for tests.

Everything is read from the program that will run: memory as the compiler allocates it, collectives with their bytes,
each multiplied by the trip counts of the loops around it; a loop that ends when the data say so counts once. Bytes are
those of the full value on one device: what an all-gather produces, what a reduction takes in.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from zero2jax.base.tables import aligned
from zero2jax.programs.groups import axis_names
from zero2jax.programs.hlo import (
    KINDS,
    Array,
    Collective,
    Module,
    module_collectives,
    parse,
    type_bytes,
)

SMALL_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device as the compiler allocates them; `host_bytes` lie in host memory, the others on the device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Peak of the step: arguments, outputs that are not written into donated arguments, temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one kind along one axis.

    Attributes:
      kind: `all-gather`, `reduce-scatter`, ...
      axis: mesh axes it runs along, joined by `+`; empty if the mesh is unknown or the groups lie along none.
      across: whether a group spans several hosts.
      num_instructions: instructions in the program; the compiler may combine several collectives into one.
      num_runs: how often they run per step, all together.
      bytes_per_step: bytes per device and step.
      largest_bytes: bytes of the largest single run.
      at_least: whether some of them run in a loop whose trip count depends on data, which counts once.
    """

    kind: str
    axis: str
    across: bool
    num_instructions: int
    num_runs: int
    bytes_per_step: int
    largest_bytes: int
    at_least: bool = False


@dataclasses.dataclass(frozen=True)
class Audit:
    """The reading of one compiled program, per device.

    Attributes:
      memory: bytes as the compiler allocates them.
      collectives: every collective, in the order of the schedule.
      mesh_shape: axes of the mesh that the program was compiled for; empty if it is not known.
      devices_per_host: devices of one host, to tell in-node collectives from others.
      module: the parsed program.
    """

    memory: Memory
    collectives: tuple[Collective, ...]
    mesh_shape: Mapping[str, int]
    devices_per_host: int
    module: Module = dataclasses.field(repr=False)

    def axis(self, collective: Collective) -> str:
        """The mesh axes a collective runs along, joined by `+`."""
        return "+".join(axis_names(collective.groups, self.mesh_shape))

    def across(self, collective: Collective) -> bool:
        """Whether a group of a collective spans several hosts."""
        return any(len({d // self.devices_per_host for d in group}) > 1 for group in collective.groups)

    def rows(self, collectives: Iterable[Collective] | None = None) -> tuple[CollectiveRow, ...]:
        """The collectives (all, by default) summed by kind and axis, in the order of `KINDS`."""
        groups: dict[tuple[str, str, bool], list[Collective]] = {}
        for c in self.collectives if collectives is None else collectives:
            groups.setdefault((c.kind, self.axis(c), self.across(c)), []).append(c)
        in_order = sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1:]))
        return tuple(
            CollectiveRow(
                kind=kind,
                axis=axis,
                across=across,
                num_instructions=len(members),
                num_runs=sum(c.trips for c in members),
                bytes_per_step=sum(c.total_bytes for c in members),
                largest_bytes=max(c.num_bytes for c in members),
                at_least=not all(c.trips_known for c in members),
            )
            for (kind, axis, across), members in in_order
        )

    def as_dict(self) -> dict[str, Any]:
        """The audit as plain JSON values."""
        return {
            "memory": dataclasses.asdict(self.memory) | {"total_bytes": self.memory.total_bytes},
            "collectives": [dataclasses.asdict(row) for row in self.rows()],
            "mesh": dict(self.mesh_shape),
        }

    def table(self) -> str:
        """The audit as text."""
        m = self.memory
        lines = [
            f"arguments {m.argument_bytes:,}  outputs {m.output_bytes:,} (in place {m.alias_bytes:,})  "
            f"temporary {m.temp_bytes:,}  total {m.total_bytes:,} bytes per device"
        ]
        rows = [("collective", "axis", "", "instructions", "runs", "bytes per step", "largest")]
        for row in self.rows():
            place = "across hosts" if row.across else "in node"
            counts = (row.num_instructions, row.num_runs, row.bytes_per_step, row.largest_bytes)
            instructions, runs, total, largest = (f"{n:,}" for n in counts)
            least = ">= " if row.at_least else ""
            sums = (instructions, f"{least}{runs}", f"{least}{total}", largest)
            rows.append((row.kind, row.axis or "?", place, *sums))
        return "\n".join([*lines, *aligned(rows, right=(3, 4, 5, 6))])

    __str__ = table


def audit(compiled: Compiled, *, mesh: Mesh | None = None, devices_per_host: int = 8) -> Audit:
    """Read memory and collectives out of any compiled step.

    Args:
      compiled: from `jax.jit(step).lower(...).compile()`, or `engine.lower(batch).compile()`.
      mesh: the mesh it was compiled for, to name axes; by default that of its arguments' shardings.
      devices_per_host: devices of one host.

    Raises:
      ValueError: the backend does not report the memory or the text of compiled programs.

    Example:
      >>> import jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(8)).compile()
      >>> audit(compiled).memory.alias_bytes
      32
    """
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    if analysis is None or text is None:
        raise ValueError(
            "auditing a compiled step: its backend reports neither memory nor program text. Compile it for a GPU "
            "target or for CPU devices."
        )
    module = parse(text)
    memory = Memory(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        host_bytes=analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes,
    )
    return Audit(
        memory=memory,
        collectives=tuple(module_collectives(module)),
        mesh_shape=dict(mesh.shape) if mesh is not None else _mesh_shape(compiled),
        devices_per_host=devices_per_host,
        module=module,
    )


def assert_collectives(
    compiled: Compiled | Audit,
    expected: Mapping[str, int | range],
    *,
    bytes_per_step: Mapping[str, int] | None = None,
    axis: str | None = None,
    small_bytes: int = SMALL_BYTES,
    donated: bool = False,
) -> None:
    """Raise an AssertionError unless a compiled step communicates what it should, and nothing else.

    Args:
      compiled: the compiled step, or its audit.
      expected: for each kind, how often it runs per step, loops multiplied out, as a number or a range. A kind that
        is not named must not occur. On GPUs the compiler combines neighbours: expect a range there, or bytes.
      bytes_per_step: for each kind named here, exact bytes per device and step.
      axis: look only at collectives along this mesh axis (`"data"`, `"data+model"`).
      small_bytes: collectives of at most this many bytes (losses, norms) are left out.
      donated: every output larger than `small_bytes` must be written into a donated argument.

    A collective in a loop that ends when the data say so cannot be counted, and fails.

    Example:
      One reduce-scatter per layer and one for the embedding, no all-reduce above 64 KiB, everything donated::

        assert_collectives(compiled, {"reduce-scatter": 33, "all-gather": range(33, 100)}, donated=True)
    """
    read = compiled if isinstance(compiled, Audit) else audit(compiled)
    unknown = sorted({*expected, *(bytes_per_step or {})} - set(KINDS))
    if unknown:
        raise ValueError(
            f"checking collectives: there is no kind {unknown[0]!r}. There are {', '.join(KINDS)}."
        )
    large = [c for c in read.collectives if c.num_bytes > small_bytes and axis in (None, read.axis(c))]
    problems = []
    for kind in KINDS:
        members = [c for c in large if c.kind == kind]
        runs, total = sum(c.trips for c in members), sum(c.total_bytes for c in members)
        wanted = expected.get(kind, 0)
        if runs not in (wanted if isinstance(wanted, range) else (wanted,)):
            problems.append(f"{kind}: {runs} runs per step, expected {_words(wanted)}{_listed(members)}")
        uncounted = [c for c in members if not c.trips_known]
        if uncounted:
            problems.append(
                f"{kind}: how often {len(uncounted)} of them run cannot be counted: a loop around them ends when the "
                f"data say so{_listed(uncounted)}"
            )
        if bytes_per_step and kind in bytes_per_step and total != bytes_per_step[kind]:
            problems.append(f"{kind}: {total:,} bytes per step, expected {bytes_per_step[kind]:,}")
    kept = _kept_outputs(read.module, small_bytes) if donated else []
    if kept:
        problems.append(f"{sum(kept):,} bytes of the outputs are not written into donated arguments")
    if problems:
        raise AssertionError(
            f"collectives above {small_bytes:,} bytes of the compiled step:\n"
            + "\n".join(problems)
            + f"\n\n{read}"
        )


def _mesh_shape(compiled: Compiled) -> dict[str, int]:
    """The axes of the mesh that the arguments are placed on; empty if they are not placed by name."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    return {}


def _kept_outputs(module: Module, small_bytes: int) -> list[int]:
    """Bytes of each output above `small_bytes` that has a place of its own."""
    root = next((i.type for i in module.instructions(module.entry) if i.is_root), ())
    outputs = {(): root} if isinstance(root, Array) else {(n,): kind for n, kind in enumerate(root)}
    sizes = {path: type_bytes(kind) for path, kind in outputs.items()}
    return [size for path, size in sizes.items() if path not in module.aliases and size > small_bytes]


def _words(wanted: int | range) -> str:
    return f"{wanted.start} to {wanted.stop - 1}" if isinstance(wanted, range) else str(wanted)


def _listed(members: list[Collective]) -> str:
    """The first few of the collectives in question."""
    some = [
        f"{c.name} ({c.num_bytes:,} bytes x {c.trips}, from {c.op_name or 'nowhere named'})"
        for c in members[:4]
    ]
    more = f" and {len(members) - 4} more" if len(members) > 4 else ""
    return f": {', '.join(some)}{more}" if some else ""
