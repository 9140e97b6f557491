"""Which plan a step gets where the memory of the host is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatrain.passes.program import Program
from megatrain.planning.host_plan import HostPlan
from megatrain.scheduler.builder.results import result_bytes
from megatrain.scheduler.schedule import Schedule


class HostedStep(NamedTuple):
    """A planned step.

    Attributes:
        program: The blocks.
        table: The schedule.
        too_small: Why it doesn't fit the device, or None.
        host: The memory of the host.
    """

    program: Program
    table: Schedule
    too_small: str | None
    host: HostPlan


def with_host_room(plan: Callable[..., HostedStep], updates: Sequence[str], host_memory: int | None) -> HostedStep:
    """The fastest plan, or one that takes less memory of the host if it doesn't fit there.

    Args:
        plan: Plans a step by when its updates run, with other options if they are given.
        updates: When they may run, the fastest first.
        host_memory: Bytes of the host; None is what is free.
    """
    fastest, *others = updates
    made = plan(fastest)
    missing = made.host.missing_bytes(host_memory)
    if made.too_small is None and missing and made.table.results:
        fewer = plan(fastest, most_result_bytes=max(0, _result_bytes(made.table) - missing))
        made = fewer if not fewer.host.missing_bytes(host_memory) else made
    # Without a machine as little as possible is parked on the host; later updates leave less for the next step.
    for each in (fastest, *(others if host_memory is not None else ())):
        if made.too_small is None and made.host.missing_bytes(host_memory):
            less = plan(each, hardware=None)
            made = less if less.host.total_bytes < made.host.total_bytes else made
    return made


def _result_bytes(table: Schedule) -> int:
    workload = table.known_workload()
    return table.kind.micro_batches * sum(result_bytes(workload, block) for block in table.results)
