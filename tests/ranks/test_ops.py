"""T and V in schedules: what they add to the table of one process, and that ranks never wait in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.ranks.rank_exchange import with_others  # its module registers the ops
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import position, with_figures, with_moved
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def alone(workload: Workload, chosen: Options) -> Schedule:
    """The schedule of one process that a rank begins with: the host makes all of its updates."""
    made = replace(chosen, outputs="release", device_updates=frozenset()).build(workload)
    assume(any(op.what == "G" for op in made.ops) and made.kind.holds_gradients)
    return made


def shared(updates: str = "deferred", num: int = 3) -> Schedule:
    return with_others(build(trained(num), StepKind(updates=updates, outputs="release"), num_slots=3))


@given(workloads(), whole_steps())
@draws(80, usual=20)
def test_a_rank_has_the_ops_of_one_process_in_their_order_and_its_own(workload: Workload, chosen: Options):
    before = alone(workload, chosen)
    found = with_others(before)
    for stream in (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST):
        mine, theirs = ([str(op) for op in each.ops if op.stream == stream] for each in (found, before))
        assert mine == theirs
    assert [op.block for op in found.ops if op.what == "T"] == [op.block for op in before.ops if op.what == "G"]
    assert [op.block for op in found.ops if op.what == "V"] == [op.block for op in before.ops if op.what == "U"]
    assert found.device_bytes == before.device_bytes
    assert_checked_and_read_back(found, workload)


@given(workloads(), st.lists(whole_steps(), min_size=2, max_size=3))
@draws(80, usual=20)
def test_ranks_never_wait_for_each_other_in_a_circle(workload: Workload, chosen: list[Options]):
    """Ranks make the same updates at the same places, but may have other slots and micro-batches."""
    first = chosen[0]
    alike = {"updates": first.updates, "clip": first.clip, "reports_norm": first.reports_norm}
    schedules = [with_others(alone(workload, replace(options, **alike))) for options in chosen]
    assert nx.is_directed_acyclic_graph(graph_of_ranks(schedules))


def graph_of_ranks(schedules: Sequence[Schedule]) -> nx.DiGraph[object]:
    """All ops of all ranks: a T waits for all G of its block, a V for all U, and an N for what all N wait for."""
    graph: nx.DiGraph[object] = nx.DiGraph()
    asked = {"T": "G", "V": "U"}
    for rank, schedule in enumerate(schedules):
        graph.add_edges_from(((rank, a), (rank, b)) for a, b in dependency_graph(schedule).edges)
        for other, theirs in enumerate(schedules):
            for at, op in schedule.positions():
                for where, answer in theirs.positions() if rank != other else ():
                    if answer.what == asked.get(op.what) and answer.block == op.block:
                        graph.add_edge((other, where), (rank, at))
                    if op.what == answer.what == "N":
                        graph.add_edges_from(((other, p), (rank, at)) for p in dependency_graph(theirs).pred[where])
    return graph


@pytest.mark.parametrize(
    ("updates", "cells", "rule"),
    [
        ("overlap", {"T1": None}, "sums:T1 is missing"),
        ("overlap", {"V1": None}, "peers:V1 is missing"),
        ("deferred", {"V1": None}, "peers:V1 is missing"),
        ("overlap", {"T0": 4}, r"sums:T0 at tick 4 adds what lands with d2h:G0"),
        ("overlap", {"T1": 12}, r"host:U1 at tick \d+ uses the total of sums:T1 at tick 12"),
        ("deferred", {"V1": 6}, r"h2d:W1@1 at tick \d reads what other ranks have written by peers:V1 at tick 6"),
        ("deferred", {"V1": 0}, r"peers:V1 at tick 0 follows host:U1 at tick 1"),
    ],
)
def test_a_table_that_lacks_a_wait_for_other_ranks_is_refused(updates: str, cells: dict[str, int | None], rule: str):
    schedule = shared(updates)
    with pytest.raises(ScheduleError, match=rule):
        with_figures(with_moved(schedule, cells)).check()


def test_gradients_that_others_may_still_read_are_not_overwritten():
    """With few places a G lands where an earlier block's gradients were: once all ranks have added these."""
    schedule = shared("overlap", num=8)
    places = {place.block: range(place.offset, place.offset + place.nbytes) for place in schedule.places}
    graph = dependency_graph(schedule)
    reused = [(a, b) for a in places for b in places if b < a and places[a].start < places[b].stop and
              places[b].start < places[a].stop]  # fmt: skip
    assert reused
    for earlier, later in reused:
        assert nx.has_path(graph, position(schedule, f"V{earlier}"), position(schedule, f"G{later}"))


def test_a_wait_that_may_close_a_circle_is_refused():
    """`U2` would wait for the `U0` of other ranks, which may stand after their `U2`."""
    schedule = shared("deferred", num=5)
    graph = dependency_graph(schedule)
    check_schedule(schedule, schedule.known_workload(), graph)
    graph.add_edge(position(schedule, "V0"), position(schedule, "U2"), kind="data")
    with pytest.raises(ScheduleError, match=r"host:U2 at tick \d+ waits for peers:V0 at tick \d+, of a later block"):
        check_schedule(schedule, schedule.known_workload(), graph)
