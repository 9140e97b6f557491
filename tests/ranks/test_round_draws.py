"""Dealt blocks draw the random numbers of one process, each on its own device; what can't be known ahead is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.comparing import assert_same, difference
from tests.ranks.processes import Processes
from tests.ranks.round_draws import (
    CASE,
    SAME,
    WRONG,
    counting_round,
    differing_round,
    interrupted_round,
    interrupted_steps,
    wrong_round,
)
from tests.ranks.rounds import ROUND
from tests.ranks.sides import Case, begin, resume, resume_here, state_of, take, train
from tests.ranks.test_parity import THREE, TWO, assert_parity
from tests.ranks.timed import timed
from tests.tiers import wide
from tests.training.parity import MODES

BF16 = {**ROUND, "precision": "bf16"}
CASES = {
    "tied-deferred-bf16-of-two": Case(
        "tied", "deferred", TWO, compile={**BF16, "activations": "recompute"}, draws=True
    ),
    "dropping-serial-clipped-chaos": Case(
        "dropping",
        "serial_clipped",
        THREE,
        compile={**ROUND, "transfer": "copy"},
        draws=True,
        chaos=5,
        is_weighted=True,
    ),
}
FURTHER = (
    {
        f"{task}-{mode}-{activations}": Case(
            task, mode, deal, compile={**BF16, "activations": activations}, draws=True, chaos=seed
        )
        for seed, (task, deal, mode, activations) in enumerate(
            (task, deal, mode, activations)
            for task, deal in (("tied", THREE), ("adapted", TWO), ("dropping", THREE))
            for mode in MODES
            for activations in ("keep", "recompute", "offload")
        )
    }
    | {f"{task}-overlap": Case(task, "overlap", TWO, compile=ROUND, draws=True) for task in ("gpt", "t5", "lora")}
    | {
        "tied-overlap-bf16": Case("tied", "overlap", THREE, compile=BF16, draws=True),
        "dropping-deferred-of-two": Case(
            "dropping", "deferred", TWO, compile={**ROUND, "activations": "recompute"}, draws=True
        ),
    }
    | {
        f"dropping-{mode}-{edit}": Case("dropping", mode, THREE, compile=BF16, edits=edit, draws=True, looks=True)
        for mode in ("spread", "serial_clipped")
        for edit in ("unseen", "new moments")
    }
)
FOUR = {
    f"{task}-{mode}": Case(task, mode, [(1, 2, 1, 1), (2, 1, 1, 3), (1, 1, 1, 1)], compile=ROUND, draws=True)
    for task in ("tied", "dropping")
    for mode in MODES
}


@pytest.mark.parametrize("name", CASES)
def test_dealt_blocks_draw_the_numbers_of_one_process(name: str, three: Processes):
    assert_parity(CASES[name], three)


@pytest.mark.parametrize("name", [*map(wide, FURTHER)])
def test_more_dealt_blocks_draw_the_numbers_of_one_process(name: str, three: Processes):
    assert_parity(FURTHER[name], three)


@pytest.mark.parametrize("name", [*map(wide, FOUR)])
def test_dealt_blocks_of_four_ranks_draw_the_numbers_of_one_process(name: str, four: Processes):
    assert_parity(FOUR[name], four)


def test_calls_skipped_steps_and_draws_of_the_user_go_between(three: Processes):
    expected = interrupted_steps(None, None)
    for rank, found in enumerate(three.run(interrupted_round)):
        assert not isinstance(found, BaseException), found
        assert ("calls" in found) == (rank == 0)
        assert_same({key: expected[key] for key in found}, found, f"rank {rank}")


@pytest.mark.parametrize("reader", ["round", *map(wide, ("replicate", "alone"))])
def test_a_checkpoint_goes_on_with_the_numbers_that_follow(reader: str, three: Processes, tmp_path: Path):
    folder, case = str(tmp_path / "run"), replace(CASE, mode="deferred")
    assert three.run(resume_here, replace(case, deal=case.deal[:1]), folder, 0, True) == [True] * 3
    if reader == "alone":
        found = [resume(case, None, None, folder, 1, saves=False)]
    else:
        there = replace(case, compile={"across_devices": reader})
        found = three.run(resume_here, there, folder, 1, False)
    torch.manual_seed(6)
    compiled, optimizer, step = begin(case)
    take(case, None, step, [0])
    expected = {**take(case, None, step, [1, 2]), **state_of(compiled, optimizer, step)}
    for rank, each in enumerate(found):
        assert not isinstance(each, BaseException), each
        if rank > 0:
            del each["generator"]
        assert_same({name: expected[name] for name in each}, each, f"rank {rank}")


@pytest.mark.wide  # tests/ranks/test_round.py times a step that draws
def test_a_timed_step_draws_the_same(three: Processes, tmp_path: Path):
    case = replace(CASE, deal=CASE.deal[:2])
    expected = train(case, None, None)
    for rank, found in enumerate(three.run(timed, case, str(tmp_path))):
        assert not isinstance(found, BaseException), found
        after = {key: value for key, value in found["after"].items() if rank == 0 or key != "generator"}
        assert_same({key: expected[key] for key in after}, after, f"rank {rank}")


@pytest.mark.parametrize("what", WRONG)
def test_a_block_that_begins_elsewhere_is_refused_or_has_other_bits(what: str, three: Processes):
    expected, found = train(SAME, None, None), three.run(wrong_round, what)
    if what == "another micro-batch":
        assert all(difference(expected["losses"], each["losses"]) is not None for each in found)
    else:
        assert any(text.startswith("DrawsError: a block drew another number of random values") for text in found)
        assert all(text.startswith(("DrawsError: a block drew", "RanksError: rank ")) for text in found), found


def test_ranks_that_draw_other_numbers_ahead_are_refused_and_the_next_step_follows(three: Processes):
    torch.manual_seed(6)
    _, _, step = begin(CASE)
    expected = take(CASE, None, step, range(2))["losses"]
    for texts, count, losses in three.run(differing_round):
        assert texts[0] == texts[2] == ""
        assert texts[1].startswith("RanksError: the ranks differ: rank 1 has drawn other random numbers than rank 0")
        assert count == 2
        assert_same(expected, losses)


def test_draws_that_depend_on_values_end_the_training_of_all(three: Processes):
    found = three.run(counting_round)
    assert any(texts[0].startswith("DrawsError: a block drew another number of random values") for texts in found)
    for first, then in found:
        assert first.startswith(("DrawsError: a block drew", "RanksError: rank ")), first
        assert then.startswith("ExecuteError: the ranks are no longer at the same step"), then
