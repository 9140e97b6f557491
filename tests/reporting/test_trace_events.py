"""The trace obeys Chrome's JSON format as Perfetto reads it, and says what the report says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatrain.reporting.step_report import step_report
from megatrain.reporting.trace_events import trace_text
from megatrain.scheduler.effects import streams
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.costs import Hardware
from tests.draws import draws
from tests.reporting.steps import EVIL, drawn, evil, made, small

Event = dict[str, Any]


def events(plan: Schedule, machine: Hardware | None = None) -> list[Event]:
    found = made(plan) if machine is None else step_report(plan, machine, None)
    return json.loads(trace_text(found.figures))["traceEvents"]


def ns(microseconds: float) -> int:
    """As Perfetto reads a number."""
    return round(microseconds * 1000)


def test_the_trace_is_what_it_was(golden: Callable[[str, str], None]):
    golden("report_trace", trace_text(made().figures))


FREE = Hardware(float("inf"), 1e9, 1e9, host_bytes_per_s=1e9)
"""Its prefetches take no time: Perfetto has nothing open at their moment that a flow could belong to."""


@given(drawn(), st.sampled_from([None, FREE]))
@draws(40)
def test_no_two_ops_of_a_track_overlap_and_each_flow_begins_and_ends_within_one(
    plan: Schedule, machine: Hardware | None
):
    found = events(plan, machine)
    opened: dict[tuple[int, int], Event] = {}
    flows: dict[int, Event] = {}
    latest = 0.0
    for event in found:
        track = event["pid"], event["tid"]
        if event["ph"] in "XCsf":
            assert event["ts"] >= latest or event["pid"] == 2
            latest = event["ts"]
        if event["ph"] == "X":
            before = opened.get(track)
            assert before is None or ns(before["ts"]) + ns(before["dur"]) <= ns(event["ts"])
            opened[track] = event
        elif event["ph"] in "sf":
            around = opened[track]
            assert ns(around["ts"]) <= ns(event["ts"]) < ns(around["ts"]) + ns(around["dur"])
            if event["ph"] == "s":
                assert event["id"] not in flows
                flows[event["id"]] = around
            else:
                giver = flows[event["id"]]
                assert event["bp"] == "e"
                assert ns(giver["ts"]) <= ns(around["ts"])
                assert (giver["cat"], around["cat"]) in {("W", "F"), ("W", "B"), ("G", "U")}
    assert {event["ph"] for event in found} <= set("MXCsf")
    assert sum(event["ph"] == "s" for event in found) == sum(event["ph"] == "f" for event in found)


@given(drawn())
@draws(40)
def test_each_op_is_there_once_in_each_band(plan: Schedule):
    for process in (1, 2):
        ops = [(streams()[e["tid"] - 1], e["name"]) for e in events(plan) if e["ph"] == "X" and e["pid"] == process]
        assert sorted(ops) == sorted((p.stream, str(op)) for p, op in plan.positions())


def test_weights_flow_to_their_readers_and_gradients_to_their_updates():
    plan = small()
    starts = [event for event in events(plan) if event["ph"] == "s" and event["pid"] == 1]
    counts = {name: sum(event["name"] == name for event in starts) for name in ("weights", "gradients")}
    assert counts == {"weights": len(plan.bindings()), "gradients": 4}


def test_counters_reach_the_planned_peak():
    report = made()
    counters: dict[str, list[int]] = {}
    for event in json.loads(trace_text(report.figures))["traceEvents"]:
        if event["ph"] == "C" and event["pid"] == 1:
            counters.setdefault(event["name"], []).append(event["args"]["bytes"])
    assert set(counters) == {"live device bytes", "live host bytes"}
    assert max(counters["live device bytes"]) == max(total for _, total in report.figures.device_curves[0].totals)
    assert 0 < max(counters["live device bytes"]) <= report.figures.schedule.device_bytes
    assert 0 < max(counters["live host bytes"]) <= report.figures.schedule.host_bytes


def test_bands_are_processes_that_say_which_they_are():
    names = [e["args"]["name"] for e in events(small()) if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["plan", "measured"]


def test_a_name_stays_a_name():
    assert {e["args"].get("name") for e in events(evil()) if e["ph"] == "X"} == {f"{EVIL}{i}" for i in range(3)}
