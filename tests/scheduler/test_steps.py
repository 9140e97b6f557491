"""Whole steps: micro-batches in block-major order, updates, budgets, and how long they take."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatrain
from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import ACTIVATIONS, backward_schedule
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.from_program import workload as workload_of
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import OUTPUTS, UPDATES
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import (
    ACT,
    EMBED,
    LAYER,
    chain,
    example,
    plans_down_from,
    step_schedules,
    trained,
    with_updates,
    workloads,
)

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES)


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


def test_eight_micro_batches_move_the_weights_and_gradients_of_one():
    one, eight = (schedule(trained(6), keep=6, micro_batches=n, updates="overlap") for n in (1, 8))
    assert moved(eight, "W") == moved(one, "W") == (10, sum(b.state_bytes for b in trained(6).blocks) + 4 * LAYER)
    # Nothing is parked, so these are all bytes that move.
    assert (eight.h2d_bytes, eight.d2h_bytes) == (one.h2d_bytes, one.d2h_bytes)


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


@given(workloads(), st.integers(1, 3000), st.integers(2, 4), st.sampled_from(ACTIVATIONS), st.sampled_from(UPDATES))
@draws(80)
def test_a_budget_for_a_step_is_kept_or_refused(
    workload: Workload, memory: int, micro_batches: int, activations: str, updates: str
):
    options = {"activations": activations, "micro_batches": micro_batches, "updates": updates}
    options["clip"] = updates != "spread"
    refusal = ""
    try:
        plan = schedule(workload, memory=memory, **options)
    except ScheduleError as error:
        refusal = str(error)
    if refusal:
        least = int(refusal.split("at least ")[1].split()[0])
        assert least > memory
        assert schedule(workload, memory=least, **options).device_bytes <= least
        return
    assert plan.device_bytes <= memory
    plan.check()


def test_less_memory_for_a_step_means_fewer_graphs_and_more_parking_then_one_slot():
    workload = trained(8)
    full = schedule(workload, activations="keep", micro_batches=2).device_bytes
    plans = plans_down_from(full, lambda memory: schedule(workload, memory=memory, micro_batches=2))
    seen = [(plan.num_slots, len(plan.saves), plan.keep) for plan in plans]
    assert seen[0] == (2, 8, 8)
    assert [s[:2] for s in seen] == sorted((s[:2] for s in seen), reverse=True)
    assert {s[1] for s in seen} >= {8, 4, 1}
    assert {s[2] for s in seen if s[0] == 2} >= {8, 4}
    assert seen[-1][0] == 1


def test_more_micro_batches_take_more_memory_for_activations_only():
    workload = trained(6)
    sizes = [schedule(workload, micro_batches=n, keep=0).peak_bytes for n in (2, 3, 4)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]
    assert sizes[1] - sizes[0] < LAYER


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


def test_shared_parameters_wait_for_all_their_gradients():
    plan = schedule(trained(4, tied=True), updates="overlap")
    order = [str(op) for op in plan.ops]
    assert [o for o in order if o[0] == "U"] == ["U2", "U1", "U0"]
    assert order.index("U0") > order.index("G3")
    late = schedule(trained(4, tied=True), updates="deferred")
    positions = {str(op): p for p, op in late.positions()}
    graph = late.to_networkx()
    assert graph.has_edge(positions["U0"], positions["W0@0"])
    third = next(p for p, op in late.positions() if (op.what, op.block) == ("W", 3))
    assert nx.has_path(graph, positions["U0"], third)


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


@given(step_schedules(), MACHINES)
@draws(40)
def test_a_simulated_whole_step_is_as_long_as_its_longest_chain(plan: Schedule, machine: Hardware):
    found = plan.simulate(machine)
    assert found.step_s == pytest.approx(plan.critical_path(machine)[0])
    for bound in plan.lower_bounds(machine).values():
        assert found.step_s >= bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0 is less than 1."),
        ({"updates": "later"}, "updates='later' is not known."),
        ({"outputs": "drop"}, "outputs='drop' is not known."),
        ({"mode": "forward", "micro_batches": 2}, 'mode="forward" with micro-batches, updates, a norm'),
        ({"mode": "backward", "clip": True}, 'mode="backward" with micro-batches, updates, a norm'),
    ],
)
def test_an_impossible_option_of_a_step_is_named(options, message):
    with pytest.raises(OptionError) as caught:
        schedule(example(), **options)
    assert str(caught.value).startswith(message)


def test_a_whole_step_can_not_be_split():
    options: Any
    for options in ({"micro_batches": 2}, {"updates": "overlap"}, {"clip": True}, {"outputs": "release"}):
        with pytest.raises(ScheduleError, match="can't be split"):
            backward_schedule(schedule(trained(3), **options))


@pytest.mark.parametrize(
    "block", [{"update_bytes": 8, "gradient_bytes": 0}, {"update_bytes": 8, "has_backward": False}, {"shares": (0,)}]
)
def test_an_update_without_gradients_or_with_itself_is_refused(block):
    workload = trained(2)
    with pytest.raises(ScheduleError, match=r"^block 0 \(layers\.0\) "):
        schedule(replace(workload, blocks=(replace(workload.blocks[0], **block), workload.blocks[1])))


@pytest.mark.wide
def test_two_thousand_blocks_of_four_micro_batches_take_seconds():
    workload = with_updates(chain([40 * EMBED, *[LAYER + 64 * (i % 3) for i in range(1998)], 40 * EMBED]))
    start = time.process_time()
    plan = schedule(workload, memory=60_000_000, micro_batches=4, updates="deferred", clip=True)
    built = time.process_time()
    plan.check()
    checked = time.process_time()
    assert len(plan.ops) > 20_000
    # Several times what it takes; quadratic work would take minutes.
    assert built - start < 20
    assert checked - built < 12


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
