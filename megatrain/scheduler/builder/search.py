"""Search: of the plans that fit a budget, one whose step is short.

Plans are the rungs of ladders: from the most frugal plan, memory goes step by step to what saves time on the longer
stream. A few ladders are climbed, and the steps of the plans where they end are simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices, with_late_offloads
from megatrain.scheduler.builder.stays import by_benefit
from megatrain.scheduler.effects import keep_all, parked_values
from megatrain.scheduler.simulate import OpSeconds, simulate_books
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


def result_bytes(workload: Workload, block: int) -> int:
    """Bytes of the results that a block may keep."""
    return sum(value.nbytes for value in workload.values if value.is_result and value.producer == block)


def spared_seconds(workload: Workload, block: int, seconds: OpSeconds) -> float:
    """Seconds by which the backward of a block gets shorter if it finds its results."""
    work = workload.blocks[block]
    return 0.0 if work.kept is None else seconds.of_kernels(work.forward) - seconds.of_kernels(work.kept.repeated)


def sparing_results(workload: Workload, machine: Hardware) -> tuple[int, ...]:
    """The blocks whose backward gets shorter with results that are there.

    The last one's backward follows its forward at once: nothing is gained there that its graph wouldn't.
    """
    seconds = OpSeconds(machine)
    return tuple(b for b in workload.backward_blocks()[:-1] if spared_seconds(workload, b, seconds) > 0)


def spared_bytes(workload: Workload, kind: StepKind, block: int) -> int:
    """Bytes of the host that aren't needed where the device updates a block: its state, and gradients that wait."""
    work = workload.blocks[block]
    return (
        work.state_bytes - work.frozen_bytes + work.optimizer_bytes + work.landing_bytes * (kind.updates == "deferred")
    )


def within(workload: Workload, kind: StepKind, blocks: Sequence[int], most_bytes: int | None) -> tuple[int, ...]:
    """The last of some blocks, whose results take no more than so many bytes together; None is any number."""
    chosen: list[int] = []
    for block in reversed(blocks):
        nbytes = kind.micro_batches * result_bytes(workload, block)
        most_bytes = None if most_bytes is None else most_bytes - nbytes
        if most_bytes is not None and most_bytes < 0:
            break
        chosen.append(block)
    return tuple(reversed(chosen))


# What a second of copies counts in seconds of compute: streams overlap less well than their sums say, in either way.
_WEIGHTS = (0.0, 0.7, 1.4, 2.0, 4.0, inf)
# A ladder whose fastest plan is faster than the best one by less than this part isn't worth climbing.
_NEAR = 0.002
# Updates on the device that make a step no shorter than so much aren't worth the copies when somebody looks.
_WORTH = 0.98


@dataclass(frozen=True, slots=True)
class Freedom:
    """Which choices the caller left open, and how.

    Args:
        parks: Values may be parked for the sake of time alone. Else memory goes to them first: on the host, too, they
            take memory.
        results: The blocks whose results may be kept.
    """

    keep: bool
    saves: bool
    stays: bool
    parks: bool
    results: tuple[int, ...] = ()
    is_any_slots: bool = True


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
        """The plans from a start."""
        seconds = _Seconds(builder, machine)
        blocks = builder.workload.blocks
        graphs = [seconds.graph(b, start) for b in builder.workload.backward_blocks() if b not in start.saves]
        if not freedom.parks:
            graphs += [seconds.results(b) for b in freedom.results if b not in start.saves]
        graphs.sort(key=lambda use: (-use.seconds / max(1, use.nbytes), -use.number))
        streamed = [b for b, block in enumerate(blocks) if block.state_bytes > 0 and b not in start.device_updates]
        weights = [seconds.weights(b) for b in streamed]
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

    def first_blocks_first(self) -> Family:
        """The same plans, but of persistent weights of one size those of the first two blocks come first.

        Nothing runs at the beginning of a step while these weights come.
        """
        sizes = {use.nbytes: place for place, use in reversed([*enumerate(self.stays)]) if use.choice == "persistent"}

        def place(at: int, use: MemoryUse) -> tuple[int, bool, int]:
            if use.choice != "persistent":
                return at, True, at
            return sizes[use.nbytes], use.number > 1, at

        order = sorted(enumerate(self.stays), key=lambda each: place(*each))
        return replace(self, stays=tuple(use for _, use in order))

    def ladder(self, weight: float = 1.0) -> Iterator[MemoryUse]:
        """Yields all uses of memory: the next one is always of the stream that is the longer one by then.

        A second of copies counts `weight` seconds of compute.
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
        works = enumerate(self._workload.blocks)
        forward = sum(self._op_seconds.of_kernels(block.forward, b in plan.recorded) for b, block in works)
        backward = sum(self._backward(b, plan, is_saved=b in plan.saves) for b in self._workload.backward_blocks())
        blocks = self._workload.blocks
        updates = sum(self._op_seconds.of_kernels(blocks[b].device_update) for b in plan.device_updates)
        return forward * self._kind.micro_batches + backward + updates

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
        works = map(whole, range(self._kind.micro_batches))
        return sum(self._op_seconds.of_kernels(each, block in plan.recorded) for each in works)


class Search:
    """Finds plans that fit."""

    def __init__(self, builder: Builder, memory: int, freedom: Freedom, machine: Hardware) -> None:
        self._builder, self._memory, self._freedom, self._machine = builder, memory, freedom, machine
        self._seconds: dict[Choices, float] = {}

    def fits(self, plan: Choices) -> bool:
        """Tells whether a plan fits."""
        return self._builder.device_bytes(plan) <= self._memory

    def balanced(self, start: Choices) -> Choices:
        """The plan that takes what saves time on the longer stream, step by step, as long as it fits."""
        return self._climbed(self._family(start), 1.0)

    def shortest(self, plans: Sequence[Choices]) -> Choices:
        """The plan with the shortest simulated step; of equal ones the first."""
        return plans[0] if len(plans) == 1 else min(plans, key=self._time)

    def fastest(self, known: Sequence[Choices], starts: Iterable[Choices]) -> Choices:
        """The plan with the shortest simulated step of `known` and those from starts that fit; of equals the first."""
        best = self.shortest(known)
        families = [self._family(start) for start in starts if self.fits(start)]
        families += [family.first_blocks_first() for family in families]
        nearest: Family | None = None
        for family in families:
            # With all the memory that it can use, a family is as fast as it gets.
            fastest = with_late_offloads(family.everything, self._builder.kind)
            if self._time(best) > self._time(fastest) * (1 + _NEAR):
                found = self._climbed(family, 1.0)
                if nearest is None or self._time(found) < self._time(best):
                    nearest = family
                best = self.shortest([best, found])
        if nearest is None:
            return best
        ways = dict.fromkeys([nearest, nearest.first_blocks_first()])
        return self.shortest([best, *(self._climbed(way, weight) for way in ways for weight in _WEIGHTS)])

    def updated_there(self, best: Choices, start: Choices, least: int = 0) -> Choices:
        """The plan with the shortest step, where blocks may be updated on the device.

        Tried are as many blocks as fit, a half and a quarter of them; then numbers around the best of these. Each has
        beside it what else fits. Those that spare the host `least` bytes count; if none does, that of the most blocks.
        """
        workload, kind = self._builder.workload, self._builder.kind
        blocks = workload.blocks
        able = [b for b, block in enumerate(blocks) if block.optimizer_bytes > 0]
        able.sort(key=lambda b: by_benefit(b, blocks[b].update_bytes))
        spared = [0, *accumulate(spared_bytes(workload, kind, b) for b in able)]

        def plan(count: int) -> Choices:
            return replace(start, device_updates=tuple(sorted(able[:count])))

        most = bisect_right(range(1, len(able) + 1), False, key=lambda count: not self.fits(plan(count)))
        if most == 0:
            return best
        fewest = min(most, bisect_left(spared, least))
        found: dict[int, Choices] = {}
        counts = {most, most // 2, most // 4, fewest}
        for _ in range(2):  # time falls with more of them, and then rises: look closer at the least
            counts = {max(count, fewest) for count in counts}.difference({0}, found)
            found |= {count: self.balanced(plan(count)) for count in sorted(counts, reverse=True)}
            known = [0, *sorted(found)]
            at = min(range(1, len(known)), key=lambda index: self._time(found[known[index]]))
            counts = {(known[at] + other) // 2 for other in known[at - 1 : at + 2]}
        shortest = self.shortest(list(found.values()))
        return shortest if fewest or self._time(shortest) < self._time(best) * _WORTH else best

    def _family(self, start: Choices) -> Family:
        return Family.of(self._builder, start, self._freedom, self._machine)

    def _climbed(self, family: Family, weight: float) -> Choices:
        taken: tuple[MemoryUse, ...] = ()
        left = tuple(family.ladder(weight))
        while left:
            count = self._most_uses(family, taken, left)
            taken, left = (*taken, *left[:count]), left[count:]
            # The next one is too large, and so are others of its kind; smaller ones may fit.
            left = tuple(use for use in left[1:] if not _is_as_large(use, left[0]))
        plan = self._stating_all_kept(family.plan(taken))
        late = with_late_offloads(plan, self._builder.kind)
        return late if self.fits(late) else plan

    def _stating_all_kept(self, plan: Choices) -> Choices:
        """The same plan with the largest `keep` that parks as little: what retained graphs hold isn't parked anyway."""
        if not self._freedom.keep:
            return plan
        workload, kind = self._builder.workload, self._builder.kind
        parked = parked_values(workload, kind, keep=plan.keep, saves=plan.saves, results=plan.results)
        return replace(plan, keep=keep_all(workload) - 1 - max(parked, default=-1))

    def _most_uses(self, family: Family, taken: tuple[MemoryUse, ...], left: tuple[MemoryUse, ...]) -> int:
        """How many of the uses that are left fit, where none does and more of them take more memory.

        A use takes about its own bytes at the peak, or none there. So the guess between two known numbers is good; a
        guess that leaves more than half of the numbers is followed by one in their middle.
        """

        def nbytes(count: int) -> int:
            return self._builder.device_bytes(family.plan((*taken, *left[:count])))

        sizes = [0, *accumulate(use.nbytes for use in left)]
        low, high = 0, len(left) + 1
        halves = False
        while (width := high - low) > 1:
            room = float(self._memory - nbytes(low))
            if high <= len(left):
                room *= (sizes[high] - sizes[low]) / (nbytes(high) - nbytes(low))
            guess = (low + high) // 2 if halves else bisect_right(sizes, sizes[low] + room) - 1
            guess = min(high - 1, max(low + 1, guess))
            low, high = (guess, high) if nbytes(guess) <= self._memory else (low, guess)
            halves = not halves and 2 * (high - low) > width
        return low

    def _time(self, plan: Choices) -> float:
        if plan not in self._seconds:
            self._seconds[plan] = simulate_books(self._builder.books(plan), self._machine).step_s
        return self._seconds[plan]


def _is_as_large(use: MemoryUse, other: MemoryUse) -> bool:
    return use.choice == other.choice and (use.choice == "keep" or use.nbytes >= other.nbytes)
