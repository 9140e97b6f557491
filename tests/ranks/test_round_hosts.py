"""Hosts that each deal the blocks to their devices train together with the bits of one process."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatrain.errors import RanksError
from megatrain.ranks.chain import column
from megatrain.scheduler.timing.dealt_waits import waits_of
from megatrain.scheduler.timing.rank_waits import books_of_ranks
from megatrain.scheduler.timing.ranks_run import RanksRun
from tests.comparing import assert_same, difference
from tests.ranks.hosted import (
    CASE,
    HOSTS,
    dealing_otherwise,
    differing_hosts,
    disturbed_hosts,
    failing_hosts,
    nonfinite_hosts,
    on_hosts,
    passing,
    ungrouped,
)
from tests.ranks.processes import Processes
from tests.ranks.rounds import ROUND, dying_round, frozen_alone, frozen_round
from tests.ranks.shared_processes import processes_fixture
from tests.ranks.sides import EDITS, Case, resume, resume_here, train
from tests.ranks.test_parity import assert_parity
from tests.ranks.timed import timed
from tests.tiers import wide
from tests.training.parity import MODES

DEAL = [(1, 2, 1, 1), (2, 1, 1, 3), (1, 1, 1, 1)]
BF16 = {**ROUND, "precision": "bf16"}
CASES = {
    "tied-deferred-clipped-bf16-draws": Case(
        "tied", "deferred", DEAL, compile=BF16, hosts=HOSTS, draws=True, is_weighted=True, looks=True
    ),
    "adapted-overlap-copies-chaos": Case(
        "adapted", "overlap", DEAL, compile={**ROUND, "transfer": "copy"}, hosts=HOSTS, chaos=3, optimizer="sgd"
    ),
}
FURTHER = (
    {
        f"{task}-{mode}-{transfer}": Case(task, mode, DEAL, compile={**ROUND, "transfer": transfer}, hosts=HOSTS)
        for task in ("stack", "tied", "adapted")
        for mode in MODES
        for transfer in ("bind", "copy")
    }
    | {
        f"{task}-{mode}-chaos-{seed}": Case(
            task, mode, DEAL, compile={**BF16, "transfer": "copy"}, hosts=HOSTS, draws=True, chaos=10 * seed
        )
        for seed, (task, mode) in enumerate(((t, m) for t in ("tied", "dropping") for m in MODES), start=1)
    }
    | {
        f"tied-{mode}-{edit}": Case("tied", mode, DEAL, compile=BF16, hosts=HOSTS, edits=edit)
        for mode in ("overlap", "serial_clipped")
        for edit in EDITS
    }
    | {
        f"{task}-spread-weighted": Case(task, "spread", DEAL, compile=ROUND, hosts=HOSTS, is_weighted=True, draws=True)
        for task in ("gpt", "llama", "t5", "lora")
    }
    | {f"tied-{mode}-hooks": Case("tied", mode, DEAL, compile=ROUND, hosts=HOSTS, hooks=True) for mode in MODES}
    | {
        "tied-overlap-norm-sum": Case(
            "tied", "overlap", DEAL, compile=ROUND, hosts=HOSTS, options={"report_norm": True, "reduce": "sum"}
        ),
        "tied-serial-budget": Case("tied", "serial", DEAL, compile={**ROUND, "memory": "64KiB"}, hosts=HOSTS),
        "tied-overlap-offload": Case("tied", "overlap", DEAL, compile={**ROUND, "activations": "offload"}, hosts=HOSTS),
    }
)
TELLING = "tied-deferred-clipped-bf16-draws"
THREE_HOSTS = {
    f"{task}-{mode}-three-hosts": Case(
        task, mode, [(1, 1, 2, 1, 1, 1), (1, 3, 1, 1, 2, 2)], compile=BF16, hosts="aabbcc", draws=True
    )
    for task in ("tied", "dropping")
    for mode in ("overlap", "serial_clipped")
}


processes = processes_fixture(4, "function")
six = processes_fixture(6)


@pytest.mark.parametrize("name", [name if name == TELLING else wide(name) for name in CASES | FURTHER])
def test_hosts_with_dealt_blocks_train_with_the_bits_of_one_process(name: str, four: Processes):
    assert_parity((CASES | FURTHER)[name], four)


class Exchanged(Case):
    """One process that has the micro-batches of the second host first."""

    def batches(self, step: int) -> list[list[object]]:
        """See `Case`."""
        first, second, *others = super().batches(step)
        return [*others, first, second]


def test_another_order_of_hosts_has_other_bits():
    case = replace(CASES[TELLING], draws=False, deal=DEAL[:2])
    exchanged = Exchanged(**{each.name: getattr(case, each.name) for each in fields(case)})
    one, other = (train(each, None, None)["masters"] for each in (case, exchanged))
    assert difference(one, other) is not None


@pytest.mark.parametrize("name", [*map(wide, THREE_HOSTS)])
def test_three_hosts_train_with_the_bits_of_one_process(name: str, six: Processes):
    assert_parity(THREE_HOSTS[name], six)


def test_sums_go_from_host_to_host_and_values_stay_on_a_host(four: Processes):
    first, last = (
        {"place": [place, place, "own", 2, 2], "channels": [channel, "totals"], "within": None, "ops": sorted(ops)}
        for place, channel, ops in (("first", "after", "GXDP"), ("last", "before", "GXDR"))
    )
    assert four.run(on_hosts, HOSTS, passing) == [first, first, last, last]


def test_hosts_that_would_deal_otherwise_deal_as_the_first_one(four: Processes):
    case = replace(CASE, compile=ROUND, hosts=HOSTS, deal=CASE.deal[:2])
    expected = train(case, None, None)
    for rank, found in enumerate(four.run(on_hosts, HOSTS, dealing_otherwise, case)):
        assert not isinstance(found, BaseException), found
        assert_same({key: expected[key] for key in found}, found, f"rank {rank}")


@pytest.mark.parametrize("name", [*map(wide, ("stack", "tied"))])
def test_a_checkpoint_of_two_hosts_goes_on_in_one_process_and_back(name: str, four: Processes, tmp_path: Path):
    case, folder = Case(name, "overlap", DEAL, compile=ROUND, hosts=HOSTS), str(tmp_path / "run")
    assert four.run(resume_here, replace(case, deal=DEAL[:1]), folder, 0, True) == [True] * 4
    expected = resume(replace(case, compile={}), None, None, folder, 1, saves=False)
    for found in four.run(resume_here, case, folder, 1, False):
        assert not isinstance(found, BaseException), found
        generator = {"generator": found["generator"]}  # of a checkpoint, on each rank
        assert_same({**expected, **generator}, found)
    alone = str(tmp_path / "alone")
    resume(replace(case, compile={}, deal=DEAL[:2]), None, None, alone, 0, saves=True)
    expected = resume(replace(case, compile={}), None, None, alone, 2, saves=False)
    for found in four.run(resume_here, case, alone, 2, False):
        assert not isinstance(found, BaseException), found
        assert_same({**expected, "generator": found["generator"]}, found)


@pytest.mark.parametrize("hosts", [*map(wide, ("aabb", "aaaa"))])
def test_ranks_that_train_nothing_take_part_and_calls_see_all_updates(hosts: str, four: Processes):
    expected = frozen_alone(4)
    for found in four.run(on_hosts, hosts, frozen_round):
        assert not isinstance(found, BaseException), found
        assert_same(expected, found)


def test_a_step_whose_gradients_are_not_finite_is_skipped_on_all_hosts(four: Processes):
    found = four.run(on_hosts, HOSTS, nonfinite_hosts)
    assert found == [found[0]] * 4
    assert found[0][0] == 1
    assert found[0][1].startswith("the gradient of `")


def test_hosts_that_train_other_parameters_are_refused_and_the_next_step_follows(four: Processes):
    for rank, (text, then) in enumerate(four.run(on_hosts, HOSTS, differing_hosts)):
        assert text.startswith("RanksError: the ranks differ: rank 2 has other blocks than rank 0"), (rank, text)
        assert then == ""


@pytest.mark.parametrize("what", ["circle", wide("unsound")])
def test_tables_of_hosts_that_are_not_one_step_are_refused_on_all_and_the_next_step_follows(what: str, four: Processes):
    for rank, (text, then, count) in enumerate(four.run(on_hosts, HOSTS, disturbed_hosts, what)):
        expected = "ScheduleError: hosts wait for each other in a circle"
        if what == "unsound":
            named = "RanksError: rank 2 failed before the step: " if rank < 2 else ""
            expected = f"{named}ScheduleError: these tables are no step"
        assert text.startswith(expected), (rank, text)
        assert (then, count) == ("", "1")


@pytest.mark.parametrize("mode", [*map(wide, ("overlap", "serial_clipped"))])
def test_a_timed_step_has_the_lanes_of_all_hosts(mode: str, four: Processes, tmp_path: Path):
    case = Case("tied", mode, DEAL[:2], compile={**ROUND, "transfer": "copy"}, hosts=HOSTS, draws=True)
    expected, found = train(case, None, None), four.run(timed, case, str(tmp_path))
    for rank, each in enumerate(found):
        assert not isinstance(each, BaseException), each
        after = {key: value for key, value in each["after"].items() if rank == 0 or key != "generator"}
        assert_same({key: expected[key] for key in after}, after, f"rank {rank}")
    run: RanksRun = found[0]["run"]
    assert run.hosts == (0, 0, 1, 1)
    waits = waits_of(books_of_ranks(run.schedules), run.hosts)
    times = {(rank, t.position): t for rank, timeline in enumerate(run.timelines) for t in timeline}
    for place, befores in waits.ends.items():
        for before in befores:
            if run.hosts[place[0]] == run.hosts[before[0]]:  # others have other clocks
                assert times[before].start_s <= times[place].end_s, (place, before)
    assert {(place[0], before[0]) for place, before in waits.pieces.items()} == {(2, 0), (3, 1)}


@pytest.mark.parametrize("op", ["B1.0", *map(wide, ("F0.1", "X0.0", "D0.1", "R1", "P1", "U0", "W0@0", "G1"))])
def test_an_op_that_fails_ends_the_training_on_all_hosts_with_its_name(op: str, four: Processes):
    who = 3 if op == "R1" else 1  # the first host gets no sum
    found = four.run(on_hosts, HOSTS, failing_hosts, op, who)
    assert f"{op} fail" in found[who][0], found
    for rank in {*range(4)} - {who}:
        assert found[rank][0].startswith(f"RanksError: rank {who} failed: "), found[rank]
    for _, then in found:
        assert then.startswith("ExecuteError: the ranks are no longer at the same step"), then


@pytest.mark.parametrize("when", [*map(wide, ("values", "update", "between", "still"))])
def test_a_rank_that_is_killed_is_named_on_all_hosts(when: str, processes: Processes):
    for text in processes.run(on_hosts, HOSTS, dying_round, when, 6.0, CASE, of=(0, 2, 3)):
        named = "rank 1 ended: no sign of life", "rank 1 ended.", "rank 1 failed: it ended"
        assert text.removeprefix("RanksError: ").startswith(named), text


def test_hosts_that_cannot_deal_alike_are_refused(four: Processes):
    for hosts, text in (("aaab", "rank 3 shares no memory with others"), ("abab", "ranks 0, 2 are on one host")):
        for found in four.run(on_hosts, hosts, ungrouped):
            assert found.startswith(f"RanksError: {text}"), found
    with pytest.raises(RanksError, match="hosts have 2 and 3 ranks, so that blocks can't be dealt"):
        column(0, [(0, 1), (2, 3, 4)])
    assert [column(rank, [(0, 1), (2, 3), (4, 5)]) for rank in (0, 3)] == [[0, 2, 4], [1, 3, 5]]
