"""The checker's own accounting of host memory: parked values, values on the host, and gradients that wait there."""

from __future__ import annotations

from megatrain.scheduler.check.case import Case
from megatrain.sizes import aligned


def recount_host(case: Case) -> int:
    """Bytes of parked values, and where gradients land and have places."""
    if case.schedule.kind.transfer == "bind":
        return 0
    sizes = (case.workload.blocks[op.block].landing_bytes for _, op in case.ops if op.what == "G")
    slab = max([0, *sizes]) if not case.schedule.kind.holds_gradients else 0
    places = max((place.offset + place.nbytes for place in case.schedule.places), default=0)
    parks = sum(aligned(case.workload.values[v].nbytes) for values in case.parked.values() for v in values)
    return slab + places + len(case.micro_batches) * parks


def recount_host_values(case: Case) -> int:
    """Values that are tensors of the CPU, with their gradients: each memory once for each micro-batch."""
    memories: dict[int, int] = {}
    gradients = 0
    for index, value in enumerate(case.workload.values):
        if value.on_host:
            memories[value.storage] = case.workload.storages[value.storage]
            has_one = case.schedule.kind.mode != "forward" and case.workload.has_value_gradient(index)
            gradients += value.nbytes if has_one else 0
    return len(case.micro_batches) * (sum(memories.values()) + gradients)


def recount_waiting(case: Case) -> int:
    """The most bytes of gradients on the host without places: gradients that no update has consumed yet.

    A step begins with all gradients that its deferred updates consume.
    """
    if not case.schedule.kind.holds_gradients or case.schedule.kind.transfer == "copy":
        return 0
    consumed = consumed_bytes(case)
    head = next(
        (tick for tick, row in enumerate(case.schedule.ticks) if row.d2h is not None and row.d2h.what == "G"), 0
    )
    of_before = {"deferred": len(case.schedule.ticks), "spread": head}.get(case.schedule.kind.updates, 0)
    most = waiting = sum(nbytes for tick, nbytes in consumed.items() if tick < of_before)
    for tick, row in enumerate(case.schedule.ticks):
        if row.d2h is not None and row.d2h.what == "G":
            waiting += case.workload.blocks[row.d2h.block].gradient_bytes
        most = max(most, waiting)
        waiting -= consumed.get(tick, 0)
    return most


def consumed_bytes(case: Case) -> dict[int, int]:
    """Bytes of gradients that the host needs no more after a tick: its `U` is the last to read those of some block."""
    updates = [(p.tick, op.block) for p, op in case.ops if op.what == "U"]
    found: dict[int, int] = {}
    seen: set[int] = set()
    for tick, block in reversed(updates):
        for member in {block, *case.workload.blocks[block].shares} - seen:
            seen.add(member)
            work = case.workload.blocks[member]
            if work.has_backward and work.gradient_bytes > 0:
                found[tick] = found.get(tick, 0) + work.gradient_bytes
    return found
