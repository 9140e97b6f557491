"""Printed forms of whole steps, and what is read back."""

from __future__ import annotations

import json

import expecttest
import pytest
from hypothesis import given

from megatrain.errors import ScheduleError
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import example, step_schedules, trained


@given(step_schedules())
@draws(60)
def test_a_step_equals_what_its_text_reads(plan: Schedule):
    again = Schedule.parse(str(plan), plan.known_workload())
    assert again == plan
    assert str(again) == str(plan)
    workload = plan.known_workload()
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("micro-batches: 0", "expected `micro-batches: 4`"),
        ("micro-batches: two", "expected `micro-batches: 4`"),
        ("updates: later", "`later` is none of none, overlap, serial, deferred"),
        ("outputs: drop", "`drop` is none of keep, release"),
        ("updates: serial, cut", "expected `updates: deferred`, `updates: deferred, clipped` or"),
    ],
)
def test_an_unreadable_line_of_a_step_is_named(line: str, message: str):
    text = str(schedule(example(), num_slots=2, keep=2)).replace("tick  h2d", f"{line}\ntick  h2d")
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)


class TestPrintedSteps(expecttest.TestCase):
    maxDiff = None

    def test_deferred_updates_of_tied_weights_with_two_micro_batches(self):
        plan = schedule(trained(4, tied=True), keep=1, micro_batches=2, updates="deferred", clip=True)
        self.assertExpectedInline(
            str(plan),
            """\
schedule: 4 blocks, 2 slots, keep 1, 21 ticks; h2d 829952 B, d2h 564224 B, peak 589312 B
device: 754944 B; host: 564224 B
slots: 0 = 0+132864; 1 = 132864+132864
saves: 3
micro-batches: 2
updates: deferred, clipped
places: 0 = 398592+132864; 1 = 265728+132864; 2 = 132864+132864; 3 = 0+132864
tick  h2d   compute  d2h   host  live_bytes
   0  .     .        .     U0        266240
   1  W0@0  .        .     U1        266240
   2  W1@1  F0.0     .     U2        274432
   3  .     F0.1     A1.0  .         282624
   4  W2@0  F1.0     A1.1  .         290816
   5  .     F1.1     A2.0  .         290816
   6  W3@1  F2.0     A2.1  .         290816
   7  .     F2.1     .     .         290816
   8  .     F3.0*    .     .         307200
   9  .     B3.0     .     .         456448
  10  A2.0  F3.1*    .     .         464640
  11  A2.1  B3.1     .     .         481024
  12  W1@1  B2.0     .     .         589312
  13  A1.0  B2.1     G3    .         589312
  14  A1.1  B1.0     .     S3        589312
  15  W0@0  B1.1     G2    .         581120
  16  .     B0.0     .     S2        564736
  17  .     B0.1     G1    .         556288
  18  .     .        G0    S1        414976
  19  .     .        .     S0        282112
  20  .     .        .     N         282112""",
        )

    def test_overlapping_updates_of_one_micro_batch(self):
        self.assertExpectedInline(
            str(schedule(trained(3), updates="overlap")),
            """\
schedule: 3 blocks, 2 slots, keep 3, 9 ticks; h2d 531456 B, d2h 398592 B, peak 564480 B
device: 597248 B; host: 265728 B
slots: 0 = 0+132864; 1 = 132864+132864
saves: 2
updates: overlap
places: 0 = 0+132864; 1 = 132864+132864; 2 = 0+132864
tick  h2d   compute  d2h  host  live_bytes
   0  W0@1  .        .    .         265984
   1  W1@0  F0       .    .         274176
   2  W2@1  F1       .    .         282368
   3  .     F2*      .    .         306944
   4  .     B2       .    .         456192
   5  W0@1  B1       G2   .         564480
   6  .     B0       G1   U2        548096
   7  .     .        G0   U1        406784
   8  .     .        .    U0        273920""",
        )
