"""Blocks that are dealt to devices: every table is safe, and all together are one step that never stands still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import products
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.check.schedule_rules import check_waits
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.simulate_devices import simulate_devices
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.dealing import deals, needed_waits, schedules
from tests.scheduler.dealt_machine import Machine, of_one_process
from tests.scheduler.mutations import mutants, with_figures
from tests.scheduler.workloads import EMBED, LAYER, chain


@st.composite
def kinds(draw: st.DrawFn) -> StepKind:
    updates = draw(st.sampled_from(["none", "overlap", "serial"]))
    return StepKind(
        micro_batches=draw(st.integers(1, 3)),
        updates=updates,
        clip=draw(st.booleans()),
        outputs="release",
        transfer=draw(st.sampled_from(["copy", "copy", "bind"])),
    )


FORWARD, BACKWARD = products(10**12), products(2 * 10**12)
CHOICES = st.tuples(st.integers(1, 3), st.sampled_from(["recompute", "keep", "offload"]))


@draws(120, usual=12)
@given(deals(), kinds(), CHOICES)
def test_each_table_is_safe_and_all_are_one_step(
    deal: tuple[Workload, list[int]], kind: StepKind, chosen: tuple[int, str]
):
    whole, devices = deal
    assume(max(devices) > 0)
    found = schedules(whole, devices, kind, num_slots=chosen[0], activations=chosen[1])
    for schedule in found:
        schedule.check()
        assert schedule.instructions.all
        assert Schedule.parse(str(schedule), schedule.workload) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule
    check_devices(found)


@draws(120, usual=12)
@given(deals(), kinds(), CHOICES, st.integers(0, 2**20))
def test_any_timing_adds_gradients_in_the_order_of_one_process(
    deal: tuple[Workload, list[int]], kind: StepKind, chosen: tuple[int, str], seed: int
):
    whole, devices = deal
    assume(max(devices) > 0)
    found = schedules(whole, devices, kind, num_slots=chosen[0], activations=chosen[1])
    assert Machine(found).run(Random(seed)) == of_one_process(whole, range(kind.micro_batches))


@draws(20)
@given(deals(), kinds(), CHOICES, st.integers(0, 2**20))
def test_a_table_that_differs_in_one_place_is_refused_or_harmless(
    deal: tuple[Workload, list[int]], kind: StepKind, chosen: tuple[int, str], seed: int
):
    whole, devices = deal
    assume(max(devices) > 0)
    found = schedules(whole, devices, kind, num_slots=chosen[0], activations=chosen[1])
    device = seed % len(found)
    assume(any(op.what in "XD" for op in found[device].ops))
    expected = of_one_process(whole, range(kind.micro_batches))
    all_mutants = list(mutants(found[device], Random(seed)))
    for name, mutant in Random(seed).sample(all_mutants, min(50, len(all_mutants))):
        changed = [with_figures(mutant) if number == device else table for number, table in enumerate(found)]
        try:
            changed[device].check()
            check_devices(changed)
        except ScheduleError:
            continue
        for number in range(3):
            try:
                assert Machine(changed).run(Random(seed + number)) == expected
            except AssertionError as harm:
                raise AssertionError(f"{name} passed the check, but {harm}") from None


def round_of(micro_batches: int = 2, updates: str = "overlap", **options: object) -> list[Schedule]:
    """Five blocks dealt to two devices in turns."""
    whole = chain([EMBED, LAYER, LAYER, LAYER, EMBED])
    kind = StepKind(micro_batches=micro_batches, updates=updates, outputs="release", clip=updates == "serial")
    return schedules(whole, [0, 1, 0, 1, 0], kind, **{"num_slots": 2, **options})


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_each_wait_of_an_op_between_devices_is_needed(device: int, activations: str):
    schedule = round_of(activations=activations)[device]
    assert needed_waits(schedule, "XD") > 20


def test_a_device_takes_turns_with_the_others(golden: Callable[[str, str], None]):
    golden("dealt_schedules", "\n\n".join(map(str, round_of())))


def test_devices_are_at_work_together():
    whole = chain([EMBED, *[LAYER] * 6, EMBED])
    whole = replace(whole, blocks=tuple(replace(b, forward=FORWARD, backward=BACKWARD) for b in whole.blocks))
    machine, kind = Hardware.preset("rtx-4090"), StepKind(micro_batches=8, updates="overlap", outputs="release")
    alone = build(whole, kind, num_slots=2).simulate(machine).step_s
    in_turns, in_halves = (
        simulate_devices(schedules(whole, devices, kind, num_slots=2), machine)
        for devices in ([0, 1] * 4, [0] * 4 + [1] * 4)
    )
    assert 1.8 < alone / in_turns.step_s < 2
    assert alone / in_halves.step_s < 1.3
    assert in_turns.busy["compute"] > 0.9


def changed(schedule: Schedule, index: int, **parts: object) -> Schedule:
    """The schedule whose workload has another value."""
    workload = schedule.known_workload()
    values = list(workload.values)
    values[index] = replace(values[index], **parts)  # pyright: ignore[reportArgumentType]
    return replace(schedule, workload=replace(workload, values=tuple(values)))


def test_tables_that_are_not_of_one_step_are_refused():
    first, second = round_of()
    for tables, what in (
        ([first, first], "blocks [0, 2, 4] are on several devices"),
        ([first], "the blocks of all devices are [0, 2, 4]"),
        ([first, round_of(3)[1]], "2 tables can't be one step"),
        ([replace(first, kind=replace(first.kind, losses="elsewhere")), second], "0 devices have the losses"),
        ([first, changed(second, 0, nbytes=64)], "message 0 of micro-batch 0 from device 0 to device 1"),
    ):
        with pytest.raises(ScheduleError) as caught:
            check_devices(tables)
        assert str(caught.value).startswith(what)


def test_devices_that_wait_in_a_circle_are_refused():
    tables = round_of(1)
    graphs = [dependency_graph(table) for table in tables]
    position = {str(op): at for at, op in tables[1].positions() if at.stream == Stream.SEND}
    computes = {str(op): at for at, op in tables[1].positions() if at.stream == Stream.COMPUTE}
    graphs[1].add_edge(computes["F1"], position["X0"], kind="data")
    with pytest.raises(ScheduleError, match="wait for each other in a circle") as caught:
        check_devices(tables, graphs)
    assert "F1 of device 1 (compute) waits for X1 of device 1 (receive)" in str(caught.value)
    waits = {**tables[1].waits(), position["X0"]: (computes["F1"],)}
    with pytest.raises(ScheduleError, match=r"may wait for it on another device|earlier"):
        check_waits(tables[1], tables[1].known_workload(), {at: waits[at] for at, _ in tables[1].positions()})


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2, "updates": "deferred"},
        {"devices": 2, "updates": "spread"},
        {"devices": 2},
        {"losses": "elsewhere", "updates": "overlap"},
    ],
)
def test_a_kind_of_step_that_cannot_be_dealt_is_refused(options: dict[str, Any]):
    with pytest.raises(OptionError, match="is impossible"):
        StepKind(**options)


def test_values_cross_only_between_devices():
    (first, _) = round_of()
    alone = replace(first, kind=replace(first.kind, devices=1))
    with pytest.raises(ScheduleError, match="has nothing to bring to another device"):
        alone.check()
    workload = first.known_workload()
    comes = next(value for value in workload.values if value.comes is not None)
    for wrong in (replace(comes, producer=0), replace(comes, has_gradient=False), replace(comes, is_output=True)):
        values = tuple(wrong if value is comes else value for value in workload.values)
        with pytest.raises(ScheduleError, match="can't come from another device"):
            replace(workload, values=values).check()
    for numbers in ((), (0, 2), (0, 4, 2)):
        with pytest.raises(ScheduleError):
            replace(workload, numbers=numbers).check()
