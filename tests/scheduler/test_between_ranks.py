"""Sums of gradients between ranks: where they travel, which tables are refused; ranks never wait in a circle."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.rank_graph import graph_of_ranks
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def place(rank: int, size: int) -> str:
    return "first" if rank == 0 else "last" if rank == size - 1 else "middle"


def of_rank(workload: Workload, chosen: Options, ranks: str) -> Schedule:
    kind = StepKind(
        "train",
        chosen.transfer,
        chosen.micro_batches,
        chosen.updates,
        chosen.clip,
        "release",
        chosen.reports_norm,
        ranks,
    )
    return build(workload, kind, num_slots=chosen.num_slots, keep=chosen.keep, activations=chosen.activations)


def position(schedule: Schedule, token: str) -> Position:
    return next(p for p, op in schedule.positions() if str(op) == token)


@given(workloads(), whole_steps(), st.sampled_from(["first", "middle", "last"]))
@draws(60, usual=8)
def test_a_rank_has_the_ops_of_a_process_alone_and_those_between_ranks(workload: Workload, chosen: Options, ranks: str):
    alone, found = (of_rank(workload, chosen, each) for each in ("alone", ranks))
    blocks = sorted(op.block for op in alone.ops if op.what == "G")
    further = {"R": blocks * found.kind.receives, "P": blocks * found.kind.sends}
    for what, expected in further.items():
        assert sorted(op.block for op in found.ops if op.what == what) == expected
        assert all(op.what != what for op in alone.ops)
    for other in (found, alone):
        assert_checked_and_read_back(other, workload)
    assert ("\nranks: " in str(found), "ranks" in str(alone)) == (True, False)


@given(workloads(), st.lists(whole_steps(), min_size=2, max_size=4))
@draws(60)
def test_ranks_never_wait_for_each_other_in_a_circle(workload: Workload, chosen: list[Options]):
    schedules = [of_rank(workload, options, place(rank, len(chosen))) for rank, options in enumerate(chosen)]
    assert nx.is_directed_acyclic_graph(graph_of_ranks(schedules))


def middle(micro_batches: int = 2) -> Schedule:
    kind = StepKind(updates="overlap", ranks="middle", micro_batches=micro_batches)
    return build(trained(3), kind, num_slots=3)


def test_a_middle_rank_of_one_micro_batch_adds_while_it_passes_on():
    text = str(middle(1))
    assert_expected_inline(
        text[text.index("ranks:") :],
        """\
ranks: middle
tick  h2d   compute  d2h  host  send  live_bytes
   0  W0@0  .        .    .     .         398848
   1  W1@1  F0       .    .     .         407040
   2  W2@2  F1       .    .     .         415232
   3  .     F2*      .    .     .         439808
   4  .     B2       .    .     .         689152
   5  .     B1       .    .     P2        946688
   6  .     B0       G2   .     P1        938240
   7  .     .        G1   U2    P0        672512
   8  .     .        G0   U1    .         406784
   9  .     .        .    U0    .         406784""",
    )


def test_a_middle_rank_receives_adds_and_passes_on():
    text = str(middle())
    assert_expected_inline(
        text[text.index("ranks:") :],
        """\
ranks: middle
tick  h2d   compute  d2h  host  receive  send  live_bytes
   0  W0@0  .        .    .     .        .         399104
   1  W1@1  F0.0     .    .     .        .         407296
   2  W2@2  F0.1     .    .     .        .         415488
   3  .     F1.0     .    .     .        .         423680
   4  .     F1.1     .    .     .        .         431872
   5  .     F2.0*    .    .     .        .         589312
   6  .     B2.0     .    .     R2       .         738560
   7  .     F2.1*    .    .     .        .         730368
   8  .     B2.1     .    .     .        .         746752
   9  .     B1.0     .    .     R1       .         855040
  10  .     B1.1     .    .     .        P2        846848
  11  .     B0.0     G2   .     R0       .         830464
  12  .     B0.1     .    .     .        P1        822016
  13  .     .        G1   U2    .        P0        547840
  14  .     .        G0   U1    .        .         414976
  15  .     .        .    U0    .        .         414976""",
    )


def compute_of(schedule: Schedule, block: int) -> str:
    return " ".join(str(op) for op in schedule.ops if op.stream == Stream.COMPUTE and op.block == block)


READING = replace(trained(3), last_reads_values=True)


def test_where_no_forward_runs_again_each_backward_of_the_last_block_follows_its_forward():
    kind = StepKind(updates="overlap", micro_batches=2)
    assert compute_of(build(trained(3), kind, num_slots=3), 2) == "F2.0 B2.0 F2.1 B2.1"
    assert compute_of(middle(), 2) == "F2.0 B2.0 F2.1 B2.1"


@pytest.mark.parametrize("ranks", ["alone", "first", "middle", "last"])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_steps_whose_last_block_reads_values_run_all_forwards_before_the_first_backward(ranks: str, activations: str):
    kind = StepKind(updates="overlap", ranks=ranks, micro_batches=2, outputs="release")
    found = build(READING, kind, num_slots=3, activations=activations)
    assert_checked_and_read_back(found, READING)
    assert compute_of(found, 2) == "F2.0 F2.1 B2.0 B2.1"
    assert (2 in found.saves) == (activations == "keep")
    assert [op.what for op in found.ops if op.stream == Stream.COMPUTE] == ["F"] * 6 + ["B"] * 6


def test_the_graphs_and_outputs_of_all_micro_batches_are_there_when_the_first_backward_of_such_a_rank_begins():
    kind = StepKind(updates="overlap", ranks="first", micro_batches=3, outputs="release")
    found, other = (build(each, kind, num_slots=3, activations="keep") for each in (READING, trained(3)))
    live = [each.live_bytes[position(each, "B2.0").tick] for each in (found, other)]
    assert live[0] - live[1] == 2 * (READING.blocks[2].saved_bytes + READING.values[-1].nbytes)


@pytest.mark.parametrize(
    ("token", "rule"),
    [
        ("R1", "receive:R1 is missing"),
        ("P1", r"d2h:G1 at tick 13 moves gradients of compute:B1\.0 at tick 9, which may not be done"),
    ],
)
def test_a_sum_that_does_not_travel_is_refused(token: str, rule: str):
    schedule = middle()
    broken = with_figures(with_cells(schedule, {position(schedule, token): None}))
    with pytest.raises(ScheduleError, match=rule):
        broken.check()


@pytest.mark.parametrize(("one", "other"), [("R2", "R1"), ("P2", "P1"), ("G2", "G1")])
def test_another_order_than_that_of_all_ranks_is_refused(one: str, other: str):
    schedule = middle()
    cells = {position(schedule, a): schedule.ticks[position(schedule, b).tick][position(schedule, b).stream]
             for a, b in ((one, other), (other, one))}  # fmt: skip
    with pytest.raises(ScheduleError):
        with_figures(with_cells(schedule, dict(cells))).check()


def test_a_sum_that_comes_too_late_is_refused():
    schedule = middle()
    late = position(schedule, "B1.1").tick + 1
    gone = {position(schedule, token): None for token in ("R1", "R0")}
    moved = with_cells(schedule, {**gone, Position(late, Stream.RECEIVE): Op(Stream.RECEIVE, "R", 1)})
    moved = with_cells(moved, {Position(len(moved.ticks), Stream.RECEIVE): Op(Stream.RECEIVE, "R", 0)})
    with pytest.raises(ScheduleError, match="adds to the sum that comes with"):
        with_figures(moved).check()


def test_an_op_between_ranks_that_waits_for_a_later_one_is_refused():
    """`P2` would wait for `R1`, and the rank before could wait for `P2` ahead of its `P1`."""
    schedule = middle()
    graph = dependency_graph(schedule)
    graph.add_edge(position(schedule, "R1"), position(schedule, "P2"), kind="data")
    with pytest.raises(ScheduleError, match=r"send:P2 at tick \d+ waits for receive:R1 at tick \d+, of a later block"):
        check_schedule(schedule, schedule.known_workload(), graph)


@pytest.mark.parametrize("kind", [StepKind(), StepKind(mode="forward")])
def test_only_training_steps_have_ranks(kind: StepKind):
    with pytest.raises(OptionError, match='ranks="first" needs a training step'):
        replace(kind, ranks="first")


def test_a_process_alone_has_no_op_between_ranks():
    alone = build(trained(3), StepKind(updates="overlap"), num_slots=3)
    broken = with_cells(alone, {Position(3, Stream.RECEIVE): Op(Stream.RECEIVE, "R", 2)})
    with pytest.raises(ScheduleError, match="receive:R2 at tick 3 has no other rank"):
        with_figures(broken).check()
