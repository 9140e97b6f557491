"""Budget: a plan that fits the device memory, or an error with the bytes needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.counts import counted
from megatrain.errors import TooSmallError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.scheduler.builder.draft import Builder, Choices, with_late_offloads
from megatrain.scheduler.builder.results import sparing_results, within
from megatrain.scheduler.builder.search import Freedom, Search
from megatrain.scheduler.builder.stays import alternates, giants
from megatrain.scheduler.items import NO_BLOCK
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.parking import keep_all
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload

SMALLER_BLOCKS = "a smaller block_bytes"


def choose_plan(
    builder: Builder,
    *,
    num_slots: int | None,
    keep: int | None,
    memory: int | None,
    activations: str,
    hardware: Hardware | None = None,
    usual: Hardware | None = None,
    most_result_bytes: int | None = None,
) -> Choices:
    """The plan with the shortest step found for `hardware`, of those that fit.

    With `hardware` the plans of ladders are compared.
    Without it nothing is simulated, except where results of blocks may be kept: then with and without them. Memory
    goes to activations, so that as few as can be are parked, and then, step by step, to what saves time on the longer
    stream of a `usual` machine. Two slots come before one, and before that giants alone.

    Raises:
        TooSmallError: If none fits.
    """
    counts = (2, 1) if num_slots is None else (num_slots,)
    kind = builder.kind
    if memory is None:
        plan = _starting_plan(builder, counts[0], keep, activations)
        return with_late_offloads(plan, kind)
    streams = kind.transfer == "copy" and kind.mode != "forward"
    freedom = Freedom(
        keep=streams and keep is None and activations in ("auto", "recompute"),
        saves=kind.mode != "forward" and activations == "auto",
        # A call's caller has tensors of their own beside it; all that a training step has counts.
        stays=streams and kind.is_training_step and num_slots is None,
        parks=False,
    )
    starts = [_starting_plan(builder, count, 0 if freedom.keep else keep, activations) for count in counts]
    if num_slots is None and giants(builder.workload):
        starts.insert(1, replace(starts[0], has_giants_alone=True))
    start = first_fit(builder, starts, memory)
    usual = usual or usual_machine()
    if freedom.saves and kind.mode == "train":
        results = [b for b in sparing_results(builder.workload, hardware or usual) if b not in start.saves]
        freedom = replace(freedom, results=within(builder.workload, kind, results, most_result_bytes))
    found = _by_rule(builder, memory, freedom, usual, start)
    if hardware is None or not streams:
        return Search(builder, memory, freedom, hardware or usual).shortest(found)
    found += _by_rule(builder, memory, freedom, hardware, start)
    more = [start] if num_slots is not None else [start, *_of_slots(start)]
    # Results start parked like other values, and stay where memory is left.
    more += [replace(plan, results=freedom.results) for plan in more if freedom.results]
    return Search(builder, memory, replace(freedom, parks=True), hardware).fastest(found, more)


def _by_rule(builder: Builder, memory: int, freedom: Freedom, machine: Hardware, start: Choices) -> list[Choices]:
    """The plans that take, step by step, what saves time on the longer stream: without results, and with them."""
    chosen = [replace(freedom, results=()), *([freedom] if freedom.results else [])]
    return [Search(builder, memory, each, machine).balanced(start) for each in chosen]


def _of_slots(start: Choices) -> list[Choices]:
    """The same plan with more slots, or without giants alone.

    With more of them copies run further ahead, which helps where blocks of many sizes take turns.
    """
    plans = (replace(start, num_slots=count, has_giants_alone=False) for count in (2, 3))
    return [plan for plan in plans if plan != start]


def first_fit(builder: Builder, plans: Iterable[Choices], memory: int | None) -> Choices:
    """The first plan that fits.

    Raises:
        TooSmallError: If none fits.
    """
    tried: list[Choices] = []
    for plan in plans:
        tried.append(plan)
        if memory is None or builder.table(plan).device_bytes <= memory:
            return plan
    assert memory is not None
    raise _too_small(builder, tried, memory, can_park_more=tried[0].keep > 0)


def _starting_plan(builder: Builder, num_slots: int, keep: int | None, activations: str) -> Choices:
    """The plan of these options if memory is no concern."""
    blocks = () if builder.kind.mode == "forward" else builder.workload.backward_blocks()
    saves = blocks if activations == "keep" else blocks[len(blocks) - _least_saves(builder) :]
    if keep is None and activations == "offload":
        keep = 0
    return Choices(num_slots, _normal_keep(builder.workload, builder.kind, keep), saves)


def _least_saves(builder: Builder) -> int:
    """How many graphs are retained in any case: one where the step turns, if its backward comes at once.

    With several micro-batches it doesn't if blocks without a backward follow, nor where the last block may run
    again: then there are as many graphs as micro-batches, and they are retained only where they fit.
    """
    at_once = builder.kind.micro_batches == 1 or alternates(builder.workload, builder.kind)
    return min(len(builder.workload.backward_blocks()), int(at_once))


def _normal_keep(workload: Workload, kind: StepKind, keep: int | None) -> int:
    """The `keep` that a schedule states: no larger than makes a difference, all where nothing parks."""
    if kind.mode == "forward":
        return 0
    everything = keep_all(workload)
    return everything if keep is None or kind.transfer == "bind" else min(keep, everything)


def _too_small(builder: Builder, tried: Sequence[Choices], memory: int, *, can_park_more: bool) -> TooSmallError:
    best = min(tried, key=lambda plan: builder.table(plan).device_bytes)
    table = builder.table(best)
    peak = find_peak(table)
    block = NO_BLOCK if peak.op is None else peak.op.block
    where = "" if block < 0 else f", set by block {block} ({builder.workload.blocks[block].name})"
    parts = ", ".join(f"{name} {nbytes} B" for name, nbytes in peak.parts)
    helps = ["a larger memory", SMALLER_BLOCKS, "a smaller batch"]
    if can_park_more and builder.kind.mode != "forward" and builder.kind.transfer == "copy":
        helps.insert(2, 'activations="offload"')
    slots = counted(best.num_slots, "slot")
    return TooSmallError(
        f"a memory of {memory} B is too small: at least {table.device_bytes} B are needed{where}.\n"
        f"  At its {peak.op} (tick {peak.tick}, {slots}): {parts}.",
        table.device_bytes,
        helps,
    )
