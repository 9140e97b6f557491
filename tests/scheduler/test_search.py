"""The search for the plan with the shortest step: it fits, and is never worse than the plan by the rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError, TooSmallError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import products, total_flops
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.build import NotShorterError, build
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import BlockWork, KeptWork, ValueWork, Workload
from tests.draws import draws
from tests.scheduler.every_plan import every_plan
from tests.scheduler.workloads import with_results

SMALL = st.integers(1, 12)


def layers(kinds: list[tuple[int, int, int, int, bool]], order: list[int], nbytes: int) -> Workload:
    """Layers of one or two kinds, as models have them, each after the other.

    Args:
        kinds: Of each kind what state, saved tensors, workspace and FLOPs are multiples of, and whether it is frozen.
        order: The kind of each layer.
        nbytes: Of the values between them.
    """
    blocks: list[BlockWork] = []
    for index, kind in enumerate(order):
        state, saved, workspace, flops, is_frozen = kinds[kind]
        gradient = state * 8 if is_frozen else state * 64
        frozen = state * 56 if is_frozen else 0
        sizes = (state * 64, gradient, saved * 32, workspace * 4, workspace * 8)
        works = products(flops * 1000), products(2000 * flops)
        blocks.append(BlockWork(f"b{index}", *sizes, True, *works, update_bytes=7 * gradient, frozen_bytes=frozen))
    values = [ValueWork("ids", 8, 0, None, (0,), False, False, False)]
    for index in range(len(order)):
        is_last = index == len(order) - 1
        readers = () if is_last else (index + 1,)
        values.append(ValueWork(f"v{index}", nbytes, index + 1, index, readers, is_last, True, not is_last))
    return Workload(tuple(blocks), tuple(values), (8, *[nbytes] * len(order)))


@st.composite
def chains(draw: st.DrawFn, most: int) -> Workload:
    """Layers of up to two kinds; some keep results that spare a part of their repeated forward."""
    count = draw(st.integers(2, most))
    kinds = [draw(st.tuples(SMALL, SMALL, SMALL, SMALL, st.booleans())) for _ in range(2)]
    order = [draw(st.integers(0, 1)) for _ in range(count)]
    made = layers(kinds, order, draw(SMALL) * 8)
    part, size = draw(st.sampled_from([10, 0, 2, 9])), draw(SMALL) * 8
    for index, block in enumerate(made.blocks if part < 10 else ()):
        workspace = max(0, block.backward_workspace_bytes - size)
        kept = KeptWork(block.forward_workspace_bytes, workspace, products(total_flops(block.forward) * part // 10))
        made = with_results(made, index, kept, [size])
    return made


WORKS = products(1_000), products(2_000)
PARTS = st.integers(0, 100)
RATES = st.sampled_from([1e3, 3e3, 1e4, 3e4])
MACHINES = st.builds(Hardware, RATES, RATES, st.sampled_from([1e4, 1e5, 1e6]), st.just(0.0), RATES)
STEPS = st.fixed_dictionaries(
    {
        "updates": st.sampled_from(["overlap", "serial", "none"]),
        "clip": st.just(False),
        "outputs": st.just("release"),
        "micro_batches": st.integers(1, 2),
    }
)


def planned(workload: Workload, memory: int, machine: Hardware | None, step: dict[str, object]) -> Schedule:
    try:
        return schedule(workload, memory=memory, hardware=machine, **step)  # type: ignore[arg-type]
    except ScheduleError:
        assume(False)
        raise


def memories(workload: Workload, step: dict[str, object]) -> range:
    """From too little to all that a step can use."""
    largest = schedule(workload, activations="keep", **step).device_bytes  # type: ignore[arg-type]
    return range(largest // 4, largest + sum(block.state_bytes for block in workload.blocks))


def found_in_part(workload: Workload, part: int, machine: Hardware, step: dict[str, object]) -> tuple[int, Schedule]:
    """So many percent of the way from too little memory to all, and the plan by time in that memory."""
    between = memories(workload, step)
    memory = between[len(between) * part // 101]
    return memory, planned(workload, memory, machine, step)


@given(chains(7), st.integers(0, 100), MACHINES, STEPS)
@draws(60, usual=6)
def test_a_plan_by_time_fits_and_is_never_slower_than_the_rule(
    workload: Workload, part: int, machine: Hardware, step: dict[str, object]
):
    between = memories(workload, step)
    memory = between[len(between) * part // 101]
    rule, found = planned(workload, memory, None, step), planned(workload, memory, machine, step)
    own = build(workload, found.kind, memory=memory, usual=machine)
    found.check()
    assert found.device_bytes <= memory
    assert found.simulate(machine).step_s <= min(plan.simulate(machine).step_s for plan in (rule, own))


def test_weights_cross_where_memory_for_graphs_would_save_less():
    """Few tokens, frozen weights: each graph is cheap to recompute, and each weight takes long to bring."""
    layer = BlockWork("layer", 10_000, 100, 9_000, 100, 200, True, *WORKS, frozen_bytes=9_900)
    values = [ValueWork("ids", 8, 0, None, (0,), False, False, False)]
    values += [ValueWork(f"v{i}", 80, i + 1, i, (i + 1,) if i < 7 else (), i == 7, True, i < 7) for i in range(8)]
    works = Workload((layer,) * 8, tuple(values), (8, *[80] * 8))
    machine = Hardware(1e4, 1e4, 1e6)
    rule, found = (
        schedule(works, memory=100_000, updates="overlap", outputs="release", hardware=hardware)
        for hardware in (None, machine)
    )
    assert len(found.persistent) == 8 > len(rule.persistent)
    assert len(found.saves) < len(rule.saves)
    assert found.simulate(machine).step_s < 0.5 * rule.simulate(machine).step_s


@pytest.mark.parametrize("memory", [None, 10**9])
def test_with_ample_memory_the_rule_is_the_plan(memory: int | None):
    layer = BlockWork("layer", 1000, 1000, 500, 100, 200, True, *WORKS, update_bytes=7000)
    works = Workload((layer,) * 3, (), ())
    machine = Hardware(1e4, 1e4, 1e6)
    plans = [schedule(works, memory=memory, updates="overlap", hardware=hardware) for hardware in (None, machine)]
    assert plans[0] == plans[1]


def equal_chain(count: int, *, state: int, saved: int, value: int) -> Workload:
    works = products(5000), products(10_000)
    layer = BlockWork("layer", state, state, saved, 12, 24, True, *works, update_bytes=7 * state)
    values = [ValueWork("ids", 8, 0, None, (0,), False, False, False)]
    for index in range(count):
        readers = () if index == count - 1 else (index + 1,)
        values.append(ValueWork(f"v{index}", value, index + 1, index, readers, not readers, True, bool(readers)))
    return Workload((layer,) * count, tuple(values), (8, *[value] * count))


def test_a_search_places_few_plans(monkeypatch: pytest.MonkeyPatch):
    """The ops of long steps are placed a few times."""
    works = equal_chain(40, state=64, saved=352, value=32)
    machine, made = Hardware(1e4, 1e4, 1e6, 0.0, 1e4), set[Choices]()

    class Counting(Builder):
        def device_bytes(self, plan: Choices) -> int:
            made.add(plan)
            return super().device_bytes(plan)

    kind = StepKind(updates="overlap", outputs="release", micro_batches=8)
    monkeypatch.setattr("megatrain.scheduler.builder.build.Builder", Counting)
    build(works, kind, memory=20_000, hardware=machine)
    assert len(made) < 80


@given(chains(2), STEPS)
@draws(20, usual=4)
def test_the_bytes_of_a_plan_are_those_of_its_table(workload: Workload, step: dict[str, Any]):
    builder = Builder(workload, StepKind(**step))
    for plan in every_plan(workload, builder.kind):
        assert builder.device_bytes(plan) == builder.table(plan).device_bytes, plan


def test_a_step_of_no_blocks_fits_any_memory():
    assert build(Workload((), (), ()), StepKind(), memory=0).device_bytes == 0


def test_no_plan_is_looked_for_that_cant_be_shorter_than_a_known_one():
    works, machine = equal_chain(8, state=64, saved=352, value=32), Hardware(1e4, 1e4, 1e6, 0.0, 1e4)
    kind, options = StepKind(updates="overlap", outputs="release"), {"memory": 2_000, "hardware": machine}
    plan: Schedule = build(works, kind, **options)  # type: ignore[arg-type]
    step_s, bound_s = plan.simulate(machine).step_s, step_bound(plan.effects(), 2_000, machine).seconds
    assert bound_s < step_s
    assert build(works, kind, **options, known_s=step_s) == plan  # type: ignore[arg-type]
    assert build(works, kind, **options, known_s=bound_s) == plan  # type: ignore[arg-type]
    with pytest.raises(NotShorterError):
        build(works, kind, **options, known_s=bound_s * 0.99)  # type: ignore[arg-type]
    with pytest.raises(TooSmallError):
        build(works, kind, memory=100, hardware=machine, known_s=bound_s * 0.99)
