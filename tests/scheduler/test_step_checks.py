"""The checker on whole steps: every op and every wait of the host is needed. Random steps are in test_check."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.step_kind import UPDATES
from megatrain.scheduler.table import Position
from tests.scheduler.mutations import mutants, with_cells, with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.test_check import is_rejected
from tests.scheduler.workloads import trained
from tests.tiers import wide


@pytest.mark.parametrize(
    "updates", [updates if updates in ("spread", "deferred") else wide(updates) for updates in UPDATES[1:]]
)
def test_most_mutations_of_a_step_are_rejected_even_with_figures_that_fit(updates: str):
    plan = schedule(trained(4), keep=1, micro_batches=2, updates=updates, clip=updates != "spread")
    changed = [with_figures(mutant) for _, mutant in mutants(plan, Random(0))]
    assert len(changed) > 250
    assert sum(map(is_rejected, changed)) > 0.9 * len(changed)


KINDS = [(updates, norm) for updates in UPDATES for norm in ("", "clip") if (updates, norm) != ("spread", "clip")]
REPORTED = [("overlap", "reports_norm"), ("serial", "reports_norm")]


@pytest.mark.parametrize(("updates", "norm"), [*KINDS, *REPORTED])
def test_every_op_of_the_host_is_needed_where_it_is(updates: str, norm: str):
    """Deleted, doubled, or one op earlier in its stream: each is refused, and the oracle agrees where it runs."""
    options: dict[str, Any] = {norm: True} if norm else {}
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=3, updates=updates, **options)
    host = [(p, op) for p, op in plan.positions() if p.stream == Stream.HOST]
    # Of the four blocks three have gradients, and a norm of them all.
    assert len(host) == (0 if updates == "none" else 3) + {"": 0, "clip": 4 + 1, "reports_norm": 1}[norm]
    for position, op in host:
        if norm == "reports_norm" and op.what == "N":  # it is last: later is where it is, and earlier is refused
            assert position == host[-1][0]
        assert is_rejected(with_figures(with_cells(plan, {position: None})))
        doubled = Position(len(plan.ticks), Stream.HOST)
        assert is_rejected(with_figures(with_cells(plan, {doubled: op})))
        if updates == "spread":
            # A deferred one behind what reads its parameters; another ahead of its gradients, beside the first G.
            first = next(p.tick for p, op in plan.positions() if op.what == "G")
            place = Position(first - (op.block in plan.deferred), Stream.HOST)
            assert place not in dict(host)
            late = with_cells(plan, {position: None, place: op})
        elif updates == "deferred" and op.what == "U":
            late = with_cells(plan, {position: None, doubled: op})
        else:
            late = with_cells(plan, {position: None, Position(0, Stream.HOST): op})
        assert is_rejected(with_figures(late))
        with pytest.raises(Harm):
            find_harm(with_figures(late), plan.known_workload())


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
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=3, updates="deferred", clip=True)
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
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=3, updates=updates, clip=op[0] in "NS")
    position, found = next((p, o) for p, o in plan.positions() if str(o) == op)
    moved = with_cells(plan, {position: None, Position(tick, Stream.HOST): found})
    with pytest.raises(ScheduleError) as caught:
        with_figures(moved).check()
    assert message in str(caught.value).splitlines()[0]


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
