"""Printed forms of schedules, what is read back, and words about them: differences, reasons to wait, pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.ranks.ops import with_others
from megatrain.scheduler.builder.build import backward_schedule, build
from megatrain.scheduler.effects import streams
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Measured, TimedRun
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import parse_op
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import example, schedules, step_schedules, trained

CARD = Hardware(25e9, 25e9, 1e11, host_bytes_per_s=60e9)


def test_printed_forms(golden: Callable[[str, str], None]):
    """Tables, instructions, differences, reasons, pictures and measurements, one after the other."""
    plan, bound = schedule(example(), keep=1), schedule(example(), activations="keep", transfer="bind")
    step = schedule(trained(4, tied=True), keep=1, micro_batches=2, updates="deferred", clip=True)
    short = schedule(trained(3), keep=0, micro_batches=2, updates="overlap", outputs="release")
    seconds = {p: (1 + i) * 1e-3 for i, (p, _) in enumerate(step.positions())}
    run = TimedRun.of(short, {t.position: (t.start_s, t.end_s) for t in short.simulate(CARD).timeline})
    forms = {
        "the example of the design": schedule(example(), num_slots=2, keep=2),
        "a backward alone without copies": backward_schedule(bound),
        "deferred updates of tied weights with two micro-batches": step,
        "one of several ranks": with_others(build(trained(3), StepKind(updates="overlap"), num_slots=3)),
        "a step and its instructions": f"{short}\n\n{short.instructions}",
        "one slot fewer": schedule(example(), num_slots=2).diff(schedule(example(), num_slots=1)),
        "two micro-batches and updates": schedule(trained(2)).diff(
            schedule(trained(2), updates="overlap", micro_batches=2)
        ),
        "why a backward waits": plan.why("B3"),
        "a picture": schedule(trained(4), updates="overlap").gantt(CARD, width=60),
        "measured": Measured(step, seconds),
        "timed": run,
    }
    golden("schedules", "\n\n".join(f"-- {name} --\n{form}" for name, form in forms.items()))


@given(st.one_of(schedules(), step_schedules()))
@draws(100)
def test_a_schedule_equals_what_its_text_reads(plan: Schedule):
    workload = plan.known_workload()
    again = Schedule.parse(str(plan), workload)
    assert again == plan
    assert str(again) == str(plan)
    again.check()
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("W3@1", "W3", "line 9 of the schedule can't be read: `W3` must name a slot."),
        ("F2", "G2", "line 9 of the schedule can't be read: the compute stream can't do `G`; it does F and B and U."),
        ("F3*", "F3", "line 10 of the schedule can't be read: `F3` must have a star"),
        ("F2 ", "F2*", "line 9 of the schedule can't be read: `F2*` must not have a star"),
        ("   4 ", "   5 ", "line 10 of the schedule can't be read: expected tick 4, found `5`."),
        ("saves: 3", "saves: 9", "line 4 of the schedule can't be read: `9` isn't a range of blocks"),
        ("saves: 3", "sieves: 3", "line 4 of the schedule can't be read: `sieves:` is neither a key of the header"),
        ("1 = 1", "2 = 1", "line 3 of the schedule can't be read: `2 = 132864+132864` isn't slot 1"),
        ("schedule:", "plan:", "line 1 of the schedule can't be read: a schedule begins with"),
        ("10 ticks", "11 ticks", "line 15 of the schedule can't be read: the header announces 11 ticks"),
        ("d2h  live", "live", "line 5 of the schedule can't be read: expected the heading"),
    ],
)
def test_an_unreadable_line_is_named_and_quoted(before: str, after: str, message: str):
    text = str(schedule(example(), num_slots=2, keep=2)).replace(before, after, 1)
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    first, *_, quoted = str(caught.value).splitlines()
    assert first.startswith(message)
    assert quoted.strip() in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("micro-batches: 0", "expected `micro-batches: 4`"),
        ("micro-batches: two", "expected `micro-batches: 4`"),
        ("updates: later", "`later` is none of none, overlap, serial, deferred"),
        ("outputs: drop", "`drop` is none of keep, release"),
        ("updates: serial, cut", "expected `updates: deferred`, `updates: deferred, clipped` or"),
        ("mode: forward\nupdates: overlap", "the header of the schedule contradicts itself: mode="),
        ("updates: overlap\nupdates: serial", "an earlier line says the same thing"),
    ],
)
def test_an_unreadable_line_of_a_step_is_named(line: str, message: str):
    text = str(schedule(example(), num_slots=2, keep=2)).replace("tick  h2d", f"{line}\ntick  h2d")
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)


def test_tokens_read_back_and_what_is_no_token_is_refused():
    for stream, token in (("h2d", "W3@1"), ("d2h", "A3.0"), ("d2h", "G12"), ("host", "N"), ("host", "U3.1")):
        assert str(parse_op(token, Stream(stream))) == token
    for stream, token in product(streams(), ("", "W", "F", "N3", "F3@1", "w3@1", "W3@", "F3*")):
        with pytest.raises(ScheduleError):
            parse_op(token, stream)


# -- differences --------------------------------------------------------------------------------------------------


def test_computation_in_another_order_has_moved():
    plan = schedule(example(), keep=1)
    ticks = list(plan.ticks)
    first, second = ticks[7].compute, ticks[8].compute
    ticks[7], ticks[8] = ticks[7].replaced("compute", second), ticks[8].replaced("compute", first)
    text = plan.diff(replace(plan, ticks=tuple(ticks)))
    assert re.search(r"^  moved: B[01] \(compute, tick (7 -> 8|8 -> 7)\)$", text, re.MULTILINE)
    assert "vanished" not in text


def test_each_figure_that_differs_is_told():
    plan = schedule(example(), keep=1)
    for name in ("device_bytes", "peak_bytes", "host_bytes", "h2d_bytes", "d2h_bytes"):
        value = getattr(plan, name)
        lines = plan.diff(replace(plan, **{name: value + 1})).splitlines()
        assert lines == [
            "the other schedule: as many graphs, parks and ticks",
            f"  bytes{' moved' if '2' in name else ''}: {name.removesuffix('_bytes')} {value} -> {value + 1}",
        ]
    slots = (replace(plan.slots[0], nbytes=7), *plan.slots[1:])
    assert "slots: 0+132864, 132864+132864 -> 0+7, 132864+132864" in plan.diff(replace(plan, slots=slots))
    live = (plan.live_bytes[0] + 1, *plan.live_bytes[1:])
    assert plan.diff(replace(plan, live_bytes=live)).endswith("\n  live bytes: others at ticks 0")


# -- why an op waits, and pictures --------------------------------------------------------------------------------


def test_every_op_that_recurs_is_told_by_its_tick():
    plan = schedule(example(), keep=1)
    ticks = [p.tick for p, op in plan.positions() if str(op) == "W1@1"]
    assert len(ticks) == 2
    first, second = (plan.why("W1@1", tick).splitlines() for tick in ticks)
    assert plan.why("W1@1").splitlines() == first
    assert first[:2] == [f"W1@1 (h2d, tick {ticks[0]})", "  comes after W0@0 (h2d, tick 0) in its stream"]
    assert second[0] == f"W1@1 (h2d, tick {ticks[1]})"
    with pytest.raises(ScheduleError, match=r"no op `W1@1` at tick 3.\n.*\n  It is at ticks 1, 6"):
        plan.why("W1@1", 3)
    with pytest.raises(ScheduleError, match="no op `B9`"):
        plan.why("B9")
