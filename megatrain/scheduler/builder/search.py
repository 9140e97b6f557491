"""Search: of all plans that fit a budget, the one whose simulated step is the shortest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import total_flops
from megatrain.scheduler.builder.draft import Builder, Choices, Draft
from megatrain.scheduler.parking import parked_values
from megatrain.scheduler.timing.simulate import simulate

# More than two slots let copies run further ahead, where blocks of many sizes take turns.
_MORE_SLOTS = 1
# So many plans along one axis are tried at once; then as many between the neighbours of the best.
_PROBES = 5
# A step that is longer than its bound by less than this part isn't worth a search.
_NEAR = 0.002


@dataclass(frozen=True, slots=True)
class _Family:
    """Plans along two axes: retained graphs save compute; activations and weights that stay save copies.

    Larger numbers take more memory and no more time. The order along an axis depends on no rate of a machine, so a
    faster machine, or more memory, chooses from the same plans.

    Args:
        start: The plan without any of it.
        saves: Blocks, in the order in which their graphs are retained.
        keeps: Values of `keep`, ascending; the first is that of `start`.
        resident: Blocks, in the order in which they become resident.
        frozen: Those of them that become persistent as well.
    """

    start: Choices
    saves: tuple[int, ...]
    keeps: tuple[int, ...]
    resident: tuple[int, ...]
    frozen: frozenset[int]

    @property
    def most_copies(self) -> int:
        """The largest number along the second axis."""
        return len(self.keeps) - 1 + len(self.resident)

    def plan(self, num_saves: int, num_copies: int) -> Choices:
        """The plan with so many further graphs, and so many of activations and weights that stay."""
        num_keeps = min(num_copies, len(self.keeps) - 1)
        return replace(
            self.start,
            saves=tuple(sorted((*self.start.saves, *self.saves[:num_saves]))),
            keep=self.keeps[num_keeps],
            resident=tuple(sorted(self.resident[: num_copies - num_keeps])),
            persistent=tuple(sorted(self.frozen.intersection(self.resident[: num_copies - num_keeps]))),
        )


class Search:
    """Finds the plan with the shortest step.

    Args:
        builder: Of the workload.
        memory: Device bytes that a plan may take.
        hardware: The machine on which it is to be short.
    """

    def __init__(self, builder: Builder, memory: int, hardware: Hardware) -> None:
        self._builder, self._memory, self._hardware = builder, memory, hardware
        self._drafts: dict[Choices, Draft] = {}
        self._seconds: dict[Choices, float] = {}

    def fastest(
        self, first: Draft, least: Choices, *, is_keep_free: bool, is_save_free: bool, is_slots_free: bool
    ) -> Draft:
        """The draft with the shortest step; of equal ones the first.

        Args:
            first: A draft that fits.
            least: The plan that parks and recomputes most.
            is_keep_free: Whether `keep` is to be chosen.
            is_save_free: Whether the retained graphs are.
            is_slots_free: Whether the number of slots is.
        """
        best = self._drafts[first.plan] = first
        counts = range(1, 3 + _MORE_SLOTS) if is_slots_free else [first.plan.num_slots]
        lates = [True, False] if self._builder.kind.micro_batches > 1 else [False]
        starts = [replace(least, num_slots=n, has_late_offloads=late) for late in lates for n in counts]
        families = [self._family(start, is_keep_free=is_keep_free, is_save_free=is_save_free) for start in starts]
        for family in families:
            # With all the memory that it can use, a family is as fast as it gets.
            bound = self._time(family.plan(len(family.saves), family.most_copies)) * (1 + _NEAR)
            if self._time(best.plan) > bound:
                found = self._fastest_of(self._without_giants(family))
                best = found if found is not None and self._time(found.plan) < self._time(best.plan) else best
        return best

    def _family(self, start: Choices, *, is_keep_free: bool, is_save_free: bool) -> _Family:
        blocks, kind = self._builder.workload.blocks, self._builder.kind
        free = [b for b in self._builder.workload.backward_blocks() if b not in start.saves] if is_save_free else []
        saves = sorted(free, key=lambda b: (-_ratio(total_flops(blocks[b].forward), blocks[b].saved_bytes), -b))
        keeps = self._keeps(start) if is_keep_free else (start.keep,)
        frozen = frozenset(b for b, work in enumerate(blocks) if work.is_mostly_frozen and kind.is_training_step)
        rest = range(len(blocks) - start.num_slots) if kind.is_training_step else ()
        resident = {b for b in rest if blocks[b].state_bytes > 0 and blocks[b].has_backward}
        return _Family(start, tuple(saves), keeps, tuple(sorted(resident | frozen, reverse=True)), frozen)

    def _without_giants(self, family: _Family) -> _Family:
        """The family without what doesn't fit beside the least plan: it would keep out all that comes after it."""
        blocks = self._builder.workload.blocks
        left = self._memory - self._draft(family.start).device_bytes
        number = self._builder.kind.micro_batches
        return replace(
            family,
            saves=tuple(b for b in family.saves if blocks[b].saved_bytes * number <= left),
            resident=tuple(b for b in family.resident if blocks[b].state_bytes <= left),
        )

    def _keeps(self, start: Choices) -> tuple[int, ...]:
        """The values of `keep` that make a difference."""
        workload, kind = self._builder.workload, self._builder.kind
        found: dict[int, int] = {}
        for keep in range(start.keep, len(workload.blocks) + 1):
            parked = parked_values(workload, kind, keep=keep, saves=start.saves)
            found.setdefault(sum(map(len, parked.values())), keep)
        return tuple(sorted(found.values()))

    def _fastest_of(self, family: _Family) -> Draft | None:
        """Along the graphs retained, each with as much else as fits. The time has one valley there, or nearly so."""
        if not self._fits(family.start):
            return None
        low, high = 0, self._largest(len(family.saves), lambda num_saves: family.plan(num_saves, 0))
        while True:
            step = max(1, -(-(high - low) // (_PROBES - 1)))
            probes = list(dict.fromkeys((*range(low, high, step), high)))
            drafts = [self._filled(family, num_saves) for num_saves in probes]
            at = min(range(len(probes)), key=lambda i: (self._time(drafts[i].plan), -probes[i]))
            if step == 1:
                return drafts[at]
            low, high = probes[max(0, at - 1)], probes[min(len(probes) - 1, at + 1)]

    def _filled(self, family: _Family, num_saves: int) -> Draft:
        count = self._largest(family.most_copies, lambda n: family.plan(num_saves, n))
        return self._draft(family.plan(num_saves, count))

    def _largest(self, most: int, plan: Callable[[int], Choices]) -> int:
        """The largest number of 0..most whose plan fits, where that of 0 does and larger ones take more memory.

        Memory grows nearly evenly, so the guess between two known numbers is good; each third halves what is left.
        """
        if self._fits(plan(most)):
            return most
        low, high = 0, most
        turn = 0
        while high - low > 1:
            turn += 1
            least, beyond = self._draft(plan(low)).device_bytes, self._draft(plan(high)).device_bytes
            part = (self._memory - least) / (beyond - least) if turn % 3 else 0.5
            guess = min(high - 1, max(low + 1, low + int((high - low) * part)))
            low, high = (guess, high) if self._fits(plan(guess)) else (low, guess)
        return low

    def _draft(self, plan: Choices) -> Draft:
        if plan not in self._drafts:
            self._drafts[plan] = self._builder.draft(plan)
        return self._drafts[plan]

    def _fits(self, plan: Choices) -> bool:
        return self._draft(plan).device_bytes <= self._memory

    def _time(self, plan: Choices) -> float:
        if plan not in self._seconds:
            self._seconds[plan] = simulate(self._builder.finish(self._draft(plan)), self._hardware).step_s
        return self._seconds[plan]


def _ratio(work: int, nbytes: int) -> float:
    return work / nbytes if nbytes else float("inf")
