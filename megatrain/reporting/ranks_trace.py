"""ranks_trace_text(): a step of several ranks as a trace in Chrome's JSON format: a process for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from megatrain.reporting.ranks_figures import RanksFigures
from megatrain.reporting.trace_events import Event, events_text, flow_events, name_events, op_events, thread_of, us
from megatrain.scheduler.timing.ranks_band import RanksBand

_NAMES = {"P": "sum", "G": "total", "U": "update of another rank", "S": "squares", "X": "values", "D": "gradients"}
"""What comes from an op of another rank, by its letter."""


def ranks_trace_text(figures: RanksFigures) -> str:
    """The trace, an event a line."""
    events: list[Event] = []
    number, last = len(figures.ranks), len(figures.ranks) * len(figures.bands)
    # Ids of flows are known to Perfetto by themselves alone; those within a process begin at a million.
    ids = count(1_000_000 * (last + 1))
    for which, band in enumerate(figures.bands):
        timed: list[Event] = []
        for rank, (each, timeline) in enumerate(zip(figures.ranks, band.timelines, strict=True)):
            process = which * number + rank + 1
            events += name_events(process, f"rank {rank}, {band.name}: {band.origin}", timeline)
            timed += [*op_events(each, process, timeline), *flow_events(each, process, timeline)]
        timed += _between(figures, which * number + 1, band, ids)
        # The order of equal times stays: ops, then flows, which belong to the op that is open then.
        events += sorted(timed, key=lambda event: event["ts"])
    return events_text(events)


def _between(figures: RanksFigures, first: int, band: RanksBand, ids: Iterator[int]) -> Iterator[Event]:
    """Arrows from an op to the one of another rank that needs what it does."""
    for (rank, index), (other, there) in band.others.items():
        taker, giver = band.timelines[rank][index], band.timelines[other][there]
        begin, end = us(giver.start_s), us(taker.end_s)
        # A sum goes piece by piece, so its taker may begin before its giver. A slice without length takes no flow.
        arrives = max(us(taker.start_s), begin)
        if us(giver.end_s) > begin and arrives < end:
            op = figures.ranks[other].schedule.ticks[giver.position.tick][giver.position.stream]
            event: Event = {"name": _NAMES[op.what], "cat": "ranks", "id": next(ids)}
            yield {"ph": "s", **event, **thread_of(first + other, giver.position), "ts": begin}
            yield {"ph": "f", "bp": "e", **event, **thread_of(first + rank, taker.position), "ts": arrives}
