"""A store that ranks share: each update waits for those of the others, which tables are refused, and no circle."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.check.shared_rules import check_shared_store
from megatrain.scheduler.dependency import dependency_graph, derive_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.rank_graph import graph_of_ranks
from tests.scheduler.test_between_ranks import of_rank, place, position
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def shared(workload: Workload, chosen: Options, ranks: str) -> Schedule:
    kind = replace(of_rank(workload, chosen, ranks).kind, store="shared")
    return build(workload, kind, num_slots=chosen.num_slots, keep=chosen.keep, activations=chosen.activations)


@given(workloads(), whole_steps(), st.sampled_from(["first", "middle", "last"]))
@draws(40)
def test_each_update_of_a_shared_store_is_followed_by_a_wait_for_the_others(
    workload: Workload, chosen: Options, ranks: str
):
    own, found = of_rank(workload, chosen, ranks), shared(workload, chosen, ranks)
    updates = sorted(op.block for op in found.ops if op.what == "U")
    assert updates == sorted(op.block for op in found.ops if op.what == "V")
    assert updates == sorted(op.block for op in own.ops if op.what == "U")
    assert not any(op.what == "V" for op in own.ops)
    assert_checked_and_read_back(found, workload)
    assert ("\nstore: shared" in str(found), "store" in str(own)) == (True, False)


@given(workloads(), st.lists(whole_steps(), min_size=2, max_size=4))
@draws(40)
def test_ranks_that_share_a_store_never_wait_for_each_other_in_a_circle(workload: Workload, chosen: list[Options]):
    # Ranks of one host make the same updates at the same places, but may have other slots and micro-batches.
    first = chosen[0]
    alike = {"updates": first.updates, "clip": first.clip, "reports_norm": first.reports_norm}
    schedules = [
        shared(workload, replace(options, **alike), place(rank, len(chosen))) for rank, options in enumerate(chosen)
    ]
    assert nx.is_directed_acyclic_graph(graph_of_ranks(schedules))


def middle(updates: str = "deferred", num: int = 3) -> Schedule:
    return build(trained(num), StepKind(updates=updates, ranks="middle", store="shared"), num_slots=3)


def test_a_step_waits_for_the_updates_of_other_ranks_before_it_reads():
    text = str(middle())
    assert_expected_inline(
        text[text.index("ranks:") :],
        """\
ranks: middle
store: shared
tick  h2d   compute  d2h  host  send  peers  live_bytes
   0  .     .        .    U0    .     .          398848
   1  .     .        .    U1    .     V0         398848
   2  W0@0  .        .    U2    .     V1         398848
   3  W1@1  F0       .    .     .     V2         407040
   4  W2@2  F1       .    .     .     .          415232
   5  .     F2*      .    .     .     .          439808
   6  .     B2       .    .     .     .          689152
   7  .     B1       .    .     P2    .          946688
   8  .     B0       G2   .     P1    .          938240
   9  .     .        G1   .     P0    .          672512
  10  .     .        G0   .     .     .          406784""",
    )


@pytest.mark.parametrize(
    ("updates", "cells", "rule"),
    [
        ("deferred", {"V1": None}, "peers:V1 is missing"),
        ("overlap", {"V1": None}, "peers:V1 is missing"),
        ("deferred", {"V1": 5}, r"h2d:W1@1 at tick 3 reads what other ranks have written by peers:V1 at tick 5"),
        ("deferred", {"V1": 0}, r"peers:V1 at tick 0 follows host:U1 at tick 1"),
    ],
)
def test_an_update_of_others_that_nobody_waits_for_is_refused(updates: str, cells: dict[str, int | None], rule: str):
    schedule = middle(updates)
    for token, tick in cells.items():
        at = position(schedule, token)
        moved = {} if tick is None else {Position(tick, at.stream): schedule.ticks[at.tick][at.stream]}
        schedule = with_cells(schedule, {at: None, **moved})
    with pytest.raises(ScheduleError, match=rule):
        with_figures(schedule).check()


@pytest.mark.parametrize(
    ("updates", "first", "then", "rule"),
    [
        ("deferred", "V0", "U2", r"host:U2 at tick \d+ waits for peers:V0 at tick \d+, and others wait for it"),
        (
            "overlap",
            "V4",
            "U2",
            r"(host:U2|d2h:G\d) at tick \d+ waits for peers:V4 at tick \d+, which waits for other ranks",
        ),
        ("overlap", "V4", "G0", r"d2h:G0 at tick \d+ waits for peers:V4 at tick \d+, which waits for other ranks"),
    ],
)
def test_a_wait_that_may_close_a_circle_is_refused(updates: str, first: str, then: str, rule: str):
    schedule = middle(updates, num=5)
    graph = dependency_graph(schedule)
    check_schedule(schedule, schedule.known_workload(), graph)
    graph.add_edge(position(schedule, first), position(schedule, then), kind="data")
    with pytest.raises(ScheduleError, match=rule):
        check_schedule(schedule, schedule.known_workload(), graph)


def test_a_reader_that_another_rank_may_overwrite_is_refused():
    schedule = middle("overlap")
    waits = derive_waits(schedule)
    check_shared_store(Case(schedule, schedule.known_workload(), waits))
    waits[position(schedule, "P2")] = ()
    with pytest.raises(ScheduleError, match=r"h2d:W2@2 at tick 2 reads what another rank may be updating"):
        check_shared_store(Case(schedule, schedule.known_workload(), waits))


def test_a_process_alone_shares_its_store_with_nobody():
    with pytest.raises(OptionError, match='store="shared" with ranks="alone" is impossible'):
        StepKind(updates="overlap", store="shared")
    alone = build(trained(3), StepKind(updates="overlap"), num_slots=3)
    broken = with_cells(alone, {Position(len(alone.ticks), Stream.PEERS): Op(Stream.PEERS, "V", 2)})
    with pytest.raises(ScheduleError, match="peers:V2 at tick 9 waits for an update that nobody makes"):
        with_figures(broken).check()
