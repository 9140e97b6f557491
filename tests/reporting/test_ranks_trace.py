"""The trace of several ranks: a process for each, and arrows from rank to rank that Perfetto accepts."""

from __future__ import annotations

import json

import pytest

from megatrain.reporting.ranks_trace import ranks_trace_text
from tests.reporting.rank_steps import figures, tables
from tests.reporting.test_trace_events import Event, ns


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_rank_is_a_process_and_each_flow_begins_and_ends_within_an_op(micro_batches: int):
    made = figures(tables(3, micro_batches=micro_batches))
    found = json.loads(ranks_trace_text(made))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert [name.split(":")[0] for name in names.values()] == [
        f"rank {rank}, {band}" for band in ("plan", "measured") for rank in range(3)
    ]
    slices: dict[tuple[int, int], list[Event]] = {}
    for event in found:
        if event["ph"] == "X":
            line = slices.setdefault((event["pid"], event["tid"]), [])
            assert not line or ns(line[-1]["ts"]) + ns(line[-1]["dur"]) <= ns(event["ts"])
            line.append(event)
    for process, each in enumerate([*made.ranks, *made.ranks], start=1):
        assert sum(len(line) for (pid, _), line in slices.items() if pid == process) == len(each.schedule.ops)

    def around(event: Event) -> Event:
        line = slices[event["pid"], event["tid"]]
        return next(s for s in line if ns(s["ts"]) <= ns(event["ts"]) < ns(s["ts"]) + ns(s["dur"]))

    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    assert len(starts) == sum(event["ph"] == "s" for event in found)
    ends = [event for event in found if event["ph"] == "f"]
    assert {event["id"] for event in ends} == set(starts)
    kinds: set[tuple[str, str, str]] = set()
    for event in ends:
        giver, taker = around(starts[event["id"]]), around(event)
        assert ns(starts[event["id"]]["ts"]) <= ns(event["ts"])
        if event["cat"] == "ranks":
            assert giver["pid"] != taker["pid"]
            kinds.add((event["name"], giver["cat"], taker["cat"]))
        else:
            assert giver["pid"] == taker["pid"]
    # One micro-batch is added to the sum piece by piece, and the last rank makes the total of it.
    joined = {("sum", "P", "P"), ("sum", "P", "G")} if micro_batches == 1 else {("sum", "P", "R")}
    assert kinds == {*joined, ("total", "G", "G"), ("update of another rank", "U", "V")}
