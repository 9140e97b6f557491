"""The checker's rules of memory: the figures that a table states, and proof that no timing exceeds them."""

from __future__ import annotations

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.host_memory import consumed_bytes, recount_host, recount_host_values, recount_waiting
from megatrain.scheduler.check.recount import counted_moments, needed_moments
from megatrain.scheduler.check.weight_rules import loaded_bytes
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position


def check_releases_come_first(case: Case) -> None:
    """Every op that allocates certainly runs after the ops of earlier ticks that release memory."""
    rule = "Live bytes omit memory that earlier ticks released, so an op that allocates must wait for its release."
    last: dict[Stream, Position] = {}
    consumed = consumed_bytes(case)
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
        "host_bytes": recount_host(case) + recount_waiting(case) + recount_host_values(case),
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
                moved[position.stream] += nbytes
    return moved[Stream.H2D], moved[Stream.D2H]
