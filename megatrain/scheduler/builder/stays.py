"""Placement: how long each block's state stays on the device, and at which bytes of the arena."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import NamedTuple

from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Slot
from megatrain.scheduler.workload import Workload


class Work(NamedTuple):
    """One F or B of one micro-batch."""

    is_backward: bool
    block: int
    micro_batch: int


# The weights of so many blocks may come before anything computes, where all have bytes of their own.
AHEAD = 16

# What runs on one block's weights without a break: the same op of every micro-batch.
Stage = tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """A stay of one block's state on the device, from one `W` to its last reader.

    Args:
        needed: Stage that needs it first; the order of prefetches.
        first: Stage from which its bytes are reserved; may be negative.
        last: Stage that reads it last, inclusive.
        nbytes: Bytes it takes; 0 if weights are used in place.
        ahead: How many stages before `needed` its `W` may come, mostly one less than there are slots.
    """

    block: int
    needed: int
    first: int
    last: int
    nbytes: int
    ahead: int


def compute_stages(workload: Workload, kind: StepKind) -> tuple[Stage, ...]:
    """The fixed order of the compute stream: forward in block order, then backward in reverse.

    All micro-batches of a block run before the next block does, so its weights are needed as often as with
    one. Where the step turns around in the last block, each of its backwards follows its forward at once, if it
    alternates: then only one of its graphs exists at a time.
    """
    last = len(workload.blocks) - 1
    numbers = range(kind.micro_batches)
    backward = () if kind.mode == "forward" else workload.backward_blocks()
    forward = range(0 if kind.mode == "backward" else len(workload.blocks))
    turn: list[Stage] = []
    if kind.micro_batches > 1 and alternates(workload, kind):
        forward, backward = forward[:-1], backward[:-1]
        turn = [tuple(Work(is_backward, last, m) for m in numbers for is_backward in (False, True))]
    return (
        *(tuple(Work(False, block, m) for m in numbers) for block in forward),
        *turn,
        *(tuple(Work(True, block, m) for m in numbers) for block in reversed(backward)),
    )


def alternates(workload: Workload, kind: StepKind) -> bool:
    """Tells whether forward and backward meet in the last block, with the losses between them.

    They don't where the forward of this block may have to run again with another capture: no loss, which is the user's
    code and may keep something, is made by then.
    """
    if workload.last_reads_values:
        return False
    return kind.mode == "train" and workload.backward_blocks()[-1:] == (len(workload.blocks) - 1,)


def stays_of(
    workload: Workload,
    kind: StepKind,
    stages: Sequence[Stage],
    *,
    num_slots: int,
    resident: Collection[int],
    persistent: Collection[int],
    alone: Collection[int] = (),
    device_updates: Collection[int] = (),
) -> tuple[Stay, ...]:
    """Every stay of every block's state, in the order of first need.

    Resident blocks stay from their forward to their backward, which saves their second prefetch. The last `num_slots`
    of the other blocks do so in any case: together they are no more than what the slots hold at the turn. The bytes of
    persistent blocks are reserved for the whole step, and so are those of blocks that the device updates, with the
    state of the optimizer. If the first blocks are resident, theirs are reserved from its start: their weights come
    while the host still updates others. Next to blocks that are `alone` only those are there.
    """
    uses: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        block = stage[0].block
        if workload.blocks[block].state_bytes > 0:
            uses.setdefault(block, []).append(number)
    kept, whole = {*resident, *persistent, *device_updates}, {*persistent, *device_updates}
    ahead, at_turn = num_slots - 1, 1 if alone else num_slots
    streamed = [block for block in uses if block not in kept]
    staying = {*resident, *streamed[max(0, len(streamed) - at_turn) :]}
    first = [block for block, _ in takewhile(lambda use: use[0] in resident, uses.items())][:AHEAD]
    found: list[Stay] = []
    for block, at in uses.items():
        nbytes = 0 if kind.transfer == "bind" else workload.blocks[block].state_bytes
        own = ahead + (at[0] if at[0] < AHEAD and block in first else 0)
        if block in whole:
            nbytes += workload.blocks[block].optimizer_bytes if block in device_updates else 0
            found.append(Stay(block, at[0], -ahead, len(stages) - 1, nbytes, ahead + min(at[0], AHEAD)))
            continue
        for run in [at] if block in staying else [[stage] for stage in at]:
            found.append(Stay(block, run[0], run[0] - own, run[-1], nbytes, own))
    found.sort(key=lambda stay: stay.needed)
    found = list(_as_slots_are_free(found, kept, num_slots))
    return tuple(_without_company(found, frozenset(alone).difference(kept), kept)) if alone else tuple(found)


def _as_slots_are_free(stays: Iterable[Stay], kept: Collection[int], num_slots: int) -> Iterator[Stay]:
    """The same stays, but those of streamed blocks begin when a slot is free: the stages of kept blocks need none."""
    lasts: list[int] = []  # of the streamed blocks so far, ascending
    ended: dict[int, int] = {}  # the stage after a block's previous stay
    for stay in stays:
        if stay.block in kept:
            yield stay
            continue
        free = lasts[-num_slots] + 1 if len(lasts) >= num_slots else 1 - num_slots
        begin = max(min(stay.first, max(free, stay.needed - AHEAD)), ended.get(stay.block, 1 - num_slots))
        ended[stay.block] = stay.last + 1
        insort(lasts, stay.last)
        yield replace(stay, first=begin, ahead=stay.needed - begin)


def _without_company(stays: Iterable[Stay], alone: Collection[int], kept: Collection[int]) -> Iterator[Stay]:
    """The same stays, but those next to one that is alone don't begin before it is over, nor it before they are."""
    over, last = 0, 0  # the stage after the latest that is alone, and after the latest of any
    for stay in stays:
        if stay.block in kept:
            yield stay
            continue
        begin = min(stay.needed, max(stay.first, last if stay.block in alone else over))
        yield replace(stay, first=begin, ahead=stay.needed - begin)
        last = stay.last + 1
        over = last if stay.block in alone else over


def giants(workload: Workload) -> tuple[int, ...]:
    """The blocks whose weights are larger than those of two usual blocks."""
    sizes = sorted(block.state_bytes for block in workload.blocks if block.state_bytes > 0)
    usual = sizes[len(sizes) // 2] if sizes else 0
    return tuple(index for index, block in enumerate(workload.blocks) if block.state_bytes > 2 * usual)


def by_benefit(block: int, nbytes: int) -> tuple[int, float]:
    """The order in which blocks get to stay on the device: the largest first, equal ones evenly spread over the model.

    Where those that stay lie between others, copies of the others run during the compute of both. Each beginning of
    the order is spread evenly: equal sizes follow each other by their numbers with reversed bits.
    """
    return -nbytes, sum(2.0 ** -(place + 1) for place in range(block.bit_length()) if block >> place & 1)


def place_slots(stays: Sequence[Stay]) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Gives every stay bytes of the arena, so that those alive at the same time don't overlap.

    This is offline dynamic storage allocation: the largest first, each at the first place that is free for
    its whole life. Equal sizes are placed outwards from the stays that span the turn, the longest of
    which comes first: on each side that is the order in which first fit needs no more places than are alive
    at once. Those of the whole step lie at the start of the arena, in the order in which blocks get to stay: schedules
    for batches of other sizes then find them at the same bytes.

    Returns:
        The slots by offset, and for each stay the index of its slot.
    """
    whole, rest = _whole(stays)
    least = _most_alive(stays)
    offsets: list[int] = []
    fewest = -1
    for key, reuse in ((_outwards(stays), True), (_outwards(stays), False), (lambda stay: (stay.first,), True)):
        placed = _assign(stays, whole, sorted(rest, key=lambda i: key(stays[i])), reuse=reuse)
        nbytes = max((o + s.nbytes for o, s in zip(placed, stays, strict=True)), default=0)
        if fewest < 0 or nbytes < fewest:
            offsets, fewest = placed, nbytes
        if fewest == least:
            break  # no placement takes less
    sizes: dict[int, int] = {}
    for offset, stay in zip(offsets, stays, strict=True):
        sizes[offset] = max(sizes.get(offset, 0), stay.nbytes)
    slots = tuple(Slot(offset, sizes[offset]) for offset in sorted(sizes))
    index = {slot.offset: i for i, slot in enumerate(slots)}
    return slots, tuple(index[offset] for offset in offsets)


def _most_alive(stays: Sequence[Stay]) -> int:
    """The most bytes that are alive at once."""
    change: dict[int, int] = {}
    for stay in stays:
        change[stay.first] = change.get(stay.first, 0) + stay.nbytes
        change[stay.last + 1] = change.get(stay.last + 1, 0) - stay.nbytes
    return max(accumulate(change[stage] for stage in sorted(change)), default=0)


def _outwards(stays: Sequence[Stay]) -> Callable[[Stay], tuple[int, ...]]:
    # All stays that span the turn exist when the last of them is first needed. Nothing spans a turn in
    # a step of one direction, whose start is as good a place to begin.
    turn = max((s.needed for s in stays if s.last > s.needed), default=0)

    def outwards(stay: Stay) -> tuple[int, ...]:
        distance = max(0, stay.first - turn, turn - stay.last)
        return -stay.nbytes, distance, stay.first - stay.last, stay.first

    return outwards


def _whole(stays: Sequence[Stay]) -> tuple[list[int], list[int]]:
    """Those of the whole step, in the order in which blocks get to stay, and the others."""
    start, end = min((s.first for s in stays), default=0), max((s.last for s in stays), default=0)
    whole = [i for i, s in enumerate(stays) if (s.first, s.last) == (start, end)]
    whole.sort(key=lambda i: by_benefit(stays[i].block, stays[i].nbytes))
    return whole, sorted(set(range(len(stays))).difference(whole))


def _assign(stays: Sequence[Stay], whole: Sequence[int], order: Sequence[int], *, reuse: bool) -> list[int]:
    """Offsets: those of the whole step first, one after the other, then the others in an order by first fit.

    With `reuse`, offsets that are in use already are tried first.
    """
    placed = Placed()
    offsets, start = [0] * len(stays), 0
    for index in whole:
        offsets[index], start = start, start + stays[index].nbytes
    known: dict[int, None] = {}
    for index in order:
        stay = stays[index]
        taken = _disjoint(placed.beside(stay))
        found = _known_fit(taken, stay.nbytes, known) if reuse else None
        offsets[index] = _first_fit(taken, stay.nbytes, start) if found is None else found
        known[offsets[index]] = None
        placed.add(stay, offsets[index])
    return offsets


class Placed:
    """The bytes of stays, and when they are taken."""

    def __init__(self) -> None:
        self._in_stage: dict[int, list[tuple[int, int]]] = {}
        # The first and the last stages of all stays in the same bytes, which follow each other.
        self._in_bytes: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def add(self, stay: Stay, offset: int) -> None:
        """Takes bytes for a stay."""
        span = offset, offset + stay.nbytes
        firsts, lasts = self._in_bytes.setdefault(span, ([], []))
        place = bisect_right(firsts, stay.first)
        firsts.insert(place, stay.first)
        lasts.insert(place, stay.last)
        for stage in range(stay.first, stay.last + 1):
            self._in_stage.setdefault(stage, []).append(span)

    def beside(self, stay: Stay) -> Collection[tuple[int, int]]:
        """The bytes that are taken at some time of a stay."""
        if stay.last - stay.first < _SHORT:
            stages = range(stay.first, stay.last + 1)
            return {span for stage in stages for span in self._in_stage.get(stage, ())}
        return [
            span
            for span, (firsts, lasts) in self._in_bytes.items()
            if (place := bisect_right(firsts, stay.last)) and lasts[place - 1] >= stay.first
        ]


# Stays of fewer stages look through these, others through all bytes that are taken.
_SHORT = 8


def _disjoint(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bytes of all spans, ascending, as spans that don't overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _first_fit(taken: Sequence[tuple[int, int]], nbytes: int, end: int) -> int:
    for start, stop in taken:
        if end + nbytes <= start:
            return end
        end = stop
    return end


def _known_fit(taken: Sequence[tuple[int, int]], nbytes: int, known: Iterable[int]) -> int | None:
    for offset in known:
        after = bisect_right(taken, offset, key=lambda span: span[0])
        follows = after == 0 or taken[after - 1][1] <= offset
        if follows and (after == len(taken) or offset + nbytes <= taken[after][0]):
            return offset
    return None
