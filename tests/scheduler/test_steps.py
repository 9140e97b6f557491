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
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.from_program import workload as workload_of
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import memory_limits, op_durations
from megatrain.scheduler.step_kind import UPDATES
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import (
    LAYER,
    step_schedules,
    trained,
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


# -- spread updates ----------------------------------------------------------------------------------------------


def test_spread_updates_leave_no_time_unused():
    """The host works in the forward and in the backward, and its memory moves something nearly all the time."""
    machine = Hardware(1e9, 1e9, 4e10, host_bytes_per_s=3e9)
    plans = {
        updates: schedule(trained(16), updates=updates, outputs="release", memory=1 << 30)
        for updates in ("overlap", "deferred", "spread")
    }
    seconds = {updates: plan.simulate(machine).step_s for updates, plan in plans.items()}
    assert seconds["spread"] < 0.9 * min(seconds["overlap"], seconds["deferred"])
    to_device, to_host = memory_limits(machine)
    weights = {Stream.H2D: to_device, Stream.D2H: to_host, Stream.HOST: 1.0}
    alone = op_durations(plans["spread"], machine)
    assert seconds["spread"] < 1.1 * sum(weights.get(p.stream, 0.0) * alone_s for p, alone_s in alone.items())


def tied_pairs(workload: Workload) -> Workload:
    """Block 0 updates a parameter that block 3 holds too, which updates others that block 5 holds."""
    blocks = list(workload.blocks)
    blocks[0], blocks[3] = replace(blocks[0], shares=(3,)), replace(blocks[3], shares=(5,))
    return replace(workload, blocks=tuple(blocks))


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
