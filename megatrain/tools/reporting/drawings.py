"""page_text() and trace_text(): the figures of a step as one static page of HTML, and as a trace for Perfetto.

The page needs nothing else: no network, no script, no other file. Moving through a long step is what Perfetto is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from string import Template
from typing import Any

from megatrain.base.counts import counted
from megatrain.base.sizes import format_bytes
from megatrain.hardware.work import total_flops
from megatrain.scheduler.bands import Band, format_s
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position
from megatrain.tools.reporting.figures import Curve, StepFigures

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>megatrain report: $title</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 1180px; margin: 24px auto 64px; padding: 0 20px; font: 15px/1.5 system-ui, sans-serif; }
body { overflow-wrap: anywhere; }
h1, h2 { margin: 28px 0 4px; font-weight: 600; font-size: 24px; }
h2 { font-size: 17px; }
.verdict { padding: 8px 16px; border: 1px solid #8884; border-left: 3px solid #2f9a7a; }
.verdict p { margin: 4px 0; }
ul { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; list-style: none; font-size: 13px; }
li i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; }
svg { width: 100%; min-width: 640px; font: 12px system-ui, sans-serif; fill: currentColor; border: 1px solid #8884; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 16px 4px 0; text-align: left; font-weight: 400; border-bottom: 1px solid #8883; }
.n { text-align: right; white-space: nowrap; }
.note, thead { opacity: .75; font-size: 13px; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="note">$kind</p>
<div class="verdict">$verdict</div>
<h2>The step in time</h2>
<ul>$ops</ul>
<div class="scroll">$drawing</div>
<ul>$parts</ul>
<p class="note">A line below an op marks the path that bounds the step. Pointing at an op says what it is;
ops too short for that are thin lines. Sizes of memory are planned, never measured: $moments.
The dashed line is the planned peak. To move through the step, open its trace in ui.perfetto.dev.</p>
<h2>What holds the peak</h2>
<p>$peak.</p>
<div class="scroll">$holders</div>
<h2>What each stream does, and the part of the step that it bounds</h2>
<div class="scroll">$streams</div>
</body>
</html>
""")
_MEANINGS = {
    "h2d W": ("#7fa8d6", "weights to a slot"),
    "h2d A": ("#b3cfe8", "activations come back"),
    "compute F": ("#7cc4a7", "forward"),
    "compute B": ("#3f9f80", "backward"),
    "d2h A": ("#e6cd9b", "activations are parked"),
    "d2h G": ("#d8a95c", "gradients leave"),
    "host S": ("#c6b3da", "squares of gradients"),
    "host N": ("#957db0", "norm"),
    "host U": ("#ab8fca", "update"),
}
_PARTS = {
    "weights": "#7fa8d6",
    "activations": "#9ad0bd",
    "retained graphs": "#3f9f80",
    "gradients of activations": "#e6cd9b",
    "gradients of parameters": "#d8a95c",
    "loss": "#c79a9a",
}
_OTHER = "#a5acb2"
_WIDTH, _LEFT, _RIGHT, _LANE, _HEAD, _PLOT = 1160, 84, 1146, 26, 28, 132
_MOST_HOLDERS = 12


def page_text(figures: StepFigures) -> str:
    """The text of the page."""
    table, kind, peak = figures.schedule, figures.schedule.kind, figures.peak
    words = [counted(table.num_blocks, "block"), counted(len(table.ticks), "tick"), counted(len(table.ops), "op")]
    words += [counted(kind.micro_batches, "micro-batch")] if kind.micro_batches > 1 else []
    words += [f"updates {kind.updates}"] if kind.updates != "none" else []
    words += [*(["clipped"] if kind.clip else []), f"host, besides state: {format_bytes(table.host_bytes)}"]
    moments = "the filled curve has them at the moments of the plan"
    moments += "" if figures.measured is None else ", the line at those of the measured step"
    used = dict.fromkeys((position.stream, op.what) for position, op in table.positions())
    return _PAGE.substitute(
        title=_text(figures.name),
        kind=_text(", ".join(words)),
        verdict="".join(f"<p>{_text(line[:1].upper() + line[1:])}.</p>" for line in figures.verdict),
        ops="".join(_swatch(_colour(*key), f"{key[1]} {_meaning(*key)[1]}".strip()) for key in used),
        drawing=_drawing(figures),
        parts="".join(
            _swatch(_PARTS.get(part, _OTHER), f"{part}, {format_bytes(dict(peak.peak.parts).get(part, 0))} at the peak")
            for part in figures.device_curves[0].parts
        ),
        moments=moments,
        peak=_text(f"The device holds {format_bytes(table.device_bytes)} at {peak.place}, {peak.most()}"),
        holders=_holders_table(figures),
        streams=_streams_table(figures),
    )


def _text(text: str) -> str:
    """A name for HTML: without marks of its own, and without characters that no page may have."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text))


def _meaning(stream: str, what: str) -> tuple[str, str]:
    return _MEANINGS.get(f"{stream} {what}", (_OTHER, ""))


def _colour(stream: str, what: str) -> str:
    return _meaning(stream, what)[0]


def _swatch(colour: str, text: str) -> str:
    return f'<li><i style="background:{colour}"></i>{_text(text)}</li>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_words: int) -> str:
    """A table whose first columns are words, and all others numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = ["" if index < num_words else ' class="n"' for index in range(len(cells))]
        return f"<tr>{''.join(f'<{tag}{k}>{_text(c)}</{tag}>' for k, c in zip(kinds, cells, strict=True))}</tr>"

    return f"<table><thead>{row(heads, 'th')}</thead><tbody>{''.join(row(each, 'td') for each in rows)}</tbody></table>"


def _holders_table(figures: StepFigures) -> str:
    holders, whole = figures.peak.holders, max(1, figures.schedule.device_bytes)
    rows = [(h.name, h.part, h.nbytes) for h in holders[:_MOST_HOLDERS]]
    if rest := holders[_MOST_HOLDERS:]:
        rows.append((f"{len(rest)} others", "", sum(holder.nbytes for holder in rest)))
    cells = [(name, part, format_bytes(nbytes), f"{nbytes / whole:.0%}") for name, part, nbytes in rows]
    return _table(("holder", "kind", "bytes", "share"), cells, 2)


def _streams_table(figures: StepFigures) -> str:
    heads, rows = ["stream", "ops", "bytes"], list[list[str]]()
    for band in figures.bands:
        heads += [f"works, {band.name}", "of the step", "bounds it"]
    for stream in streams():
        mine = [position for position, _ in figures.schedule.positions() if position.stream == stream]
        moved = sum(figures.effects[position].moves for position in mine)
        row = [str(stream), str(len(mine)), format_bytes(moved) if stream != Stream.COMPUTE else ""]
        for band in figures.bands:
            busy = band.busy.get(stream, 0.0)
            row += [format_s(busy * band.step_s), f"{busy:.0%}", f"{band.shares.get(stream, 0.0):.0%}"]
        rows += [row] if mine else []
    return _table(heads, rows, 1)


def _drawing(figures: StepFigures) -> str:
    """The bands as lanes, and the device's memory below, on one axis of time."""
    whole = max(band.step_s for band in figures.bands) or 1.0

    def x(seconds: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * seconds / whole, 1)

    shapes, top = list[str](), 0
    for band in figures.bands:
        head = f"{band.name}: {band.origin}, {format_s(band.step_s)}"
        shapes.append(f'<text x="8" y="{top + 18}" font-weight="600">{_text(head)}</text>')
        top += _HEAD
        for stream in streams():
            if any(timing.position.stream == stream for timing in band.timeline):
                shapes += _lane(figures, band, stream, top, x)
                top += _LANE
    shapes += _memory(figures, top, x)
    height = top + _PLOT + 20
    shapes += [
        f'<text x="{x(whole * part / 8)}" y="{height - 5}" text-anchor="middle">{format_s(whole * part / 8)}</text>'
        for part in range(8)
    ]
    label = "The streams of the step as lanes, and the bytes on the device; the tables say the same in figures."
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _lane(figures: StepFigures, band: Band, stream: str, top: int, x: Callable[[float], float]) -> Iterator[str]:
    """The ops of a stream; those narrower than two pixels are lines, so that a page stays small."""
    ops, path, thin = figures.ops, frozenset(band.path), dict[str, dict[float, None]]()
    marks = dict[float, float]()
    yield f'<text x="8" y="{top + 16}">{stream}</text>'
    for index, timing in enumerate(band.timeline):
        if timing.position.stream != stream:
            continue
        begin, colour, name = x(timing.start_s), _colour(stream, ops[index].what), figures.op_name(index)
        width = round(x(timing.end_s) - begin, 1)
        if index in path:
            marks[begin] = max(width, 0.5)
        if width < 2:
            thin.setdefault(colour, {})[begin] = None
            continue
        place = f'x="{begin}" y="{top + 3}" width="{width}" height="17"'
        yield f'<rect {place} fill="{colour}"><title>{_text(_said(figures, band, index))}</title></rect>'
        if width > 7 * len(name) + 6:
            yield f'<text x="{begin + 4}" y="{top + 16}" fill="#15181b" pointer-events="none">{name}</text>'
    line = "".join(f"M{begin} {top + 22}h{width}" for begin, width in marks.items())
    yield f'<path d="{line}" stroke="currentColor" stroke-width="2"/>'
    for colour, begins in thin.items():
        lines = "".join(f"M{begin} {top + 3}v17" for begin in begins)
        yield f'<path d="{lines}" stroke="{colour}" stroke-width="0.8"/>'


def _said(figures: StepFigures, band: Band, index: int) -> str:
    """What an op is, a line each."""
    timing, op, follows = band.timeline[index], figures.ops[index], band.follows[index]
    effect = figures.effects[timing.position]
    lines = [f"{figures.op_name(index)} {_meaning(timing.position.stream, op.what)[1]}".strip()]
    lines += [f"tick {timing.position.tick}"]
    if op.block >= 0:
        lines += [f"block {op.block} ({figures.schedule.known_workload().blocks[op.block].name})"]
    lines += [format_bytes(effect.moves)] if effect.moves else []
    lines += [f"{flops:.3g} FLOP"] if (flops := total_flops(effect.work)) else []
    lines += [f"{format_s(timing.end_s - timing.start_s)}, from {format_s(timing.start_s)}"]
    lines += [f"waited for {figures.op_name(follows)}"] if follows is not None else []
    return "\n".join([*lines, *filter(None, [figures.source(op.block)])])


def _memory(figures: StepFigures, top: int, x: Callable[[float], float]) -> Iterator[str]:
    """The plan's curve, a part above the other; the measured step's as a line; the planned peak."""
    (plan, *others), bound, ops = figures.device_curves, figures.schedule.device_bytes, figures.schedule.positions()
    most = max(1, bound, *(total for curve in figures.device_curves for _, total in curve.totals))

    def y(nbytes: int) -> float:
        return round(top + _PLOT - (_PLOT - 24) * nbytes / most, 1)

    def outline(curve: Curve, num_parts: int, step_s: float) -> str:
        steps: list[str] = []
        for _, group in groupby(curve.points, lambda point: int(x(point[0]))):
            # Of what happens within a pixel its largest moment is drawn, and how it ends.
            near = list(group)
            for moment, sizes in dict.fromkeys((max(near, key=lambda point: sum(point[1])), near[-1])):
                steps.append(f"H{x(moment)}V{y(sum(sizes[:num_parts]))}")
        return f"{''.join(steps)}H{x(step_s)}"

    for number, part in reversed([*enumerate(plan.parts, start=1)]):
        line, colour = outline(plan, number, figures.plan.step_s), _PARTS.get(part, _OTHER)
        yield f'<path d="M{_LEFT} {y(0)}{line}V{y(0)}z" fill="{colour}"><title>{part}</title></path>'
    for band, curve in zip(figures.bands[1:], others, strict=True):
        line = outline(curve, len(curve.parts), band.step_s)
        yield f'<path d="M{_LEFT} {y(0)}{line}" fill="none" stroke="currentColor"/>'
    yield f'<path d="M{_LEFT} {y(bound)}H{_RIGHT}" stroke="currentColor" stroke-dasharray="5 4"/>'
    yield f'<text x="8" y="{y(bound) + 4}">{format_bytes(bound)}</text><text x="8" y="{y(0)}">device</text>'
    peak = figures.peak.peak
    index = next(i for i, (position, op) in enumerate(ops) if (position.tick, op) == (peak.tick, peak.op))
    timing = figures.plan.timeline[index]
    at = min(max(x((timing.start_s + timing.end_s) / 2), _LEFT + 60), _RIGHT - 60)
    yield f'<text x="{at}" y="{y(most) - 6}" text-anchor="middle">peak at {figures.op_name(index)}</text>'


# -- the trace -----------------------------------------------------------------------------------------------------

_Event = dict[str, Any]


def trace_text(figures: StepFigures) -> str:
    """The trace in Chrome's JSON format, an event a line.

    Perfetto reads `X` events that don't overlap on their track, `C` counters and `M` names, in the order of time.
    """
    events: list[_Event] = []
    for process, (band, curve) in enumerate(zip(figures.bands, figures.device_curves, strict=True), start=1):
        events += _name_events(process, band)
        timed = [*_op_events(figures, process, band)]
        counter: _Event = {"ph": "C", "name": "live device bytes", "pid": process, "tid": 0}
        timed += [{**counter, "ts": _us(moment), "args": {"bytes": nbytes}} for moment, nbytes in curve.totals]
        events += sorted(timed, key=lambda event: event["ts"])
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)


def _thread(process: int, position: Position) -> _Event:
    return {"pid": process, "tid": streams().index(position.stream) + 1}


def _name_events(process: int, band: Band) -> Iterator[_Event]:
    """Names a process, and its streams as threads; thread 0 has the counter."""
    used = {timing.position.stream for timing in band.timeline}
    threads = [(number, str(stream)) for number, stream in enumerate(streams(), start=1) if stream in used]
    names = [("process", 0, process, f"{band.name}: {band.origin}"), *(("thread", n, n, name) for n, name in threads)]
    for kind, thread, order, name in names:
        event: _Event = {"ph": "M", "pid": process, "tid": thread}
        yield {**event, "name": f"{kind}_name", "args": {"name": name}}
        yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _op_events(figures: StepFigures, process: int, band: Band) -> Iterator[_Event]:
    blocks = figures.schedule.known_workload().blocks
    for timing, op in zip(band.timeline, figures.schedule.ops, strict=True):
        effect, name = figures.effects[timing.position], blocks[op.block].name if op.block >= 0 else ""
        args: _Event = {"block": op.block, "name": name, "source": figures.source(op.block)} if op.block >= 0 else {}
        args |= {"bytes": effect.moves, "flops": total_flops(effect.work)}
        args = {"tick": timing.position.tick} | {key: value for key, value in args.items() if key == "block" or value}
        begin = _us(timing.start_s)
        event: _Event = {"ph": "X", "name": str(op), "cat": op.what, **_thread(process, timing.position)}
        yield {**event, "ts": begin, "dur": round(_us(timing.end_s) - begin, 3), "args": args}
