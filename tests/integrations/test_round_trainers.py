"""Trainers with dealt blocks: the bits of one process, whose trainer's code one of the processes runs for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer as StockTrainer

from tests.comparing import assert_same
from tests.integrations.round_trainers import (
    OF_FOUR,
    OF_ROUND,
    REFUSED_DEALT,
    ROUND,
    refused_dealt,
    train_alone,
    train_dealt,
)
from tests.integrations.test_several import assert_as_one, trained
from tests.ranks.hosted import HOSTS, on_hosts
from tests.ranks.processes import Processes
from tests.ranks.shared_processes import processes_fixture
from tests.tiers import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("one_thread"),
]
FAST = ("keeping", "three micro-batches")


two = processes_fixture(2)
three = processes_fixture(3)
four = processes_fixture(4)


def some(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [name if name in fast else wide(name) for name in names]


def in_several(processes: Processes, name: str, folder: Path, streaming: Any = ROUND, **training: Any) -> list[Any]:
    found = processes.run(train_dealt, name, str(folder), training, streaming)
    for each in found:
        assert not isinstance(each, BaseException), each
    return found


def assert_as_alone(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All processes have the state of one; what the code keeps behind its call, the one that makes the losses has."""
    assert [each["makes losses"] for each in found].count(True) == 1
    for each in found:
        assert_same(each["after"], expected["after"])
        assert each["kept"] == (expected["kept"] if each["makes losses"] else [])


@pytest.mark.parametrize("name", some([name for name in OF_ROUND if name != "best"], FAST))
def test_two_processes_with_dealt_blocks_train_with_the_bits_of_one(name: str, two: Processes, tmp_path: Path):
    if name in ("own loss", "keeping") and not hasattr(StockTrainer, "loss_is_scaled_for_ga"):
        pytest.skip("this transformers adds up own losses: more processes with fewer steps aren't the same")
    found = in_several(two, name, tmp_path / "two")
    expected = train_alone(name, 2, tmp_path / "one")
    assert_as_one(found, expected)
    if name == "evaluated":  # processes divide an evaluation otherwise than one does
        for ours, theirs in zip(found, in_several(two, name, tmp_path / "replicate", {}), strict=True):
            assert ours["log"] == theirs["log"]
            assert_same(ours["after"], theirs["after"])
        return
    assert_as_alone(found, expected)
    assert (len(expected["kept"]) > 0) == (name == "keeping")


@pytest.mark.parametrize("name", some(["dropout", "keeping", "lora", "masters", "own function"], ()))
def test_three_processes_with_dealt_blocks_train_with_the_bits_of_one(name: str, three: Processes, tmp_path: Path):
    found = in_several(three, name, tmp_path / "three")
    expected = train_alone(name, 3, tmp_path / "one")
    assert_as_alone(found, expected)
    for each in found:
        assert_same(each["values"], expected["values"])
        # The trainer multiplies each loss by 3, and the mean of three divides by it.
        assert trained(each) == [pytest.approx(row, rel=3e-7) for row in trained(expected)]
        norms = [[row.get("grad_norm") for row in trained(one)] for one in (each, expected)]
        assert norms[0] == norms[1]


@pytest.mark.parametrize("name", some(OF_FOUR, ()))
def test_processes_of_two_hosts_that_deal_their_blocks_train_with_the_bits_of_one(
    name: str, four: Processes, tmp_path: Path
):
    found = four.run(on_hosts, HOSTS, train_dealt, f"{name} of four", str(tmp_path / "four"), {}, ROUND)
    for each in found:
        assert not isinstance(each, BaseException), each
    expected = train_alone(f"{name} of four", 4, tmp_path / "one")
    assert_as_one(found, expected)
    assert [each["makes losses"] for each in found[:2]].count(True) == 1
    assert [each["makes losses"] for each in found[2:]].count(True) == 1
    for each in found:
        assert_same(each["after"], expected["after"])
    # One process of each host keeps what its trainer's code has made of the micro-batches of this host.
    assert sorted(kept for each in found for kept in each["kept"]) == sorted(expected["kept"])


@pytest.mark.parametrize("name", some(["saved", "saved in bf16"], ()))
def test_a_run_with_dealt_blocks_goes_on_with_and_without_them(name: str, two: Processes, tmp_path: Path):
    one = train_alone(name, 2, tmp_path / "one")
    whole = in_several(two, name, tmp_path / "two")
    assert_as_one(whole, one)
    for folder in ("one", "two"):
        checkpoint = str(tmp_path / folder / "checkpoint-2")
        again = in_several(two, name, tmp_path / f"again from {folder}", resume_from_checkpoint=checkpoint)
        assert_as_one(again, one, start=2)
        assert_as_alone(again, one)
    alone = train_alone(name, 2, tmp_path / "alone", resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))
    assert_as_one([alone], one, start=2)
    plain = in_several(two, name, tmp_path / "plain", {}, resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))
    assert_as_one(plain, one, start=2)


# -- what is refused, and what fails -----------------------------------------------------------------------------------

APART = "so an update isn't one training step, as it must be in several processes."
AHEAD = "ExecuteError, 0 updates: the code ahead of the call of the model "
CALLS = "ExecuteError, 0 updates: the code ahead of the call gives the model"
EXCHANGES = "ExecuteError, 0 updates: the loss exchanges values with other processes (allgather), and the blocks"
SAYS = {
    "callback": "ExecuteError, 0 updates: the callback Looks may read gradients before the optimizer's step, so",
    "own step": "ExecuteError, 0 updates: OwnStep has a training_step of its own, so an update isn't one training step",
    "optimizer": "ExecuteError, 0 updates: the optimizer can't update in a training step",
    "other layers": "ExecuteError, 0 updates: the micro-batches of an update run other layers (the model leaves",
    "other weights": "RanksError, 0 updates: the ranks differ: the value of ",
    "draws": f"ExecuteError, 0 updates: the loss draws random numbers before it calls the model, {APART}",
    "twice": f"ExecuteError, 0 updates: the loss calls the model more than once, {APART}",
    "gathers": f"{EXCHANGES} are dealt to devices.",
    "gathers ahead": f"{EXCHANGES} are dealt to devices.",
    "other words": f"{CALLS} another `input_ids` for a micro-batch of rank ",
    "other arguments": f"{CALLS} other arguments for a micro-batch of rank ",
    "writes": f"{AHEAD}writes into tensors that it is given, {APART}",
    "counts": f"{AHEAD}changes `calls` of the trainer, {APART}",
    "own batches": "ValueError, 0 updates: a batch of nobody",
    "lock": "ExecuteError, 0 updates: a micro-batch can't be given to other ranks: TypeError: cannot pickle",
    "few blocks": "LowerError, 0 updates: 1 block can't be dealt to 2 devices.",
    "fails ahead": "ValueError, 1 updates: a bad batch",
    "fails behind": "ValueError, 1 updates: a bad loss",
    "interrupted": "KeyboardInterrupt, 1 updates: ",
}


def test_each_refusal_of_dealt_blocks_is_tested():
    assert SAYS.keys() == REFUSED_DEALT.keys()


@pytest.mark.parametrize("name", some(SAYS, ("other words", "own batches", "fails behind")))
def test_what_a_trainer_cant_do_with_dealt_blocks_is_refused_and_all_processes_hear_it(name: str, two: Processes):
    found = two.run(refused_dealt, name)
    said = [text.startswith(SAYS[name]) for text in found]
    assert any(said), found
    updates = SAYS[name].partition(", ")[2].partition(":")[0]
    for text, is_said in zip(found, said, strict=True):
        named = text.startswith(f"RanksError, {updates}: rank {said.index(True)} failed")
        assert is_said or named, text
