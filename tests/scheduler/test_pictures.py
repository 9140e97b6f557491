"""Why an op waits, and the picture of a simulated step."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from tests.draws import draws
from tests.scheduler.workloads import example, schedules, step_schedules, trained

CARD = Hardware(25e9, 25e9, 1e11, host_bytes_per_s=60e9)


class TestPictures(TestCase):
    def test_why_a_backward_waits(self) -> None:
        self.assertExpectedInline(
            schedule(example(), keep=1).why("B3"),
            """\
B3 (compute, tick 5)
  needs what F3 (compute, tick 4) makes
  takes memory that A2 (d2h, tick 3) releases
  needs the weights that W3@1 (h2d, tick 3) brings
F3 (compute, tick 4)
  needs what F2 (compute, tick 3) makes
  takes memory that A2 (d2h, tick 3) releases
  needs the weights that W3@1 (h2d, tick 3) brings
F2 (compute, tick 3)
  needs what F1 (compute, tick 2) makes
  takes memory that A1 (d2h, tick 2) releases
  needs the weights that W2@0 (h2d, tick 2) brings
F1 (compute, tick 2)
  needs what F0 (compute, tick 1) makes
  needs the weights that W1@1 (h2d, tick 1) brings
F0 (compute, tick 1)
  needs the weights that W0@0 (h2d, tick 0) brings
W0@0 (h2d, tick 0)
  waits for nothing""",
        )

    def test_a_step_whose_updates_overlap(self) -> None:
        plan = schedule(trained(4), updates="overlap")
        self.assertExpectedInline(
            plan.gantt(CARD, width=60),
            """\
step 0.176 ms; busy: h2d 18%, compute 85%, d2h 12%, host 35%; bound by compute; 0.00294 ms a character
h2d      WWww.wwwwww...........www.......www.........................
compute  .FFFFFFFFFFFFFFBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB.......
d2h      ......................ggg.......ggg.......ggg.......GGG.....
host     ........................uuuuuu....uuuuuu....uuuuuu....UUUUUU""",
        )


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


@given(st.one_of(schedules(), step_schedules()))
@draws(60)
def test_every_chain_ends_where_nothing_is_waited_for_and_every_op_is_drawn(plan: Schedule):
    for position, op in plan.positions():
        lines = plan.why(str(op), position.tick).splitlines()
        assert lines[-1].endswith("waits for nothing")
        assert sum(not line.startswith(" ") for line in lines) <= len(plan.ops)
    rows = plan.gantt(Hardware(1e3, 1e3, 1e3, launch_s=1.0), width=4 * len(plan.ops) or 1).splitlines()[1:]
    # Each op takes at least the time of a launch, no op more than the step, so each has a slice of its own.
    streams = {str(p.stream) for p, _ in plan.positions()}
    assert {row.split()[0] for row in rows} == streams
    assert all(set(row.split()[1].upper()) <= set("WAFBGSNU.") for row in rows)


def test_a_step_that_takes_no_time_is_drawn_empty():
    plan = schedule(example())
    free = Hardware(float("inf"), float("inf"), float("inf"))
    assert set("".join(row.split()[1] for row in plan.gantt(free, width=5).splitlines()[1:])) <= {"."}


def test_the_repr_of_a_schedule_is_short():
    assert repr(schedule(example())) == "<Schedule: 4 blocks, 10 ticks, train, peak 551.25 KiB>"
