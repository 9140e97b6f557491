"""When each op of each rank begins and ends, whom it waited for, and what holds the step of all up."""

from __future__ import annotations

from math import inf

import pytest
from expecttest import TestCase

from megatrain.hardware.hardware import Hardware
from megatrain.reporting.ranks_report import RanksReport
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.bands import GAPS
from megatrain.scheduler.timing.rank_waits import books_of_ranks, rank_waits
from megatrain.scheduler.timing.ranks_band import RanksBand, ranks_band
from megatrain.scheduler.timing.shared import Timing
from tests.reporting.rank_steps import HOST, figures, run_of_ranks, simulated, tables

STEPS = {
    "one": tables(2),
    "four": tables(4, micro_batches=2),
    "unlike": tables(3, 5, micro_batches=(2, 1, 3)),
    "clipped": tables(3, 4, micro_batches=2, updates="deferred", clip=True),
    "apart": tables(3, store="own"),
}
MACHINES = {
    "usual": HOST,
    "slow links": Hardware(1e8, 1e8, 1e13, host_bytes_per_s=1e12),
    "slow host": Hardware(1e11, 1e11, 1e13, host_bytes_per_s=1e9),
    "no launches": Hardware(1e10, 1e10, 1e12),
}


def planned(found: list[Schedule], machine: Hardware) -> RanksBand:
    simulation, books = simulated(found, machine), books_of_ranks(found)
    return ranks_band("plan", "", books, rank_waits(books), simulation.timelines, simulation.stood_s)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", STEPS)
def test_no_op_begins_before_what_it_waits_for_on_any_rank(name: str, machine: str):
    found = STEPS[name]
    simulation = simulated(found, MACHINES[machine])
    assert simulation == simulated(found, MACHINES[machine])
    for schedule, timeline in zip(found, simulation.timelines, strict=True):
        assert [timing.position for timing in timeline] == [position for position, _ in schedule.positions()]
    assert max(t.end_s for timeline in simulation.timelines for t in timeline) == simulation.step_s
    times = {(rank, t.position): t for rank, timeline in enumerate(simulation.timelines) for t in timeline}
    waits = rank_waits(books_of_ranks(found))
    for place, befores in waits.ends.items():
        assert all(times[before].end_s <= times[place].start_s for before in befores), place
    for place, before in waits.pieces.items():
        assert times[before].end_s < times[place].end_s, place
        lasts = times[place].end_s - times[place].start_s
        assert 0 <= simulation.stood_s.get(place, 0.0) < lasts
    assert set(simulation.stood_s) <= set(waits.pieces)
    for timeline in simulation.timelines:
        free: dict[Stream, float] = {}
        for timing in timeline:
            assert free.get(timing.position.stream, 0.0) <= timing.start_s <= timing.end_s
            free[timing.position.stream] = timing.end_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", STEPS)
def test_the_path_leads_back_to_the_beginning_and_all_of_the_step_is_somebody_s(name: str, machine: str):
    band = planned(STEPS[name], MACHINES[machine])
    assert sum(band.shares.values()) == pytest.approx(1)
    assert GAPS not in band.shares  # nothing on paper waits for anything else
    ops = [band.timelines[rank][index] for rank, index in band.path]
    assert ops[0].start_s == 0
    assert ops[-1].end_s == band.step_s
    for at, before in zip(band.path[1:], band.path, strict=False):
        assert band.follows[at[0]][at[1]] == before
    assert [op.end_s for op in ops] == sorted(op.end_s for op in ops)


def test_whom_an_op_needs_on_another_rank():
    found = STEPS["four"]
    band = planned(found, HOST)
    ops = [list(schedule.positions()) for schedule in found]
    needs = {
        (rank, str(ops[rank][index][1])): (other[0], str(ops[other[0]][other[1]][1]))
        for (rank, index), other in band.others.items()
    }
    assert needs[1, "R2"] == (0, "P2")
    assert needs[3, "R0"] == (2, "P0")
    assert needs[2, "G1"] == (3, "G1")
    assert (3, "G1") not in needs
    assert {other[1] for (_, name), other in needs.items() if name == "V1"} == {"U1"}
    assert all(rank != other[0] for (rank, _), other in needs.items())


def test_a_link_that_holds_the_sums_up_is_named():
    band = planned(tables(3, 6), MACHINES["slow links"])
    assert next(iter(band.shares))[1] in ("send", "h2d", "d2h")
    fast = planned(tables(3, 6, micro_batches=3), Hardware(inf, inf, 1e9))
    (rank, stream), _ = next(iter(fast.shares.items()))
    assert stream == "compute"
    # Each rank's second micro-batch waits for the last one of the rank before.
    idle = [its.get(Stream.COMPUTE, 0.0) for its in fast.waits_s]
    assert idle[0] == 0 < idle[1] < idle[2]
    assert rank == 2


def test_clocks_of_hosts_are_set_by_the_end_of_the_step():
    found = tables(3)
    one, several = run_of_ranks(found), run_of_ranks(found, hosts="aba")
    assert one.hosts == (0, 0, 0)
    assert several.hosts == (0, 1, 0)
    assert one.clocks == ""
    assert several.clocks.startswith("the clocks of 2 hosts are set by the end of the step")
    for mine, other in zip(one.timelines, several.timelines, strict=True):
        assert [t.end_s for t in other] == pytest.approx([t.end_s for t in mine], abs=1e-9)
    assert several.step_s == pytest.approx(1.25 * simulated(found).step_s)
    assert str(several).count("\nrank ") == 3


class TestWords(TestCase):
    def test_what_holds_the_step_up(self) -> None:
        self.assertExpectedInline(
            str(RanksReport(figures(tables(3, micro_batches=2)))),
            """\
report: Model, 3 ranks, 3 blocks, 96 ops
  plan: 106 us a step of 3 ranks
  plan: held up by compute of rank 0 21% of the time
    then h2d of rank 0 18%, compute of rank 1 11%, receive of rank 1 11%, others 39%
    of all ranks together: compute 38%, h2d 18%, receive 16%, send 14%, d2h 11%, host 3%, peers 1%
  plan: because of other ranks, compute of rank 2 stands idle longest, 38.9 us or 37% of the step
  measured: 133 us a step of 3 ranks
  measured: held up by compute of rank 0 21% of the time
    then h2d of rank 0 18%, compute of rank 1 11%, receive of rank 1 11%, others 39%
    of all ranks together: compute 38%, h2d 18%, receive 16%, send 14%, d2h 11%, host 3%, peers 1%
  measured: because of other ranks, compute of rank 2 stands idle longest, 48.7 us or 37% of the step
  the measured step took 25% longer than the plan""",
        )

    def test_a_step_that_takes_no_time(self) -> None:
        free = Hardware(inf, inf, inf)
        self.assertExpectedInline(planned(tables(2), free).words()[0], """plan: a step takes no time""")


def test_a_measured_step_has_time_between_its_ops():
    found = tables(3)
    run = run_of_ranks(found)
    first, *others = run.timelines
    late = [[Timing(t.position, t.start_s + 1e-3, t.end_s + 1e-3) for t in first], *others]
    books = books_of_ranks(found)
    band = ranks_band("measured", "", books, rank_waits(books), late)
    # The last rank's total is of rank 0's sum, so all wait for it.
    assert band.step_s > run.step_s
    assert band.path[0][0] == 0
    assert sum(band.shares.values()) == pytest.approx(1)
    assert band.shares[GAPS] == pytest.approx(1e-3 / band.step_s, rel=0.1)
