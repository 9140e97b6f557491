"""The checker's rules of sections: each is updated once and copied once, and nobody mistakes a part for the whole."""

from __future__ import annotations

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.table import Position

_RULE = (
    "One block may be divided: its update is deferred, and its first W comes in as many sections, one after another "
    "into one slot."
)


def check_sections(case: Case) -> None:
    """The deferred update of at most one block is divided, and so is the first copy of its weights."""
    divided = [(position, op) for position, op in case.ops if op.section is not None]
    if not divided:
        return
    first, one = divided[0]
    for position, op in divided:
        if op.block != one.block:
            what = f"{case.name(position)} is of another block than {case.name(first)}."
            raise case.fault(what, _RULE, position.tick, "Divide one of them.")
    block, schedule = one.block, case.schedule
    if schedule.kind.transfer == "bind" or block in schedule.persistent or not case.is_deferred(block):
        raise case.fault(f"block {block} can't be divided.", _RULE, first.tick, "Leave the sections out.")
    updates = [(p, op) for p, op in divided if op.what == "U"]
    loads = [(p, op) for p, op in divided if op.what == "W"]
    count = 1 + max(op.section or 0 for _, op in divided)
    for found in (updates, loads):
        _check_numbers(case, found, count, first)
    if len(updates) != len(case.at(Stream.HOST, "U", block)):
        raise case.fault(f"block {block} is updated as a whole, too.", _RULE, first.tick, "Have one of them.")
    if case.at(Stream.H2D, "W", block)[0] != loads[0][0]:
        raise case.fault(f"{case.name(loads[0][0])} isn't the first W of its block.", _RULE, first.tick, "Divide that.")
    for position, op in loads:
        if op.slot != loads[0][1].slot:
            what = f"{case.name(position)} fills another slot than {case.name(loads[0][0])}."
            raise case.fault(what, _RULE, position.tick, "Use one slot.")


def _check_numbers(case: Case, found: list[tuple[Position, Op]], count: int, first: Position) -> None:
    numbers = [op.section for _, op in found]
    if numbers != list(range(count)):
        position = found[0][0] if found else first
        what = f"the sections of {case.name(position)} are {numbers}, not 0 to {count - 1}."
        raise case.fault(what, _RULE, position.tick, "Have each once, in their order.")
