"""trace_text(): a report as a trace in Chrome's JSON format, which Perfetto opens.

Perfetto reads `X` events that don't overlap on their track, `C` counters, `M` names, and flows (`s`, `f`), which belong
to the slice around them on their track. All of these come in the order of time, an op before its flows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatrain.hardware.work import total_flops
from megatrain.reporting.memory_curve import Curve
from megatrain.reporting.step_figures import StepFigures
from megatrain.scheduler.effects import streams
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.bands import Band

_Event = dict[str, Any]
_COUNTERS = 0
"""The thread of the counters; those of the streams begin at 1."""


def trace_text(figures: StepFigures) -> str:
    """The trace, an event a line."""
    events: list[_Event] = []
    for process, (band, device, host) in enumerate(
        zip(figures.bands, figures.device_curves, figures.host_curves, strict=True), start=1
    ):
        events += _names(process, band)
        timed = [*_ops(figures, process, band), *_flows(figures, process, band)]
        timed += [*_counter(process, "live device bytes", device), *_counter(process, "live host bytes", host)]
        # The order of equal times stays: ops, then flows, which belong to the op that is open then.
        events += sorted(timed, key=lambda event: event["ts"])
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _names(process: int, band: Band) -> Iterator[_Event]:
    def event(kind: str, tid: int, **args: Any) -> _Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args}

    yield event("process_name", _COUNTERS, name=f"{band.name}: {band.origin}")
    yield event("process_sort_index", _COUNTERS, sort_index=process)
    used = {timing.position.stream for timing in band.timeline}
    for number, stream in enumerate(streams(), start=1):
        if stream in used:
            yield event("thread_name", number, name=str(stream))
            yield event("thread_sort_index", number, sort_index=number)


def _ops(figures: StepFigures, process: int, band: Band) -> Iterator[_Event]:
    ops = dict(figures.schedule.positions())
    blocks = figures.schedule.known_workload().blocks
    for timing in band.timeline:
        op = ops[timing.position]
        args: _Event = {"tick": timing.position.tick}
        if op.block >= 0:
            args |= {"block": op.block, "name": blocks[op.block].name}
            source = figures.sources[op.block] if figures.sources else ""
            args |= {"source": source} if source else {}
        effect = figures.effects[timing.position]
        args |= {"bytes": effect.moves} if effect.moves else {}
        flops = total_flops(effect.work)
        args |= {"flops": flops} if flops else {}
        begin = _us(timing.start_s)
        yield {
            "ph": "X",
            "name": str(op),
            "cat": op.what,
            **_place(process, timing.position),
            "ts": begin,
            "dur": round(_us(timing.end_s) - begin, 3),
            "args": args,
        }


def _flows(figures: StepFigures, process: int, band: Band) -> Iterator[_Event]:
    begins = {timing.position: _us(timing.start_s) for timing in band.timeline}
    # A slice without length is closed when its flow would begin.
    lasting = {t.position for t in band.timeline if _us(t.end_s) > _us(t.start_s)}
    pairs = [(load, reader, "weights") for reader, load in figures.schedule.bindings().items()]
    pairs += [(offload, update, "gradients") for offload, update in _updates(figures)]
    for number, (giver, taker, name) in enumerate(sorted(pairs)):
        if giver in lasting and taker in lasting:
            # Ids of two processes differ: Perfetto knows them by the id alone.
            event: _Event = {"name": name, "cat": name, "id": 1_000_000 * process + number}
            yield {"ph": "s", **event, **_place(process, giver), "ts": begins[giver]}
            yield {"ph": "f", "bp": "e", **event, **_place(process, taker), "ts": begins[taker]}


def _updates(figures: StepFigures) -> Iterator[tuple[Position, Position]]:
    """Each `U` with the `G` before it that brought gradients which it uses."""
    workload, offloads = figures.schedule.known_workload(), dict[int, Position]()
    for position, op in figures.schedule.positions():
        if op.what == "G":
            offloads[op.block] = position
        elif op.what == "U":
            for block in workload.update_group(op.block):
                if block in offloads:
                    yield offloads[block], position


def _counter(process: int, name: str, curve: Curve) -> Iterator[_Event]:
    for moment, nbytes in curve.totals:
        yield {"ph": "C", "name": name, "pid": process, "tid": _COUNTERS, "ts": _us(moment), "args": {"bytes": nbytes}}


def _place(process: int, position: Position) -> _Event:
    return {"pid": process, "tid": streams().index(position.stream) + 1}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
