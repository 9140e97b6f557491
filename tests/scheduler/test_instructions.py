"""Instructions are all that the runtime needs: printed, read back, and checked by rules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.scheduler.check.instruction_rules import check_instructions
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.instructions import Bytes, Half, Instruction, Instructions, Parked
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from tests.draws import draws
from tests.scheduler.workloads import example, schedules, step_schedules, trained


def changed(made: Instructions, index: int, **parts: Any) -> Instructions:
    """The same with one instruction changed."""
    split = len(made.forward.instructions)
    every = [*made.all]
    every[index] = replace(every[index], **parts)
    return replace(
        made,
        forward=replace(made.forward, instructions=tuple(every[:split])),
        backward=replace(made.backward, instructions=tuple(every[split:])),
    )


def mutants(made: Instructions, dice: Random) -> Iterator[tuple[str, Instructions]]:
    """A wait less, a range moved or another size, a free less, more or elsewhere, a flag turned, a figure changed."""
    for index, one in enumerate(made.all):
        where = f"{one.op} at {one.position.tick}"
        for wait in one.waits:
            yield f"{where} without {wait}", changed(made, index, waits=tuple(w for w in one.waits if w != wait))
        for flag in ("retains", "recomputes", "turns"):
            yield f"{where}, {flag}", changed(made, index, **{flag: not getattr(one, flag)})
        for name in ("state", "landing", "buffer", "file"):
            found: Bytes | None = getattr(one, name)
            others = [Bytes(0, 64)] if found is None else [None, *_moved(found)]
            yield from ((f"{where}, {name} {other}", changed(made, index, **{name: other})) for other in others)
        yield from _other_parks(made, index, one, where)
        yield from _other_frees(made, index, one, where, dice)
    for name in ("slot_bytes", "park_bytes", "buffer_bytes", "landing_bytes"):
        yield name, replace(made, **{name: getattr(made, name) + 64})
    for name in ("forward", "backward"):
        half: Half = getattr(made, name)
        for what in ("frees", "takes"):
            items: tuple[Item, ...] = getattr(half, what)
            for item in items:
                kept = tuple(i for i in items if i != item)
                yield f"{name} {what} no {item}", replace(made, **{name: replace(half, **{what: kept})})


def _moved(found: Bytes) -> list[Bytes]:
    return [Bytes(found.offset + 64, found.nbytes), Bytes(found.offset, found.nbytes + 64)]


def _other_parks(made: Instructions, index: int, one: Instruction, where: str) -> Iterator[tuple[str, Instructions]]:
    for number, (value, host) in enumerate(one.parked):
        rest = one.parked[:number], one.parked[number + 1 :]
        yield f"{where} without {value}", changed(made, index, parked=(*rest[0], *rest[1]))
        for other in _moved(host):
            parked = (*rest[0], Parked(value, other), *rest[1])
            yield f"{where}, {value} at {other}", changed(made, index, parked=parked)


def _other_frees(
    made: Instructions, index: int, one: Instruction, where: str, dice: Random
) -> Iterator[tuple[str, Instructions]]:
    for name in ("frees_before", "frees_after", "takes", "leaves"):
        items: tuple[Any, ...] = getattr(one, name)
        for item in items:
            less = changed(made, index, **{name: tuple(i for i in items if i != item)})
            yield f"{where}, {name} without {item}", less
            other = dice.randrange(len(made.all))
            if other != index and item not in getattr(made.all[other], name):
                moved = changed(less, other, **{name: (*getattr(made.all[other], name), item)})
                yield f"{where}, {name} {item} by number {other}", moved
    yield f"{where} frees more", changed(made, index, frees_after=(*one.frees_after, Item("value", 99)))


def is_rejected(plan: Schedule, made: Instructions) -> bool:
    try:
        check_instructions(made, plan, plan.known_workload())
    except ScheduleError:
        return True
    return False


@given(st.one_of(schedules(), step_schedules()), st.integers(0, 2**20))
@draws(60, usual=6)  # each has hundreds of mutants
def test_instructions_of_every_schedule_pass_their_check_and_every_other_is_refused(plan: Schedule, seed: int):
    made = plan.instructions
    assert [(i.position, i.op) for i in made.all] == list(plan.positions())
    assert {i.position: i.waits for i in made.all} == dict(plan.waits())
    plan.check(instructions=made)
    assert [name for name, mutant in mutants(made, Random(seed)) if not is_rejected(plan, mutant)] == []


def test_many_mutations_are_tried():
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=2, updates="deferred", clip=True, outputs="release")
    made = plan.instructions
    tried = dict(mutants(made, Random(0)))
    assert len(tried) > 300
    assert not any(mutant == made for mutant in tried.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"waits": (Position(9, Stream.H2D),)}, "compute:F2 at tick 3 waits for h2d 9"),
        ({"state": Bytes(64, 132864)}, "compute:F2 at tick 3 has state 64+132864, not 0+132864"),
        ({"retains": True}, "compute:F2 at tick 3 has a retained graph True, not False"),
        ({"frees_before": ()}, "compute:F2 at tick 3 has frees before it nothing, not original 1.0"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], message: str):
    plan = schedule(example(), keep=1)
    made = plan.instructions
    index = next(n for n, i in enumerate(made.all) if str(i.op) == "F2")
    with pytest.raises(ScheduleError) as caught:
        plan.check(instructions=changed(made, index, **change))
    assert str(caught.value).splitlines()[0] == message + "."
