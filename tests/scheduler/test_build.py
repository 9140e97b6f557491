"""The builder: options, budgets, placement, and how long it takes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import ACTIVATIONS, backward_schedule
from megatrain.scheduler.builder.stays import Placed, Stay, compute_stages, place_slots, stays_of
from megatrain.scheduler.effects import streams
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.parking import keep_all
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Slot
from megatrain.scheduler.workload import ValueWork, Workload
from tests.draws import draws
from tests.scheduler.workloads import EMBED, LAYER, block, chain, example, plans_down_from, with_updates, workloads


def loads(plan):
    return [str(op) for op in plan.ops if op.what == "W"]


def test_without_memory_auto_recomputes_all_but_the_last_and_parks_nothing():
    plan = schedule(example())
    assert (plan.saves, plan.keep, plan.num_slots) == ((3,), 4, 2)
    assert plan == schedule(example(), activations="recompute")
    assert all(op.what != "A" for op in plan.ops)


def test_keep_retains_all_graphs_and_offload_parks_all_inputs_but_the_last():
    assert schedule(example(), activations="keep").saves == (0, 1, 2, 3)
    parked = schedule(example(), activations="offload")
    assert parked.parked() == {1: (1,), 2: (2,)}
    assert [str(op) for op in parked.ops if op.what == "A"] == ["A1", "A2", "A2", "A1"]


def test_the_last_blocks_stay_from_forward_to_backward():
    assert loads(schedule(example(), num_slots=1)) == ["W0@0", "W1@0", "W2@0", "W3@0", "W2@0", "W1@0", "W0@0"]
    assert len(loads(schedule(example(), num_slots=2))) == 6
    assert len(loads(schedule(example(), num_slots=4))) == 4


def test_a_block_without_state_needs_no_slot():
    plan = schedule(chain([64, 0, 64, 0]))
    assert {op.block for op in plan.ops if op.what == "W"} == {0, 2}


def test_bound_weights_take_no_bytes_and_move_none():
    plan = schedule(example(), transfer="bind", activations="offload")
    assert plan.slots == (Slot(0, 0),)
    assert (plan.h2d_bytes, plan.d2h_bytes, plan.host_bytes, plan.arena_bytes) == (0, 0, 0, 0)
    assert all(op.what != "A" for op in plan.ops)
    assert len(loads(plan)) == 6


def test_an_embedding_larger_than_two_layers_does_not_double_the_arena():
    plan = schedule(chain([100 * LAYER, *[LAYER] * 9, 100 * LAYER]))
    assert plan.arena_bytes == 101 * LAYER
    assert plan.num_slots == 2


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_equal_blocks_take_as_many_slots_as_there_are(count: int, num_slots: int):
    plan = schedule(chain([LAYER] * count), num_slots=num_slots)
    assert plan.num_slots == min(num_slots, count)
    assert plan.arena_bytes == plan.num_slots * LAYER


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


@given(workloads(), st.integers(0, 2000), st.sampled_from(ACTIVATIONS), st.sampled_from(["copy", "bind"]))
@draws(150, usual=20)
def test_a_budget_is_kept_or_refused(workload: Workload, memory: int, activations: str, transfer: str):
    assume(memory > 0)
    refusal = ""
    try:
        plan = schedule(workload, memory=memory, activations=activations, transfer=transfer)
    except ScheduleError as error:
        refusal = str(error)
    if refusal:
        assert f"a memory of {memory} B is too small: at least " in refusal
        least = int(refusal.split("at least ")[1].split()[0])
        assert least > memory
        with_least = schedule(workload, memory=least, activations=activations, transfer=transfer)
        assert with_least.device_bytes <= least
        return
    assert plan.device_bytes <= memory
    plan.check()


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


def test_less_memory_means_fewer_graphs_and_more_parking_then_one_slot():
    """Step by step, and no step with less memory is faster on the machine that the choices are weighed for."""
    workload = chain([LAYER] * 12)
    full = schedule(workload, activations="keep").device_bytes
    plans = plans_down_from(full, lambda memory: schedule(workload, memory=memory))
    seen = [(plan.num_slots, len(plan.saves), plan.keep) for plan in plans]
    assert seen[0] == (2, 12, 12)
    assert [s[:2] for s in seen] == sorted((s[:2] for s in seen), reverse=True)
    assert {s[1] for s in seen if s[0] == 2} == set(range(1, 13))
    assert {s[2] for s in seen if s[0] == 2} >= {12, 6, 4}
    assert seen[-1] == (1, 1, 2)
    usual = Hardware.preset("rtx-4090")
    for count in (1, 2):
        steps = [plan.simulate(usual).step_s for plan in plans if plan.num_slots == count]
        assert all(more <= less * (1 + 1e-9) for more, less in pairwise(steps))


def test_explicit_choices_are_honoured_under_a_budget():
    roomy = 10**9
    plan = schedule(example(), memory=roomy, num_slots=1, keep=1)
    assert (plan.num_slots, plan.keep) == (1, 1)
    with pytest.raises(ScheduleError, match="too small"):
        schedule(example(), memory=schedule(example(), num_slots=2).device_bytes - 1, num_slots=2, keep=4)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots=0 is less than 1."),
        ({"keep": -1}, "keep=-1 is less than 0."),
        ({"memory": 0}, "memory=0 is less than"),
        ({"memory": True}, "memory=True is not a"),
        ({"activations": "drop"}, "activations='drop' is not known."),
        ({"transfer": "send"}, "transfer='send' is not known."),
        ({"mode": "sideways"}, "mode='sideways' is not known."),
    ],
)
def test_an_unknown_option_is_named(options, message):
    with pytest.raises(OptionError) as caught:
        schedule(example(), **options)
    assert str(caught.value).startswith(message)


def test_a_backward_needs_a_schedule_that_trains():
    with pytest.raises(ScheduleError, match="has no backward to split off"):
        backward_schedule(schedule(example(), mode="forward"))
    with pytest.raises(ScheduleError, match="too small"):
        backward_schedule(schedule(example()), memory=1000)
    tight = backward_schedule(schedule(example()), memory=480_000)
    assert tight.num_slots == 1
    assert tight.device_bytes <= 480_000


def test_a_backward_alone_starts_without_weights():
    alone = backward_schedule(schedule(example(), keep=2))
    assert loads(alone) == ["W3@1", "W2@0", "W1@1", "W0@0"]
    assert {op.what for op in alone.ops} == {"W", "A", "B", "G"}


def test_a_model_without_backward_only_runs_forward():
    frozen = Workload(
        tuple(replace(b, has_backward=False, gradient_bytes=0) for b in example().blocks),
        tuple(replace(v, has_gradient=False) for v in example().values),
        example().storages,
    )
    plan = schedule(frozen, memory=10**6)
    plan.check()
    assert {op.what for op in plan.ops} == {"W", "F"}
    assert (plan.keep, plan.saves) == (0, ())


def test_no_blocks_make_an_empty_schedule():
    plan = schedule(Workload((), (), ()))
    plan.check()
    assert plan.ticks == ()


def test_every_op_waits_only_for_other_streams():
    for position, before in schedule(example(), keep=0).waits().items():
        assert all(b.stream != position.stream and b.tick < position.tick for b in before)
        assert len(before) == len({b.stream for b in before})
        assert position.stream in streams()


@pytest.mark.parametrize(
    "value",
    [
        ValueWork("x", 8, 0, 1, (1,), False, True, False),
        ValueWork("x", 8, 0, 0, (3, 2), False, True, False),
        ValueWork("x", 8, 0, 0, (9,), False, True, False),
        ValueWork("x", 8, 7, 0, (1,), False, True, False),
        ValueWork("x", -8, 0, 0, (1,), False, True, False),
        ValueWork("x", 8, 0, 9, (), False, True, False),
        ValueWork("x", 8, 0, 0, (1,), True, True, True),
        ValueWork("x", 8, 0, 0, (1,), False, True, True, on_host=True),
    ],
)
def test_an_inconsistent_workload_is_refused(value: ValueWork):
    with pytest.raises(ScheduleError, match=r"^value x "):
        schedule(Workload((block("a", EMBED),) * 4, (value,), (8,)))


def test_two_thousand_blocks_take_seconds():
    workload = chain([40 * EMBED, *[LAYER + 64 * (i % 3) for i in range(1998)], 40 * EMBED])
    start = time.process_time()
    plan = schedule(workload, memory=30_000_000)
    built = time.process_time()
    plan.check()
    checked = time.process_time()
    assert len(plan.saves) > 100
    # Several times what it takes; quadratic work would take minutes.
    assert built - start < 5
    assert checked - built < 8


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


@given(st.lists(st.tuples(st.integers(-3, 40), st.integers(0, 30), st.integers(0, 9), st.integers(0, 3)), max_size=30))
@draws(200)
def test_bytes_that_are_taken_are_those_of_stays_at_the_same_time(drawn: list[tuple[int, int, int, int]]):
    placed, there = Placed(), list[tuple[Stay, int]]()
    for first, length, place, size in drawn:
        stay = Stay(0, first, first, first + length, 1 + size, 0)
        taken = {(at, at + other.nbytes) for other, at in there if other.first <= stay.last and other.last >= first}
        assert set(placed.beside(stay)) == taken
        offset = 4 * place
        if all(stop <= offset or offset + stay.nbytes <= start for start, stop in taken):
            placed.add(stay, offset)
            there.append((stay, offset))
