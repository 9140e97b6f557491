"""The checker's rules of memory: the figures that a table states, and proof that no timing exceeds them."""

from __future__ import annotations

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.recount import counted_moments, needed_moments
from megatrain.scheduler.check.weight_rules import loaded_bytes
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position
from megatrain.sizes import aligned


def check_releases_come_first(case: Case) -> None:
    """Every op that allocates certainly runs after the ops of earlier ticks that release memory."""
    rule = "Live bytes omit memory that earlier ticks released, so an op that allocates must wait for its release."
    last: dict[Stream, Position] = {}
    consumed = _consumed(case)
    for tick, row in enumerate(case.schedule.ticks):
        for stream, op in row.items():
            for other in _OF_COMPUTE if stream == Stream.COMPUTE else _RELEASING.get((stream, op.what), ()):
                if other in last:
                    case.require_before(last[other], Position(tick, stream), "takes memory released by", rule)
        for stream, op in row.items():
            # A total that comes from another rank frees nothing here.
            frees_nothing = op.what == "G" and case.schedule.kind.sends
            if not frees_nothing and (stream != Stream.HOST or tick in consumed):
                last[stream] = Position(tick, stream)


# Ops that take memory, and the streams that release some of it.
_OF_COMPUTE = (Stream.D2H, Stream.SEND)
_RELEASING: dict[tuple[Stream, str], tuple[Stream, ...]] = {
    (Stream.H2D, "A"): (Stream.COMPUTE,),
    (Stream.D2H, "G"): (Stream.HOST,),
    (Stream.RECEIVE, "R"): (Stream.COMPUTE,),
}


def check_live_bytes(case: Case) -> None:
    """The live bytes of every tick are those of the weights, values, gradients and graphs alive in it."""
    rule = "Live bytes of a tick: slots, and all items made by then and not released before."
    moments = counted_moments(case)
    live = map(max, moments[::2], moments[1::2])
    for tick, (stated, counted) in enumerate(zip(case.schedule.live_bytes, live, strict=True)):
        if stated != counted:
            raise case.fault(
                f"tick {tick} states {stated} live bytes, but {counted} are.", rule, tick, f"State {counted}."
            )


def check_figures(case: Case) -> None:
    """The figures of the header are the sums and maxima of the table."""
    schedule = case.schedule
    h2d, d2h = _recount_moved(case)
    counted = {
        "h2d_bytes": h2d,
        "d2h_bytes": d2h,
        "peak_bytes": max(schedule.live_bytes, default=0),
        "device_bytes": max(needed_moments(case), default=0),
        "host_bytes": _recount_host(case) + _recount_waiting(case) + _recount_host_values(case),
    }
    for name, figure in counted.items():
        if getattr(schedule, name) != figure:
            raise case.fault(
                f"{name} is stated as {getattr(schedule, name)}, but is {figure}.",
                "The figures of the header follow from the table.",
                0,
                f"State {figure}.",
            )


def _recount_moved(case: Case) -> tuple[int, int]:
    moved = {Stream.H2D: 0, Stream.D2H: 0}
    if case.schedule.kind.transfer == "copy":
        for position, op in case.ops:
            if op.what == "A":
                moved[position.stream] += sum(case.workload.values[v].nbytes for v in case.parked[op.block])
            elif op.what == "W" or (op.what == "G" and not case.schedule.kind.sends):
                is_load = op.what == "W"
                nbytes = loaded_bytes(case, op.block) if is_load else case.workload.blocks[op.block].gradient_bytes
                # The sections of a divided block add up to the whole.
                moved[position.stream] += nbytes if not op.section else 0
    return moved[Stream.H2D], moved[Stream.D2H]


def _recount_host(case: Case) -> int:
    if case.schedule.kind.transfer == "bind":
        return 0
    sizes = (case.workload.blocks[op.block].landing_bytes for _, op in case.ops if op.what == "G")
    slab = max([0, *sizes]) if not case.schedule.kind.holds_gradients else 0
    places = max((place.offset + place.nbytes for place in case.schedule.places), default=0)
    parks = sum(aligned(case.workload.values[v].nbytes) for values in case.parked.values() for v in values)
    return slab + places + len(case.micro_batches) * parks


def _recount_host_values(case: Case) -> int:
    """Values that are tensors of the CPU, with their gradients: each memory once for each micro-batch."""
    memories: dict[int, int] = {}
    gradients = 0
    for index, value in enumerate(case.workload.values):
        if value.on_host:
            memories[value.storage] = case.workload.storages[value.storage]
            has_one = case.schedule.kind.mode != "forward" and case.workload.has_value_gradient(index)
            gradients += value.nbytes if has_one else 0
    return len(case.micro_batches) * (sum(memories.values()) + gradients)


def _recount_waiting(case: Case) -> int:
    """The most bytes of gradients on the host without places: gradients that no update has consumed yet.

    A step begins with all gradients that its deferred updates consume.
    """
    if not case.schedule.kind.holds_gradients or case.schedule.kind.transfer == "copy":
        return 0
    consumed = _consumed(case)
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


def _consumed(case: Case) -> dict[int, int]:
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
