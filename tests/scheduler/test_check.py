"""The checker: accepts every schedule that is built, and nothing that an oracle finds harm in."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import UPDATES
from megatrain.scheduler.table import Op, Position
from tests.draws import draws
from tests.scheduler.mutations import mutants, with_cells, with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.workloads import LAYER, chain, example, schedules, step_schedules, trained

ANY = st.one_of(schedules(), step_schedules())
"""Of calls and of whole steps."""


def built_example() -> Schedule:
    return schedule(example(), num_slots=2, keep=2)


def host_step(updates: str, norm: str = "") -> Schedule:
    """A step of four blocks, of which the first and the last share parameters."""
    options: dict[str, Any] = {norm: True} if norm else {}
    return schedule(trained(4, tied=True), keep=1, micro_batches=3, updates=updates, **options)


def waits_graph(plan: Schedule) -> nx.DiGraph[Any]:
    """Streams and reduced waits as a graph: what the runtime enforces."""
    graph = nx.DiGraph()
    last: dict[Stream, Position] = {}
    for position, before in plan.waits().items():
        graph.add_node(position)
        graph.add_edges_from((b, position) for b in before)
        if position.stream in last:
            graph.add_edge(last[position.stream], position)
        last[position.stream] = position
    return graph


def is_rejected(plan: Schedule) -> bool:
    try:
        plan.check()
    except ScheduleError:
        return True
    return False


@given(ANY, st.integers(0, 2**20))
@draws(120, usual=25)
def test_every_built_schedule_is_accepted_and_does_no_harm_in_any_order(plan: Schedule, seed: int):
    plan.check()
    find_harm(plan, plan.known_workload(), seed=seed, runs=8)


@given(schedules().filter(lambda s: s.kind.mode == "train"), st.integers(1, 3))
@draws(40)
def test_the_backward_of_every_schedule_can_run_alone(plan: Schedule, num_slots: int):
    alone = backward_schedule(plan, num_slots=num_slots)
    alone.check()
    assert (alone.keep, alone.saves) == (plan.keep, plan.saves)
    find_harm(alone, alone.known_workload(), runs=4)


@given(ANY, st.integers(0, 2**20), st.booleans())
@draws(30, usual=4)  # each has hundreds of mutants
def test_every_mutation_is_rejected_or_harmless(plan: Schedule, seed: int, fits: bool):
    for name, mutant in mutants(plan, Random(seed)):
        mutant = with_figures(mutant) if fits else mutant
        if not is_rejected(mutant):
            try:
                find_harm(mutant, plan.known_workload(), seed=seed)
            except Harm as harm:
                raise AssertionError(f"{name}: {harm}\n{plan}\n{mutant}") from harm


@pytest.mark.parametrize("updates", ["", "deferred"])
def test_most_mutations_are_rejected_even_with_figures_that_fit(updates: str):
    plan = host_step(updates, "clip") if updates else built_example()
    changed = [with_figures(mutant) for _, mutant in mutants(plan, Random(0))][:: 4 if updates else 1]
    assert len(changed) > 100
    assert sum(map(is_rejected, changed)) > 0.9 * len(changed)


@given(ANY)
@draws(45)
def test_waits_imply_exactly_the_dependencies_and_none_can_be_deleted(plan: Schedule):
    graph, full, workload = waits_graph(plan), plan.to_networkx(), plan.known_workload()
    assert set(nx.transitive_closure(graph).edges) == set(nx.transitive_closure(full).edges)
    check_schedule(plan, workload, graph)
    for position, before in plan.waits().items():
        for wait in before:
            weaker = graph.copy()
            weaker.remove_edge(wait, position)
            assert not nx.has_path(weaker, wait, position), "the wait is redundant"
            with pytest.raises(ScheduleError):
                check_schedule(plan, workload, weaker)


def test_the_oracle_finds_a_deleted_wait():
    plan = built_example()
    found = 0
    for position, before in plan.waits().items():
        for wait in before:
            waits = {**plan.waits(), position: tuple(b for b in before if b != wait)}
            try:
                find_harm(plan, plan.known_workload(), waits=waits, runs=60)
            except Harm:
                found += 1
    # Some waits guard memory that happens not to be the peak; the others do harm when they are missing.
    assert found >= 12


def test_the_oracle_finds_each_wait_of_the_host_that_is_deleted():
    """Also those of a `W` for an update: what it would copy is of the step before."""
    for updates in UPDATES[1:]:
        plan = schedule(trained(4, tied=True), micro_batches=2, updates=updates, clip=updates == "deferred")
        waits = plan.waits()
        of_host = [(p, b) for p, before in waits.items() for b in before if Stream.HOST in (p.stream, b.stream)]
        assert len(of_host) >= 1
        for position, wait in of_host:
            less = {**waits, position: tuple(b for b in waits[position] if b != wait)}
            with pytest.raises(Harm):
                find_harm(plan, plan.known_workload(), waits=less, runs=60)


@pytest.mark.parametrize(
    ("updates", "norm"), [("spread", ""), ("overlap", "reports_norm"), ("serial", "clip"), ("deferred", "clip")]
)
def test_every_op_of_the_host_is_needed_where_it_is(updates: str, norm: str):
    """Deleted, doubled, or one op earlier in its stream: each is refused, and the oracle agrees where it runs."""
    plan = host_step(updates, norm)
    host = [(p, op) for p, op in plan.positions() if p.stream == Stream.HOST]
    # Of the four blocks three have gradients, and a norm of them all.
    assert len(host) == 3 + {"": 0, "clip": 4 + 1, "reports_norm": 1}[norm]
    first = next(p.tick for p, op in plan.positions() if op.what == "G")
    for position, op in host:
        assert is_rejected(with_figures(with_cells(plan, {position: None})))
        doubled = Position(len(plan.ticks), Stream.HOST)
        assert is_rejected(with_figures(with_cells(plan, {doubled: op})))
        place = Position(0, Stream.HOST)
        if updates == "spread":  # a deferred one after what reads its parameters; another before its gradients
            place = Position(first - (op.block in plan.deferred), Stream.HOST)
        elif updates == "deferred" and op.what == "U":
            place = doubled
        late = with_figures(with_cells(plan, {position: None, place: op}))
        assert is_rejected(late)
        with pytest.raises(Harm):
            find_harm(late, plan.known_workload())


def test_gradients_that_run_ahead_of_updates_are_refused_and_do_harm():
    plan = schedule(trained(6, tied=True), updates="overlap", micro_batches=2)
    graph, enforced, ops = plan.to_networkx(), waits_graph(plan), dict(plan.positions())
    holds = [(a, b) for a, b in graph.edges if a.stream == Stream.HOST and ops[b].what == "G"]
    assert len(holds) >= 3
    assert {graph.edges[hold]["kind"] for hold in holds} == {"memory"}
    enforced.remove_edges_from(holds)
    tick = {str(op): p.tick for p, op in plan.positions()}
    with pytest.raises(ScheduleError) as caught:
        check_schedule(plan, plan.known_workload(), enforced)
    assert str(caught.value).splitlines()[0] == (
        f"d2h:G2 at tick {tick['G2']} overwrites gradients of block 4, read by host:U4 at tick {tick['U4']}, "
        "which may not be done by then."
    )
    ahead = {
        p: tuple(b for b in before if not (ops[p].what == "G" and b.stream == Stream.HOST))
        for p, before in plan.waits().items()
    }
    with pytest.raises(Harm, match="overwrites gradients of block"):
        find_harm(plan, plan.known_workload(), waits=ahead, runs=60)


@given(step_schedules(), st.integers(0, 2**20))
@draws(100, usual=10)
def test_every_other_place_is_refused_or_does_no_harm(plan: Schedule, seed: int):
    for index, place in enumerate(plan.places):
        for offset in {0, place.offset + 32, place.offset - 32, *(p.offset for p in plan.places)} - {place.offset}:
            moved = (*plan.places[:index], replace(place, offset=offset), *plan.places[index + 1 :])
            if offset < 0 or is_rejected(mutant := with_figures(replace(plan, places=moved))):
                continue
            find_harm(mutant, plan.known_workload(), seed=seed, runs=4)


def test_a_weight_overwritten_while_in_use_is_shown_with_its_row():
    moved = Position(3, Stream.H2D)
    with pytest.raises(ScheduleError) as caught:
        with_cells(built_example(), {moved: Op(Stream.H2D, "W", 3, slot=0)}).check()
    assert str(caught.value) == (
        "h2d:W3@0 at tick 3 overwrites h2d:W2@0 at tick 2, read by compute:F2 at tick 3, "
        "which may not be done by then.\n"
        "  F and B read what the last W of their block copied; no W writes there before they are done.\n"
        "  Move it below tick 3, or add the wait."
    )
    assert caught.value.__notes__ == [
        "    tick  h2d   compute  d2h  live_bytes\n"
        "       1  W1@1  F0       .        274176\n"
        "       2  W2@0  F1       A1       282368\n"
        "  >    3  W3@0  F2       .        282368\n"
        "       4  .     F3*      .        315136\n"
        "       5  A1    B3       .        397056"
    ]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({Position(9, Stream.D2H): None}, "d2h:G0 is missing."),
        ({Position(9, Stream.H2D): Op(Stream.H2D, "A", 1)}, "h2d:A1 occurs 2 times."),
        ({Position(4, Stream.H2D): Op(Stream.H2D, "W", 2, slot=1)}, "compute:F3 at tick 4, which may"),
        ({Position(8, Stream.H2D): Op(Stream.H2D, "W", 0, slot=1)}, "h2d:W0@1 at tick 8 is read by nothing."),
        ({Position(0, Stream.H2D): None}, "compute:F0 at tick 1 needs W0, which isn't at an earlier tick."),
        ({Position(9, Stream.COMPUTE): Op(Stream.COMPUTE, "F", 9)}, "compute:F9 at tick 9 has no block."),
        ({Position(8, Stream.H2D): Op(Stream.H2D, "W", 0, slot=7)}, "h2d:W0@7 at tick 8 has no slot."),
        ({Position(4, Stream.D2H): Op(Stream.D2H, "A", 2)}, "d2h:A2 at tick 4 has nothing to move."),
        ({Position(9, Stream.HOST): Op(Stream.HOST, "U", 2)}, "host:U2 at tick 9 has nothing to update."),
        ({Position(9, Stream.HOST): Op(Stream.HOST, "N", -1)}, "host:N at tick 9 is read by nothing."),
        ({Position(8, Stream.COMPUTE): Op(Stream.COMPUTE, "B", 0, micro_batch=0)}, "B0.0 at tick 8 doesn't name"),
        ({Position(10, Stream.D2H): None}, "tick 10 states 339456 live bytes, but 273920 are."),
    ],
)
def test_each_fault_is_named(cells: dict[Position, Op | None], message: str):
    with pytest.raises(ScheduleError) as caught:
        with_cells(built_example(), cells).check()
    assert message in str(caught.value).splitlines()[0]
    assert "  >" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batches": 10_000}, "10000 micro-batches can't run in "),
        ({"micro_batches": 2}, ".2 at tick 4 has no micro-batch."),
        ({"micro_batches": 1}, "F0.0 at tick 2 doesn't name its micro-batch."),
        ({"micro_batches": 4}, "compute:F0.3 is missing."),
        ({"updates": "serial"}, "host:U0 at tick 0 reads what leaves with d2h:G0"),
        ({"updates": "none"}, "host:U0 at tick 0 has nothing to update."),
        ({"clip": False}, "is read by nothing."),
    ],
)
def test_each_fault_of_a_step_is_named(changes: dict[str, object], message: str):
    plan = host_step("deferred", "clip")
    with pytest.raises(ScheduleError) as caught:
        replace(plan, kind=replace(plan.kind, **changes)).check()
    assert message in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("updates", "op", "tick", "message"),
    [
        ("deferred", "U1", 5, "h2d:W1@1 at tick 2 reads what is written by host:U1 at tick 5"),
        ("deferred", "N", 3, "host:N at tick 3 takes the norm from what is summed by host:S0"),
        ("deferred", "S1", 3, "host:S1 at tick 3 sums squares of gradients that leave with d2h:G1"),
        ("overlap", "U2", 5, "host:U2 at tick 5 reads what leaves with d2h:G2"),
        ("serial", "N", 32, "host:U0 at tick 31 is scaled by host:N at tick 32"),
    ],
)
def test_an_op_of_the_host_in_the_wrong_place_is_named(updates: str, op: str, tick: int, message: str):
    plan = host_step(updates, "clip" if op[0] in "NS" else "")
    position, found = next((p, o) for p, o in plan.positions() if str(o) == op)
    moved = with_cells(plan, {position: None, Position(tick, Stream.HOST): found})
    with pytest.raises(ScheduleError) as caught:
        with_figures(moved).check()
    assert message in str(caught.value).splitlines()[0]


def test_each_fault_of_places_is_named():
    plan = schedule(trained(4, tied=True), keep=1, updates="overlap")
    first, second, *rest = plan.places
    for places, message in {
        (): r"places are stated for blocks \[\], but gradients of blocks \[0, 1, 2, 3\] wait",
        (second, first, *rest): r"places are stated for blocks \[1, 0, 2, 3\]",
        (replace(first, nbytes=first.nbytes - 1), second, *rest): "the place of block 0 has ",
        (first, replace(second, offset=plan.places[3].offset), *rest): "overwrites gradients of block 3, read by",
    }.items():
        with pytest.raises(ScheduleError, match=message):
            replace(plan, places=places).check()


@pytest.mark.parametrize("updates", UPDATES[1:])
def test_a_figure_of_the_host_that_omits_waiting_gradients_is_refused(updates: str):
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=2, updates=updates, clip=updates != "spread")
    for change in (-LAYER, -1, 1):
        wrong = replace(plan, host_bytes=plan.host_bytes + change)
        with pytest.raises(
            ScheduleError, match=f"host_bytes is stated as {wrong.host_bytes}, but is {plan.host_bytes}"
        ):
            wrong.check()


def test_another_workload_is_refused():
    with pytest.raises(ScheduleError, match="the schedule has 4 blocks, the workload 2"):
        built_example().check(chain([64, 64]))
    with pytest.raises(ScheduleError, match=r"live bytes, but \d+ are"):
        built_example().check(chain([64, 64, 64, 64]))
