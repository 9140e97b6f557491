"""Ranks to whose devices blocks are dealt train with the bits of one process; what they can't do is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from megatrain.reporting.ranks_figures import figures_of_run
from megatrain.reporting.ranks_report import RanksReport
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.timing.dealt_waits import dealt_waits
from megatrain.scheduler.timing.rank_waits import books_of_ranks
from megatrain.scheduler.timing.ranks_run import RanksRun
from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.ranks.rounds import (
    CASE,
    ROUND,
    dying_round,
    failing_early_round,
    failing_round,
    frozen_alone,
    frozen_round,
    naming,
    nonfinite_round,
    prepared_round,
    preparing_round,
    refused_rounds,
)
from tests.ranks.shared_processes import processes_fixture
from tests.ranks.sides import EDITS, Case, resume, resume_here, train
from tests.ranks.test_parity import THREE, TWO, assert_parity
from tests.ranks.timed import timed
from tests.tiers import wide
from tests.training.parity import MODES

BF16 = {**ROUND, "precision": "bf16"}
CASES = {
    "tied-deferred-clipped-bf16": Case("tied", "deferred", THREE, compile=BF16, looks=True),
    "adapted-overlap-copies-chaos": Case(
        "adapted", "overlap", THREE, compile={**ROUND, "transfer": "copy"}, chaos=3, optimizer="sgd"
    ),
    "lora-spread-weighted": Case("lora", "spread", TWO[1:], compile=ROUND, is_weighted=True),
}
FURTHER = (
    {
        f"{task}-{mode}-{transfer}": Case(task, mode, THREE, compile={**ROUND, "transfer": transfer})
        for task in ("stack", "tied", "adapted")
        for mode in MODES
        for transfer in ("bind", "copy")
    }
    | {
        f"{task}-{mode}-chaos-{seed}": Case(task, mode, THREE, compile={**ROUND, "transfer": "copy"}, chaos=10 * seed)
        for seed, (task, mode) in enumerate(product(("tied", "adapted"), MODES), start=1)
    }
    | {f"tied-{mode}-{edit}": Case("tied", mode, THREE, compile=BF16, edits=edit) for mode in MODES for edit in EDITS}
    | {f"{task}-overlap": Case(task, "overlap", TWO, compile=ROUND) for task in ("gpt", "llama", "t5")}
    | {f"llama-{mode}-bf16": Case("llama", mode, TWO, compile=BF16) for mode in MODES}
    | {f"tied-{mode}-hooks": Case("tied", mode, THREE, compile=ROUND, hooks=True) for mode in MODES}
    | {
        "lora-spread-weighted-longer": Case("lora", "spread", TWO, compile=ROUND, is_weighted=True),
        "tied-overlap-norm-sum": Case(
            "tied", "overlap", THREE, compile=ROUND, options={"report_norm": True, "reduce": "sum"}
        ),
        "tied-serial-budget": Case("tied", "serial", THREE, compile={**ROUND, "memory": "64KiB"}),
        "tied-overlap-offload": Case("tied", "overlap", THREE, compile={**ROUND, "activations": "offload"}),
    }
)
FOUR = {
    f"{task}-{mode}-four": Case(task, mode, [(1, 2, 1, 1), (2, 1, 1, 3), (1, 1, 1, 1)], compile=ROUND)
    for task in ("stack", "tied")
    for mode in ("overlap", "deferred")
}


processes = processes_fixture(3, "function")


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_dealt_blocks_train_with_the_bits_of_one_process(name: str, three: Processes):
    assert_parity(CASES[name], three)


@pytest.mark.parametrize("name", [*map(wide, FURTHER)])
def test_more_ranks_with_dealt_blocks_train_with_the_bits_of_one_process(name: str, three: Processes):
    assert_parity(FURTHER[name], three)


@pytest.mark.parametrize("name", [*map(wide, FOUR)])
def test_four_ranks_with_dealt_blocks_train_with_the_bits_of_one_process(name: str, four: Processes):
    assert_parity(FOUR[name], four)


@pytest.mark.parametrize("name", [*map(wide, ("stack", "tied"))])
def test_a_checkpoint_of_dealt_blocks_goes_on_in_one_process_and_back(name: str, three: Processes, tmp_path: Path):
    case, folder = Case(name, "overlap", THREE, compile=ROUND), str(tmp_path / "run")
    assert three.run(resume_here, Case(name, "overlap", THREE[:1], compile=ROUND), folder, 0, True) == [True] * 3
    expected = resume(Case(name, "overlap", THREE), None, None, folder, 1, saves=False)
    for found in three.run(resume_here, case, folder, 1, False):
        assert not isinstance(found, BaseException), found
        generator = {"generator": found["generator"]}  # of a checkpoint, on each rank
        assert_same({**expected, **generator}, found)


REFUSED = (
    "DrawsError: the model draws random numbers that nobody can draw ahead of its forward.",
    "ExecuteError: a module or a hook runs its own code at each step, which several ranks can't do yet.",
    "ExecuteError: Python code reads values of the forward, and the blocks are dealt to devices.",
    "ExecuteError: the forward leaves a tensor in `",
    "LowerError: the model returns `",
    "LowerError: 1 block can't be dealt to 3 devices.",
    "OptimizerError: hooks run before or after the optimizer's step, and the blocks are dealt to devices.",
    'OptionError: across_devices="round" is impossible: each rank of this host has a store of its own.',
    "ExecuteError: a micro-batch can't be given to other ranks: TypeError: cannot pickle '_thread.lock' object",
    "",
)


def test_what_cannot_be_dealt_is_refused_by_name_and_the_next_step_follows(three: Processes):
    for found in three.run(refused_rounds):
        for text, expected in zip(found, REFUSED, strict=True):
            assert text.startswith(expected), text
            assert (text == "") == (expected == "")


def test_a_step_whose_gradients_are_not_finite_is_skipped_by_all(three: Processes):
    found = three.run(nonfinite_round)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == 1
    assert found[0][1].startswith("the gradient of `")


def test_a_prepared_step_changes_nothing_and_is_the_one_that_runs(three: Processes):
    expected = train(CASE, None, None)
    for rank, found in enumerate(three.run(preparing_round)):
        assert not isinstance(found, BaseException), found
        assert found["same"]
        assert found["is planned"]
        after = {key: value for key, value in found["after"].items() if rank == 0 or key != "generator"}
        assert_same({key: expected[key] for key in after}, after, f"rank {rank}")


def test_ranks_that_do_not_prepare_together_are_told_where_each_is(three: Processes):
    found = three.run(prepared_round)
    places = "RanksError: the ranks are in different calls: rank 0 in a step, rank 1 in step.prepare, rank 2 in a step."
    for rank, (prepared, taken, apart, empty, unfit, last) in enumerate(found):
        assert "dealt to: 3" in prepared
        assert prepared == taken
        assert apart.startswith(places), apart
        named = "" if rank == 1 else "RanksError: rank 1 failed before the step: "
        assert empty.startswith(f"{named}ExecuteError: a step was called with an empty list."), empty
        assert unfit, unfit
        assert last == ""
    assert len({table for table, *_ in found}) == 3


def test_ranks_that_train_nothing_take_part_and_calls_see_all_updates(three: Processes):
    expected = frozen_alone(3)
    for found in three.run(frozen_round):
        assert not isinstance(found, BaseException), found
        assert_same(expected, found)


def test_all_ranks_have_the_texts_that_a_forward_leaves(three: Processes):
    expected = naming(None)
    assert expected[-2:] == ["seen", ["seen", "before"]]
    for found in three.run(naming):
        assert not isinstance(found, BaseException), found
        assert_same(expected, found)


def test_a_rank_that_fails_before_a_step_leaves_all_as_they_were(three: Processes):
    found = three.run(failing_early_round)
    assert [count for _, count in found] == [2, 2, 2]
    for rank, (texts, _) in enumerate(found):
        assert texts[0] == texts[3] == ""
        named = "" if rank == 1 else "RanksError: rank 1 failed before the step: "
        assert texts[1].startswith(f"{named}ExecuteError: a step was called with an empty list.")
        assert texts[2]


def test_a_timed_step_has_the_lanes_of_all_devices(three: Processes, tmp_path: Path):
    case = Case("tied", "serial_clipped", THREE[:2], compile={**ROUND, "transfer": "copy"}, draws=True)
    found = three.run(timed, case, str(tmp_path))
    expected = train(case, None, None)
    for rank, each in enumerate(found):
        assert not isinstance(each, BaseException), each
        assert each["run"] == found[0]["run"]
        assert each["bands"] == [["plan", "measured"]] * 2
        after = {key: value for key, value in each["after"].items() if rank == 0 or key != "generator"}
        assert_same({key: expected[key] for key in after}, after, f"rank {rank}")
        assert "rank 2, measured" in (tmp_path / f"rank {rank}.html").read_text()
    run: RanksRun = found[0]["run"]
    check_devices(run.schedules)
    drawn = RanksReport(figures_of_run("Tied", (), run, None))
    drawn.perfetto(tmp_path / "trace.json")
    assert '"values"' in (tmp_path / "trace.json").read_text()
    times = {(rank, t.position): t for rank, timeline in enumerate(run.timelines) for t in timeline}
    for place, befores in dealt_waits(books_of_ranks(run.schedules)).ends.items():
        for before in befores:
            assert times[before].start_s <= times[place].end_s, (place, before)


@pytest.mark.parametrize("op", ["F0.1", *map(wide, ("X0.0", "D0.2", "B1.0", "U0", "W0@0", "G1"))])
def test_an_op_that_fails_ends_the_training_of_all_with_its_name(op: str, three: Processes):
    found = three.run(failing_round, op)
    assert f"{op} fail" in found[1][0], found
    for rank in (0, 2):
        assert found[rank][0].startswith("RanksError: rank 1 failed: "), found[rank]
    for _, then in found:
        assert then.startswith("ExecuteError: the ranks are no longer at the same step"), then


@pytest.mark.parametrize("when", ["values", *map(wide, ("update", "between", "still"))])
def test_a_rank_that_is_killed_is_named_by_all_others(when: str, processes: Processes):
    for text in processes.run(dying_round, when, 6.0, of=(0, 2)):
        named = "rank 1 ended: no sign of life", "rank 1 ended.", "rank 1 failed: it ended"
        assert text.removeprefix("RanksError: ").startswith(named), text
