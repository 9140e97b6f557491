"""Every plan of a small workload: the judge of bounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.stays import alternates, giants
from megatrain.scheduler.effects import keep_all
from megatrain.scheduler.simulate import simulate
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


def fastest_of_all(workload: Workload, kind: StepKind, memory: int | None, machine: Hardware) -> float | None:
    """Seconds of the shortest step of all choices that fit; None if none does."""
    builder = Builder(workload, kind)
    tables = (builder.table(plan) for plan in every_plan(workload, kind))
    fitting = (table for table in tables if memory is None or table.device_bytes <= memory)
    return min((simulate(table, machine).step_s for table in fitting), default=None)


def every_plan(workload: Workload, kind: StepKind) -> Iterator[Choices]:
    """All choices: slots, parked values, retained graphs, results, weights that stay, late offloads, giants alone."""
    backward = workload.backward_blocks()
    blocks = [b for b, work in enumerate(workload.blocks) if work.state_bytes > 0]
    able = [b for b in blocks if kind.may_update_there and workload.blocks[b].optimizer_bytes > 0]
    frozen = [b for b in blocks if workload.blocks[b].is_mostly_frozen]
    keeping = [b for b in backward[:-1] if workload.blocks[b].kept is not None]
    has_giants = bool(giants(workload))
    least = backward[-1:] if kind.micro_batches == 1 or alternates(workload, kind) else ()
    for slots, keep, saves in product((1, 2, 3), range(keep_all(workload) + 1), _subsets(backward)):
        if not set(least) <= set(saves):
            continue
        for persistent, there in product(_subsets(frozen), _subsets(able)):
            for resident in _subsets([b for b in blocks if b in backward and b not in (*persistent, *there)]):
                for late, alone in product((False, True)[: kind.micro_batches], (False, True)[: 1 + has_giants]):
                    for results in _subsets([b for b in keeping if b not in saves]):
                        yield Choices(slots, keep, saves, resident, persistent, alone, late, results, (), there)


def _subsets(numbers: tuple[int, ...] | list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(numbers, count) for count in range(len(numbers) + 1))
