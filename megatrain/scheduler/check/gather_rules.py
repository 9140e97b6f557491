"""The checker's rules of weights that come in shards: each rank copies one, and gathers the others from other devices.

A `C` is a collective: it is over when all ranks of the host have copied their shards and begun their own `C` of the
block. Each table is checked alone, and ranks compare their blocks before a step. So all have the same `C` in the same
order if the blocks alone say which there are: those of the forward, then those of the backward in reverse, without the
last block, whose weights stay.

No two ranks wait for each other in a circle if all ops between ranks have one order that is the same on all of them,
and none waits for a later one on its own rank. It is by the number of the last `C` that their compute needs, and of
those with the same number first the `C`, then the sums by block, last one first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position
from megatrain.sizes import device_shard_bytes

_SUMS = ((Stream.RECEIVE, "R"), (Stream.SEND, "P"), (Stream.D2H, "G"))


def check_gathers(case: Case) -> None:
    """Each W of weights in shards has one C, in one order on all ranks, and no ranks wait in a circle."""
    rule = "Weights in shards have one C for each W, in the order of the forward and then of the backward."
    found = [position for position, op in case.ops if op.what == "C"]
    expected = list(_expected(case))
    for position, block in zip(found, expected, strict=False):
        if case.op(position).block != block:
            raise case.fault(
                f"{case.name(position)} stands where C{block} is due.", rule, position.tick, f"Put C{block} there."
            )
    if len(found) != len(expected):
        raise case.fault(f"there are {len(found)} C, not {len(expected)}.", rule, 0, "Have one for each W.")
    loads = [position for position, op in case.ops if op.what == "W" and _is_gathered(case, op.block)]
    if len(loads) != len(found):
        raise case.fault(f"there are {len(loads)} W of shards, not {len(found)}.", rule, 0, "Have one for each C.")
    for load, gather in zip(loads, found, strict=True):
        one, other = case.op(load), case.op(gather)
        if (one.block, one.slot, one.section) != (other.block, other.slot, None):
            what = f"{case.name(gather)} completes {case.name(load)}, which is another block or slot"
            raise case.fault(f"{what}.", rule, gather.tick, "Have both in one order.")
        case.require_before(load, gather, "gathers what belongs to the shard of", rule)
    if found:
        _check_circles(case, found)


def _is_gathered(case: Case, block: int) -> bool:
    shards = case.schedule.kind.shards
    return shards > 1 and device_shard_bytes(case.workload.blocks[block].state_bytes, shards) > 0


def _expected(case: Case) -> Iterator[int]:
    """The blocks whose weights are gathered, in order."""
    blocks = case.workload.blocks
    with_state = [block for block, work in enumerate(blocks) if work.state_bytes > 0]
    backward = [block for block in with_state if blocks[block].has_backward and block != with_state[-1]]
    yield from (block for block in (*with_state, *reversed(backward)) if _is_gathered(case, block))


def _check_circles(case: Case, gathers: Sequence[Position]) -> None:
    rule = "Ops between ranks have one order on all of them, and none waits for a later one."
    later: dict[Stream, Position] = {}  # of each stream the first op of later groups
    for group in reversed(list(_in_order(case, gathers))):
        for mine in group:
            for theirs in later.values():
                if case.clocks.is_before(theirs, mine):
                    what = f"{case.name(mine)} waits for {case.name(theirs)}"
                    raise case.fault(f"{what}, which may wait for it on another rank.", rule, mine.tick, "Move it.")
        later |= {position.stream: position for position in group}


def _in_order(case: Case, gathers: Sequence[Position]) -> Iterator[list[Position]]:
    """The ops between ranks in groups: each C, and the sums of a block."""
    left = list(gathers)
    latest: dict[int, int] = {}  # the number of the latest C of each block
    number = 0  # of those that compute has needed so far
    for position, op in case.ops:
        if position == next(iter(left), None):
            del left[0]
            latest[op.block] = len(gathers) - len(left)
        if position.stream != Stream.COMPUTE:
            continue
        for gather in gathers[number : latest.get(op.block, 0)]:
            yield [gather]
        number = max(number, latest.get(op.block, 0))
        is_last = op.what == "B" and (op.micro_batch or 0) == case.micro_batches[-1]
        sums = [at for stream, what in _SUMS for at in case.at(stream, what, op.block)] if is_last else []
        if sums:
            yield sums
