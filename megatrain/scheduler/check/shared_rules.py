"""The checker's rules of a store that ranks of one host share: who may write its parts when, and who reads them.

Each rank updates a part of every block's parameters with its `U`, and its `V` waits for the `U` of all others. Each
table is checked alone; ranks of one host have the same blocks and the same updates, which they compare before a step.

- An update of this step, on any rank, follows a `G` of its block, which brings the total; the total is made when the
  sum has gone through all ranks. So a reader that comes before this rank hands on its sum comes before the `U` of every
  rank.
- A deferred update writes what the steps before have read: they are over on all ranks. Its `V` comes before the first
  reader of this step.
- A `V` waits for other ranks' `U`. Deferred ones wait for nothing of another rank; all others only for totals. So
  nobody waits in a circle if no deferred `U` waits for an op between ranks, and neither sums nor any `U`
  wait for a `V` of this step's updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position


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
