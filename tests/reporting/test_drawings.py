"""The page and the trace say what the figures say, ask for nothing, and take any name for a name."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given

from megatrain.scheduler.effects import streams
from megatrain.scheduler.schedule import Schedule
from megatrain.tools.reporting.drawings import page_text, trace_text
from megatrain.tools.reporting.figures import StepFigures
from tests.draws import draws
from tests.reporting.steps import EVIL, drawn, evil, made

Event = dict[str, Any]


class Seen(HTMLParser):
    """The elements of a page with their attributes and texts, and the rows of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        self.rows += [[]] if tag == "tr" else []
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.texts[-1] += data
            if self.elements[-1][0] in ("td", "th"):
                self.rows[-1][-1] += data

    def of(self, tag: str) -> list[tuple[dict[str, Any], str]]:
        return [(own, text) for (name, own), text in zip(self.elements, self.texts, strict=True) if name == tag]


def test_the_verdict_and_every_figure_are_words():
    figures = made().figures
    seen = Seen(page_text(figures))
    assert [text.strip() for _, text in seen.of("p")][1:5][: len(figures.verdict)] == [
        f"{line[0].upper()}{line[1:]}." for line in figures.verdict
    ]
    rows = {row[0]: row[1:] for row in seen.rows}
    assert {holder.name for holder in figures.peak.holders[:12]} <= set(rows)
    for stream in {position.stream for position, _ in figures.schedule.positions()}:
        assert rows[stream][0] == str(sum(op.stream == stream for op in figures.ops))
    assert "measured" not in page_text(made(is_measured=False).figures).replace("never measured", "")


def test_no_name_becomes_a_part_of_the_page():
    page, harmless = page_text(made(evil()).figures), page_text(made().figures)
    seen = Seen(page)
    assert {tag for tag, _ in seen.elements} == {tag for tag, _ in Seen(harmless).elements}
    shown = EVIL.replace("\u2028", "\ufffd").replace("\x07", "\ufffd")
    assert any(f"block 0 ({shown}0)" in text for _, text in seen.of("title"))
    assert any(shown in row[0] for row in seen.rows)
    page.encode("utf-8")


def test_the_page_runs_nothing_and_asks_for_nothing():
    seen = Seen(page_text(made().figures))
    links = [(tag, own[name]) for tag, own in seen.elements for name in ("src", "href") if name in own]
    assert links == [("link", "data:,")]
    assert not seen.of("script")
    policy = next(own["content"] for own, _ in seen.of("meta") if own.get("http-equiv") == "Content-Security-Policy")
    assert policy.split(";")[0] == "default-src 'none'"
    (style,) = [text for _, text in seen.of("style")]
    assert not re.search(r"@import|url\(", style)


# -- the trace -----------------------------------------------------------------------------------------------------


def events(figures: StepFigures) -> list[Event]:
    return json.loads(trace_text(figures))["traceEvents"]


def ns(microseconds: float) -> int:
    """As Perfetto reads a number."""
    return round(microseconds * 1000)


@given(drawn())
@draws(40)
def test_no_two_ops_of_a_track_overlap(plan: Schedule):
    opened: dict[tuple[int, int], Event] = {}
    latest = 0.0
    found = events(made(plan).figures)
    for event in found:
        track = event["pid"], event["tid"]
        if event["ph"] in "XC":
            assert event["ts"] >= latest or event["pid"] == 2
            latest = event["ts"]
        if event["ph"] == "X":
            before = opened.get(track)
            assert before is None or ns(before["ts"]) + ns(before["dur"]) <= ns(event["ts"])
            opened[track] = event
    assert {event["ph"] for event in found} <= set("MXC")
    for process in {event["pid"] for event in found}:
        ops = [(streams()[e["tid"] - 1], e["name"]) for e in found if e["ph"] == "X" and e["pid"] == process]
        assert sorted(ops) == sorted((p.stream, str(op)) for p, op in plan.positions())


def test_counters_and_names_of_a_trace():
    figures = made().figures
    found = events(figures)
    live = [event["args"]["bytes"] for event in found if event["ph"] == "C" and event["pid"] == 1]
    assert live == [total for _, total in figures.device_curves[0].totals]
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["plan", "measured"]
    hostile = events(made(evil()).figures)
    assert {e["args"].get("name") for e in hostile if e["ph"] == "X"} == {f"{EVIL}{i}" for i in range(3)}
