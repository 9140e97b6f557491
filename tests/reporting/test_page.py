"""The page: one file that needs nothing else, with every figure in it, whatever the names of a model are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from megatrain.reporting.page import page_text
from tests.reporting.steps import EVIL, evil, long, made

MOST_BYTES = 1_000_000
ASSETS = {name: (files("megatrain.reporting.html") / name).read_text() for name in ("page.css", "page.js")}


class Seen(HTMLParser):
    """The elements and the texts of a page, and the rows of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.cell = tag in ("td", "th")
        self.rows += [[]] if tag == "tr" else []
        if self.cell:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.cell:
            self.rows[-1][-1] += data


def data_of(page: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    assert not set("<>&") & set(found[0])
    return json.loads(found[0])


def test_the_page_is_what_it_was(golden: Callable[[str, str], None]):
    page = page_text(made().figures)
    for name, text in ASSETS.items():
        assert page.count(text) == 1
        page = page.replace(text, f"({name})\n")
    golden("report_page", page)
    assert page_text(made().figures) == page_text(made().figures)


def test_a_page_without_a_measured_step_speaks_of_none():
    page = page_text(made(is_measured=False).figures)
    assert [band["name"] for band in data_of(page)["bands"]] == ["plan"]
    text = page.replace(ASSETS["page.js"], "")
    assert "step, measured" not in text
    assert text.count("measured") == 2  # of the drawing that would have one, and of sizes that never are


@pytest.mark.parametrize("name", ["h1", "verdict", "tables"])
def test_every_figure_is_there_without_a_drawing(name: str):
    report = made()
    seen = Seen(page_text(report.figures))
    words = {"h1": ["schedule"], "verdict": [f"{line[0].upper()}{line[1:]}." for line in report.verdict]}
    if name != "tables":
        assert set(words[name]) <= set(seen.texts)
        return
    rows = {row[0]: row[1:] for row in seen.rows}
    streams = {str(position.stream) for position, _ in report.figures.schedule.positions()}
    assert streams <= set(rows)
    assert rows["h2d"][0] == str(sum(p.stream == "h2d" for p, _ in report.figures.schedule.positions()))
    assert {f"{i} (layers.{i})" for i in range(4)} <= set(rows)
    assert {holder.name for holder in report.figures.peak.holders[:12]} <= set(rows)


def test_the_data_are_the_schedule_and_both_bands():
    report = made()
    found, plan = data_of(page_text(report.figures)), report.figures.schedule
    starred = {f"{op}*" if op.what in "FB" and op.block in plan.saves else str(op) for op in plan.ops}
    assert {op[2] for op in found["ops"]} == starred
    assert [(found["streams"][op[0]], op[1]) for op in found["ops"]] == [
        (p.stream, p.tick) for p, _ in plan.positions()
    ]
    for band, own in zip(found["bands"], report.figures.bands, strict=True):
        starts, lasts = band["times"][::2], band["times"][1::2]
        assert starts == [round(t.start_s * 1e9) for t in own.timeline]
        assert [a + b for a, b in zip(starts, lasts, strict=True)] == [round(t.end_s * 1e9) for t in own.timeline]
    assert found["bound"] == plan.device_bytes
    for drawn, curve in zip(found["curves"], report.figures.device_curves, strict=True):
        live = [0] * len(drawn["parts"])
        for (moment, *changes), (second, sizes) in zip(drawn["points"], curve.points, strict=True):
            for part, nbytes in zip(changes[::2], changes[1::2], strict=True):
                live[part] = nbytes
            assert (moment, live) == (round(second * 1e9), list(sizes))


def test_no_name_becomes_a_part_of_the_page():
    page, harmless = page_text(made(evil()).figures), page_text(made().figures)
    seen = Seen(page)
    tags = {tag for tag, _ in Seen(harmless).elements}
    assert {element for element, _ in seen.elements} == tags - {"b"}
    assert page.count("</script>") == harmless.count("</script>") == 2
    shown = EVIL.replace("\u2028", "\ufffd").replace("\x07", "\ufffd")
    assert f"0 ({shown}0)" in {row[0] for row in seen.rows}
    assert data_of(page)["blocks"][0][0] == f"{EVIL}0"
    page.encode("utf-8")


def test_the_page_asks_for_nothing():
    seen = Seen(page_text(made().figures))
    links = [
        (element, name, value)
        for element, own in seen.elements
        for name, value in own.items()
        if name in ("src", "href")
    ]
    assert links == [("link", "href", "data:,")]
    policy = next(own["content"] for _, own in seen.elements if own.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.split(";")[0] == "default-src 'none'"
    for text in ASSETS.values():
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttp|import\(|WebSocket", text)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_hundred_layers_fit_in_a_megabyte(micro_batches: int):
    page = page_text(made(long(100, micro_batches)).figures)
    assert len(page.encode()) < MOST_BYTES / 2
