"""Family: the plans between the most frugal one and the one that uses all the memory it can."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
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
    """

    keep: bool
    saves: bool
    stays: bool
    parks: bool


class MemoryUse(NamedTuple):
    """A use of memory, and the time that it saves.

    Attributes:
        choice: The field of `Choices` that it adds to: `"saves"`, `"persistent"`, `"keep"` or `"resident"`.
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
        start: The most frugal plan.
        graphs: Graphs to retain, the most time for their bytes first.
        stays: Weights and activations. Weights that never cross again come first: they save two copies a step.
        compute_s: Seconds of compute at the start.
        copies_s: Seconds of copies to the device once memory has gone to `first`.
        first: What memory goes to before anything else.
    """

    start: Choices
    graphs: tuple[MemoryUse, ...]
    stays: tuple[MemoryUse, ...]
    compute_s: float
    copies_s: float
    first: tuple[MemoryUse, ...] = ()

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
        graphs = [seconds.graph(b) for b in builder.workload.backward_blocks() if b not in start.saves]
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
        return Family(start, tuple(graphs if freedom.saves else ()), stays, seconds.compute(start.saves), copies, first)

    def plan(self, uses: Sequence[MemoryUse]) -> Choices:
        """The plan that uses memory in these ways."""
        numbers: dict[str, list[int]] = {"saves": [*self.start.saves], "persistent": [], "keep": [], "resident": []}
        for use in uses:
            numbers[use.choice].append(use.number)
        return replace(
            self.start,
            saves=tuple(sorted(numbers["saves"])),
            keep=max(numbers["keep"], default=self.start.keep),
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
        self._seconds = OpSeconds(machine).of_kernels

    def compute(self, saves: Collection[int]) -> float:
        """Of all forwards and backwards."""
        forward = sum(self._seconds(block.forward) for block in self._workload.blocks)
        backward = sum(self._backward(block, is_saved=block in saves) for block in self._workload.backward_blocks())
        return forward * self._kind.micro_batches + backward

    def graph(self, block: int) -> MemoryUse:
        """A block's graphs."""
        nbytes = self._workload.blocks[block].saved_bytes * self._kind.micro_batches
        return MemoryUse(
            "saves", block, nbytes, self._backward(block, is_saved=False) - self._backward(block, is_saved=True)
        )

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
        parked = parked_values(workload, self._kind, keep=start.keep, saves=start.saves)
        everything = keep_all(workload)
        found: list[MemoryUse] = []
        for block in sorted(parked, reverse=True):
            nbytes = number * sum(workload.values[value].nbytes for value in parked[block])
            found.append(MemoryUse("keep", everything - block, nbytes, nbytes / self._machine.h2d_bytes_per_s))
        return tuple(found)

    def _backward(self, block: int, *, is_saved: bool) -> float:
        whole = self._workload.blocks[block].whole_backward
        return sum(self._seconds(whole(is_saved, number)) for number in range(self._kind.micro_batches))
