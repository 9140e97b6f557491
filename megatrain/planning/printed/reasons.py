"""reasons(): why a plan is as it is, in sentences: what stays, what bounds it, and what more memory would buy."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.counts import counted
from megatrain.hardware.work import Works
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.printed.results_text import results_reason
from megatrain.scheduler.emit import emit
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.bands import Band, format_s, planned_band
from megatrain.sizes import format_bytes

GIB = 1 << 30


def reasons(plan: PlannedStep) -> str:
    """Says why a plan is as it is; the next GiB of memory is planned for that."""
    parts = [_time(plan), *_peak(plan), *_kept(plan), *_next_gib(plan), *_host(plan)]
    return "\n".join(parts)


def _time(plan: PlannedStep) -> str:
    if plan.simulation is None:
        return (
            "No time is known without hardware=: graphs are retained first, then weights stay, as far as memory goes."
        )
    tokens, step_s = plan.tokens_per_step, plan.simulation.step_s
    rate = f", {tokens / step_s:.0f} tokens/s" if tokens and step_s else ""
    machine = plan.hardware.name if plan.hardware is not None and plan.hardware.name else "this machine"
    return f"On {machine} a step takes {format_s(step_s)}{rate}. {_bound(plan)}{_least(plan, step_s)}"


def _least(plan: PlannedStep, step_s: float) -> str:
    """How far a plan is from the bound of all."""
    bound = plan.lower_bound
    if bound is None:
        return ""
    memory = "" if plan.device_memory is None else f" in {format_bytes(plan.device_memory)}"
    above = bound.above(step_s)
    found = "this one takes as long" if f"{above:.1%}" == "0.0%" else f"this one takes {above:.1%} more"
    return f" No plan of these blocks{memory} takes less than {format_s(bound.seconds)} ({bound.reason}): {found}."


def _bound(plan: PlannedStep) -> str:
    band = band_of(plan)
    bound, share = next(iter(band.shares.items()))
    text = f"It is bound by {bound}, {share:.0%} of the time."
    if band.then is None:
        return text
    return f"{text} Without the time of {bound} it would take {format_s(band.then.step_s)}, bound by {band.then.name}."


def band_of(plan: PlannedStep) -> Band:
    """The step in time, with what bounds it. The plan has a machine."""
    assert plan.simulation is not None
    seconds = {timing.position: timing.end_s - timing.start_s for timing in plan.simulation.timeline}
    return planned_band(emit(plan.schedule), seconds, "modelled from the rates of a machine")


def _peak(plan: PlannedStep) -> Iterator[str]:
    table = plan.schedule
    peak = find_peak(table)
    where = "" if peak.op is None else f" at {peak.op}"
    if peak.op is not None and peak.op.block >= 0:
        where += f", in block {peak.op.block} ({plan.program.blocks[peak.op.block].name})"
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in peak.parts)
    yield f"The device's peak is {format_bytes(table.device_bytes)}{where}: {parts}."


def _kept(plan: PlannedStep) -> Iterator[str]:
    table, machine = plan.schedule, plan.hardware
    work = table.known_workload()
    backward, numbers = work.backward_blocks(), table.kind.micro_batches
    recomputed = [b for b in backward if b not in table.saves]
    saved = sum(work.blocks[b].saved_bytes for b in table.saves)
    each = "" if numbers == 1 else " a micro-batch"
    text = f"The graphs of {len(table.saves)} of {len(backward)} blocks are retained ({format_bytes(saved)}{each})"
    if recomputed:
        more = sum(work.blocks[b].saved_bytes for b in recomputed)
        text += f"; the others would take {format_bytes(more)} more{each}, so they are recomputed"
        if machine is not None:
            seconds = numbers * sum(machine.seconds(_repeated(table, b)) for b in recomputed)
            text += f", {format_s(seconds)} a step"
    yield f"{text}."
    yield from filter(None, [results_reason(table, machine)])
    yield from _weights(table)
    yield from _parks(plan)


def _repeated(table: Schedule, block: int) -> Works:
    """The kernels of the recompute of a block."""
    work = table.known_workload().blocks[block]
    return work.kept.repeated if work.kept is not None and block in table.results else work.forward


def _weights(table: Schedule) -> Iterator[str]:
    if table.kind.transfer == "bind":
        return
    resident = table.resident()
    text = f"Weights of {len(resident)} of {table.num_blocks} blocks cross to the device once a step, the others twice"
    if table.persistent:
        text += f"; frozen ones of {len(table.persistent)} blocks stay from step to step, and don't cross again"
    moved = f"{format_bytes(table.h2d_bytes)} to the device, {format_bytes(table.d2h_bytes)} to the host"
    yield f"{text}. A step moves {moved}, activations included."


def _parks(plan: PlannedStep) -> Iterator[str]:
    table = plan.schedule
    count = table.kind.micro_batches * sum(map(len, table.parked().values()))
    if not count:
        yield "No activation is parked on the host."
        return
    text = f"The host parks {counted(count, 'activation')} ({format_bytes(table.park_bytes)})"
    if plan.simulation is not None and plan.hardware is not None:
        busy = max(share for stream, share in plan.simulation.busy.items() if stream in ("h2d", "d2h"))
        text += f": the link is busy for {busy:.0%} of the step"
    yield f"{text}."


def _next_gib(plan: PlannedStep) -> Iterator[str]:
    if plan.device_memory is None:
        yield "The device's memory isn't bounded, so more of it buys nothing."
        return
    if plan.asked is None:
        return
    more = plan.asked.again({"device_memory": plan.device_memory + GIB})
    if more.too_small is not None:
        yield "With 1 GiB more of the device the step would still not fit."
        return
    if plan.too_small is not None:
        yield "With 1 GiB more of the device the step would fit."
        return
    gains = _gains(plan, more)
    if not gains:
        yield "With 1 GiB more of the device nothing would change."
        return
    text = f"With 1 GiB more of the device there would be {', '.join(gains)}"
    if plan.simulation is not None and more.simulation is not None:
        here, there = plan.simulation.step_s, more.simulation.step_s
        less = f"{1 - there / here:.1%}"
        is_shorter = there < here and less != "0.0%"
        text += f": a step would take {format_s(there)}, {less} less" if is_shorter else ", and a step no shorter"
    yield f"{text}."


def _gains(plan: PlannedStep, more: PlannedStep) -> list[str]:
    """What changes, in words: each figure before and after."""
    found: list[str] = []
    for name, here, there in (
        ("blocks with results kept", len(plan.schedule.results), len(more.schedule.results)),
        ("retained graphs", len(plan.schedule.saves), len(more.schedule.saves)),
        ("blocks whose weights cross once", len(plan.schedule.resident()), len(more.schedule.resident())),
        ("blocks whose frozen weights stay", len(plan.schedule.persistent), len(more.schedule.persistent)),
        ("slots", len(plan.schedule.slots), len(more.schedule.slots)),
    ):
        found += [f"{there} {name} in place of {here}"] if here != there else []
    parks = [table.park_bytes for table in (plan.schedule, more.schedule)]
    found += [f"{format_bytes(parks[1])} parked in place of {format_bytes(parks[0])}"] if parks[0] != parks[1] else []
    return found


def _host(plan: PlannedStep) -> Iterator[str]:
    largest = sorted(plan.host.rows, key=lambda row: -row.nbytes)[:3]
    parts = ", ".join(f"{row.name} {format_bytes(row.nbytes)}" for row in largest)
    yield f"The host holds {format_bytes(plan.host.total_bytes)}, most of it {parts}."
