"""How much of the communication a compiled schedule hides behind arithmetic. Pure Python over a parsed program.

Walks the schedule with two clocks. Matrix products and convolutions advance the first at the rate of their dtype; a
collective occupies the second, the link, for its bytes at the target's bandwidth, one after the other. A collective
that starts asynchronously runs beside whatever is scheduled up to its `-done`, where the first clock waits for what is
left; a synchronous one is waited for at once. What was waited for is exposed. Each iteration of a loop is alike.

Without a memory bandwidth everything but products and convolutions is taken to cost no time, so the hidden share is a
lower bound. With one, each instruction takes the longer of its products and the bytes that it reads and writes
(`traffic`). Neither counts latency, which matters for small collectives, nor that collectives slow down what runs
beside them.
"""

import dataclasses
from collections.abc import Callable

from zero2jax.programs.hlo import Around, Collective, Instruction, Module, collective_kind, make_collective
from zero2jax.programs.products import Product, Products
from zero2jax.programs.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast things go; functions of a collective and of a product, since links and dtypes differ.

    Attributes:
      flops: floating-point operations per second of matrix products.
      bytes_per_s: bytes per second that one device sends for a given collective.
      product_flops: the same as `flops` for a given product; None takes `flops` for all.
      memory_bytes_per_s: bytes per second that a device reads and writes in its memory; None takes no time.
    """

    flops: float
    bytes_per_s: Callable[[Collective], float]
    product_flops: Callable[[Product], float] | None = None
    memory_bytes_per_s: float | None = None

    def seconds(self, product: Product) -> float:
        """Time of one run of a product."""
        return product.flops / (self.flops if self.product_flops is None else self.product_flops(product))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One collective of the schedule and what runs beside it.

    Attributes:
      collective: the collective.
      flops_inside: operations scheduled between its start and its done, each time it runs.
      seconds: time on the link, each time.
      exposed_s: the part of `seconds` that the schedule waits for.
    """

    collective: Collective
    flops_inside: float
    seconds: float
    exposed_s: float

    @property
    def exposed_bytes(self) -> float:
        """Bytes per step that are not hidden, in the unit of `Collective.num_bytes`."""
        share = self.exposed_s / self.seconds if self.seconds else 0.0
        return share * self.collective.total_bytes


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The schedule at given rates: products and collectives of one step, in the order of the schedule.

    Attributes:
      step_s: seconds of the step: what is computed, one after the other, and what is waited for.
      compute_s: seconds of the products.
      products: matrix products and convolutions.
      overlaps: collectives.
    """

    step_s: float
    compute_s: float
    products: tuple[Product, ...]
    overlaps: tuple[Overlap, ...]

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        return sum(p.total_flops for p in self.products)

    @property
    def flops_by_dtype(self) -> dict[str, float]:
        """The same by the dtype that is multiplied in, most first."""
        sums: dict[str, float] = {}
        for p in self.products:
            sums[p.dtype] = sums.get(p.dtype, 0.0) + p.total_flops
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def exposed_s(self) -> float:
        """Seconds of a step that wait for communication."""
        return sum(o.exposed_s * o.collective.trips for o in self.overlaps)

    @property
    def communication_s(self) -> float:
        """Seconds of a step during which the link is busy."""
        return sum(o.seconds * o.collective.trips for o in self.overlaps)

    @property
    def hidden_share(self) -> float | None:
        """The share of `communication_s` that is not waited for; None if nothing is communicated."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s else None


def simulate(module: Module, rates: Rates, *, as_before_conversion: bool = False) -> Timeline:
    """Run the two clocks over a program; for `as_before_conversion` see `Products`."""
    products = Products(module, as_before_conversion=as_before_conversion)
    run = _Simulation(rates, products).run(module.entry, Around())
    overlaps = tuple(_overlap(one) for one in run.collectives)
    return Timeline(run.now, run.compute_s, tuple(run.products), overlaps)


@dataclasses.dataclass
class _OnLink:
    """A collective's time on the link, and how much of it was waited for."""

    collective: Collective
    start: float
    end: float
    flops_before: float
    flops_inside: float = 0.0
    exposed_s: float = 0.0


@dataclasses.dataclass
class _Run:
    """One run of a computation: both clocks, and what has been passed."""

    now: float = 0.0
    link_free: float = 0.0
    flops: float = 0.0
    compute_s: float = 0.0
    products: list[Product] = dataclasses.field(default_factory=list)
    collectives: list[_OnLink] = dataclasses.field(default_factory=list)
    on_link: list[_OnLink] = dataclasses.field(
        default_factory=list
    )  # those not inside of a called computation

    def begin(self, collective: Collective, seconds: float) -> _OnLink:
        """Queue a collective behind those that occupy the link."""
        start = max(self.now, self.link_free)
        self.link_free = start + seconds
        one = _OnLink(collective, start, self.link_free, self.flops)
        self.on_link.append(one)
        self.collectives.append(one)
        return one

    def finish(self, one: _OnLink) -> None:
        """Wait for a collective and those that occupy the link before it; each gets its part of the wait."""
        one.flops_inside = self.flops - one.flops_before
        for other in self.on_link:
            other.exposed_s += max(0.0, min(one.end, other.end) - max(self.now, other.start))
        self.now = max(self.now, one.end)

    def add(self, inner: "_Run", times: int) -> None:
        """Run a computation inside of this one; its lists are of all of its runs already."""
        self.now += times * inner.now
        self.flops += times * inner.flops
        self.compute_s += times * inner.compute_s
        self.products += inner.products
        self.collectives += inner.collectives


class _Simulation:
    def __init__(self, rates: Rates, products: Products):
        self.rates, self.products, self.module = rates, products, products.module
        self.traffic = Traffic(self.module)

    def run(self, name: str, around: Around) -> _Run:
        """One run of a computation."""
        instructions = self.module.instructions(name)
        types = {i.name: i.type for i in instructions}
        run = _Run()
        pending: dict[str, _OnLink] = {}
        for i in instructions:
            if collective_kind(i):
                collective = make_collective(i, types, around)
                one = run.begin(collective, collective.wire_bytes / self.rates.bytes_per_s(collective))
                if collective.is_async:
                    pending[i.name] = one
                else:
                    run.finish(one)
            elif i.opcode.endswith("-done") and i.operands and i.operands[0] in pending:
                run.finish(pending.pop(i.operands[0]))
            elif i.opcode == "while":
                trips = self.module.trips(name, i)
                run.add(self.run(i.body, around.inside(i.body, trips)), 1 if trips is None else trips)
            elif i.opcode in ("call", "conditional", "async-start"):
                branches = [self.run(target, around) for target in i.called]
                run.add(max(branches, key=lambda branch: branch.now, default=_Run()), 1)
            else:
                bandwidth = self.rates.memory_bytes_per_s
                moving_s = self.traffic.of(i, types) / bandwidth if bandwidth else 0.0
                run.now += max(self._multiply(run, name, i, around), moving_s)
        return run

    def _multiply(self, run: _Run, name: str, i: Instruction, around: Around) -> float:
        """Seconds of the products in an instruction."""
        total = 0.0
        for product in self.products.of(name, i):
            total += self.rates.seconds(product)
            run.flops += product.flops
            run.products.append(dataclasses.replace(product, trips=around.trips))
        run.compute_s += total
        return total


def _overlap(one: _OnLink) -> Overlap:
    return Overlap(
        collective=one.collective,
        flops_inside=one.flops_inside,
        seconds=one.end - one.start,
        exposed_s=one.exposed_s,
    )
