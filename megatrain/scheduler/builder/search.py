"""Search: of the plans that fit a budget, one whose step is short."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import ceil, inf, log2

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bounds.bound import step_bound
from megatrain.scheduler.builder.bounds.plan_bound import PlanBound
from megatrain.scheduler.builder.draft import Builder, Choices, Draft, with_late_offloads
from megatrain.scheduler.builder.family import Family, Freedom, MemoryUse
from megatrain.scheduler.builder.neighbours import Neighbours
from megatrain.scheduler.builder.rows.step_timer import StepTimer
from megatrain.scheduler.parking import keep_all, parked_values

# What a second of copies counts in seconds of compute: streams overlap less well than their sums say, in either way.
_WEIGHTS = (0.0, 0.7, 1.4, inf)
# A step that is longer than its bound by less than this part isn't worth a search.
_NEAR = 0.002
# Ladders of a little less memory end at other plans, from which a search may find one that is faster. Budgets that are
# nearly equal begin at the same ones: some of a grid that has so many for each doubling.
_STEPS_PER_DOUBLING = 24
_NUM_LESS = 6
_MOST_FIRSTS = 12
# Plans that a search from plan to plan drafts have so many ops together: hundreds of small plans, a few of long ones.
# Asking whether another plan is worth a draft is a small part of that work, simulating its step adds to it.
_MOST_OPS = 48_000
_UNDRAFTED, _SIMULATED = 1 / 32, 3 / 4
# Less than this part isn't a gain.
_GAIN = 1e-9


class Search:
    """Finds plans that fit, and remembers their drafts.

    Args:
        builder: Of the workload.
        memory: Device bytes that a plan may take.
        freedom: Which choices are open.
        machine: Whose rates count.
    """

    def __init__(self, builder: Builder, memory: int, freedom: Freedom, machine: Hardware) -> None:
        self._builder, self._memory, self._freedom, self._machine = builder, memory, freedom, machine
        self._drafts: dict[Choices, Draft] = {}
        self._seconds: dict[Choices, float] = {}
        self._timer = StepTimer(machine)

    @cached_property
    def _bound(self) -> PlanBound:
        return PlanBound(self._builder.any_effects, self._machine)

    def draft(self, plan: Choices) -> Draft:
        """The draft of a plan."""
        if plan not in self._drafts:
            self._drafts[plan] = self._builder.draft(plan)
        return self._drafts[plan]

    def fits(self, plan: Choices) -> bool:
        """Tells whether a plan fits."""
        return self.draft(plan).device_bytes <= self._memory

    def balanced(self, start: Choices) -> Draft:
        """The plan that takes what saves time on the longer stream, step by step, as long as it fits.

        Args:
            start: The most frugal plan, which fits.
        """
        return self._climbed(self._family(start), 1.0)

    def shortest(self, known: Sequence[Draft]) -> Draft:
        """The draft with the shortest simulated step; of equal ones the first."""
        self._drafts.update((draft.plan, draft) for draft in known)
        if len(known) == 1:
            return known[0]  # nothing is simulated
        return min(known, key=lambda draft: self._time(draft.plan))

    def fastest(self, known: Sequence[Draft], starts: Iterable[Choices]) -> Draft:
        """The draft with the shortest simulated step of `known` and those from each start; of equal ones the first.

        Args:
            known: Drafts that fit.
            starts: The most frugal plans; those that don't fit are left out.
        """
        best = self.shortest(known)
        families = [self._family(start) for start in starts if self.fits(start)]
        nearest: Family | None = None
        for family in families:
            # With all the memory that it can use, a family is as fast as it gets.
            fastest = with_late_offloads(family.everything, self._builder.kind)
            if self._time(best.plan) > self._time(fastest) * (1 + _NEAR):
                found = self._climbed(family, 1.0)
                if nearest is None or self._time(found.plan) < self._time(best.plan):
                    nearest = family
                best = min(best, found, key=lambda draft: self._time(draft.plan))
        tried = () if nearest is None else (self._climbed(nearest, weight) for weight in _WEIGHTS)
        return min([best, *tried], key=lambda draft: self._time(draft.plan))

    def improved(self, best: Draft, starts: Sequence[Choices], *, has_slots: bool) -> Draft:
        """A plan that no neighbour is faster than; or the best one when the work is spent.

        It is found from `best`, then from the fastest plans of ladders of less memory. A neighbour that can't fit, or
        whose streams work as long by themselves, isn't drafted.

        Args:
            best: A plan that fits.
            starts: As for `fastest`, the most frugal plan first.
            has_slots: Whether the number of slots is open.
        """
        bound = step_bound(self._builder.effects(best.plan), self._memory, self._machine).seconds
        enough_s = bound * (1 + _NEAR)
        if self._time(best.plan) <= enough_s:
            return self.draft(self._stating_all_kept(best.plan))
        neighbours = Neighbours(self._builder, self._freedom, starts[0], has_slots=has_slots)
        seen: set[Choices] = set()
        left = _MOST_OPS / max(1, best.num_ops)
        plan, left = self._descended(best.plan, neighbours, seen, left, enough_s)
        less = _smaller(self._memory)
        if left > 0:
            firsts = self._of_less_memory(starts, less)
        else:  # they are candidates, and nothing begins there
            alike = [start for start in starts if start.num_slots == plan.num_slots]
            firsts = self._of_less_memory(starts, less[:1]) | self._of_less_memory(alike, less[1:])
            firsts = {first for first in firsts if self._may_be_faster(first, plan)}
        for first in sorted(firsts, key=lambda first: (self._time(first), repr(first)))[:_MOST_FIRSTS]:
            found, left = self._descended(first, neighbours, seen, left, enough_s)
            plan = min(plan, found, key=self._time)
        return self.draft(self._stating_all_kept(plan))

    def _of_less_memory(self, starts: Sequence[Choices], memories: Sequence[int]) -> set[Choices]:
        """The plans that ladders reach with less memory."""
        found: set[Choices] = set()
        for memory in memories:
            less = copy(self)  # with the same memory of drafts
            less._memory = memory
            found.update(less._climbed(self._family(start), 1.0).plan for start in starts if less.fits(start))
        return found

    def _descended(
        self, plan: Choices, neighbours: Neighbours, seen: set[Choices], left: float, enough_s: float
    ) -> tuple[Choices, float]:
        """Gives way to faster neighbours until there is none, or the step is short enough, or the work is spent.

        Args:
            plan: A plan that fits.
            neighbours: Of any plan.
            seen: Plans that were looked at, which grow.
            left: How many plans may be drafted.
            enough_s: The step that is short enough.

        Returns:
            The plan, and how many may be drafted after it.
        """
        seen.add(plan)
        while left > 0 and self._time(plan) > enough_s:
            for other in neighbours.of(plan):
                if other in seen:
                    continue
                seen.add(other)
                left -= _UNDRAFTED
                if self._may_be_faster(other, plan):
                    left -= 1
                    if self.fits(other):
                        left -= _SIMULATED
                        if self._time(other) < self._time(plan) * (1 - _GAIN):
                            plan = other
                            break
                if left <= 0:
                    break
            else:
                break
        return plan, left

    def _family(self, start: Choices) -> Family:
        return Family.of(self._builder, start, self._freedom, self._machine)

    def _climbed(self, family: Family, weight: float) -> Draft:
        taken: tuple[MemoryUse, ...] = ()
        left = tuple(family.ladder(weight))
        while left:
            count = self._most_uses(family, taken, left)
            taken, left = (*taken, *left[:count]), left[count:]
            # The next one is too large, and so are others of its kind; smaller ones may fit.
            left = tuple(use for use in left[1:] if not _is_as_large(use, left[0]))
        plan = self._stating_all_kept(family.plan(taken))
        late = with_late_offloads(plan, self._builder.kind)
        return self.draft(late if self.fits(late) else plan)

    def _stating_all_kept(self, plan: Choices) -> Choices:
        """The same plan with the largest `keep` that parks as little: what retained graphs hold isn't parked anyway."""
        if not self._freedom.keep:
            return plan
        workload, kind = self._builder.workload, self._builder.kind
        parked = parked_values(workload, kind, keep=plan.keep, saves=plan.saves, results=plan.results)
        return replace(plan, keep=keep_all(workload) - 1 - max(parked, default=-1))

    def _most_uses(self, family: Family, taken: tuple[MemoryUse, ...], left: tuple[MemoryUse, ...]) -> int:
        """How many of the uses that are left fit, where none does and more of them take more memory.

        A use takes about its own bytes at the peak, or none there. So the guess between two known numbers is good; each
        fourth halves what is left.
        """

        def plan(count: int) -> Choices:
            return family.plan((*taken, *left[:count]))

        sizes = [0, *accumulate(use.nbytes for use in left)]
        low, high = 0, len(left) + 1
        turn = 0
        while high - low > 1:
            turn += 1
            room = float(self._memory - self.draft(plan(low)).device_bytes)
            if high <= len(left):
                needed = self.draft(plan(high)).device_bytes - self.draft(plan(low)).device_bytes
                room *= (sizes[high] - sizes[low]) / needed
            guess = bisect_right(sizes, sizes[low] + room) - 1 if turn % 4 else (low + high) // 2
            guess = min(high - 1, max(low + 1, guess))
            low, high = (guess, high) if self.fits(plan(guess)) else (low, guess)
        return low

    def _may_be_faster(self, plan: Choices, than: Choices) -> bool:
        """Whether a plan may fit, and its streams have less to do than another takes: as far as is known undrafted."""
        seconds, nbytes = self._builder.at_least(plan, self._bound)
        return nbytes <= self._memory and seconds < self._time(than) * (1 - _GAIN / 2)

    def _time(self, plan: Choices) -> float:
        if plan not in self._seconds:
            times = self._builder.times(self.draft(plan), self._timer)
            self._seconds[plan] = max((of_stream[-1][1] for of_stream in times.values()), default=0.0)
        return self._seconds[plan]


def _is_as_large(use: MemoryUse, other: MemoryUse) -> bool:
    return use.choice == other.choice and (use.choice == "keep" or use.nbytes >= other.nbytes)


def _smaller(memory: int) -> list[int]:
    """Budgets of the grid that are smaller by 2 % or more, the largest first."""
    step = ceil(_STEPS_PER_DOUBLING * log2(max(1.0, memory * 0.98))) - 1
    return [int(2 ** ((step - number) / _STEPS_PER_DOUBLING)) for number in range(_NUM_LESS)]
