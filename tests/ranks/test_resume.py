"""A checkpoint that ranks wrote goes on in any number of ranks, or in one process, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sides import Case, begin, resume, resume_here, state_of, take, train_here

# The same micro-batches in each step, dealt to two ranks and to three.
TWO = Case("tied", "deferred", [(1, 3)] * 2, compile={"precision": "bf16"})
FOUR_STEPS = replace(TWO, deal=[(1, 3)] * 4)
READERS = {"three": [(1, 1, 2)] * 4, "two": [(2, 2)] * 4, "alone": None}


@pytest.mark.parametrize("reader", ["three", nightly("two"), nightly("alone")])
def test_a_checkpoint_of_two_ranks_goes_on_elsewhere(reader: str, three: Processes, tmp_path: Path):
    folder = str(tmp_path / "run")
    assert three.run(resume_here, TWO, folder, 0, True)[:2] == [True, True]
    deal = READERS[reader]
    if deal is None:
        found = [resume(FOUR_STEPS, None, None, folder, 2, saves=False)]
    else:
        found = three.run(resume_here, replace(FOUR_STEPS, deal=deal), folder, 2, False)[: len(deal[0])]
    compiled, optimizer, step = begin(FOUR_STEPS)
    torch.manual_seed(6)
    take(FOUR_STEPS, None, step, range(2))
    expected = {**take(FOUR_STEPS, None, step, range(2, 4)), **state_of(compiled, optimizer, step)}
    for rank, side in enumerate(found):
        assert not isinstance(side, BaseException), side
        if rank > 0:
            del side["generator"]
        assert_same({name: expected[name] for name in side}, side, f"rank {rank}")


def test_a_checkpoint_has_the_generators_of_each_rank(three: Processes, tmp_path: Path):
    folder = str(tmp_path / "run")
    drawn = replace(TWO, deal=[(1, 1)] * 4, draws=True)
    undisturbed = three.run(train_here, drawn)[:2]
    assert three.run(resume_here, replace(drawn, deal=drawn.deal[:2]), folder, 0, True)[:2] == [True, True]
    for rank, found in enumerate(three.run(resume_here, drawn, folder, 2, False)[:2]):
        assert not isinstance(found, BaseException), found
        expected = undisturbed[rank]
        found["losses"], found["norms"] = (
            expected["losses"][:2] + found["losses"],
            expected["norms"][:2] + found["norms"],
        )
        assert_same(expected, found, f"rank {rank}")
    first, second = (each["generator"] for each in undisturbed)
    assert not torch.equal(first, second), "each rank draws from its own"
