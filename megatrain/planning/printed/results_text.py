"""The results of attention that a step keeps from forward to backward, in words."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.counts import counted
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.results import result_bytes, spared_seconds
from megatrain.scheduler.printed.block_ranges import ranges
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.costs import OpSeconds
from megatrain.sizes import format_bytes


class _Kept(NamedTuple):
    """What is kept in a step.

    Attributes:
        nbytes: Of all results.
        parked_bytes: The part that is on the host between forward and backward.
        seconds: By which compute gets shorter; None without a machine.
    """

    nbytes: int
    parked_bytes: int
    seconds: float | None


def results_lines(table: Schedule, hardware: Hardware | None) -> list[str]:
    """A line about the results that are kept, if any are."""
    if not table.results:
        return []
    kept = _kept(table, hardware)
    where = f"in block{'s' * (len(table.results) > 1)} {', '.join(ranges(table.results))}"
    spared = "" if kept.seconds is None else f", {format_s(kept.seconds)} of compute less"
    sizes = f"{format_bytes(kept.nbytes)}, of which {format_bytes(kept.parked_bytes)} parked"
    return [f"results: of attention {where} kept instead of computed again, {sizes}{spared}"]


def results_reason(table: Schedule, hardware: Hardware | None) -> str:
    """Says why results are kept; empty if none are."""
    if not table.results:
        return ""
    kept = _kept(table, hardware)
    text = (
        f"Of {counted(len(table.results), 'block')} the results of attention are kept ({format_bytes(kept.nbytes)}, of "
        f"which {format_bytes(kept.parked_bytes)} are parked on the host), so that attention isn't recomputed"
    )
    if kept.seconds is None or hardware is None:
        return f"{text}."
    there, back = kept.parked_bytes / hardware.d2h_bytes_per_s, kept.parked_bytes / hardware.h2d_bytes_per_s
    crossing = f"they cross in {format_s(there)} and {format_s(back)}" if kept.parked_bytes else "none of them crosses"
    return f"{text}: that spares {format_s(kept.seconds)} of compute a step, and {crossing}."


def _kept(table: Schedule, hardware: Hardware | None) -> _Kept:
    workload, number = table.known_workload(), table.kind.micro_batches
    values = [workload.values[value] for values in table.parked().values() for value in values]
    seconds = None
    if hardware is not None:
        costs = OpSeconds(hardware)
        seconds = number * sum(spared_seconds(workload, block, costs) for block in table.results)
    return _Kept(
        number * sum(result_bytes(workload, block) for block in table.results),
        number * sum(value.nbytes for value in values if value.is_result),
        seconds,
    )
