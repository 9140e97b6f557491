"""The checker: accepts every schedule that is built, and nothing that an oracle finds harm in."""

from __future__ import annotations

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
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from tests.draws import draws
from tests.scheduler.mutations import mutants, with_cells, with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.workloads import chain, example, schedules, step_schedules

ANY = st.one_of(schedules(), step_schedules())
"""Of calls and of whole steps."""


def built_example() -> Schedule:
    return schedule(example(), num_slots=2, keep=2)


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


@given(ANY)
@draws(200, usual=20)
def test_every_built_schedule_is_accepted(plan: Schedule):
    plan.check()


@given(ANY, st.integers(0, 2**20))
@draws(90)
def test_every_built_schedule_does_no_harm_in_any_order(plan: Schedule, seed: int):
    find_harm(plan, plan.known_workload(), seed=seed)


@given(schedules().filter(lambda s: s.kind.mode == "train"), st.integers(1, 3))
@draws(40)
def test_the_backward_of_every_schedule_can_run_alone(plan: Schedule, num_slots: int):
    alone = backward_schedule(plan, num_slots=num_slots)
    alone.check()
    assert (alone.keep, alone.saves) == (plan.keep, plan.saves)
    find_harm(alone, alone.known_workload(), runs=4)


@given(ANY, st.integers(0, 2**20), st.booleans())
@draws(30)
def test_every_mutation_is_rejected_or_harmless(plan: Schedule, seed: int, fits: bool):
    for name, mutant in mutants(plan, Random(seed)):
        mutant = with_figures(mutant) if fits else mutant
        if not is_rejected(mutant):
            try:
                find_harm(mutant, plan.known_workload(), seed=seed)
            except Harm as harm:
                raise AssertionError(f"{name}: {harm}\n{plan}\n{mutant}") from harm


def test_most_mutations_are_rejected_even_with_figures_that_fit():
    plan = built_example()
    changed = [with_figures(mutant) for _, mutant in mutants(plan, Random(0))]
    rejected = sum(map(is_rejected, changed))
    assert len(changed) > 100
    assert rejected > 0.9 * len(changed)


@given(ANY)
@draws(40)
def test_waits_imply_exactly_the_dependencies(plan: Schedule):
    reduced, full = waits_graph(plan), plan.to_networkx()
    assert set(nx.transitive_closure(reduced).edges) == set(nx.transitive_closure(full).edges)


@given(ANY)
@draws(45)
def test_no_wait_can_be_deleted(plan: Schedule):
    graph, workload = waits_graph(plan), plan.known_workload()
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


def test_another_workload_is_refused():
    with pytest.raises(ScheduleError, match="the schedule has 4 blocks, the workload 2"):
        built_example().check(chain([64, 64]))
    with pytest.raises(ScheduleError, match=r"live bytes, but \d+ are"):
        built_example().check(chain([64, 64, 64, 64]))
