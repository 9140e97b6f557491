"""ranks_page_text(): a step of several ranks as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.counts import counted
from megatrain.reporting.drawn_ops import blocks_data, ops_data
from megatrain.reporting.html.html_parts import html_table, page
from megatrain.reporting.ranks_figures import RanksFigures
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.ranks_band import RanksBand
from megatrain.sizes import format_bytes

_NS = 1e9
_MOST_LARGE_LANES = 80
"""More lanes than that are narrow, without names on their ops: a browser draws no picture of any height."""
_LARGE, _SMALL = 22, 12


def ranks_page_text(figures: RanksFigures) -> str:
    """The text of the page."""
    parts = {
        "ranks": _ranks_table(figures),
        "streams": _streams_table(figures),
    }
    return page(
        "ranks_body.html",
        parts,
        title=figures.name,
        kind=_kind(figures),
        verdict=figures.verdict,
        figures=_main_figures(figures),
        data=_data(figures),
    )


def _kind(figures: RanksFigures) -> str:
    table = figures.ranks[0].schedule
    number = sum(len(each.schedule.ops) for each in figures.ranks)
    parts = [counted(len(figures.ranks), "rank"), counted(table.num_blocks, "block"), counted(number, "op")]
    parts += [f"updates {table.kind.updates}"] if table.kind.updates != "none" else []
    return ", ".join([*parts, *(["clipped"] if table.kind.clip else [])])


def _used(figures: RanksFigures) -> list[Stream]:
    """The streams of all ranks, in the order of lanes."""
    found = {position.stream for each in figures.ranks for position, _ in each.schedule.positions()}
    return [stream for stream in streams() if stream in found]


# -- the data of the drawing ---------------------------------------------------------------------------------------


def _data(figures: RanksFigures) -> dict[str, Any]:
    """What the script draws; times are whole nanoseconds."""
    names = _used(figures)
    tables = {id(each): each for each in figures.ranks}
    numbers = {key: number for number, key in enumerate(tables)}
    lanes = len(figures.bands) * len(figures.ranks) * len(names)
    bands: list[dict[str, Any]] = []
    for band in figures.bands:
        first = len(bands)
        for rank, each in enumerate(figures.ranks):
            bands.append({**_band_data(band, rank), "first": first, "table": numbers[id(each)]})
    return {
        "streams": list(names),
        **blocks_data(figures.ranks[0]),
        "tables": [ops_data(each, names) for each in tables.values()],
        "bands": bands,
        "lane": _LARGE if lanes <= _MOST_LARGE_LANES else _SMALL,
    }


def _band_data(band: RanksBand, rank: int) -> dict[str, Any]:
    """The lanes of a rank.

    `gaps` has how long each op begins after the one before it in its stream, and how long it lasts; `across`, of each
    op that needs another rank, the op there, and whether it waited.
    """
    timeline, follows = band.timelines[rank], band.follows[rank]
    free, gaps = dict[Stream, int](), list[int]()
    for timing in timeline:
        begin, end = round(timing.start_s * _NS), round(timing.end_s * _NS)
        gaps += [begin - free.get(timing.position.stream, 0), end - begin]
        free[timing.position.stream] = end
    return {
        "name": f"rank {rank}, {band.name}",
        "kind": band.name,
        "rank": rank,
        "origin": band.origin,
        "step": round(max((t.end_s for t in timeline), default=0.0) * _NS),
        "gaps": gaps,
        "follows": [each[1] if each is not None and each[0] == rank else -1 for each in follows],
        "across": [
            [index, *other, int(follows[index] == other)] for (own, index), other in band.others.items() if own == rank
        ],
        "path": [index for own, index in band.path if own == rank],
    }


# -- the figures as tables -----------------------------------------------------------------------------------------


def _main_figures(figures: RanksFigures) -> list[tuple[str, str]]:
    rows = [(f"step, {band.name}", format_s(band.step_s)) for band in figures.bands]
    devices = figures.devices
    if devices is not None:
        rows += [
            ("one device alone, its part", format_s(devices.alone_s)),
            ("of as many alone", f"{devices.efficiency:.2f}"),
        ]
        rows += [] if devices.tokens_per_s is None else [("tokens/s", f"{devices.tokens_per_s:.0f}")]
        rows += [("reads and writes of the host", format_s(devices.simulation.host_s))]
    rows += [("a device at its peak, at most", format_bytes(max(each.schedule.device_bytes for each in figures.ranks)))]
    return rows


def _ranks_table(figures: RanksFigures) -> str:
    heads = ["rank", "micro-batches", "ops", "device at its peak"]
    for band in figures.bands:
        heads += [f"begins, {band.name}", "ends", "computes", "holds the step up"]
    rows: list[Sequence[str]] = []
    for rank, each in enumerate(figures.ranks):
        table = each.schedule
        row = [str(rank), str(table.kind.micro_batches), str(len(table.ops)), format_bytes(table.device_bytes)]
        for band in figures.bands:
            timeline = band.timelines[rank]
            ends = [min(t.start_s for t in timeline), max(t.end_s for t in timeline)] if timeline else [0.0, 0.0]
            own = sum(part for key, part in band.shares.items() if not isinstance(key, str) and key[0] == rank)
            row += [*map(format_s, ends), f"{band.busy[rank].get(Stream.COMPUTE, 0.0):.0%}", f"{own:.0%}"]
        rows.append(row)
    return html_table("Ranks, and the part of the step that each holds up", heads, rows)


def _streams_table(figures: RanksFigures) -> str:
    heads = ["rank", "stream", "ops", "bytes"]
    for band in figures.bands:
        heads += [f"works, {band.name}", "of the step", "holds the step up", "waits for other ranks"]
    rows: list[Sequence[str]] = []
    for rank, each in enumerate(figures.ranks):
        for stream in _used(figures):
            mine = [position for position, _ in each.schedule.positions() if position.stream == stream]
            if mine:
                moved = sum(each.effects[position].moves for position in mine)
                row = [str(rank), str(stream), str(len(mine)), format_bytes(moved) if stream != Stream.COMPUTE else ""]
                for band in figures.bands:
                    busy, share = band.busy[rank].get(stream, 0.0), band.shares.get((rank, str(stream)), 0.0)
                    waits_s = band.waits_s[rank].get(stream, 0.0)
                    row += [format_s(busy * band.step_s), f"{busy:.0%}", f"{share:.0%}", format_s(waits_s)]
                rows.append(row)
    caption = (
        "What each stream of each rank does, how much of the step it holds up, and how long it waits for other ranks"
    )
    return html_table(caption, heads, rows, num_words=2)
