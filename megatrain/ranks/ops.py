"""T and V: the ops of a schedule with which several ranks add up their gradients, and wait for each other's updates.

Each rank runs the schedule of one process on its own micro-batches. Its `G` lands its gradients in memory that all
ranks see. A `T` adds what all ranks have landed of a block, and a `V` after a `U` waits until all ranks have updated
their parts of it. The builder doesn't know these ops: `with_others` puts them into a table that is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatrain.scheduler.builder.draft import with_figures
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.effects import Effects
from megatrain.scheduler.items import NO_BLOCK, Effect, Item, OpKind, Stream
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.table import Op, Position, Tick

SUMS, PEERS = Stream("sums"), Stream("peers")


def with_others(schedule: Schedule) -> Schedule:
    """Puts a T after each G, and a V after each U.

    Other ops keep their order. Updates at the head stay there, and all that may read what they write comes a tick
    later; so does what the host does with gradients, once more.

    >>> from megatrain.scheduler.builder.build import build
    >>> from megatrain.scheduler.step_kind import StepKind
    >>> from megatrain.scheduler.workload import BlockWork, Workload
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True, update_bytes=64)
    >>> alone = build(Workload((layer, layer), (), ()), StepKind(updates="overlap", outputs="release"), num_slots=2)
    >>> print(*alone.ops)
    W0@0 W1@1 F0 F1 B1 B0 G1 G0 U1 U0
    >>> print(*with_others(alone).ops)
    W0@0 W1@1 F0 F1 B1 B0 G1 G0 T1 U1 T0 U0 V1 V0
    """
    head, cells = frozenset(schedule.deferred), dict[int, list[Op]]()
    later = 1 if head else 0
    for position, op in schedule.positions():
        of_host = position.stream == Stream.HOST
        is_head = of_host and op.what == "U" and op.block in head
        tick = position.tick + (0 if is_head else later + of_host)
        cells.setdefault(tick, []).append(op)
        if (position.stream, op.what) == (Stream.D2H, "G"):
            cells.setdefault(tick + 1, []).append(Op(SUMS, "T", op.block))
        elif of_host and op.what == "U":
            cells.setdefault(tick + 1, []).append(Op(PEERS, "V", op.block))
    ticks = tuple(Tick(*cells.get(tick, ())) for tick in range(1 + max(cells, default=-1)))
    return schedule_of(with_figures(replace(schedule, ticks=ticks)))


def _total(step: Effects, block: int, micro_batch: int) -> Effect:
    """It reads a part of the gradients of each rank, and writes that part: as many bytes as this rank's, and more."""
    del micro_batch
    landed = (Item("landed", block),)
    return Effect(landed, adds=landed, moves=step.workload.blocks[block].gradient_bytes)


def _whole(step: Effects, block: int, micro_batch: int) -> Effect:
    """Until it is over, other ranks may read the gradients that this one has landed, unless they are of before."""
    del micro_batch
    state, read = Item("state", block), list[Item]()
    if block not in step.deferred and step.kind.transfer == "copy":
        works = step.workload.blocks
        read += [Item("landed", b) for b in step.workload.update_group(block) if works[b].gradient_bytes > 0]
        read = [item for item in read if works[item.number].has_backward]
    return Effect((state, *read), (state,))


# The checker's rules. Each rank's table is checked alone. The blocks are the same on all ranks, which compare them
# before a step. So ranks can't wait for each other in a circle if every table keeps to one order of the ops that wait
# for other ranks: first the V of updates of the step before, whose U wait for no other rank; then by block, the last
# one first, its T, and the V of the update that uses its gradients last. A U and a G wait only for what comes before
# them in this order, for other ranks wait for these.


def check_totals(case: Case) -> None:
    """Every gradient is added up over the ranks, before anybody uses it, and in one order."""
    if not _has_others(case):
        return
    rule = (
        "With other ranks each G has one T, after it and before all that uses the gradients; T come in the order of G."
    )
    previous: Position | None = None
    for block in reversed(range(len(case.workload.blocks))):
        offloads = case.at(Stream.D2H, "G", block)
        if not offloads:
            case.never(SUMS, "T", block, "adds what never lands", rule)
            continue
        total = case.once(SUMS, "T", block, rule)
        case.require_before(offloads[0], total, "adds what lands with", rule)
        users = [*case.at(Stream.HOST, "S", block)]
        users += [p for b in case.updates_of(block) if not case.is_deferred(b) for p in case.at(Stream.HOST, "U", b)]
        for user in users:
            case.require_before(total, user, "uses the total of", rule)
        for norm in case.at(Stream.HOST, "N", NO_BLOCK) if users else ():
            case.require_before(total, norm, "takes the norm of the total of", rule)
        if previous is not None:
            case.require_before(previous, total, "follows", rule)
        previous = total


def check_whole(case: Case) -> None:
    """Every update is waited for on all ranks; readers come before or after it on all of them, nobody in a circle."""
    if not _has_others(case):
        return
    rule = "With other ranks each U has one V; what reads the block follows it, or comes before the gradients leave."
    for block in range(len(case.workload.blocks)):
        updates = case.at(Stream.HOST, "U", block)
        if not updates:
            case.never(PEERS, "V", block, "waits for an update that nobody makes", rule)
            continue
        whole = case.once(PEERS, "V", block, rule)
        case.require_before(updates[0], whole, "follows", rule)
        members = (block, *case.workload.blocks[block].shares)
        leaving = [position for member in members for position in case.at(Stream.D2H, "G", member)]
        for reader in case.weight_readers(members):
            if case.is_deferred(block):
                case.require_before(whole, reader, "reads what other ranks have written by", rule)
            elif not any(case.clocks.is_before(reader, position) for position in leaving):
                what = f"{case.name(reader)} reads what another rank may be updating"
                raise case.fault(f"{what}.", rule, reader.tick, "Move it above the tick where its gradients leave.")
        _check_landings(case, block, whole, members)
    _check_one_order(case)


def _has_others(case: Case) -> bool:
    """Whether the table is that of one of several ranks."""
    return any(position.stream in (SUMS, PEERS) for position, _ in case.ops)


def _check_landings(case: Case, block: int, whole: Position, members: tuple[int, ...]) -> None:
    rule = "Gradients of this rank are overwritten only when all ranks have added them: after the V of their update."
    places = {place.block: range(place.offset, place.offset + place.nbytes) for place in case.schedule.places}
    if case.is_deferred(block):
        return
    for member in (each for each in members if each in places):
        mine, (landed,) = places[member], case.at(Stream.D2H, "G", member)
        for other, place in places.items():
            (later,) = case.at(Stream.D2H, "G", other)
            if later > landed and place.start < mine.stop and mine.start < place.stop:
                case.require_before(whole, later, f"overwrites gradients of block {member}, added by all at", rule)


def _check_one_order(case: Case) -> None:
    """Nothing that other ranks wait for depends on a later wait for other ranks."""
    rule = "T, V and N come in one order on all ranks: deferred V, then by block, last one first; N after all T."
    order = _order(case)
    asked: dict[Position, int] = {**order}
    for position, op in case.ops:
        if position.stream == Stream.HOST and op.what == "U":
            asked[position] = order.get(_whole_of(case, op.block), 0) - 1 if not case.is_deferred(op.block) else -1
        elif position.stream == Stream.D2H and op.what == "G" and case.at(SUMS, "T", op.block):
            asked[position] = order[case.at(SUMS, "T", op.block)[0]] - 1
    for position, place in asked.items():
        for other, its in order.items():
            if its > place and case.clocks.is_before(other, position):
                what = f"{case.name(position)} waits for {case.name(other)}"
                raise case.fault(f"{what}, of a later block.", rule, position.tick, "Move it, or drop the wait.")


def _whole_of(case: Case, block: int) -> Position:
    return case.at(PEERS, "V", block)[0]


def _order(case: Case) -> dict[Position, int]:
    """The place of each op that waits for other ranks in the order of all of them: the same on all ranks."""
    last = len(case.workload.blocks)
    clip = case.schedule.kind.clip

    def of_update(block: int) -> int:
        if case.is_deferred(block):
            return 0
        members = (block, *case.workload.blocks[block].shares)
        least = min((b for b in members if case.at(Stream.D2H, "G", b)), default=block)
        return 4 * (last - least) + 3 + (4 * (last + 1) if clip or case.schedule.kind.updates == "serial" else 0)

    places: Mapping[str, Callable[[int], int]] = {"T": lambda block: 4 * (last - block) + 1, "V": of_update}
    found = {p: places[op.what](op.block) for p, op in case.ops if p.stream in (SUMS, PEERS) and op.what in places}
    for norm in case.at(Stream.HOST, "N", NO_BLOCK):
        found[norm] = 4 * (last + 1) + 1 if clip else 8 * (last + 2)
    return found


TOTAL, WHOLE = OpKind(SUMS, "T", _total), OpKind(PEERS, "V", _whole)
