"""Spread updates: which are deferred, what they wait for, what they bring, and which tables are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.host_ticks import DEFERRED_SHARE, deferred_updates
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import LAYER, chain, trained, with_updates, workloads

# The link, the host and compute take about as long as each other.
EVEN = Hardware(1e9, 1e9, 4e10, host_bytes_per_s=3e9)


def tied_pairs(workload: Workload) -> Workload:
    """Block 0 updates a parameter that block 3 holds too, which updates others that block 5 holds."""
    blocks = list(workload.blocks)
    blocks[0], blocks[3] = replace(blocks[0], shares=(3,)), replace(blocks[3], shares=(5,))
    return replace(workload, blocks=tuple(blocks))


@given(workloads())
@draws(100)
def test_updates_that_share_gradients_are_deferred_together(workload: Workload):
    deferred = deferred_updates(workload, StepKind(updates="spread"))
    assert deferred <= set(workload.update_blocks())
    for block in workload.update_blocks():
        for other in workload.update_blocks():
            if not {*workload.update_group(block)}.isdisjoint(workload.update_group(other)):
                assert (block in deferred) == (other in deferred)


def test_so_many_bytes_are_deferred_evenly_from_the_first_block_on():
    sizes = [LAYER * n for n in (6, *[1] * 30, 7)]
    workload = with_updates(chain(sizes))
    deferred = schedule(workload, updates="spread").deferred
    assert deferred[:2] == (0, 10)  # the first is as large as six; it is two fifths of the first fifteen
    assert deferred[2:6] == (13, 15, 18, 20)
    for end in range(15, 33):
        total = sum(sizes[:end])
        share = sum(sizes[b] for b in deferred if b < end)
        assert abs(share - DEFERRED_SHARE * total) <= 7 * LAYER
    assert deferred_updates(workload, StepKind(updates="deferred")) == set(range(32))
    assert not deferred_updates(workload, StepKind(updates="overlap"))


def test_a_chain_of_shared_parameters_is_one():
    workload = tied_pairs(trained(8))
    plan = schedule(workload, updates="spread")
    plan.check()
    find_harm(plan, workload)
    assert {0, 3, 5} <= set(plan.deferred)
    ops = [str(op) for op in plan.ops]
    for block in range(8):
        members = {0: (0, 3), 3: (3, 5)}.get(block, (block,))
        for member in members:
            assert (ops.index(f"U{block}") < ops.index(f"G{member}")) == (block in plan.deferred)


def test_weights_that_nobody_updates_come_first():
    """Resident blocks' weights come while the host updates the first block, whose weights all the others follow."""
    sizes = [8 * LAYER, *[LAYER] * 9]
    workload = with_updates(chain(sizes))
    plan = schedule(workload, updates="spread", memory=1 << 30, outputs="release")
    assert plan.resident() == tuple(range(10))
    assert plan.deferred == (0,)
    loads = [op.block for op in plan.ops if op.what == "W"]
    # U0 moves 7 times its weights, and the host counts as 4 times as fast as the link: 14 layers could come meanwhile.
    assert loads == [*range(1, 10), 0]
    late = schedule(workload, updates="deferred", memory=1 << 30, outputs="release")
    assert [op.block for op in late.ops if op.what == "W"] == list(range(10))
    plan.check()
    find_harm(plan, workload)


@pytest.mark.parametrize(("count", "most"), [(1, 0.8), (2, 0.8), (5, 0.9)])
def test_spread_updates_leave_no_time_unused(count: int, most: float):
    """The host works in the forward and in the backward."""
    seconds = {
        updates: schedule(trained(16), updates=updates, micro_batches=count, outputs="release", memory=1 << 30)
        .simulate(EVEN)
        .step_s
        for updates in ("overlap", "deferred", "spread")
    }
    assert seconds["spread"] < most * min(seconds["overlap"], seconds["deferred"])


def test_gradients_run_two_blocks_ahead_of_updates():
    """Else each G would wait for the update before it, and the host for each G."""
    plan = schedule(trained(12), updates="spread")
    graph, ops = plan.to_networkx(), dict(plan.positions())
    waits = [
        (ops[before].block, ops[after].block)
        for before, after in graph.edges
        if ops[before].what == "U" and ops[after].what == "G" and before.tick > 2
    ]
    assert waits
    assert all(updated - left >= 3 for updated, left in waits if updated not in plan.deferred)


def test_an_update_that_is_moved_to_the_head_is_deferred():
    """A reader may edit the table: the text says nothing else of which updates are deferred."""
    plan = schedule(trained(8), updates="spread")
    assert plan.deferred == (0, 3, 5)
    last = max(p.tick for p, op in plan.positions() if op.what == "W" and op.block == 7)
    position = next(p for p, op in plan.positions() if str(op) == "U7")
    moved = with_cells(plan, {position: None, Position(last - 1, Stream.HOST): plan.ticks[position.tick].host})
    moved = with_figures(moved)
    assert moved.deferred == (0, 3, 5, 7)
    with pytest.raises(ScheduleError, match="overwrites gradients of block 7"):
        moved.check()  # which wait, and so need a place of their own


def test_updates_that_share_gradients_are_not_parted():
    workload = tied_pairs(trained(8))
    plan = schedule(workload, updates="spread")
    position = next(p for p, op in plan.positions() if str(op) == "U3")
    end = Position(len(plan.ticks), Stream.HOST)
    parted = with_figures(with_cells(plan, {position: None, end: plan.ticks[position.tick].host}))
    with pytest.raises(ScheduleError) as caught:
        parted.check()
    assert str(caught.value) == (
        f"host:U0 at tick 0 uses gradients of the previous step, host:U3 at tick {end.tick} those of this step.\n"
        "  Updates that use gradients of one block are all deferred, or none is.\n"
        "  Move one of them."
    )


def test_a_norm_is_refused():
    with pytest.raises(OptionError, match=r'clip=True with updates="spread" is impossible'):
        schedule(trained(3), updates="spread", clip=True)
    with pytest.raises(OptionError, match=r'reports_norm=True with clip=False and updates="spread" is impossible'):
        schedule(trained(3), updates="spread", reports_norm=True)
