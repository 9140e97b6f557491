"""Gradients that wait on the host for their updates: how many at most, and that slow updates hold the others back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import UPDATES
from megatrain.scheduler.table import Tick
from tests.draws import draws
from tests.scheduler.mutations import with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.test_check import is_rejected, waits_graph
from tests.scheduler.workloads import LAYER, example, step_schedules, trained

# Hosts from a thousand times slower than the device to a thousand times faster.
RATES = st.floats(1e3, 1e5)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), st.floats(1, 1e8))


def waiting(plan: Schedule) -> int:
    """The figure's part for waiting gradients: all but what is parked. Without updates and norm there is none."""
    if not plan.kind.holds_gradients:
        return 0
    return plan.landing_bytes


def most_at_once(plan: Schedule, machine: Hardware) -> int:
    """The most bytes of gradients on the host at any moment of a simulated step."""
    blocks = plan.known_workload().blocks
    times = {t.position: t for t in plan.simulate(machine).timeline}
    brought = {op.block: times[p].start_s for p, op in plan.positions() if op.what == "G"}
    used: dict[int, float] = {}
    for position, op in plan.positions():
        if op.what == "U":
            for block in (op.block, *blocks[op.block].shares):
                used[block] = max(used.get(block, 0.0), times[position].end_s)
    deferred = {member for block in plan.deferred for member in (block, *blocks[block].shares)}
    ends = {b: float("inf") if b in deferred else used.get(b, float("inf")) for b in brought}
    stays = [(brought[b], ends[b], blocks[b].gradient_bytes) for b in brought]
    stays += [(0.0, end, blocks[b].gradient_bytes) for b, end in used.items() if b in deferred and b in brought]
    return max((sum(n for s, e, n in stays if s <= at < e) for at, _, _ in stays), default=0)


@given(step_schedules(), MACHINES)
@draws(150, usual=15)
def test_no_host_however_slow_has_more_gradients_waiting_than_the_figure(plan: Schedule, machine: Hardware):
    if not plan.kind.holds_gradients:
        return
    assert most_at_once(plan, machine) <= plan.landing_bytes


def test_gradients_of_a_deep_model_wait_in_as_many_bytes_as_of_a_shallow_one():
    for micro_batches in (1, 3):
        plans = [schedule(trained(n), updates="overlap", micro_batches=micro_batches) for n in (8, 64)]
        assert [waiting(plan) for plan in plans] == [2 * LAYER, 2 * LAYER]
        # A host that is far slower than the device has that many waiting, and no more.
        slow = Hardware(1e9, 1e9, 1e9, host_bytes_per_s=1e6)
        assert [most_at_once(plan, slow) for plan in plans] == [2 * LAYER, 2 * LAYER]


@pytest.mark.parametrize("transfer", ["copy", "bind"])
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, 0),
        ({"clip": True}, 8),
        ({"updates": "overlap"}, 2),
        ({"updates": "overlap", "clip": True}, 8),
        ({"updates": "spread"}, 3 + 2),
        ({"updates": "serial"}, 8),
        ({"updates": "serial", "clip": True}, 8),
        ({"updates": "deferred"}, 8),
        ({"updates": "deferred", "clip": True}, 8),
    ],
)
def test_all_gradients_wait_unless_updates_follow_them_at_once(options: dict[str, Any], blocks: int, transfer: str):
    plan = schedule(trained(8), transfer=transfer, **options)
    assert waiting(plan) == blocks * LAYER
    plan.check()


def test_gradients_of_shared_parameters_wait_for_the_update_that_needs_them_all():
    tied = schedule(trained(8, tied=True), updates="overlap")
    # Those of the head stay until U0, beside the two that come and go.
    assert waiting(tied) == 3 * LAYER
    tied.check()


def test_gradients_that_no_update_needs_wait_until_the_step_ends():
    workload = trained(6)
    blocks = tuple(replace(b, update_bytes=0) if i % 2 else b for i, b in enumerate(workload.blocks))
    workload = replace(workload, blocks=blocks)
    assert waiting(schedule(workload, updates="overlap")) == 4 * LAYER
    # They are the caller's when a step is over, so the next begins only with those that are to be used.
    late = schedule(workload, updates="deferred")
    assert waiting(late) == 6 * LAYER
    assert str(late.ticks[0].host) == "U0"
    assert most_at_once(late, Hardware(1e9, 1e9, 1e9)) == 6 * LAYER


def without_holds(plan: Schedule) -> nx.DiGraph[Any]:
    """What the runtime enforces, without the waits of G for updates."""
    graph = waits_graph(plan)
    ops = dict(plan.positions())
    for before, after in list(graph.edges):
        if ops[after].what == "G" and before.stream == Stream.HOST:
            graph.remove_edge(before, after)
    return graph


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_run_ahead_of_updates_are_refused_and_do_harm(tied: bool):
    plan = schedule(trained(6, tied=tied), updates="overlap", micro_batches=2)
    graph, ops = plan.to_networkx(), dict(plan.positions())
    holds = [(a, b) for a, b in graph.edges if a.stream == Stream.HOST and ops[b].what == "G"]
    assert len(holds) >= 3
    assert {graph.edges[hold]["kind"] for hold in holds} == {"memory"}
    with pytest.raises(ScheduleError) as caught:
        check_schedule(plan, plan.known_workload(), without_holds(plan))
    held, by, block = ("G2", "U4", 4) if tied else ("G3", "U5", 5)
    tick = {str(op): p.tick for p, op in plan.positions()}
    assert str(caught.value).splitlines()[0] == (
        f"d2h:{held} at tick {tick[held]} overwrites gradients of block {block}, read by host:{by} at tick {tick[by]}, "
        "which may not be done by then."
    )
    ahead = {
        p: tuple(b for b in before if not (ops[p].what == "G" and b.stream == Stream.HOST))
        for p, before in plan.waits().items()
    }
    with pytest.raises(Harm, match="overwrites gradients of block"):
        find_harm(plan, plan.known_workload(), waits=ahead, runs=60)


def test_an_update_that_releases_nothing_holds_nothing_back():
    """Two updates of one block's parameters: its gradients wait for the later one, so only that one is waited for."""
    workload = trained(6)
    shared = (replace(workload.blocks[0], shares=(5,)), *workload.blocks[1:])
    plan = schedule(replace(workload, blocks=shared), updates="overlap")
    positions = {str(op): p for p, op in plan.positions()}
    graph = plan.to_networkx()
    later = [p for name, p in positions.items() if name[0] == "G" and p.tick > positions["U5"].tick]
    assert later
    assert not any(graph.has_edge(positions["U5"], p) for p in later)
    assert waiting(plan) == 3 * LAYER
    plan.check()
    find_harm(plan, plan.known_workload())


@pytest.mark.parametrize("updates", UPDATES[1:])
@pytest.mark.parametrize("change", [-LAYER, -1, 1, LAYER])
def test_a_figure_of_the_host_that_omits_waiting_gradients_is_refused(updates: str, change: int):
    plan = schedule(trained(4, tied=True), keep=1, micro_batches=2, updates=updates, clip=updates != "spread")
    wrong = replace(plan, host_bytes=plan.host_bytes + change)
    with pytest.raises(ScheduleError, match=f"host_bytes is stated as {wrong.host_bytes}, but is {plan.host_bytes}"):
        wrong.check()


def test_a_late_update_is_seen():
    plan = schedule(trained(5), updates="overlap")
    late = next(p for p, op in plan.positions() if str(op) == "U4")
    rows = [row.replaced("host", None) if t == late.tick else row for t, row in enumerate(plan.ticks)]
    rows.append(Tick(Op(Stream.HOST, "U", 4)))
    moved = replace(plan, ticks=tuple(rows), live_bytes=(*plan.live_bytes, plan.live_bytes[-1]))
    with pytest.raises(ScheduleError, match="G2 at tick 9 overwrites gradients of block 4, read by host:U4 at tick 13"):
        moved.check()


def test_without_updates_and_norm_nothing_changes():
    plan = schedule(example(), keep=2)
    assert plan.host_bytes == 8192 + LAYER
    assert not any(before.stream == Stream.HOST for before, _ in plan.to_networkx().edges)


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


@given(step_schedules(), st.integers(0, 2**20))
@draws(100, usual=10)
def test_every_other_place_is_refused_or_does_no_harm(plan: Schedule, seed: int):
    for index, place in enumerate(plan.places):
        for offset in {0, place.offset + 32, place.offset - 32, *(p.offset for p in plan.places)} - {place.offset}:
            moved = (*plan.places[:index], replace(place, offset=offset), *plan.places[index + 1 :])
            if offset < 0 or is_rejected(mutant := with_figures(replace(plan, places=moved))):
                continue
            find_harm(mutant, plan.known_workload(), seed=seed, runs=4)
