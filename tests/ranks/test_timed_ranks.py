"""A timed step of several ranks: each gets the times of all, on one clock, and the step has the bits of any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.scheduler.dependency import derive_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.timing.rank_waits import books_of_ranks, rank_waits
from megatrain.scheduler.timing.ranks_run import RanksRun
from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.ranks.sides import Case, train
from tests.ranks.timed import timed, timed_there, timing_alone
from tests.tiers import wide

DEAL = ((1, 1, 1), (2, 1, 3), (2, 1, 1))
CASES = {
    "one host": Case("tied", "spread", DEAL, compile={"transfer": "copy"}),
    "shards": Case("tied", "spread", DEAL, compile={"across_devices": "shard"}),
    "two hosts": Case("tied", "overlap", DEAL, hosts="aba"),
}
ON_DEVICE = {Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.RECEIVE, Stream.SEND}


def assert_on_one_clock(run: RanksRun) -> None:
    """No sum and no total is used before the op that gives it has begun.

    A `V` waits for the ranks alone that have parameters of its block, which no table says.
    """
    times = {(rank, t.position): t for rank, timeline in enumerate(run.timelines) for t in timeline}
    waits = rank_waits(books_of_ranks(run.schedules), run.hosts)
    slack = 0.0 if len(set(run.hosts)) == 1 else 0.1  # seconds
    for place, befores in waits.ends.items():
        for before in befores:
            if before[0] != place[0] and place[1].stream != Stream.PEERS:
                assert times[before].start_s <= times[place].end_s + slack, (place, before)
    for place, before in waits.pieces.items():
        assert times[before].start_s <= times[place].end_s + slack, (place, before)
    assert min(t.start_s for t in times.values()) == 0
    assert max(t.end_s for t in times.values()) == run.step_s


# A step on one host is timed by the next test too.
@pytest.mark.parametrize("name", [wide(name) if name == "one host" else name for name in CASES])
def test_each_rank_gets_the_times_of_all(name: str, three: Processes, tmp_path: Path):
    case = CASES[name]
    found = three.run(timed, case, str(tmp_path))
    expected = train(case, None, None)
    for rank, each in enumerate(found):
        assert not isinstance(each, BaseException), each
        assert each["run"] == found[0]["run"]
        assert each["bands"] == [["plan", "measured"], ["plan"] * (case.hosts is None) + ["measured"]]
        assert each["name"] == "Tied"
        after = {key: value for key, value in each["after"].items() if rank == 0 or key != "generator"}
        assert_same({key: expected[key] for key in after}, after, f"rank {rank}")
        assert "rank 2, measured" in (tmp_path / f"rank {rank}.html").read_text()
    run: RanksRun = found[0]["run"]
    assert [each.kind.micro_batches for each in run.schedules] == [2, 1, 1]
    assert [each.kind.ranks for each in run.schedules] == ["first", "middle", "last"]
    assert run.hosts == ((0, 0, 0) if case.hosts is None else (0, 1, 0))
    assert_on_one_clock(run)


def test_all_ranks_time_a_step_or_none(three: Processes):
    found = three.run(timing_alone, CASES["one host"])
    for each in found:
        assert each[0].startswith(
            "RanksError: the ranks differ: the call is step.time(batch) on rank 0, but step(batch) on rank 1.\n"
        ), each
        assert each[1:] == ["1", "", "2"]


@pytest.mark.parametrize("order", [wide("late"), wide("early")])
def test_ranks_on_devices_are_timed_by_events_of_their_streams(order: str, devices: Processes, tmp_path: Path):
    found = devices.run(timed_there, Case("tied", "spread", DEAL, order=order), str(tmp_path))
    for each in found:
        assert not isinstance(each, BaseException), each
        assert each["run"] == found[0]["run"]
        assert each["bands"][1] == ["plan", "measured"]
    # Each simulated device has a time of its own, so only the ops of one rank can be compared.
    run: RanksRun = found[0]["run"]
    for schedule, timeline in zip(run.schedules, run.timelines, strict=True):
        times = {timing.position: timing for timing in timeline}
        for position, waits in derive_waits(schedule).items():
            for wait in waits:
                if {wait.stream, position.stream} <= ON_DEVICE:
                    assert times[wait].end_s <= times[position].start_s + 1e-5, (position, wait)
