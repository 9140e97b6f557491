"""The printed form of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from megatrain.counts import counted
from megatrain.device import Device
from megatrain.device.reserve import beside
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import unknown_card
from megatrain.planning.host_plan import in_columns
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.printed.results_text import results_lines
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.sizes import format_bytes


def reserve_text(device: Device | None, nbytes: int, hardware: Hardware | None) -> str:
    """Says what a device needs besides the memory that a schedule may take, and whether a plan knows its card."""
    if device is None:
        # Without a device there is no figure of a card: the smallest on which so much may be planned.
        return f"{format_bytes(beside(nbytes))} of a card besides, assumed: a tenth of its memory, at least 1 GiB"
    unknown = unknown_card(device) if hardware is None else ""
    if device.can_bind:
        return unknown
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in device.uncounted())
    total = format_bytes(device.reserve(device.memory().total))
    text = f"{total} of {device} besides{f', of which {parts}' if parts else ''}"
    return f"{text}\n  {unknown}" if unknown else text


def verdict(nbytes: int, memory: int | None) -> str:
    """Says whether so many bytes fit."""
    if memory is None:
        return format_bytes(nbytes)
    lacking = nbytes - memory
    verdict = (
        f"fits, {format_bytes(-lacking)} left" if lacking <= 0 else f"doesn't fit, {format_bytes(lacking)} missing"
    )
    return f"{format_bytes(nbytes)} of {format_bytes(memory)}: {verdict}"


def _counted(sizes: Iterable[int]) -> Iterator[str]:
    for size, equal in groupby(sizes):
        count = len(list(equal))
        yield format_bytes(size) if count == 1 else f"{count} x {format_bytes(size)}"


def device_lines(table: Schedule, hardware: Hardware | None) -> list[str]:
    """What takes the device's memory at the peak, and what stays, parks and moves."""
    workload = table.known_workload()
    peak = find_peak(table)
    rows = [(f"at {peak.op}", "bytes", "size"), *((name, str(n), format_bytes(n)) for name, n in peak.parts)]
    kept = f"graphs of {len(table.saves)} of {len(workload.backward_blocks())} blocks, inputs of the last {table.keep}"
    if table.kind.transfer == "copy":
        kept += f", weights of {len(table.resident())}"
        kept += f" (frozen ones of {len(table.persistent)} across steps)" if table.persistent else ""
    num_parked = table.kind.micro_batches * sum(map(len, table.parked().values()))
    return [
        *in_columns(rows),
        f"slots: {', '.join(_counted(slot.nbytes for slot in table.slots))}",
        f"keeps: {kept}; parks {counted(num_parked, 'activation')}",
        *results_lines(table, hardware),
        f"moves: {format_bytes(table.h2d_bytes)} to the device, {format_bytes(table.d2h_bytes)} to the host",
    ]


def time_text(plan: PlannedStep) -> list[str]:
    """The lines about time and its bound, if there is a machine."""
    found = plan.simulation
    if found is None or plan.hardware is None:
        return []
    tokens, step_s, bound = plan.tokens_per_step, found.step_s, plan.lower_bound
    rate = f"; {tokens / step_s:.0f} tokens/s" if tokens and step_s else ""
    lines = [f"time: {found}; predicted for {plan.hardware.name}{rate}"]
    if bound is not None:
        lines.append(
            f"bound: {bound.seconds * 1e3:.3f} ms, {bound.reason}; the step takes {bound.above(step_s):.1%} more"
        )
    return lines
