"""Workloads of which the blocks are dealt to several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.ranks.legs import Crossing, Leg, Travelling, legs_of
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.schedule_rules import check_waits
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import ValueWork, Workload
from tests.scheduler.workloads import workloads


def losses_device(whole: Workload, devices: Sequence[int]) -> int:
    """The device where the step turns."""
    backward = whole.backward_blocks()
    return devices[backward[-1] if backward else -1]


def dealt(whole: Workload, devices: Sequence[int]) -> list[Workload]:
    """The workload of each device."""
    backward = [work.has_backward for work in whole.blocks]
    values = [
        Travelling(str(index), value.producer, value.readers, whole.has_value_gradient(index))
        for index, value in enumerate(whole.values)
    ]
    legs = legs_of(values, devices, backward)
    return [_of_device(whole, devices, device, legs) for device in range(max(devices) + 1)]


def _of_device(whole: Workload, devices: Sequence[int], device: int, legs: Sequence[Leg]) -> Workload:
    numbers = tuple(block for block, other in enumerate(devices) if other == device)
    local = {block: index for index, block in enumerate(numbers)}
    values: list[ValueWork] = []
    storages: list[int] = []
    places: dict[int, int] = {}
    for leg in (leg for leg in legs if leg.device == device):
        value = whole.values[int(leg.value)]
        if leg.comes is not None:
            storage = len(storages)
            storages.append(value.nbytes)
        else:
            storage = places.setdefault(value.storage, len(storages))
            storages += [whole.storages[value.storage]] * (storage == len(storages))
        values.append(
            replace(
                value,
                name=f"{value.name} {leg.name}",
                storage=storage,
                producer=None if leg.producer is None else local[leg.producer],
                readers=tuple(local[block] for block in leg.readers),
                has_gradient=leg.has_gradient,
                is_parkable=False,
                comes=None if leg.comes is None else here(leg.comes, local),
                goes=tuple(here(crossing, local) for crossing in leg.goes),
            )
        )
    used = [value.storage for value in values]
    values = [
        replace(v, is_parkable=not (v.is_there or v.is_output or v.on_host or used.count(v.storage) > 1))
        for v in values
    ]
    blocks = tuple(replace(whole.blocks[n], shares=tuple(local[b] for b in whole.blocks[n].shares)) for n in numbers)
    is_here = device == losses_device(whole, devices)
    return Workload(blocks, tuple(values), tuple(storages), whole.loss_bytes if is_here else 0, numbers)


def here(crossing: Crossing, local: dict[int, int]) -> Crossing:
    backward = None if crossing.backward is None else local[crossing.backward]
    return replace(crossing, forward=local[crossing.forward], backward=backward)


@st.composite
def deals(draw: st.DrawFn) -> tuple[Workload, list[int]]:
    """Any workload and the device of each block; blocks that update rows together are together."""
    whole = draw(workloads())
    size = draw(st.integers(2, 3))
    devices = [draw(st.integers(0, size - 1)) for _ in whole.blocks]
    for block, work in enumerate(whole.blocks):
        for other in work.shares:
            old, new = devices[other], devices[block]
            devices = [new if device == old else device for device in devices]
    known = {device: number for number, device in enumerate(dict.fromkeys(devices))}
    devices = [known[device] for device in devices]
    there = losses_device(whole, devices)
    values = []
    for value in whole.values:
        is_here = value.producer is not None and devices[value.producer] == there
        stays = is_here and all(devices[block] == there for block in value.readers)
        is_output = value.is_output and stays
        gradient = value.has_gradient and value.producer is not None
        # Results of the model that are elsewhere are refused; buffers that are written too.
        readers = value.readers
        values.append(replace(value, is_output=is_output, has_gradient=gradient, readers=readers, is_committed=False))
    values = [v for v in values if v.is_result or v.readers or v.is_output or v.producer is None]
    return replace(whole, values=tuple(values)), devices


def kind_of(whole: Workload, devices: Sequence[int], device: int, **options: object) -> StepKind:
    losses = "here" if device == losses_device(whole, devices) else "elsewhere"
    return StepKind(devices=max(2, max(devices) + 1), losses=losses, **options)  # pyright: ignore[reportArgumentType]


def schedules(whole: Workload, devices: Sequence[int], kind: StepKind, **options: object) -> list[Schedule]:
    """The table of each device."""
    there = losses_device(whole, devices)
    kinds = [
        replace(kind, devices=max(2, max(devices) + 1), losses="here" if d == there else "elsewhere")
        for d in range(max(devices) + 1)
    ]
    return [build(work, of, **options) for work, of in zip(dealt(whole, devices), kinds, strict=True)]  # pyright: ignore[reportArgumentType]


def needed_waits(schedule: Schedule, kinds: str) -> int:
    """Drops each wait of and for ops of some kinds: the checker refuses each such schedule.

    Returns:
        How many there were.
    """
    full, count = schedule.waits(), 0
    for position, before in full.items():
        for wait in before:
            ops = [schedule.ticks[p.tick][p.stream].what for p in (position, wait)]
            if not set(ops) & set(kinds):
                continue
            rest = {p: tuple(w for w in b if (p, w) != (position, wait)) for p, b in full.items()}
            with pytest.raises(ScheduleError):
                check_waits(schedule, schedule.known_workload(), rest)
            count += 1
    return count
