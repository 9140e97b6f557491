"""Which kernels compute the blocks of a step or call: eager's, one by one or recorded, or those of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatrain.base.counts import counted
from megatrain.base.sizes import format_bytes
from megatrain.errors import TooSmallError
from megatrain.hardware.machine import usual_machine
from megatrain.passes.measured_runs import launch_graph_bytes, recordable_blocks
from megatrain.passes.program import Program, has_backward
from megatrain.planning.options import Limits
from megatrain.scheduler.bands import format_s
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload

AS_ASKED = {"graphs": "recorded, as asked for", "inductor": "compiled by inductor, as asked for"}
"""What is said where nothing was to be chosen."""
RECORDED_FROM = 3
"""Kernels of a shape are recorded from this run on: to record takes milliseconds for each block."""
# A step that isn't shorter than so much of the other isn't worth recordings.
_NEAR = 0.998


def with_kernels(
    table: Schedule, programs: Sequence[Program], limits: Limits, plan: Callable[[Limits], Schedule]
) -> tuple[Schedule, str]:
    """Chooses whether kernels of a step or call are launched one by one, or recorded and launched by one call a block.

    Both have the same bits. Recorded kernels retain no graph, so that all is recomputed, and hold memory. Returns the
    plan whose step is shorter on the machine, of those that take no more of the host, and why.
    """
    machine = limits.hardware
    if machine is None and limits.device.has_launch_graphs:
        machine = usual_machine(limits.device)
    if machine is None or not machine.issue_s or limits.activations == "keep":
        return table, ""
    blocks, obstacle = recordable_blocks(programs)
    step_s = table.simulate(machine).step_s
    # No plan with recorded kernels is shorter than this one would be if its launches took as little.
    least_s = replace(table, recorded=tuple(sorted(blocks))).simulate(machine).step_s
    if not blocks:
        why = obstacle or "no two blocks run one template"
    elif least_s > step_s * _NEAR:
        why = "recorded, the step would be no shorter"
    else:
        recorded, why = _recorded(table, programs, limits, plan)
        recorded_s = step_s if recorded is None else recorded.simulate(machine).step_s
        if recorded is not None and recorded_s <= step_s * _NEAR:
            number = f"{len(recorded.recorded)} of {counted(table.num_blocks, 'block')}"
            held = format_bytes(launch_graph_bytes(programs))
            text = f"recorded in {number}, which holds {held} besides: {format_s(recorded_s)}"
            return recorded, f"{text}, one by one {format_s(step_s)}"
        why = why or f"{format_s(step_s)}, recorded (and all recomputed) {format_s(recorded_s)}"
    return table, f"one by one: {why}"


def _recorded(
    table: Schedule, programs: Sequence[Program], limits: Limits, plan: Callable[[Limits], Schedule]
) -> tuple[Schedule | None, str]:
    """The plan with recorded kernels; or None, and why a plan without them isn't given up for it."""
    try:
        recorded = plan(limits.recording)
    except TooSmallError:
        return None, "what recordings hold leaves too little memory"
    if any(_is_hidden(program, recorded) for program in programs):
        return None, "a block draws random numbers that nothing repeats, so it can't be recomputed"
    if recorded.host_bytes > table.host_bytes:
        return None, "next to what recordings hold, more activations would be parked on the host"
    return recorded, ""


def _is_hidden(program: Program, table: Schedule) -> bool:
    """Whether a plan recomputes a block whose random numbers nothing repeats."""
    again = [block for block in program.blocks if block.index not in table.saves and has_backward(program, block)]
    return table.kind.mode != "forward" and any(program.templates[block.template].hides_draws for block in again)


def as_compared(workload: Workload, limits: Limits) -> Workload:
    """What a given plan has in common with a step; kernels that a compiler makes may be others than were planned."""
    if limits.kernels != "inductor":
        return workload
    return replace(workload, blocks=tuple(replace(b, forward=(), backward=(), kept=None) for b in workload.blocks))


def given_kernels(schedule: Schedule, programs: Sequence[Program], limits: Limits) -> tuple[Schedule, list[str]]:
    """A given plan with the kernels that it has on a model, and how these differ from those of the model.

    With `kernels="graphs"` as much is recorded as the plan allows.
    """
    if limits.kernels == "graphs":
        blocks, _ = recordable_blocks(programs)
        return replace(schedule, recorded=tuple(sorted(blocks.difference(schedule.saves)))), []
    if schedule.recorded and limits.kernels != "auto":
        return schedule, [f"kernels: recorded -> {limits.kernels} on {limits.device}"]
    blocks = recordable_blocks(programs)[0] if schedule.recorded else frozenset[int]()
    if not blocks.issuperset(schedule.recorded):
        return schedule, [f"blocks with recorded kernels: {len(schedule.recorded)} -> {len(blocks)}"]
    return schedule, []
