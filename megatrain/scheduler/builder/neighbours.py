"""Neighbours: the plans that differ from one by one choice, or by one that another takes the place of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.family import Freedom
from megatrain.scheduler.builder.stays import giants
from megatrain.scheduler.parking import keep_all

# More slots than that have helped no plan.
_MOST_SLOTS = 3
# A use of memory: what it adds to, and the block.
_Use = tuple[str, int]


class Neighbours:
    """Finds the neighbours of plans.

    Args:
        builder: Of the workload.
        freedom: Which choices are open.
        start: The most frugal plan; what it retains is always retained.
        has_slots: Whether the number of slots is open.
    """

    def __init__(self, builder: Builder, freedom: Freedom, start: Choices, *, has_slots: bool) -> None:
        self._builder, self._freedom, self._start, self._has_slots = builder, freedom, start, has_slots
        blocks = builder.workload.blocks
        backward = builder.workload.backward_blocks()
        graphs = [("saves", b) for b in backward if b not in start.saves] if freedom.saves else []
        weights = [b for b, block in enumerate(blocks) if block.state_bytes > 0] if freedom.stays else []
        self._uses: list[_Use] = [
            *graphs,
            *(("results", b) for b in freedom.results),
            *(("persistent", b) for b in weights if blocks[b].is_mostly_frozen),
            *(("resident", b) for b in weights if b in backward),
        ]

    def of(self, plan: Choices) -> Iterator[Choices]:
        """Yields the neighbours of a plan: those that take more memory first, then those that take other memory."""
        taken = [use for use in self._uses if use[1] in getattr(plan, use[0])]
        has = {"resident": plan.persistent, "results": plan.saves}
        others = [use for use in self._uses if use not in taken and use[1] not in has.get(use[0], ())]
        yield from (_with(plan, more=use) for use in others)
        yield from self._of_another_kind(plan)
        yield from (_with(plan, less=one, more=other) for one, other in product(taken, others))
        yield from (_with(plan, less=use) for use in taken)
        for other, changed in product(others, self._of_another_kind(plan)):
            yield _with(changed, more=other)
        for one, changed in product(taken, self._of_another_kind(plan)):
            yield _with(changed, less=one)

    def _of_another_kind(self, plan: Choices) -> Iterator[Choices]:
        """Other activations that stay, slots, and places of copies."""
        if self._freedom.keep:
            everything = keep_all(self._builder.workload)
            keeps = dict.fromkeys((plan.keep + 1, plan.keep - 1, everything, 0))
            yield from (replace(plan, keep=keep) for keep in keeps if 0 <= keep <= everything and keep != plan.keep)
        if self._has_slots:
            counts = (plan.num_slots + 1, plan.num_slots - 1)
            yield from (replace(plan, num_slots=count) for count in counts if 1 <= count <= _MOST_SLOTS)
            if giants(self._builder.workload):
                yield replace(plan, has_giants_alone=not plan.has_giants_alone)
        if self._builder.kind.micro_batches > 1:
            yield replace(plan, has_late_offloads=not plan.has_late_offloads)


def _with(plan: Choices, *, more: _Use | None = None, less: _Use | None = None) -> Choices:
    numbers = {kind: set(getattr(plan, kind)) for kind in ("saves", "results", "persistent", "resident")}
    if less is not None:
        numbers[less[0]].discard(less[1])
    if more is not None:
        numbers[more[0]].add(more[1])
    # Weights that stay from step to step stay from forward to backward, too.
    numbers["resident"] -= numbers["persistent"]
    # A graph that is retained has its results.
    numbers["results"] -= numbers["saves"]
    return replace(plan, **{kind: tuple(sorted(found)) for kind, found in numbers.items()})
