"""trace_text(): a report as a trace in Chrome's JSON format, which Perfetto opens.

Perfetto reads `X` events that don't overlap on their track, `C` counters, `M` names, and flows (`s`, `f`), which belong
to the slice around them on their track. All of these come in the order of time, an op before its flows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatrain.hardware.work import total_flops
from megatrain.reporting.drawn_ops import Drawn
from megatrain.reporting.memory_curve import Curve
from megatrain.reporting.step_figures import StepFigures
from megatrain.scheduler.effects import streams
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.shared import Timing

Event = dict[str, Any]
_COUNTERS = 0
"""The thread of the counters; those of the streams begin at 1."""


def trace_text(figures: StepFigures) -> str:
    """The trace, an event a line."""
    events: list[Event] = []
    for process, (band, device, host) in enumerate(
        zip(figures.bands, figures.device_curves, figures.host_curves, strict=True), start=1
    ):
        events += name_events(process, f"{band.name}: {band.origin}", band.timeline)
        timed = [*op_events(figures.drawn, process, band.timeline), *flow_events(figures.drawn, process, band.timeline)]
        timed += [*_counter(process, "live device bytes", device), *_counter(process, "live host bytes", host)]
        # The order of equal times stays: ops, then flows, which belong to the op that is open then.
        events += sorted(timed, key=lambda event: event["ts"])
    return events_text(events)


def events_text(events: Iterable[Event]) -> str:
    """The file: an event a line."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def name_events(process: int, name: str, timeline: Sequence[Timing]) -> Iterator[Event]:
    """Names a process, and its streams as threads."""

    def event(kind: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args}

    yield event("process_name", _COUNTERS, name=name)
    yield event("process_sort_index", _COUNTERS, sort_index=process)
    used = {timing.position.stream for timing in timeline}
    for number, stream in enumerate(streams(), start=1):
        if stream in used:
            yield event("thread_name", number, name=str(stream))
            yield event("thread_sort_index", number, sort_index=number)


def op_events(drawn: Drawn, process: int, timeline: Sequence[Timing]) -> Iterator[Event]:
    """The ops as slices of their threads."""
    ops = dict(drawn.schedule.positions())
    blocks = drawn.schedule.known_workload().blocks
    for timing in timeline:
        op = ops[timing.position]
        args: Event = {"tick": timing.position.tick}
        if op.block >= 0:
            args |= {"block": op.block, "name": blocks[op.block].name}
            source = drawn.sources[op.block] if drawn.sources else ""
            args |= {"source": source} if source else {}
        effect = drawn.effects[timing.position]
        args |= {"bytes": effect.moves} if effect.moves else {}
        flops = total_flops(effect.work)
        args |= {"flops": flops} if flops else {}
        begin = us(timing.start_s)
        yield {
            "ph": "X",
            "name": str(op),
            "cat": op.what,
            **thread_of(process, timing.position),
            "ts": begin,
            "dur": round(us(timing.end_s) - begin, 3),
            "args": args,
        }


def flow_events(drawn: Drawn, process: int, timeline: Sequence[Timing]) -> Iterator[Event]:
    """Arrows from each `W` to the ops that read its weights, and from each `G` to its `U`."""
    begins = {timing.position: us(timing.start_s) for timing in timeline}
    # A slice without length is closed when its flow would begin.
    lasting = {t.position for t in timeline if us(t.end_s) > us(t.start_s)}
    pairs = [(load, reader, "weights") for reader, load in drawn.schedule.bindings().items()]
    pairs += [(offload, update, "gradients") for offload, update in _updates(drawn)]
    for number, (giver, taker, name) in enumerate(sorted(pairs)):
        if giver in lasting and taker in lasting:
            # Ids of two processes differ: Perfetto knows them by the id alone.
            event: Event = {"name": name, "cat": name, "id": 1_000_000 * process + number}
            yield {"ph": "s", **event, **thread_of(process, giver), "ts": begins[giver]}
            yield {"ph": "f", "bp": "e", **event, **thread_of(process, taker), "ts": begins[taker]}


def _updates(drawn: Drawn) -> Iterator[tuple[Position, Position]]:
    """Each `U` with the `G` before it that brought gradients which it uses."""
    workload, offloads = drawn.schedule.known_workload(), dict[int, Position]()
    for position, op in drawn.schedule.positions():
        if op.what == "G":
            offloads[op.block] = position
        elif op.what == "U":
            for block in workload.update_group(op.block):
                if block in offloads:
                    yield offloads[block], position


def _counter(process: int, name: str, curve: Curve) -> Iterator[Event]:
    for moment, nbytes in curve.totals:
        yield {"ph": "C", "name": name, "pid": process, "tid": _COUNTERS, "ts": us(moment), "args": {"bytes": nbytes}}


def thread_of(process: int, position: Position) -> Event:
    """The thread of an op's stream."""
    return {"pid": process, "tid": streams().index(position.stream) + 1}


def us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
