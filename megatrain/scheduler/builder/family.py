"""Family: the plans between the most frugal one and the one that uses all the memory it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.results import result_bytes, spared_seconds
from megatrain.scheduler.builder.stays import by_benefit
from megatrain.scheduler.parking import keep_all, parked_values
from megatrain.scheduler.timing.costs import OpSeconds


@dataclass(frozen=True, slots=True)
class Freedom:
    """Which choices the caller left open.

    Args:
        keep: `keep` is to be chosen.
        saves: The retained graphs are.
        stays: The blocks whose weights stay on the device are.
        parks: Values may be parked for the sake of time alone. Else memory goes to them first: on the host, too, they
            take memory.
        results: The blocks whose results may be kept.
    """

    keep: bool
    saves: bool
    stays: bool
    parks: bool
    results: tuple[int, ...] = ()


class MemoryUse(NamedTuple):
    """A use of memory, and the time that it saves.

    Attributes:
        choice: The field of `Choices` that it adds to: `"saves"`, `"results"`, `"persistent"`, `"keep"` or
            `"resident"`.
        number: The block, or the new value of `keep`.
        nbytes: Device bytes that it takes alone.
        seconds: By which compute gets shorter (of `"saves"`), or copies to the device.
    """

    choice: str
    number: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Family:
    """Plans with more and more uses of memory: retained graphs save compute, what stays on the device saves copies.

    Args:
        start: The most frugal plan. The results that it keeps are parked, or stay as other values do.
        graphs: Graphs to retain, and results to keep on the device unless they may be parked, the most time for their
            bytes first.
        stays: Weights and activations. Weights that never cross again come first: they save two copies a step.
        compute_s: Seconds of compute at the start.
        copies_s: Seconds of copies to the device once memory has gone to `first`.
        first: What memory goes to before anything else.
        keep_all: The `keep` under which nothing is parked, if results must not be; else None.
    """

    start: Choices
    graphs: tuple[MemoryUse, ...]
    stays: tuple[MemoryUse, ...]
    compute_s: float
    copies_s: float
    first: tuple[MemoryUse, ...] = ()
    keep_all: int | None = None

    @property
    def everything(self) -> Choices:
        """The plan of unlimited memory."""
        return self.plan((*self.first, *self.graphs, *self.stays))

    @staticmethod
    def of(builder: Builder, start: Choices, freedom: Freedom, machine: Hardware) -> Family:
        """The plans from a start.

        Args:
            builder: Of the workload.
            start: The most frugal plan.
            freedom: Which choices are open.
            machine: Whose rates weigh compute against copies.
        """
        seconds = _Seconds(builder, machine)
        blocks = builder.workload.blocks
        graphs = [seconds.graph(b, start) for b in builder.workload.backward_blocks() if b not in start.saves]
        if not freedom.parks:
            graphs += [seconds.results(b) for b in freedom.results if b not in start.saves]
        graphs.sort(key=lambda use: (-use.seconds / max(1, use.nbytes), -use.number))
        weights = [seconds.weights(b) for b, block in enumerate(blocks) if block.state_bytes > 0]
        weights.sort(key=lambda use: by_benefit(use.number, use.nbytes))
        persistent = [use for use in weights if use.choice == "persistent"]
        resident = [use for use in weights if use.choice == "resident" and blocks[use.number].has_backward]
        # The largest ones, an embedding and a head, need no bytes of their own while one slot serves both.
        resident.sort(key=lambda use: use.nbytes)
        values = seconds.values(start)
        stays = (
            *(persistent if freedom.stays else ()),
            *(values if freedom.keep and freedom.parks else ()),
            *(resident if freedom.stays else ()),
        )
        copies = sum(use.seconds for uses in (weights, resident, values) for use in uses)
        first = () if freedom.parks or not freedom.keep else values
        copies -= sum(use.seconds for use in first)
        everything = None if freedom.parks else keep_all(builder.workload)
        chosen = tuple(graphs if freedom.saves else ())
        return Family(start, chosen, stays, seconds.compute(start), copies, first, everything)

    def plan(self, uses: Sequence[MemoryUse]) -> Choices:
        """The plan that uses memory in these ways."""
        numbers: dict[str, list[int]] = {"saves": [*self.start.saves], "results": [*self.start.results]}
        numbers |= {"persistent": [], "keep": [], "resident": []}
        for use in uses:
            numbers[use.choice].append(use.number)
        keep = max(numbers["keep"], default=self.start.keep)
        first = 0 if self.keep_all is None else self.keep_all - keep  # of the blocks whose values aren't parked
        results = {block for block in numbers["results"] if block >= first}.difference(numbers["saves"])
        return replace(
            self.start,
            saves=tuple(sorted(numbers["saves"])),
            results=tuple(sorted(results)),
            keep=keep,
            resident=tuple(sorted(numbers["resident"])),
            persistent=tuple(sorted(numbers["persistent"])),
        )

    def ladder(self, weight: float = 1.0) -> Iterator[MemoryUse]:
        """Yields all uses of memory: the next one is always of the stream that is the longer one by then.

        Args:
            weight: What a second of copies counts in seconds of compute.
        """
        graphs, stays = list(reversed(self.graphs)), list(reversed(self.stays))
        compute, copies = self.compute_s, self.copies_s
        yield from self.first
        while graphs or stays:
            if graphs and (not stays or compute >= copies * weight):
                compute -= graphs[-1].seconds
                yield graphs.pop()
            else:
                copies -= stays[-1].seconds
                yield stays.pop()


class _Seconds:
    """What the parts of a step take on a machine if nothing else slows them down."""

    def __init__(self, builder: Builder, machine: Hardware) -> None:
        self._workload, self._kind, self._machine = builder.workload, builder.kind, machine
        self._op_seconds = OpSeconds(machine)

    def compute(self, plan: Choices) -> float:
        """Of all forwards and backwards."""
        forward = sum(self._op_seconds.of_kernels(block.forward) for block in self._workload.blocks)
        backward = sum(self._backward(b, plan, is_saved=b in plan.saves) for b in self._workload.backward_blocks())
        return forward * self._kind.micro_batches + backward

    def graph(self, block: int, plan: Choices) -> MemoryUse:
        """A block's graphs."""
        nbytes = self._workload.blocks[block].saved_bytes * self._kind.micro_batches
        spared = self._backward(block, plan, is_saved=False) - self._backward(block, plan, is_saved=True)
        return MemoryUse("saves", block, nbytes, spared)

    def results(self, block: int) -> MemoryUse:
        """A block's results, on the device."""
        number = self._kind.micro_batches
        spared = spared_seconds(self._workload, block, self._op_seconds)
        return MemoryUse("results", block, number * result_bytes(self._workload, block), number * spared)

    def weights(self, block: int) -> MemoryUse:
        """A block's weights: frozen ones are persistent and save all copies, others are resident and save one."""
        work = self._workload.blocks[block]
        seconds = work.state_bytes / self._machine.h2d_bytes_per_s
        if work.is_mostly_frozen:
            return MemoryUse("persistent", block, work.state_bytes, seconds * (1 + work.has_backward))
        return MemoryUse("resident", block, work.state_bytes, seconds)

    def values(self, start: Choices) -> tuple[MemoryUse, ...]:
        """Parked values, by the value of `keep` from which on they stay."""
        workload, number = self._workload, self._kind.micro_batches
        parked = parked_values(workload, self._kind, keep=start.keep, saves=start.saves, results=start.results)
        everything = keep_all(workload)
        found: list[MemoryUse] = []
        for block in sorted(parked, reverse=True):
            nbytes = number * sum(workload.values[value].nbytes for value in parked[block])
            found.append(MemoryUse("keep", everything - block, nbytes, nbytes / self._machine.h2d_bytes_per_s))
        return tuple(found)

    def _backward(self, block: int, plan: Choices, *, is_saved: bool) -> float:
        whole = partial(self._workload.blocks[block].whole_backward, is_saved, has_results=block in plan.results)
        return sum(self._op_seconds.of_kernels(whole(number)) for number in range(self._kind.micro_batches))
