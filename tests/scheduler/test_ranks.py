"""Several ranks: sums of gradients between them, and a store that they share; ranks never wait in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.host_rules import check_shared_store
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph, derive_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op, Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def graph_of_ranks(schedules: Sequence[Schedule]) -> nx.DiGraph[object]:
    """A transfer is one moment of all its sides: its ops on all ranks are one node."""
    graph: nx.DiGraph[object] = nx.DiGraph()
    for rank, schedule in enumerate(schedules):
        ops = dict(schedule.positions())
        gathers = [at for at, op in ops.items() if op.what == "C"]

        def node(
            at: Position,
            rank: int = rank,
            schedule: Schedule = schedule,
            ops: dict[Position, Op] = ops,
            gathers: list[Position] = gathers,
        ) -> object:
            op = ops[at]
            if op.what == "C":
                return "gather", gathers.index(at)
            if op.what in "UV" and schedule.kind.is_shared:
                return rank, op.what, op.block
            pairs = {"R": ("sum", rank - 1, op.block), "P": ("sum", rank, op.block), "G": ("total", op.block)}
            return pairs.get(op.what, (rank, at))

        graph.add_edges_from((node(a), node(b)) for a, b in dependency_graph(schedule).edges)
        graph.add_edges_from((("sum", rank - 1, op.block), node(at)) for at, op in ops.items() if joins(schedule, op))
    named = [node for node in graph if isinstance(node, tuple) and len(node) == 3]
    updates, waits = ([node for node in named if node[1] == what] for what in "UV")
    graph.add_edges_from((update, wait) for update in updates for wait in waits if update[2] == wait[2])
    return graph


def joins(schedule: Schedule, op: Op) -> bool:
    """Whether an op adds to the pieces of the sum of the rank before, as they come."""
    return op.what == schedule.kind.adding_op and op.what in ("P", "G")


def place(rank: int, size: int) -> str:
    return "first" if rank == 0 else "last" if rank == size - 1 else "middle"


def of_rank(workload: Workload, chosen: Options, ranks: str, store: str = "own") -> Schedule:
    kind = StepKind(
        "train", chosen.transfer, chosen.micro_batches, chosen.updates, chosen.clip, "release", chosen.reports_norm,
        ranks, store,
    )  # fmt: skip
    return build(workload, kind, num_slots=chosen.num_slots, keep=chosen.keep, activations=chosen.activations)


def shared(updates: str = "deferred", num: int = 3) -> Schedule:
    return build(trained(num), StepKind(updates=updates, ranks="middle", store="shared"), num_slots=3)


def position(schedule: Schedule, token: str) -> Position:
    return next(p for p, op in schedule.positions() if str(op) == token)


@given(workloads(), whole_steps(), st.sampled_from(["first", "middle", "last"]), st.booleans())
@draws(80, usual=12)
def test_a_rank_has_the_ops_of_a_process_alone_and_those_between_ranks(
    workload: Workload, chosen: Options, ranks: str, is_shared: bool
):
    alone = of_rank(workload, chosen, "alone")
    found = of_rank(workload, chosen, ranks, "shared" if is_shared else "own")
    blocks = {what: sorted(op.block for op in alone.ops if op.what == what) for what in "GU"}
    further = {
        "R": blocks["G"] * found.kind.receives,
        "P": blocks["G"] * found.kind.sends,
        "V": blocks["U"] * is_shared,
    }
    for what, expected in further.items():
        assert sorted(op.block for op in found.ops if op.what == what) == expected
        assert all(op.what != what for op in alone.ops)
    for other in (found, alone):
        assert_checked_and_read_back(other, workload)
    assert ("\nranks: " in str(found), "ranks" in str(alone)) == (True, False)
    assert ("\nstore: shared" in str(found), "store" in str(alone)) == (is_shared, False)


@given(workloads(), st.lists(whole_steps(), min_size=2, max_size=4), st.booleans())
@draws(80, usual=12)
def test_ranks_never_wait_for_each_other_in_a_circle(workload: Workload, chosen: list[Options], is_shared: bool):
    """Ranks of one host make the same updates at the same places, but may have other slots and micro-batches."""
    first = chosen[0]
    alike = {"updates": first.updates, "clip": first.clip, "reports_norm": first.reports_norm} if is_shared else {}
    store = "shared" if is_shared else "own"
    schedules = [
        of_rank(workload, replace(options, **alike), place(rank, len(chosen)), store)
        for rank, options in enumerate(chosen)
    ]
    assert nx.is_directed_acyclic_graph(graph_of_ranks(schedules))


def middle() -> Schedule:
    kind = StepKind(updates="overlap", ranks="middle", micro_batches=2)
    return build(trained(3), kind, num_slots=3)


def compute_of(schedule: Schedule, block: int) -> str:
    return " ".join(str(op) for op in schedule.ops if op.stream == Stream.COMPUTE and op.block == block)


@pytest.mark.parametrize("ranks", ["alone", "middle"])
def test_steps_whose_last_block_reads_values_run_all_forwards_before_the_first_backward(ranks: str):
    kind = StepKind(updates="overlap", ranks=ranks, micro_batches=2, outputs="release")
    assert compute_of(build(trained(3), kind, num_slots=3), 2) == "F2.0 B2.0 F2.1 B2.1"
    reading = replace(trained(3), last_reads_values=True)
    found, other = (build(each, kind, num_slots=3, activations="keep") for each in (reading, trained(3)))
    assert_checked_and_read_back(found, reading)
    assert [op.what for op in found.ops if op.stream == Stream.COMPUTE] == ["F"] * 6 + ["B"] * 6
    # The graph and the outputs of the other micro-batch are there, too.
    live = [each.live_bytes[position(each, "B2.0").tick] for each in (found, other)]
    assert live[0] - live[1] == reading.blocks[2].saved_bytes + reading.values[-1].nbytes


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
    schedule = shared(updates)
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
    schedule = shared(updates, num=5)
    graph = dependency_graph(schedule)
    check_schedule(schedule, schedule.known_workload(), graph)
    graph.add_edge(position(schedule, first), position(schedule, then), kind="data")
    with pytest.raises(ScheduleError, match=rule):
        check_schedule(schedule, schedule.known_workload(), graph)


def test_a_reader_that_another_rank_may_overwrite_is_refused():
    schedule = shared("overlap")
    waits = derive_waits(schedule)
    check_shared_store(Case(schedule, schedule.known_workload(), waits))
    waits[position(schedule, "P2")] = ()
    with pytest.raises(ScheduleError, match=r"h2d:W2@2 at tick 2 reads what another rank may be updating"):
        check_shared_store(Case(schedule, schedule.known_workload(), waits))


def test_only_training_steps_of_several_ranks_have_ops_between_them():
    for kind in (StepKind(), StepKind(mode="forward")):
        with pytest.raises(OptionError, match='ranks="first" needs a training step'):
            replace(kind, ranks="first")
    with pytest.raises(OptionError, match='store="shared" with ranks="alone" is impossible'):
        StepKind(updates="overlap", store="shared")
    alone = build(trained(3), StepKind(updates="overlap"), num_slots=3)
    for op, rule in (
        (Op(Stream.RECEIVE, "R", 2), "receive:R2 at tick 9 has no other rank"),
        (Op(Stream.PEERS, "V", 2), "peers:V2 at tick 9 waits for an update that nobody makes"),
    ):
        broken = with_cells(alone, {Position(len(alone.ticks), op.stream): op})
        with pytest.raises(ScheduleError, match=rule):
            with_figures(broken).check()
