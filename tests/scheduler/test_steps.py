"""Whole steps: micro-batches in block-major order, updates early and late, and gradients that wait on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatrain
from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.builder.host_ticks import DEFERRED_SHARE, deferred_updates
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.from_program import workload as workload_of
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import OUTPUTS, UPDATES, StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import (
    ACT,
    LAYER,
    chain,
    step_schedules,
    trained,
    with_updates,
    workloads,
)


def moved(plan: Schedule, what: str) -> tuple[int, int]:
    """How many such ops there are, and the bytes of state or gradients that they move."""
    blocks = plan.known_workload().blocks
    ops = [op for op in plan.ops if op.what == what]
    sizes = [blocks[op.block].state_bytes if what == "W" else blocks[op.block].gradient_bytes for op in ops]
    return len(ops), sum(sizes)


@given(workloads(), st.integers(2, 6), st.integers(1, 4), st.sampled_from(UPDATES))
@draws(60)
def test_weights_cross_as_often_for_many_micro_batches_as_for_one(
    workload: Workload, micro_batches: int, num_slots: int, updates: str
):
    one = schedule(workload, num_slots=num_slots)
    many = schedule(workload, num_slots=num_slots, micro_batches=micro_batches, updates=updates)
    assert moved(many, "W") == moved(one, "W")
    assert moved(many, "G") == moved(one, "G")


def test_all_micro_batches_of_a_block_run_before_the_next_one():
    plan = schedule(trained(3), micro_batches=2)
    compute = [str(op) for op in plan.ops if op.stream == Stream.COMPUTE]
    assert compute == ["F0.0", "F0.1", "F1.0", "F1.1", "F2.0", "B2.0", "F2.1", "B2.1", "B1.0", "B1.1", "B0.0", "B0.1"]


def test_a_turn_without_a_backward_retains_graphs_only_if_they_fit():
    workload = trained(4)
    blocks = (*workload.blocks[:3], replace(workload.blocks[3], has_backward=False, gradient_bytes=0, update_bytes=0))
    workload = replace(workload, blocks=blocks)
    plan = schedule(workload, micro_batches=3)
    assert plan.saves == ()
    plan.check()
    early = plan.device_bytes - workload.blocks[0].gradient_bytes  # as its gradients leave late
    tight, roomy = (
        schedule(workload, memory=early, micro_batches=3),
        schedule(workload, memory=10**9, micro_batches=3),
    )
    assert (tight.saves, roomy.saves) == ((), (0, 1, 2))
    roomy.check()


def test_gradients_leave_beside_the_whole_backward_of_the_next_block_if_they_fit():
    def beside(plan: Schedule) -> dict[str, str]:
        return {str(row.d2h): str(row.compute) for row in plan.ticks if row.d2h is not None}

    late = schedule(trained(4), micro_batches=3, keep=4)
    assert beside(late) == {"G3": "B2.2", "G2": "B1.2", "G1": "B0.2", "G0": "None"}
    early = schedule(trained(4), micro_batches=3, keep=4, memory=late.device_bytes - 1, activations="recompute")
    assert beside(early) == {"G3": "B2.0", "G2": "B1.0", "G1": "B0.0", "G0": "None"}
    assert early.saves == late.saves
    for plan in (late, early):
        plan.check()


def test_released_outputs_take_no_memory_per_micro_batch():
    """Logits, say: a chain whose last value is as large as everything else together."""
    workload = trained(4)
    big = replace(workload.values[-1], nbytes=50 * ACT)
    workload = replace(workload, values=(*workload.values[:-1], big), storages=(*workload.storages[:-1], 50 * ACT))
    peaks = {
        outputs: [schedule(workload, micro_batches=n, outputs=outputs).peak_bytes for n in (2, 3)]
        for outputs in OUTPUTS
    }
    assert peaks["keep"][1] - peaks["keep"][0] > 50 * ACT
    assert peaks["release"][1] - peaks["release"][0] < 10 * ACT


def test_updates_of_the_host_overlap_with_the_backward_unless_serial():
    machine = Hardware(1e9, 1e9, 1e9, host_bytes_per_s=1e9)
    workload = trained(8)
    seconds = {u: schedule(workload, updates=u).simulate(machine).step_s for u in UPDATES}
    host = sum(block.update_bytes for block in workload.blocks) / 1e9
    assert seconds["serial"] == pytest.approx(seconds["none"] + host)
    assert seconds["none"] <= seconds["overlap"] < 0.9 * seconds["serial"]
    assert seconds["deferred"] < 0.9 * seconds["serial"]
    # Squares are summed beside the backward: only those of the last block to leave are still missing.
    clipped = schedule(workload, clip=True).simulate(machine).step_s
    assert clipped == pytest.approx(seconds["none"] + workload.blocks[0].gradient_bytes / 1e9)
    found = schedule(workload, updates="serial").simulate(machine)
    assert found.busy[Stream.HOST] * found.step_s == pytest.approx(host)


def test_a_whole_step_can_not_be_split():
    options: Any
    for options in ({"micro_batches": 2}, {"updates": "overlap"}, {"clip": True}, {"outputs": "release"}):
        with pytest.raises(ScheduleError, match="can't be split"):
            backward_schedule(schedule(trained(3), **options))


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, a layer, and a layer that isn't trained."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.head(x)


def test_a_program_says_which_block_updates_a_parameter_and_who_shares_it():
    program = megatrain.lower(megatrain.trace(Tied(), (torch.arange(6).reshape(2, 3),)))
    found = workload_of(program)
    updates = {b.name: (b.update_bytes, b.shares) for b in found.blocks if b.update_bytes}
    last = len(found.blocks) - 1
    assert found.blocks[0].shares == (last,)
    assert found.blocks[0].update_bytes == 7 * 11 * 8 * 4
    assert found.blocks[last].update_bytes == 0
    assert sum(size for size, _ in updates.values()) == 7 * 4 * (11 * 8 + 2 * (64 + 8))
    assert workload_of(program, update_traffic=3).blocks[0].update_bytes == 3 * 11 * 8 * 4
    narrow = megatrain.lower(megatrain.trace(Tied().bfloat16(), (torch.arange(6).reshape(2, 3),)))
    for masters, nbytes in (("whole", 14), ("exact", 26), ("rounded", 22)):
        assert workload_of(narrow, masters=masters).blocks[0].update_bytes == nbytes * 11 * 8
    assert workload_of(narrow) == workload_of(narrow, masters="exact")
    assert workload_of(program, masters="rounded") == found
    plan = megatrain.schedule(program, micro_batches=2, updates="deferred", clip=True, memory="1MiB")
    plan.check()
    assert sum(op.what == "U" for op in plan.ops) == len(updates) == 3
    find_harm(plan, found)


# -- gradients that wait on the host -----------------------------------------------------------------------------


# Hosts from a thousand times slower than the device to a thousand times faster.
RATES = st.floats(1e3, 1e5)


MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), st.floats(1, 1e8))


def waiting(plan: Schedule) -> int:
    """The figure's part for waiting gradients. Without updates and norm there is none."""
    return plan.landing_bytes if plan.kind.holds_gradients else 0


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


@pytest.mark.parametrize(
    ("updates", "clip", "blocks"),
    [
        ("none", False, 0),
        ("none", True, 8),
        ("overlap", False, 2),
        ("overlap", True, 8),
        ("spread", False, 3 + 2),
        ("serial", False, 8),
        ("deferred", True, 8),
    ],
)
def test_all_gradients_wait_unless_updates_follow_them_at_once(updates: str, clip: bool, blocks: int):
    assert waiting(schedule(trained(8), updates=updates, clip=clip)) == blocks * LAYER


def test_gradients_of_shared_parameters_wait_for_the_update_that_needs_them_all():
    # Those of the head stay until U0, besides the two that come and go.
    assert waiting(schedule(trained(8, tied=True), updates="overlap")) == 3 * LAYER


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


# -- spread updates ----------------------------------------------------------------------------------------------


def tied_pairs(workload: Workload) -> Workload:
    """Block 0 updates a parameter that block 3 holds too, which updates others that block 5 holds."""
    blocks = list(workload.blocks)
    blocks[0], blocks[3] = replace(blocks[0], shares=(3,)), replace(blocks[3], shares=(5,))
    return replace(workload, blocks=tuple(blocks))


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


def test_a_chain_of_shared_parameters_is_deferred_as_one():
    workload = tied_pairs(trained(8))
    plan = schedule(workload, updates="spread")
    find_harm(plan, workload)
    assert {0, 3, 5} <= set(plan.deferred)
    ops = [str(op) for op in plan.ops]
    for block in range(8):
        for member in {0: (0, 3), 3: (3, 5)}.get(block, (block,)):
            assert (ops.index(f"U{block}") < ops.index(f"G{member}")) == (block in plan.deferred)
    position, end = next(p for p, op in plan.positions() if str(op) == "U3"), Position(len(plan.ticks), Stream.HOST)
    parted = with_figures(with_cells(plan, {position: None, end: plan.ticks[position.tick].host}))
    with pytest.raises(ScheduleError) as caught:
        parted.check()
    assert str(caught.value) == (
        f"host:U0 at tick 0 uses gradients of the previous step, host:U3 at tick {end.tick} those of this step.\n"
        "  Updates that use gradients of one block are all deferred, or none is.\n"
        "  Move one of them."
    )


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


def test_spread_updates_leave_no_time_unused():
    """The host works in the forward and in the backward, and its memory moves something nearly all the time."""
    machine = Hardware(1e9, 1e9, 4e10, host_bytes_per_s=3e9)
    plans = {
        updates: schedule(trained(16), updates=updates, outputs="release", memory=1 << 30)
        for updates in ("overlap", "deferred", "spread")
    }
    seconds = {updates: plan.simulate(machine).step_s for updates, plan in plans.items()}
    assert seconds["spread"] < 0.9 * min(seconds["overlap"], seconds["deferred"])
    assert seconds["spread"] < 1.1 * plans["spread"].lower_bounds(machine)["host memory"]


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
