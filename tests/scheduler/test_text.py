"""Printed forms: the tables of the design's example, and what is read back."""

from __future__ import annotations

import expecttest
import pytest
from hypothesis import given

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.effects import streams
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op, parse_op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Tick
from tests.draws import draws
from tests.scheduler.workloads import chain, example, schedules


class TestPrintedForm(expecttest.TestCase):
    maxDiff = None

    def test_the_example_of_the_design(self):
        self.assertExpectedInline(
            str(schedule(example(), num_slots=2, keep=2)),
            """\
schedule: 4 blocks, 2 slots, keep 2, 10 ticks; h2d 603392 B, d2h 404992 B, peak 564480 B
device: 597248 B; host: 141056 B
slots: 0 = 0+132864; 1 = 132864+132864
saves: 3
tick  h2d   compute  d2h  live_bytes
   0  W0@0  .        .        265984
   1  W1@1  F0       .        274176
   2  W2@0  F1       A1       282368
   3  W3@1  F2       .        282368
   4  .     F3*      .        315136
   5  A1    B3       .        397056
   6  W1@1  B2       G3       505344
   7  W0@0  B1       G2       564480
   8  .     B0       G1       480768
   9  .     .        G0       339456""",
        )

    def test_everything_is_parked_and_one_slot_overlaps_nothing(self):
        self.assertExpectedInline(
            str(schedule(example(), num_slots=1, activations="offload")),
            """\
schedule: 4 blocks, 1 slot, keep 0, 16 ticks; h2d 744448 B, d2h 413184 B, peak 306944 B
device: 339712 B; host: 149248 B
slots: 0 = 0+132864
saves: 3
tick  h2d   compute  d2h  live_bytes
   0  W0@0  .        .        133120
   1  .     F0       .        141312
   2  W1@0  .        A1       141312
   3  .     F1       .        149504
   4  W2@0  .        A2       141312
   5  .     F2       .        149504
   6  W3@0  .        .        141312
   7  .     F3*      .        174080
   8  A2    B3       .        256000
   9  W2@0  .        G3       231424
  10  A1    B2       .        306944
  11  W1@0  .        G2       290560
  12  .     B1       .        298752
  13  W0@0  .        G1       282368
  14  .     B0       .        215040
  15  .     .        G0       206592""",
        )

    def test_inference(self):
        self.assertExpectedInline(
            str(schedule(example(), mode="forward")),
            """\
schedule: 4 blocks, 2 slots, keep 0, 5 ticks; h2d 396800 B, d2h 0 B, peak 282112 B
device: 290304 B; host: 0 B
slots: 0 = 0+132864; 1 = 132864+132864
mode: forward
tick  h2d   compute  d2h  live_bytes
   0  W0@1  .        .        265984
   1  W1@0  F0       .        274176
   2  W2@1  F1       .        282112
   3  W3@0  F2       .        282112
   4  .     F3       .        282112""",
        )

    def test_a_backward_alone_without_copies(self):
        forward = schedule(example(), activations="keep", transfer="bind")
        self.assertExpectedInline(
            str(backward_schedule(forward)),
            """\
schedule: 4 blocks, 1 slot, keep 4, 6 ticks; h2d 0 B, d2h 0 B, peak 339712 B
device: 356096 B; host: 0 B
slots: 0 = 0+0
saves: 0-3
mode: backward
transfer: bind
tick  h2d   compute  d2h  live_bytes
   0  W3@0  .        .        106752
   1  W2@0  B3       .        180480
   2  W1@0  B2       G3       296960
   3  W0@0  B1       G2       339712
   4  .     B0       G1       239616
   5  .     .        G0        73728""",
        )


@given(schedules())
@draws(100)
def test_a_schedule_equals_what_its_text_reads(plan: Schedule):
    again = Schedule.parse(str(plan), plan.known_workload())
    assert again == plan
    assert str(again) == str(plan)
    again.check()


def test_a_schedule_without_workload_says_what_it_lacks():
    plan = Schedule.parse(str(schedule(example())))
    with pytest.raises(ScheduleError, match="doesn't know its workload"):
        plan.waits()
    plan.check(example())


def test_long_schedules_stay_narrow_and_read_back():
    plan = schedule(chain([64 * (1 + i % 7) for i in range(300)]), num_slots=5, activations="keep")
    assert "saves: 0-299" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 110
    assert Schedule.parse(str(plan)) == plan


def test_ops_of_the_host_and_micro_batches_read_back():
    row = Tick(
        Op(Stream.H2D, "W", 3, slot=1, micro_batch=2),
        Op(Stream.COMPUTE, "B", 4, micro_batch=0),
        None,
        Op(Stream.HOST, "N", -1),
    )
    plan = Schedule((row,), (), 0, (), (5,), 1, 2, 5, 5, 0, 6, StepKind())
    assert str(plan).splitlines()[-1] == "   0  W3.2@1  B4.0     .    N              5"
    assert Schedule.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("W3@1", "W3", "line 9 of the schedule can't be read: `W3` must name a slot."),
        ("W3@1", "X3", "line 9 of the schedule can't be read: the h2d stream can't do `X`; it does W and A."),
        (
            "F2",
            "G2",
            "line 9 of the schedule can't be read: the compute stream can't do `G`; it does F and B.",
        ),
        ("F3*", "F3", "line 10 of the schedule can't be read: `F3` must have a star"),
        ("F2 ", "F2*", "line 9 of the schedule can't be read: `F2*` must not have a star"),
        ("   4 ", "   5 ", "line 10 of the schedule can't be read: expected tick 4, found `5`."),
        ("265984", "-1", "line 6 of the schedule can't be read: `-1` isn't a number of live bytes."),
        ("saves: 3", "saves: 3-", "line 4 of the schedule can't be read: `3-` isn't a range of blocks"),
        ("saves: 3", "saves: 9", "line 4 of the schedule can't be read: `9` isn't a range of blocks"),
        ("saves: 3", "mode: fast", "line 4 of the schedule can't be read: `fast` is none of train,"),
        ("saves: 3", "sieves: 3", "line 4 of the schedule can't be read: `sieves:` is neither a key of the header"),
        ("1 = 1", "2 = 1", "line 3 of the schedule can't be read: `2 = 132864+132864` isn't slot 1"),
        ("device:", "devices:", "line 2 of the schedule can't be read: `devices:` is neither a key"),
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
    ("stream", "token"),
    [("h2d", "W3@1"), ("h2d", "A3"), ("d2h", "A3.0"), ("d2h", "G12"), ("host", "N"), ("host", "U3.1")],
)
def test_tokens_read_back(stream: str, token: str):
    assert str(parse_op(token, Stream(stream))) == token


@pytest.mark.parametrize("token", ["", "W", "F", "N3", "F3@1", "w3@1", "W3@", "F3*"])
def test_what_is_no_token_is_refused(token: str):
    for stream in streams():
        with pytest.raises(ScheduleError):
            parse_op(token, stream)
