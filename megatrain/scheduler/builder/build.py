"""build(): a workload, the kind of step and options in, a table of ticks x streams out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from megatrain.base.checks import Rule, count, one_of, optional
from megatrain.base.counts import counted
from megatrain.base.garbage import paused_collection
from megatrain.base.sizes import format_bytes
from megatrain.errors import ScheduleError, TooSmallError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.draft import Builder, Choices, with_late_offloads
from megatrain.scheduler.builder.search import Freedom, Search, sparing_results, within
from megatrain.scheduler.builder.stays import alternates, giants
from megatrain.scheduler.effects import keep_all
from megatrain.scheduler.items import NO_BLOCK
from megatrain.scheduler.lifetimes import find_peak
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import KIND_RULES, StepKind
from megatrain.scheduler.workload import Workload

SMALLER_BLOCKS = "a smaller block_bytes"


# Of the seconds of a bound.
_ROUNDING = 1 + 1e-9


class NotShorterError(Exception):
    """No plan of a step that fits is shorter than a known one."""


def _fastest(
    builder: Builder,
    memory: int,
    freedom: Freedom,
    start: Choices,
    hardware: Hardware | None,
    usual: Hardware,
    most_result_bytes: int | None,
    least_spared_bytes: int,
) -> Choices:
    """The plan with the shortest step found for `hardware`, of those that fit.

    With `hardware` the plans of ladders are compared. Without it nothing is simulated, except where results of blocks
    may be kept: then with and without them. Memory goes to activations, so that as few as can be are parked, and then,
    step by step, to what saves time on the longer stream of a `usual` machine.
    """
    kind, machine = builder.kind, hardware or usual
    if freedom.saves and kind.mode == "train":
        results = [b for b in sparing_results(builder.workload, machine) if b not in start.saves]
        freedom = replace(freedom, results=within(builder.workload, kind, results, most_result_bytes))
    found = _by_rule(builder, memory, freedom, usual, start)
    if hardware is None or kind.transfer != "copy" or kind.mode == "forward":
        best = Search(builder, memory, freedom, machine).shortest(found)
    else:
        found += _by_rule(builder, memory, freedom, hardware, start)
        more = [start, *(_of_slots(start) if freedom.is_any_slots else ())]
        # Results start parked like other values, and stay where memory is left.
        more += [replace(plan, results=freedom.results) for plan in more if freedom.results]
        best = Search(builder, memory, replace(freedom, parks=True), hardware).fastest(found, more)
    if not (freedom.stays and kind.may_update_there):
        return best
    return Search(builder, memory, replace(freedom, results=()), machine).updated_there(best, start, least_spared_bytes)


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
    """The first plan that fits."""
    tried: list[Choices] = []
    for plan in plans:
        tried.append(plan)
        if memory is None or builder.device_bytes(plan) <= memory:
            return plan
    assert memory is not None
    raise _too_small(builder, tried, memory, can_park_more=tried[0].keep > 0)


def _starting_plan(
    builder: Builder, num_slots: int, keep: int | None, activations: str, recorded: Collection[int]
) -> Choices:
    """The plan of these options if memory is no concern."""
    blocks = () if builder.kind.mode == "forward" else builder.workload.backward_blocks()
    saves = blocks if activations == "keep" else blocks[len(blocks) - _least_saves(builder) :]
    if keep is None and activations == "offload":
        keep = 0
    recorded = tuple(sorted(set(recorded).difference(saves)))
    return Choices(num_slots, _normal_keep(builder.workload, builder.kind, keep), saves, recorded=recorded)


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
    best = min(tried, key=lambda plan: builder.device_bytes(plan))
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
        f"a memory of {_sized(memory)} is too small: at least {_sized(table.device_bytes)} are needed{where}.\n"
        f"  At its {peak.op} (tick {peak.tick}, {slots}): {parts}.",
        table.device_bytes,
        helps,
    )


def _sized(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1 << 20 else f"{nbytes} B ({format_bytes(nbytes)})"


ACTIVATIONS = ("auto", "recompute", "keep", "offload")
# No more slots are of use than a model has blocks.
MOST_SLOTS = 10_000
STEP: Mapping[str, Rule] = {
    "num_slots": optional(count(1, MOST_SLOTS)),
    "keep": optional(count()),
    "activations": one_of(*ACTIVATIONS),
    **KIND_RULES,
}
"""What the options of a step may be, one by one."""


@paused_collection()
def build(
    workload: Workload,
    kind: StepKind,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | None = None,
    activations: str = "auto",
    hardware: Hardware | None = None,
    usual: Hardware | None = None,
    most_result_bytes: int | None = None,
    least_spared_bytes: int = 0,
    known_s: float = inf,
    recorded: Collection[int] = (),
) -> Schedule:
    """Places one step of `workload` on the streams.

    Touches no tensor and no device. The order of compute is fixed first (forward in block order, backward
    reversed); transfers are placed as early as slots allow, so the result is deterministic.

    Options are those of `megatrain.schedule`. `usual` has the rates that weigh compute against copies without
    `hardware`: by default those of an RTX 4090. Results that are kept or parked take at most `most_result_bytes`. The
    kernels of `recorded` blocks are recorded, where no graph is retained, which `"auto"` and `"keep"` do. Blocks that
    the device updates spare the host at least `least_spared_bytes`, or as much as fits.

    Raises:
        NotShorterError: If plans fit, and the bound of all of them on `hardware` is above `known_s`.
        ScheduleError: If the workload is inconsistent, or `memory` too small; the message says how much is
            needed at least, and by which block.

    >>> from megatrain.scheduler.workload import BlockWork
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True)
    >>> print(*build(Workload((layer, layer, layer), (), ()), StepKind(), num_slots=1).ops)
    W0@0 F0 W1@0 F1 W2@0 F2 B2 W1@0 G2 B1 W0@0 G1 B0 G0
    """
    workload.check()
    builder = Builder(workload, kind)
    counts = (2, 1) if num_slots is None else (num_slots,)
    if memory is None:
        start = _starting_plan(builder, counts[0], keep, activations, recorded)
        return schedule_of(builder.table(with_late_offloads(start, kind)))
    streams = kind.transfer == "copy" and kind.mode != "forward"
    freedom = Freedom(
        keep=streams and keep is None and activations in ("auto", "recompute"),
        saves=kind.mode != "forward" and activations == "auto",
        # A call's caller has tensors of their own besides; all that a training step has counts.
        stays=streams and kind.is_training_step and num_slots is None,
        parks=False,
        is_any_slots=num_slots is None,
    )
    least = 0 if freedom.keep else keep
    starts = [_starting_plan(builder, count, least, activations, recorded) for count in counts]
    if num_slots is None and giants(workload):
        starts.insert(1, replace(starts[0], has_giants_alone=True))  # before a single slot
    start = first_fit(builder, starts, memory)
    if hardware is not None and known_s < inf:
        bound = step_bound(builder.effects(start), memory, hardware)
        if bound.seconds > known_s * _ROUNDING:
            raise NotShorterError
    bounds = most_result_bytes, least_spared_bytes
    chosen = _fastest(builder, memory, freedom, start, hardware, usual or usual_machine(), *bounds)
    return schedule_of(builder.table(chosen))


@paused_collection()
def backward_schedule(forward: Schedule, *, num_slots: int | None = None, memory: int | None = None) -> Schedule:
    """The backward alone of a step whose forward ran as `forward` says and whose slots were since reused.

    Keeps and retains what `forward` does, which has mode `"train"` and knows its workload.
    No weights are on the device when it starts.

    Raises:
        ScheduleError: If `forward` has no backward or no workload, or `memory` is too small.
    """
    if forward.kind.mode != "train":
        raise ScheduleError(f"a schedule of mode `{forward.kind.mode}` has no backward to split off; use `train`.")
    if forward.kind.is_training_step:
        raise ScheduleError(
            "a schedule of a training step, with micro-batches, updates, a norm or released outputs, can't be split.\n"
            "  Only one micro-batch whose outputs are kept, without ops of the host, has a backward of its own."
        )
    builder = Builder(forward.known_workload(), replace(forward.kind, mode="backward"))
    counts = (2, 1) if num_slots is None else (num_slots,)
    first = Choices(0, forward.keep, forward.saves, results=forward.results, recorded=forward.recorded)
    plans = [replace(first, num_slots=count) for count in counts]
    return schedule_of(builder.table(first_fit(builder, plans, memory)))
