"""Every plan of a small workload: the judge of bounds and of searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.stays import alternates, giants
from megatrain.scheduler.items import Stream
from megatrain.scheduler.parking import keep_all
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Table
from megatrain.scheduler.timing.costs import op_durations
from megatrain.scheduler.timing.simulate import simulate
from megatrain.scheduler.workload import Workload


def fastest_of_all(workload: Workload, kind: StepKind, memory: int | None, machine: Hardware) -> float | None:
    """Seconds of the shortest step of all choices that fit; None if none does."""
    builder = Builder(workload, kind)
    drafts = (builder.draft(plan) for plan in every_plan(workload, kind))
    fitting = (draft for draft in drafts if memory is None or draft.device_bytes <= memory)
    return min((simulate(builder.finish(draft), machine).step_s for draft in fitting), default=None)


def fastest_below(
    workload: Workload, kind: StepKind, memory: int | None, machine: Hardware, limit_s: float
) -> tuple[float | None, int]:
    """Seconds of the shortest step of all choices, if it is below `limit_s`; and how many choices there are.

    Choices whose compute, or whose copies to the device, take as long by themselves are counted and not drafted.
    """
    builder, best, count = Builder(workload, kind), limit_s, 0
    alone_s: dict[tuple[object, ...], dict[str, float]] = {}

    def alone(choice: tuple[object, ...], plan: Choices) -> dict[str, float]:
        if choice not in alone_s:
            alone_s[choice] = _alone_s(builder.finish(builder.draft(plan)), machine)
        return alone_s[choice]

    for plan in every_plan(workload, kind):
        count += 1
        kept = alone(
            ("kept", plan.keep, plan.saves, plan.results), replace(plan, num_slots=1, resident=(), persistent=())
        )
        weights = alone((plan.num_slots, plan.resident, plan.persistent, plan.has_giants_alone), plan)
        if max(kept["compute"], kept["others"] + weights["weights"]) >= best:
            continue
        draft = builder.draft(plan)
        if memory is None or draft.device_bytes <= memory:
            best = min(best, simulate(builder.finish(draft), machine).step_s)
    return (best if best < limit_s else None), count


def _alone_s(table: Table, machine: Hardware) -> dict[str, float]:
    """Seconds of compute, of copies of weights and of other copies to the device, each one after the other."""
    seconds = op_durations(table, machine)
    found = {"compute": 0.0, "weights": 0.0, "others": 0.0}
    for position, op in table.positions():
        if position.stream == Stream.COMPUTE:
            found["compute"] += seconds[position]
        elif position.stream == Stream.H2D:
            found["weights" if op.what == "W" else "others"] += seconds[position]
    return found


def every_plan(workload: Workload, kind: StepKind) -> Iterator[Choices]:
    """All choices: slots, parked values, retained graphs, results, weights that stay, late offloads, giants alone."""
    backward = workload.backward_blocks()
    blocks = [b for b, work in enumerate(workload.blocks) if work.state_bytes > 0]
    frozen = [b for b in blocks if workload.blocks[b].is_mostly_frozen]
    keeping = [b for b in backward[:-1] if workload.blocks[b].kept is not None]
    has_giants = bool(giants(workload))
    least = backward[-1:] if kind.micro_batches == 1 or alternates(workload, kind) else ()
    for slots, keep, saves in product((1, 2, 3), range(keep_all(workload) + 1), _subsets(backward)):
        if not set(least) <= set(saves):
            continue
        for persistent in _subsets(frozen):
            for resident in _subsets([b for b in blocks if b in backward and b not in persistent]):
                for late, alone in product((False, True)[: kind.micro_batches], (False, True)[: 1 + has_giants]):
                    for results in _subsets([b for b in keeping if b not in saves]):
                        yield Choices(slots, keep, saves, resident, persistent, alone, late, results)


def _subsets(numbers: tuple[int, ...] | list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(numbers, count) for count in range(len(numbers) + 1))
