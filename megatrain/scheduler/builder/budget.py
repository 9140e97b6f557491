"""Budget: the fastest plan that fits the device memory, or an error with the bytes needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.books import find_peak
from megatrain.scheduler.builder.draft import Builder, Choices, Draft
from megatrain.scheduler.builder.search import Search
from megatrain.scheduler.builder.stays import alternates, giants
from megatrain.scheduler.items import NO_BLOCK
from megatrain.scheduler.parking import keep_all
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


def choose_draft(
    builder: Builder,
    *,
    num_slots: int | None,
    keep: int | None,
    memory: int | None,
    activations: str,
    hardware: Hardware | None = None,
) -> Draft:
    """The draft with the shortest step on `hardware`, of those that fit; without it see `_by_rule`.

    Raises:
        ScheduleError: If none fits.
    """
    draft = _by_rule(builder, num_slots, keep, memory, activations)
    if hardware is None or memory is None or builder.kind.transfer == "bind" or builder.kind.mode == "forward":
        return draft
    return Search(builder, memory, hardware).fastest(
        draft,
        _least_plan(builder, draft, keep, activations),
        is_keep_free=keep is None and activations != "offload",
        is_save_free=activations == "auto",
        is_slots_free=num_slots is None,
    )


def _least_plan(builder: Builder, draft: Draft, keep: int | None, activations: str) -> Choices:
    """The plan of these options that parks and recomputes most."""
    plan = _starting_plan(builder, draft.plan.num_slots, keep, activations)
    plan = replace(plan, has_giants_alone=draft.plan.has_giants_alone)
    if keep is None and activations not in ("keep", "offload"):
        plan = replace(plan, keep=0)
    return plan


def _by_rule(builder: Builder, num_slots: int | None, keep: int | None, memory: int | None, activations: str) -> Draft:
    """The first draft that fits, of plans ordered from fast to frugal as no time is needed to tell; see `schedule`."""
    draft = _first_that_fits(builder, num_slots, keep, memory, activations)
    if builder.kind.transfer == "bind" or draft.plan.num_slots == 1:
        return draft
    # The following takes no more than what is left: recomputed or parked activations would cost more time.
    if builder.kind.micro_batches > 1:
        late = builder.draft(replace(draft.plan, has_late_offloads=True))
        draft = late if memory is None or late.device_bytes <= memory else draft
    if builder.kind.is_training_step and num_slots is None and memory is not None:
        return _with_most_resident(builder, draft, memory)
    return draft


def _with_most_resident(builder: Builder, draft: Draft, memory: int) -> Draft:
    """The draft with as many persistent and resident blocks as fit, the last blocks first.

    Frozen weights of a persistent block never cross the bus again, the weights of a resident block cross once a step.

    Without a budget there are only those that the slots hold: nobody said that there is memory for the model. The same
    goes for calls, whose caller has a loss and tensors of their own beside them; all that a training step has counts.
    """
    blocks = range(len(builder.workload.blocks) - 1, -1, -1)
    frozen = [block for block in blocks if builder.workload.blocks[block].is_mostly_frozen]
    draft = _with_most(builder, draft, memory, frozen, "persistent")
    rest = [block for block in blocks[draft.plan.num_slots :] if block not in draft.plan.persistent]
    return _with_most(builder, draft, memory, rest, "resident")


def _with_most(builder: Builder, draft: Draft, memory: int, order: Sequence[int], name: str) -> Draft:
    """The draft with as many blocks as fit as one of the choices.

    Args:
        builder: Of the workload.
        draft: A draft that fits.
        memory: The budget.
        order: Blocks, the first choice first.
        name: Which choice.
    """
    # Of slots of many sizes more may fit, or fewer, than their sum says; a draft of a long table takes a while.
    sizes = [builder.workload.blocks[block].state_bytes for block in order]
    least = sum(total <= memory - draft.device_bytes for total in accumulate(sizes))

    def plan(count: int) -> Choices:
        return replace(draft.plan, **{name: tuple(sorted(order[:count]))})

    found = _largest_that_fits(builder, (least, plan), memory, [])
    assert found is not None, "without further blocks it is the draft, which fits"
    for count in range(len(getattr(found.plan, name)) + 1, len(order) + 1):
        more = builder.draft(plan(count))
        if more.device_bytes > memory:
            break
        found = more
    return found


def _first_that_fits(
    builder: Builder, num_slots: int | None, keep: int | None, memory: int | None, activations: str
) -> Draft:
    counts = (2, 1) if num_slots is None else (num_slots,)
    starts = [_starting_plan(builder, count, keep, activations) for count in counts]
    if memory is None:
        return builder.draft(starts[0])
    if num_slots is None and giants(builder.workload):
        starts.insert(1, replace(starts[0], has_giants_alone=True))
    tried: list[Draft] = []
    for start in starts:
        families = _families(builder, start, is_keep_free=keep is None, activations=activations)
        for family in families:
            found = _largest_that_fits(builder, family, memory, tried)
            if found is not None:
                return found
    raise _too_small(builder, tried, memory, can_park_more=bool(keep) or activations == "keep")


def first_fit(builder: Builder, plans: Iterable[Choices], memory: int | None) -> Draft:
    """The draft of the first plan that fits.

    Raises:
        ScheduleError: If none fits.
    """
    tried: list[Draft] = []
    for plan in plans:
        tried.append(builder.draft(plan))
        if memory is None or tried[-1].device_bytes <= memory:
            return tried[-1]
    assert memory is not None
    raise _too_small(builder, tried, memory, can_park_more=tried[0].plan.keep > 0)


def _starting_plan(builder: Builder, num_slots: int, keep: int | None, activations: str) -> Choices:
    """The plan of these options if memory is no concern."""
    blocks = () if builder.kind.mode == "forward" else builder.workload.backward_blocks()
    saves = blocks if activations == "keep" else blocks[len(blocks) - _least_saves(builder) :]
    if keep is None and activations == "offload":
        keep = 0
    return Choices(num_slots, _normal_keep(builder.workload, builder.kind, keep), saves)


def _least_saves(builder: Builder) -> int:
    """How many graphs are retained in any case: one where the step turns, if its backward comes at once.

    With several micro-batches it doesn't if blocks without a backward follow: then there are as many graphs as
    micro-batches, and they are retained only where they fit.
    """
    at_once = builder.kind.micro_batches == 1 or alternates(builder.workload, builder.kind)
    return min(len(builder.workload.backward_blocks()), int(at_once))


def _normal_keep(workload: Workload, kind: StepKind, keep: int | None) -> int:
    """The `keep` that a schedule states: no larger than makes a difference, all where nothing parks."""
    if kind.mode == "forward":
        return 0
    everything = keep_all(workload)
    return everything if keep is None or kind.transfer == "bind" else min(keep, everything)


# A family is a size and a function from 0..size to plans, of which larger ones are faster and take more.
_Family = tuple[int, Callable[[int], Choices]]


def _families(builder: Builder, start: Choices, *, is_keep_free: bool, activations: str) -> Sequence[_Family]:
    blocks = builder.workload.backward_blocks()
    if builder.kind.mode == "forward" or not blocks or activations in ("keep", "offload"):
        return [(0, lambda _: start)]
    families: list[_Family] = []
    if activations == "auto":
        more = len(blocks) - _least_saves(builder)
        families.append((more, lambda n: replace(start, saves=blocks[more - n :])))
    if is_keep_free and builder.kind.transfer == "copy":
        families.append((start.keep, lambda n: replace(start, keep=n)))
    return families or [(0, lambda _: start)]


def _largest_that_fits(builder: Builder, family: _Family, memory: int, tried: list[Draft]) -> Draft | None:
    """Bisects a family; takes the largest first, for that is what ample memory allows."""
    size, plan = family

    def attempt(n: int) -> Draft | None:
        tried.append(builder.draft(plan(n)))
        return tried[-1] if tried[-1].device_bytes <= memory else None

    found = attempt(size)
    if found is not None or size == 0:
        return found
    found = attempt(0)
    low, high = 0, size
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        better = attempt(middle)
        low, high, found = (middle, high, better) if better else (low, middle, found)
    return found


def _too_small(builder: Builder, tried: Sequence[Draft], memory: int, *, can_park_more: bool) -> ScheduleError:
    best = min(tried, key=lambda draft: draft.device_bytes)
    schedule = builder.finish(best)
    peak = find_peak(schedule)
    block = NO_BLOCK if peak.op is None else peak.op.block
    where = "" if block < 0 else f", set by block {block} ({builder.workload.blocks[block].name})"
    parts = ", ".join(f"{name} {nbytes} B" for name, nbytes in peak.parts)
    helps = ["a larger memory", "a smaller block_bytes", "a smaller batch"]
    if can_park_more and builder.kind.mode != "forward" and builder.kind.transfer == "copy":
        helps.insert(2, 'activations="offload"')
    slots = "one slot" if best.plan.num_slots == 1 else f"{best.plan.num_slots} slots"
    return ScheduleError(
        f"a memory of {memory} B is too small: at least {best.device_bytes} B are needed{where}.\n"
        f"  At its {peak.op} (tick {peak.tick}, {slots}): {parts}.\n"
        f"  What helps: {', '.join(helps[:-1])} or {helps[-1]}."
    )
