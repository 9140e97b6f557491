"""The checker's rules of the host: every parameter is updated once, from whole gradients, and not while it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.table import Position


def check_norm(case: Case) -> None:
    """The norm is taken once, over all gradients, after the previous step's updates have used its old value."""
    rule = (
        "A clipped step has one S for each G, after it, and one N, after all S and after updates of the previous step; "
        "steps without a norm have neither."
    )
    blocks = range(len(case.workload.blocks))
    if case.schedule.kind.reports_norm:
        _check_reported_norm(case)
        return
    if not case.schedule.kind.clip:
        for block in (NO_BLOCK, *blocks):
            case.never(Stream.HOST, "N" if block == NO_BLOCK else "S", block, "is read by nothing", rule)
        return
    norm = case.once(Stream.HOST, "N", NO_BLOCK, rule)
    for block in blocks:
        offloads = case.at(Stream.D2H, "G", block)
        if not offloads:
            case.never(Stream.HOST, "S", block, "has no gradients", rule)
            continue
        squares = case.once(Stream.HOST, "S", block, rule)
        for offload in offloads:
            case.require_before(offload, squares, "sums squares of gradients that leave with", rule)
        case.require_before(squares, norm, "takes the norm from what is summed by", rule)
        if case.schedule.kind.updates == "deferred":
            for update in case.at(Stream.HOST, "U", block):
                case.require_before(update, norm, "replaces the norm that is read by", rule)


def _check_reported_norm(case: Case) -> None:
    rule = "A step that reports its norm has one N, after all U, which have summed the squares; and no S."
    norm = case.once(Stream.HOST, "N", NO_BLOCK, rule)
    for block in range(len(case.workload.blocks)):
        case.never(Stream.HOST, "S", block, "sums what is summed with an update", rule)
        for update in case.at(Stream.HOST, "U", block):
            case.require_before(update, norm, "takes the norm from what is summed by", rule)


def check_places(case: Case) -> None:
    """Gradients that wait on the host have bytes of their own as long as they wait."""
    rule = (
        "Waiting gradients have one place per block, in the order of blocks; no G writes there before the last U has "
        "read them."
    )
    schedule = case.schedule
    found = {place.block: range(place.offset, place.offset + place.nbytes) for place in schedule.places}
    has_places = schedule.kind.holds_gradients and schedule.kind.transfer == "copy"
    expected = [b for b in range(len(case.workload.blocks)) if has_places and case.at(Stream.D2H, "G", b)]
    if [place.block for place in schedule.places] != expected:
        raise case.fault(
            f"places are stated for blocks {list(found)}, but gradients of blocks {expected} wait.",
            rule,
            0,
            "State one place for each of these.",
        )
    for block, place in found.items():
        if place.start < 0 or len(place) != case.workload.blocks[block].landing_bytes:
            raise case.fault(
                f"the place of block {block} has {len(place)} B, but its gradients land in "
                f"{case.workload.blocks[block].landing_bytes} B.",
                rule,
                case.at(Stream.D2H, "G", block)[0].tick,
                "State a place of that size.",
            )
    _check_places_are_free(case, found, rule)


def _check_places_are_free(case: Case, places: Mapping[int, range], rule: str) -> None:
    readers: dict[int, list[Position]] = {block: [] for block in places}
    is_deferred = {block: any(map(case.is_deferred, case.updates_of(block))) for block in places}
    for position, op in case.ops:
        if op.what == "U":
            for member in {op.block, *case.workload.blocks[op.block].shares} & set(readers):
                readers[member].append(position)
    # The waiting gradients by place, and the ops that consume them; those of the previous step are in the same places.
    waiting = {block: (places[block], found) for block, found in readers.items() if is_deferred[block] and found}
    for position, op in case.ops:
        if op.what != "G" or op.block not in places:
            continue
        mine = places[op.block]
        for other, (place, consumers) in list(waiting.items()):
            if not (place.start < mine.stop and mine.start < place.stop):
                continue
            del waiting[other]
            if not consumers:
                raise case.fault(
                    f"{case.name(position)} overwrites gradients of block {other}, which wait until the step is over.",
                    rule,
                    position.tick,
                    "Give it a place of its own.",
                )
            for consumer in consumers:
                case.require_before(consumer, position, f"overwrites gradients of block {other}, read by", rule)
        waiting[op.block] = mine, [] if is_deferred[op.block] else readers[op.block]


def check_updates(case: Case) -> None:
    """Each block with parameters of its own to update has one U, where `updates` says."""
    rule = "A step with updates has one U for each block that updates parameters; other steps have none."
    for block, work in enumerate(case.workload.blocks):
        if work.update_bytes == 0 or case.schedule.kind.updates == "none":
            case.never(Stream.HOST, "U", block, "has nothing to update", rule)
            continue
        members = (block, *work.shares)
        update = case.once(Stream.HOST, "U", block, rule)
        if case.is_deferred(block):
            _check_alike(case, update, members)
            _check_update_of_before(case, update, members)
        else:
            _check_update_of_this(case, update, members)


def _check_alike(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """All updates that use the gradients of a block are deferred, or none: the gradients wait for all of them."""
    rule = "Updates that use gradients of one block are all deferred, or none is."
    for other in sorted({b for member in members for b in case.updates_of(member)}):
        if not case.is_deferred(other):
            found = case.once(Stream.HOST, "U", other, rule)
            what = f"{case.name(update)} uses gradients of the previous step, {case.name(found)} those of this step."
            raise case.fault(what, rule, update.tick, "Move one of them.")


def _check_update_of_before(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """It is over when this step first reads the parameters, and when its gradients replace the ones that it reads."""
    rule = "A deferred U is done before its parameters are read, and before new gradients arrive."
    for reader in case.weight_readers(members):
        case.require_before(update, reader, "reads what is written by", rule)
    for member in members:
        for offload in case.at(Stream.D2H, "G", member):
            case.require_before(update, offload, "replaces gradients that are read by", rule)


def _check_update_of_this(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """It has whole gradients, from all blocks that share the parameters, and nobody reads what it writes."""
    rule = (
        "U follows the G of all blocks that share its parameters, N if the step is clipped, and every op that reads "
        "them."
    )
    for member in members:
        for offload in case.at(Stream.D2H, "G", member):
            case.require_before(offload, update, "reads what leaves with", rule)
    for norm in case.at(Stream.HOST, "N", NO_BLOCK) if case.schedule.kind.clip else ():
        case.require_before(norm, update, "is scaled by", rule)
    for reader in case.weight_readers(members):
        case.require_before(reader, update, "writes what is read by", rule)
    if case.schedule.kind.updates == "serial":
        # Streams keep their order, so the last one to leave stands for all.
        last = max(p for p, op in case.ops if op.what == "G")
        case.require_before(last, update, "follows all gradients, the last of which leaves with", rule)


# The checker's rules of several ranks: sums of gradients pass from one to the next, and no two wait for each other.
#
# Each rank's table is checked alone. The blocks are the same on all ranks, which compare them before a step. So if each
# table keeps to one order, an op between ranks waits only for ops that come earlier in this order, on any rank, and the
# ranks can't wait for each other in a circle: by block, last one first; of a block first `R`, then `P`, then `G`; each
# by rank.

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


# The checker's rules of a store that ranks of one host share: who may write its parts when, and who reads them.
#
# Each rank updates a part of every block's parameters with its `U`, and its `V` waits for the `U` of all others. Each
# table is checked alone; ranks of one host have the same blocks and the same updates, which they compare before a step.
#
# - An update of this step, on any rank, follows a `G` of its block, which brings the total; the total is made when the
#   sum has gone through all ranks. So a reader that comes before this rank hands on its sum comes before the `U` of
#   every rank.
# - A deferred update writes what the steps before have read: they are over on all ranks. Its `V` comes before the first
#   reader of this step.
# - A `V` waits for other ranks' `U`. Deferred ones wait for nothing of another rank; all others only for totals. So
#   nobody waits in a circle if no deferred `U` waits for an op between ranks, and neither sums nor any `U` wait for a
#   `V` of this step's updates.


def check_shared_store(case: Case) -> None:
    """Each update of a shared store has one V; readers come before the updates of all ranks, or after them."""
    rule = "Where ranks share a store, each U has one V, after it; a store of one process has none."
    for block, work in enumerate(case.workload.blocks):
        if not case.schedule.kind.is_shared or not case.at(Stream.HOST, "U", block):
            case.never(Stream.PEERS, "V", block, "waits for an update that nobody makes", rule)
            continue
        (update,) = case.at(Stream.HOST, "U", block)
        whole = case.once(Stream.PEERS, "V", block, rule)
        case.require_before(update, whole, "follows", rule)
        members = (block, *work.shares)
        if case.is_deferred(block):
            _check_deferred(case, update, whole, members)
        else:
            _check_of_this_step(case, whole, members)


def _check_deferred(case: Case, update: Position, whole: Position, members: tuple[int, ...]) -> None:
    rule = "What other ranks update at the head of a step is read after the V, and their U waits for no other rank."
    for reader in case.weight_readers(members):
        case.require_before(whole, reader, "reads what other ranks have written by", rule)
    for other in _between_ranks(case):
        if case.clocks.is_before(other, update):
            what = f"{case.name(update)} waits for {case.name(other)}"
            raise case.fault(f"{what}, and others wait for it.", rule, update.tick, "Move it, or drop the wait.")


def _check_of_this_step(case: Case, whole: Position, members: tuple[int, ...]) -> None:
    rule = "What other ranks update once they have the totals is read before this rank's sum goes on to them."
    leaving = [position for member in members for position in case.leaving(member)]
    for reader in case.weight_readers(members):
        if not any(case.clocks.is_before(reader, position) for position in leaving):
            what = f"{case.name(reader)} reads what another rank may be updating"
            raise case.fault(f"{what}.", rule, reader.tick, "Move it above the tick where its gradients leave.")
    rule = "Sums of gradients and updates wait for no V of an update of this step."
    for other in (*_between_ranks(case, is_whole=False), *_updates(case)):
        if case.clocks.is_before(whole, other):
            what = f"{case.name(other)} waits for {case.name(whole)}"
            raise case.fault(f"{what}, which waits for other ranks.", rule, other.tick, "Move it, or drop the wait.")


def _between_ranks(case: Case, *, is_whole: bool = True) -> Iterator[Position]:
    """All ops that wait for another rank; those that wait for its updates only if asked for."""
    wanted = {(Stream.RECEIVE, "R"), (Stream.SEND, "P"), (Stream.D2H, "G")}
    wanted |= {(Stream.PEERS, "V")} if is_whole else set()
    return (position for position, op in case.ops if (op.stream, op.what) in wanted)


def _updates(case: Case) -> Iterator[Position]:
    return (position for position, op in case.ops if op.what == "U")
