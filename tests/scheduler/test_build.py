"""The builder: options, budgets, placement, and how long it takes."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import ACTIVATIONS, backward_schedule
from megatrain.scheduler.builder.stays import compute_stages, giants, place_slots, stays_of
from megatrain.scheduler.effects import keep_all
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.step_kind import UPDATES, StepKind
from megatrain.scheduler.table import Slot
from megatrain.scheduler.workload import ValueWork, Workload
from tests.draws import draws
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import (
    ACT,
    EMBED,
    LAYER,
    block,
    chain,
    example,
    trained,
    with_updates,
    workloads,
)


def test_keep_retains_all_graphs_and_offload_parks_all_inputs_but_the_last():
    assert schedule(example(), activations="keep").saves == (0, 1, 2, 3)
    parked = schedule(example(), activations="offload")
    assert parked.parked() == {1: (1,), 2: (2,)}
    several = schedule(example(), activations="offload", micro_batches=3)
    assert (several.park_bytes, several.host_bytes) == (3 * 2 * ACT, 3 * 2 * ACT + LAYER)
    assert [str(op) for op in parked.ops if op.what == "A"] == ["A1", "A2", "A2", "A1"]


def test_weights_take_as_many_slots_as_there_are_and_no_more_bytes_than_they_need():
    for count, num_slots in [(2, 4), (3, 2), (5, 1), (7, 3), (11, 4)]:
        plan = schedule(chain([LAYER] * count), num_slots=num_slots)
        assert plan.num_slots == min(num_slots, count)
        assert plan.arena_bytes == plan.num_slots * LAYER
    large = schedule(chain([100 * LAYER, *[LAYER] * 9, 100 * LAYER]))  # not twice as large because of its ends
    assert (large.num_slots, large.arena_bytes) == (2, 101 * LAYER)
    assert {op.block for op in schedule(chain([64, 0, 64, 0])).ops if op.what == "W"} == {0, 2}
    overlapping = schedule(chain([3 * LAYER, LAYER, LAYER, LAYER, 3 * LAYER]), num_slots=3)
    assert (Slot(0, 3 * LAYER), Slot(LAYER, 3 * LAYER)) == overlapping.slots[:2]
    overlapping.check()


@given(
    workloads(),
    st.integers(1, 4),
    st.sampled_from(["train", "forward", "backward"]),
    st.integers(1, 3),
    st.frozensets(st.integers(0, 6)),
    st.frozensets(st.integers(0, 6)),
)
def test_stays_of_one_time_never_share_bytes(
    workload: Workload,
    num_slots: int,
    mode: str,
    micro_batches: int,
    resident: frozenset[int],
    persistent: frozenset[int],
):
    kind = StepKind(mode, micro_batches=micro_batches if mode == "train" else 1)
    stages = compute_stages(workload, kind)
    stays = stays_of(workload, kind, stages, num_slots=num_slots, resident=resident, persistent=persistent)
    slots, slot_of = place_slots(stays)
    for step in range(-num_slots, len(stages)):
        now = [(slots[s].offset, r.nbytes) for r, s in zip(stays, slot_of, strict=True) if r.first <= step <= r.last]
        ordered = sorted(now)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered))
    assert all(
        any(s == i and r.nbytes == slot.nbytes for r, s in zip(stays, slot_of, strict=True))
        for i, slot in enumerate(slots)
    )


def test_small_blocks_take_turns_in_two_slots_where_a_giant_has_the_room_of_one():
    workload = with_updates(chain([4 * LAYER, *[LAYER] * 8, 4 * LAYER]))
    assert giants(workload) == (0, 9)
    assert giants(chain([2 * LAYER, LAYER, LAYER])) == ()
    assert giants(chain([0, 0, 0, LAYER, 3 * LAYER, LAYER, 0])) == (4,)
    options = {"updates": "spread", "outputs": "release", "micro_batches": 3}
    two, one = (schedule(workload, num_slots=count, activations="offload", **options).device_bytes for count in (2, 1))
    assert one + LAYER // 2 < two
    found = schedule(workload, memory=(one + two) // 2, **options)
    assert found.device_bytes <= (one + two) // 2
    assert found.num_slots > 1
    alone, machine = schedule(workload, num_slots=1, memory=(one + two) // 2, **options), Hardware(1e9, 1e9, 1e10)
    assert found.simulate(machine).step_s < 0.9 * alone.simulate(machine).step_s
    ticks = {str(op): position.tick for position, op in found.positions()}
    last = max(tick for op, tick in ticks.items() if op.startswith("F0"))
    assert all(tick > last for op, tick in ticks.items() if op.startswith("W1@"))  # nothing comes beside the embedding
    find_harm(found, workload)
    roomy = schedule(workload, memory=two, **options)  # with room for two slots, everything comes early
    ticks = {str(op): position.tick for position, op in reversed(list(roomy.positions()))}
    assert min(tick for op, tick in ticks.items() if op.startswith("W1@")) <= ticks["F0.0"]


@given(
    workloads(),
    st.integers(1, 3000),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from(["copy", "bind"]),
    st.integers(1, 4),
    st.sampled_from(UPDATES),
)
@draws(200, usual=30)
def test_a_budget_is_kept_or_refused_with_the_least_that_is_enough(
    workload: Workload, memory: int, activations: str, transfer: str, micro_batches: int, updates: str
):
    options: dict[str, Any] = {"activations": activations, "transfer": transfer, "micro_batches": micro_batches}
    options |= {"updates": updates, "clip": updates not in ("none", "spread")}
    refusal = ""
    try:
        plan = schedule(workload, memory=memory, **options)
        assert plan.device_bytes <= memory
        plan.check()
    except ScheduleError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"a memory of {memory} B")
        assert " is too small: at least " in refusal
        least = int(refusal.split("at least ")[1].split()[0])
        assert least > memory
        assert schedule(workload, memory=least, **options).device_bytes <= least


@given(workloads(), st.integers(1, 2000))
@draws(60)
def test_auto_retains_as_many_graphs_as_fit(workload: Workload, memory: int):
    try:
        plan = schedule(workload, memory=memory, num_slots=2)
    except ScheduleError:
        return
    blocks = workload.backward_blocks()
    everything = keep_all(workload)
    assert plan.keep == everything or len(plan.saves) <= 1
    if plan.saves != blocks:
        assert schedule(workload, num_slots=2, activations="keep").device_bytes > memory
    if plan.keep < everything:
        assert schedule(workload, num_slots=2).device_bytes > memory


@given(st.lists(st.sampled_from([EMBED, LAYER]), min_size=3, max_size=9), st.floats(0.0, 3.0))
@draws(60)
def test_what_a_step_leaves_of_its_budget_holds_as_many_weights_as_fit(layers, more: float):
    works = with_updates(chain(layers))
    total = sum(work.state_bytes for work in works.blocks)
    fixed = schedule(works, updates="overlap", activations="recompute", num_slots=2)
    memory = fixed.device_bytes + int(more * total)
    found = schedule(works, updates="overlap", activations="recompute", memory=memory)
    assert found.device_bytes <= memory
    if more >= 1:
        assert len(found.resident()) == len(layers)
        assert found.h2d_bytes == total
    elif len(found.resident()) < len(layers):
        assert found.device_bytes + max(works.blocks[b].state_bytes for b in range(len(layers))) > memory
    call = schedule(works, activations="recompute", memory=memory)
    assert len(call.resident()) <= 2, "a caller has tensors of their own beside a call"


def test_too_little_memory_is_explained():
    with pytest.raises(ScheduleError) as caught:
        schedule(example(), memory=300_000)
    assert str(caught.value) == (
        "a memory of 300000 B is too small: at least 339712 B are needed, set by block 2 (layers.2).\n"
        "  At its B2 (tick 10, 1 slot): weights 132864 B, gradients of parameters 132864 B, "
        "workspace 32768 B, activations 24832 B, gradients of activations 16384 B.\n"
        "  What helps: a larger memory, a smaller block_bytes or a smaller batch."
    )
    with pytest.raises(ScheduleError, match='activations="offload"'):
        schedule(example(), memory=300_000, activations="keep")


def test_impossible_options_are_named():
    options: dict[str, Any]
    for options, message in (
        ({"num_slots": 0}, "num_slots=0 is less than 1."),
        ({"mode": "sideways"}, "mode='sideways' is not known."),
        ({"mode": "forward", "micro_batches": 2}, 'mode="forward" with micro-batches, updates, a norm'),
        ({"updates": "spread", "clip": True}, 'clip=True with updates="spread" is impossible'),
        ({"updates": "spread", "reports_norm": True}, 'reports_norm=True with clip=False and updates="spread" is'),
    ):
        with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
            schedule(example(), **options)


def test_the_kind_of_a_step_checks_itself():
    """No schedule has a contradictory one, though it may be made without the builder."""
    more: dict[str, Any]
    for more in ({"micro_batches": 2}, {"updates": "overlap"}, {"clip": True}, {"outputs": "release"}):
        with pytest.raises(OptionError, match='mode="backward" with micro-batches, updates'):
            StepKind("backward", **more)
        assert StepKind(**more).is_training_step
    wrong: dict[str, Any]
    for wrong in ({"mode": "eval"}, {"transfer": "move"}, {"micro_batches": 10**12}, {"updates": "late"}):
        with pytest.raises(OptionError, match=f"^{next(iter(wrong))}="):
            StepKind(**wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"producer": 1},
        {"readers": (3, 2)},
        {"readers": (9,)},
        {"storage": 7},
        {"nbytes": -8},
        {"producer": 9, "readers": ()},
        {"is_output": True, "is_parkable": True},
        {"is_parkable": True, "on_host": True},
    ],
    ids=str,
)
def test_an_inconsistent_workload_is_refused(change: dict[str, Any]):
    value = replace(ValueWork("x", 8, 0, 0, (1,), False, True, False), **change)
    with pytest.raises(ScheduleError, match=r"^value x "):
        schedule(Workload((block("a", EMBED),) * 4, (value,), (8,)))


def test_an_update_without_gradients_or_with_itself_is_refused():
    first, second = trained(2).blocks
    changes: list[dict[str, Any]] = [
        {"update_bytes": 8, "gradient_bytes": 0}, {"update_bytes": 8, "has_backward": False}, {"shares": (0,)}
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ScheduleError, match=r"^block 0 \(layers\.0\) "):
            schedule(replace(trained(2), blocks=(replace(first, **change), second)))


def test_a_backward_needs_a_schedule_that_trains():
    with pytest.raises(ScheduleError, match="has no backward to split off"):
        backward_schedule(schedule(example(), mode="forward"))
    with pytest.raises(ScheduleError, match="too small"):
        backward_schedule(schedule(example()), memory=1000)
    tight = backward_schedule(schedule(example()), memory=480_000)
    assert tight.num_slots == 1
    assert tight.device_bytes <= 480_000


@pytest.mark.nightly
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
