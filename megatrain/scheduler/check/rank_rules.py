"""The checker's rules of several ranks: sums of gradients pass from one to the next, and no two wait for each other.

Each rank's table is checked alone. The blocks are the same on all ranks, which compare them before a step. So if each
table keeps to one order, an op between ranks waits only for ops that come earlier in this order, on any rank, and the
ranks can't wait for each other in a circle: by block, last one first; of a block first `R`, then `P`, then `G`; each by
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position

_OPS = ((Stream.RECEIVE, "R"), (Stream.SEND, "P"), (Stream.D2H, "G"))


def check_between_ranks(case: Case) -> None:
    """Sums begin with those of the rank before, and go on once they are whole here; the total comes back."""
    rule = (
        "With several micro-batches, on all ranks but the first, each G has one R, before the second B of its block; "
        "on all but the last one P, after the last B and before the G."
    )
    kind = case.schedule.kind
    blocks = [b for b in range(len(case.workload.blocks)) if case.at(Stream.D2H, "G", b)]
    for (stream, what), is_there in zip(_OPS[:2], (kind.receives, kind.sends), strict=True):
        for block in range(len(case.workload.blocks)):
            if is_there and block in blocks:
                case.once(stream, what, block, rule)
            else:
                case.never(stream, what, block, "has no other rank", rule)
    if kind.ranks == "alone":
        return
    for block in blocks:
        backwards = case.backwards(block)
        for receiving in case.at(Stream.RECEIVE, "R", block):
            case.require_before(receiving, backwards[1], "adds to the sum that comes with", rule)
        for sending in case.at(Stream.SEND, "P", block):
            case.require_before(backwards[-1], sending, "hands on gradients of", rule)
            case.require_before(sending, case.at(Stream.D2H, "G", block)[0], "waits for what goes on with", rule)
    _check_one_order(case, blocks[::-1])


def _check_one_order(case: Case, blocks: Sequence[int]) -> None:
    rule = "Ops between ranks come in one order on all ranks, by block, last one first; none waits for a later one."
    for stream, what in _OPS:
        found = [position for position, op in case.ops if position.stream == stream and op.what == what]
        for earlier, later in pairwise(found):
            if case.op(later).block >= case.op(earlier).block:
                raise case.fault(f"{case.name(later)} comes too late.", rule, later.tick, "Exchange the two.")
    for block, later in pairwise(blocks):
        for mine in _between(case, block):
            for theirs in _between(case, later):
                if case.clocks.is_before(theirs, mine):
                    what = f"{case.name(mine)} waits for {case.name(theirs)}"
                    raise case.fault(f"{what}, of a later block.", rule, mine.tick, "Move it, or drop the wait.")


def _between(case: Case, block: int) -> list[Position]:
    return [position for stream, what in _OPS for position in case.at(stream, what, block)]
