"""What another schedule does otherwise: in words, in bytes, op by op."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from expecttest import TestCase
from hypothesis import given

from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Tick
from tests.draws import draws
from tests.scheduler.workloads import example, step_schedules, trained


class TestDiffs(TestCase):
    maxDiff = None

    def test_a_larger_budget(self) -> None:
        self.assertExpectedInline(
            schedule(example(), keep=1).diff(schedule(example(), activations="keep")),
            """\
the other schedule: 3 graphs more kept, 3 blocks fewer recomputed, 2 parks fewer
  bytes: device 597248 -> 621824, peak 564480 -> 605440, host 149248 -> 132864
  bytes moved: h2d 611584 -> 595200, d2h 413184 -> 396800
  graphs kept: 3 -> 0-3
  inputs kept of the last blocks: 1 -> 4
  live bytes: others at ticks 1-8
  vanished: A2 (h2d, tick 4)
  vanished: A1 (h2d, tick 5)
  vanished: A1 (d2h, tick 2)
  vanished: A2 (d2h, tick 3)""",
        )

    def test_a_step_of_two_micro_batches_with_updates(self) -> None:
        self.assertExpectedInline(
            schedule(trained(2)).diff(schedule(trained(2), updates="overlap", micro_batches=2)),
            """\
the other schedule: 5 ticks more
  bytes: device 580864 -> 721920, peak 548096 -> 564736, host 132864 -> 265728
  kind: micro_batches 1 -> 2, updates none -> overlap
  places: none -> 0 = 132864+132864, 1 = 0+132864
  appeared: F0.1 (compute, tick 2)
  appeared: F1.1 (compute, tick 5)
  appeared: B1.1 (compute, tick 6)
  appeared: B0.1 (compute, tick 8)
  moved: G1 (d2h, tick 4 -> 8): with B0 -> with B0.1
  moved: G0 (d2h, tick 5 -> 9): 1 tick after B0 -> 1 tick after B0.1
  appeared: U1 (host, tick 9)
  appeared: U0 (host, tick 10)""",
        )

    def test_weights_that_come_later(self) -> None:
        self.assertExpectedInline(
            schedule(example(), num_slots=2).diff(schedule(example(), num_slots=1)),
            """\
the other schedule: 1 slot fewer, 6 ticks more
  bytes: device 597248 -> 339712, peak 564480 -> 306944
  bytes moved: h2d 595200 -> 728064
  slots: 0+132864, 132864+132864 -> 0+132864
  appeared: W2@0 (h2d, tick 9)
  moved: W1@1 (h2d, tick 1 -> 2): with F0 -> 1 tick before F1, now in slot 0
  moved: W2@0 (h2d, tick 2 -> 4): with F1 -> 1 tick before F2
  moved: W3@1 (h2d, tick 3 -> 6): with F2 -> 1 tick before F3, now in slot 0
  moved: W1@1 (h2d, tick 6 -> 11): with B2 -> 1 tick before B1, now in slot 0
  moved: W0@0 (h2d, tick 7 -> 13): with B1 -> 1 tick before B0
  moved: G3 (d2h, tick 6 -> 9): with B2 -> 1 tick before B2
  moved: G2 (d2h, tick 7 -> 11): with B1 -> 1 tick before B1
  moved: G1 (d2h, tick 8 -> 13): with B0 -> 1 tick before B0""",
        )


def test_equal_schedules_are_one_line():
    plan = schedule(example(), keep=1)
    assert plan.diff(schedule(example(), keep=1)) == "the schedules are equal"
    assert plan.diff(Schedule.parse(str(plan))) == "the schedules are equal"  # without a workload


def test_a_tick_more_at_the_beginning_moves_nothing():
    plan = schedule(example(), keep=1)
    later = replace(plan, ticks=(Tick(), *plan.ticks), live_bytes=(0, *plan.live_bytes))
    assert plan.diff(later).splitlines() == [
        "the other schedule: 1 tick more",
        "  the same ops in the same order, at other ticks",
    ]


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


def _tokens(plan: Schedule) -> Counter[str]:
    """The ops of a schedule by what they are; the first micro-batch is the one of a call."""
    return Counter(f"{op.stream} {op.what}{op.block}.{op.micro_batch or 0}" for op in plan.ops)


def _listed(text: str, what: str) -> int:
    return len(re.findall(rf"^  {what}: ", text, re.MULTILINE))


@given(step_schedules(), step_schedules())
@draws(60, usual=8)
def test_a_diff_counts_what_is_only_in_one_of_two(left: Schedule, right: Schedule):
    text = left.diff(right)
    assert text == left.diff(right)
    assert (text == "the schedules are equal") == (left == right)
    assert left.diff(left) == "the schedules are equal"
    assert _listed(text, "vanished") == (_tokens(left) - _tokens(right)).total()
    assert _listed(text, "appeared") == (_tokens(right) - _tokens(left)).total()
    back = right.diff(left)
    assert _listed(back, "vanished") == _listed(text, "appeared")
    assert left == right or len(text.splitlines()) > 1 or re.search("ticks? (more|fewer)", text)
