"""page_text(): a report as one page of HTML that needs nothing else: no network, no other file, no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.counts import counted
from megatrain.reporting.drawn_ops import blocks_data, ops_data
from megatrain.reporting.html.html_parts import html_table, html_text, page
from megatrain.reporting.memory_curve import Curve
from megatrain.reporting.step_figures import StepFigures
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import columns
from megatrain.scheduler.timing.bands import Band, format_s
from megatrain.sizes import format_bytes

_MOST_HOLDERS = 12
_NS = 1e9


def page_text(figures: StepFigures) -> str:
    """The text of the page."""
    parts = {
        "streams": _streams_table(figures),
        "memory": f'<p class="note">{html_text(_memory_words(figures))}</p>',
        "peak": html_text(_peak_words(figures)),
        "kinds": _kinds_table(figures),
        "holders": _holders_table(figures),
        "blocks": _blocks_table(figures),
    }
    return page(
        "step_body.html",
        parts,
        title=figures.name,
        kind=_kind(figures),
        verdict=figures.verdict,
        figures=_main_figures(figures),
        data=_data(figures),
    )


def _memory_words(figures: StepFigures) -> str:
    moments = "the filled curve has them at the moments of the plan"
    moments += "" if figures.measured is None else ", the line at those of the measured step"
    return f"Sizes of memory are planned, never measured: {moments}. The dashed line is the planned peak."


def _peak_words(figures: StepFigures) -> str:
    peak = figures.peak.peak
    nbytes = format_bytes(figures.schedule.device_bytes)
    return f"The device holds {nbytes} at {peak.op} (tick {peak.tick}), {figures.peak.most()}"


def _kind(figures: StepFigures) -> str:
    table, kind = figures.schedule, figures.schedule.kind
    parts = [counted(table.num_blocks, "block"), counted(len(table.ticks), "tick"), counted(len(table.ops), "op")]
    parts += [counted(kind.micro_batches, "micro-batch")] if kind.micro_batches > 1 else []
    parts += [f"updates {kind.updates}"] if kind.updates != "none" else []
    return ", ".join([*parts, *(["clipped"] if kind.clip else [])])


# -- the data of the drawings ------------------------------------------------------------------------------------


def _data(figures: StepFigures) -> dict[str, Any]:
    """What the script draws; times are whole nanoseconds."""
    table, names = figures.schedule, columns(figures.schedule.ticks)
    return {
        "streams": list(names),
        **blocks_data(figures.drawn),
        "ticks": len(table.ticks),
        "ops": ops_data(figures.drawn, names),
        "bands": [_band_data(band) for band in figures.bands],
        "bound": table.device_bytes,
        "peak": _peak_data(figures),
        "curves": [_curve_data(curve) for curve in figures.device_curves],
        "maps": [
            {"name": each.name, "memory": each.memory, "bytes": each.nbytes, "areas": [list(a) for a in each.areas]}
            for each in figures.maps
        ],
    }


def _peak_data(figures: StepFigures) -> dict[str, Any]:
    peak, ops = figures.peak.peak, enumerate(figures.schedule.positions())
    at = next(index for index, (position, op) in ops if (position.tick, op) == (peak.tick, peak.op))
    return {"op": at, "most": figures.peak.most()}


def _band_data(band: Band) -> dict[str, Any]:
    times = [(round(t.start_s * _NS), round(t.end_s * _NS)) for t in band.timeline]
    return {
        "name": band.name,
        "origin": band.origin,
        "step": round(band.step_s * _NS),
        "times": [number for begin, end in times for number in (begin, end - begin)],
        "follows": [-1 if index is None else index for index in band.follows],
        "path": list(band.path),
    }


def _curve_data(curve: Curve) -> dict[str, Any]:
    """Points as changes: a moment, then the number of each part that changes and its bytes."""
    points: list[list[int]] = []
    before: Sequence[int] = (0,) * len(curve.parts)
    for moment, sizes in curve.points:
        changed = [n for i, (old, new) in enumerate(zip(before, sizes, strict=True)) if old != new for n in (i, new)]
        points.append([round(moment * _NS), *changed])
        before = sizes
    return {"parts": curve.parts, "points": points}


# -- the figures as tables -----------------------------------------------------------------------------------------


def _main_figures(figures: StepFigures) -> list[tuple[str, str]]:
    table = figures.schedule
    rows = [(f"step, {band.name}", format_s(band.step_s)) for band in figures.bands]
    rows += [
        ("device at its peak", format_bytes(table.device_bytes)),
        ("host, besides state", format_bytes(table.host_bytes)),
    ]
    rows += [("to the device", format_bytes(table.h2d_bytes)), ("to the host", format_bytes(table.d2h_bytes))]
    return rows


def _streams_table(figures: StepFigures) -> str:
    table = figures.schedule
    heads = ["stream", "ops", "bytes"]
    for band in figures.bands:
        heads += [f"works, {band.name}", "of the step", "bounds it"]
    rows: list[list[str]] = []
    for stream in streams():
        mine = [position for position, _ in table.positions() if position.stream == stream]
        if mine:
            moved = sum(figures.effects[position].moves for position in mine)
            row = [str(stream), str(len(mine)), format_bytes(moved) if stream != Stream.COMPUTE else ""]
            for band in figures.bands:
                busy = band.busy.get(stream, 0.0)
                row += [format_s(busy * band.step_s), f"{busy:.0%}", f"{band.shares.get(stream, 0.0):.0%}"]
            rows.append(row)
    return html_table("What each stream does, and the part of the step that it bounds", heads, rows)


def _kinds_table(figures: StepFigures) -> str:
    peak, rows = figures.peak, list[Sequence[str]]()
    for part, nbytes in peak.peak.parts:
        holders = peak.of(part)
        what = holders[0].name if len(holders) == 1 else f"{len(holders)}, the largest {holders[0].name}"
        rows.append((part, what, format_bytes(nbytes), f"{nbytes / peak.nbytes:.0%}"))
    return html_table(
        "The device's memory at the peak, by kind", ("kind", "holders", "bytes", "share"), rows, num_words=2
    )


def _holders_table(figures: StepFigures) -> str:
    holders, whole = figures.peak.holders, max(1, figures.schedule.device_bytes)
    rows = [(h.name, h.part, format_bytes(h.nbytes), f"{h.nbytes / whole:.0%}") for h in holders[:_MOST_HOLDERS]]
    rest = holders[_MOST_HOLDERS:]
    if rest:
        nbytes = sum(holder.nbytes for holder in rest)
        rows.append((f"{len(rest)} others", "", format_bytes(nbytes), f"{nbytes / whole:.0%}"))
    return html_table("The largest holders, of any kind", ("holder", "kind", "bytes", "share"), rows, num_words=2)


def _blocks_table(figures: StepFigures) -> str:
    table = figures.schedule
    blocks = table.known_workload().blocks
    heads = ["block", "weights", "gradients", "graph"]
    letters: dict[str, None] = dict.fromkeys(op.what for op in table.ops if op.what in "FBU")
    for band in figures.bands:
        heads += [f"{letter}, {band.name}" for letter in letters]
    columns = [_seconds_by_block(figures, band) for band in figures.bands]
    rows = [
        [
            f"{index} ({block.name})",
            *map(format_bytes, (block.state_bytes, block.gradient_bytes, block.saved_bytes)),
            *(_lasts(seconds.get((letter, index))) for seconds in columns for letter in letters),
        ]
        for index, block in enumerate(blocks)
    ]
    return html_table("Blocks: bytes of each, and the time of its ops of one kind together", heads, rows)


def _lasts(seconds: float | None) -> str:
    return "" if seconds is None else format_s(seconds)


def _seconds_by_block(figures: StepFigures, band: Band) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for timing, op in zip(band.timeline, figures.schedule.ops, strict=True):
        found[op.what, op.block] = found.get((op.what, op.block), 0.0) + timing.end_s - timing.start_s
    return found
