"""Trainers in several processes: the bits of one process that has all micro-batches, in the order of the ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from transformers import Trainer as StockTrainer

import megatrain
from megatrain.errors import OptionError
from megatrain.integrations.hf.accelerated import join
from megatrain.integrations.hf.several import refuse_several
from tests.comparing import assert_same
from tests.integrations import several
from tests.integrations.runs import ROWS, run
from tests.integrations.several import SCENARIOS, loop_here, of_one_process, step_here, stepping, train_here
from tests.integrations.several_refused import (
    REFUSED,
    gathers_ahead_here,
    refused_here,
    searches_here,
    without_cpu_here,
)
from tests.ranks.processes import Processes
from tests.ranks.shared_processes import processes_fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("one_thread"),
]
FAST = ("accumulated", "ragged")
USERS = pytest.mark.users


two = processes_fixture(2)
three = processes_fixture(3)


def some(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=USERS) for name in names]


def in_several(processes: Processes, name: str, folder: Path, *, streams: bool = True, **training: Any) -> list[Any]:
    found = processes.run(train_here, name, str(folder), streams, training)
    for each in found:
        assert not isinstance(each, BaseException), each
    return found


def in_one(name: str, size: int, folder: Path, **training: Any) -> dict[str, Any]:
    return several.left(run(of_one_process(SCENARIOS[name], size), folder, streams=True, **training))


def trained(found: dict[str, Any], start: int = 0) -> list[dict[str, Any]]:
    """What was logged of updates; how processes divide an evaluation isn't what one of them does."""
    return [row for row in found["log"] if row["step"] > start and not any("eval" in key for key in row)]


def assert_as_one(found: list[dict[str, Any]], expected: dict[str, Any], start: int = 0) -> None:
    for rank, each in enumerate(found):
        assert_same(each["values"], expected["values"], f"rank {rank}")
        logs = trained(each, start), trained(expected, start)
        assert logs[0] == logs[1] if start == 0 else logs[0][:-1] == logs[1][:-1], f"rank {rank}"
    assert_same(found[0]["generators"], expected["generators"])


@pytest.mark.parametrize("name", some([name for name in SCENARIOS if name not in ("saved", "best", "dropout")], FAST))
def test_two_processes_train_with_the_bits_of_one(name: str, two: Processes, tmp_path: Path):
    if name == "own loss" and not hasattr(StockTrainer, "loss_is_scaled_for_ga"):
        pytest.skip("this transformers adds up own losses: more processes with fewer steps aren't the same")
    found = in_several(two, name, tmp_path / "two")
    assert_as_one(found, in_one(name, 2, tmp_path / "one"))


@USERS
@pytest.mark.parametrize("name", ["ragged", "accumulated", "own function"])
def test_three_processes_train_with_the_bits_of_one(name: str, three: Processes, tmp_path: Path):
    found = in_several(three, name, tmp_path / "three")
    expected = in_one(name, 3, tmp_path / "one")
    for each in found:
        assert_same(each["values"], expected["values"])
        # The trainer multiplies each loss by 3, and the mean of three divides by it.
        assert trained(each) == [pytest.approx(row, rel=3e-7) for row in trained(expected)]
        norms = [[row.get("grad_norm") for row in trained(one)] for one in (each, expected)]
        assert norms[0] == norms[1]


# -- the stock run in as many processes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", some(["evaluated", "unclipped", "label smoothing", "own function", "dropout"], ("evaluated", "dropout"))
)
def test_two_processes_train_and_evaluate_as_the_stock_run_does(name: str, two: Processes, tmp_path: Path):
    # Of two numbers there is one sum, so an all-reduce of one micro-batch from each process has the same bits.
    found = in_several(two, name, tmp_path / "streams")
    stock = in_several(two, name, tmp_path / "stock", streams=False)
    for ours, theirs in zip(found, stock, strict=True):
        assert ours["log"] == theirs["log"]
        assert_same(ours["values"], theirs["values"])
        assert_same(ours["after"], theirs["after"])
    if name == "evaluated":
        assert sum("eval_loss" in row for row in found[0]["log"]) == 3


@USERS
@pytest.mark.parametrize("name", ["accumulated", "own loss", "means", "tied"])
def test_sums_of_the_stock_run_differ_by_their_order_alone(name: str, two: Processes, tmp_path: Path):
    # DDP adds the sums of two processes, a training step adds four micro-batches one by one: a few roundings of 2**-24
    # in each sum, which AdamW turns into some of its steps of 1e-2 relative to weights of 2e-1.
    found = in_several(two, name, tmp_path / "streams")
    stock = in_several(two, name, tmp_path / "stock", streams=False)
    for ours, theirs in zip(found, stock, strict=True):
        assert ours["log"] == [pytest.approx(row, rel=1e-5) for row in theirs["log"]]
        assert_same(ours["values"], theirs["values"], tolerance=1e-4)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_run_goes_on_in_as_many_processes_and_in_one(two: Processes, tmp_path: Path):
    folder = tmp_path / "two"
    whole = in_several(two, "saved", folder)
    one = in_one("saved", 2, tmp_path / "one")
    assert_as_one(whole, one)
    checkpoint = folder / "checkpoint-2"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "megatrain", "trainer_state.json"} <= names
    assert not names & {"optimizer.pt", "scheduler.pt"}
    again = in_several(two, "saved", tmp_path / "again", resume_from_checkpoint=str(checkpoint))
    assert_as_one(again, one, start=2)
    alone = in_one("saved", 2, tmp_path / "alone", resume_from_checkpoint=str(checkpoint))
    assert_as_one([alone], one, start=2)
    more = in_several(two, "saved", tmp_path / "more", resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert_as_one(more, one, start=2)


@USERS
def test_the_best_model_and_the_newest_checkpoint_are_found(two: Processes, tmp_path: Path):
    folder = tmp_path / "best"
    found = in_several(two, "best", folder)
    stock = in_several(two, "best", tmp_path / "stock", streams=False)
    for ours, theirs in zip(found, stock, strict=True):
        assert ours["log"] == theirs["log"]
        assert_same(ours["values"], theirs["values"])
    again = in_several(two, "best", folder, resume_from_checkpoint=True)
    assert_same(again[1]["values"], found[0]["values"])


# -- what is refused, and what fails -----------------------------------------------------------------------------------

SAYS = {
    "auto_find_batch_size": "OptionError, 0 updates: a trainer that streams can't use auto_find_batch_size in several",
    "save_on_each_node": "OptionError, 0 updates: a trainer that streams can't use save_on_each_node in several",
    "compiled for one": "OptionError, 0 updates: the model was compiled for 1 process, but the trainer has 2.",
    "uneven": "RanksError, 0 updates: the ranks differ: the number of batches in an epoch is 2 on rank 0, but",
    "other arguments": "RanksError, 0 updates: the ranks differ: gradient_accumulation_steps is 1 on rank 0, but 2 on",
    "callback": "ExecuteError, 0 updates: the callback Looks may read gradients before the optimizer's step, so",
    "own step": "ExecuteError, 0 updates: OwnStep has a training_step of its own, so an update isn't one training step",
    "optimizer": "ExecuteError, 0 updates: the optimizer can't update in a training step",
    "other layers": "ExecuteError, 0 updates: the micro-batches of an update run other layers (the model leaves",
    "draws": "ExecuteError, 0 updates: the loss draws random numbers before it calls the model, so an update isn't one",
    "twice": "ExecuteError, 0 updates: the loss calls the model more than once, so an update isn't one training step",
    "gathers": "ExecuteError, 0 updates: the loss exchanges values with other processes (",
    "other weights": "RanksError, 0 updates: the ranks differ: the value of ",
}
OF_OTHERS = {
    "bad row": ("RanksError, 1 updates: rank 1 failed: ValueError: a bad row", "ValueError, 1 updates: a bad row"),
    "stops one": ("RanksError, 1 updates: the ranks differ: control.should_training_stop, which callbacks set, is",)
    * 2,
}


def test_each_refusal_is_tested():
    assert SAYS.keys() | OF_OTHERS.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", some(SAYS, ("gathers", "callback", "uneven")))
def test_what_cant_be_right_is_refused_before_the_first_update(name: str, two: Processes):
    found = two.run(refused_here, name)
    others = ["RanksError, 0 updates: rank 0 failed: ", "RanksError, 0 updates: rank 1 failed: "]
    said = [text.startswith(SAYS[name]) for text in found]
    assert any(said), found
    assert all(
        is_said or any(text.startswith(each) for each in others) for text, is_said in zip(found, said, strict=True)
    ), found


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("DistributedType.FSDP", {}, "can't use FSDP"),
        ("DEEPSPEED", {}, "can't use DEEPSPEED"),
        ("MULTI_CPU", {"parallelism_config": object()}, "can't use parallelism_config"),
        ("MULTI_GPU", {"scaler": object()}, "can't use fp16 in several processes"),
    ],
)
def test_what_accelerate_is_told_elsewhere_is_refused_by_name(kind: str, given: dict[str, Any], says: str):
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=2, scaler=given.pop("scaler", None))
    settings = {"parallelism_config": None, "auto_find_batch_size": False, "save_on_each_node": False, **given}
    with pytest.raises(OptionError, match=says):
        refuse_several(SimpleNamespace(args=SimpleNamespace(**settings), accelerator=accelerator))


def test_a_single_process_of_torchrun_is_not_wrapped_either():
    wrapped: list[bool] = []

    def prepare(model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        wrapped.append(not evaluation_mode)

    compiled = megatrain.compile(torch.nn.Linear(2, 2), device="cpu")
    for kind, of_streams in (("MULTI_CPU", False), ("NO", True)):
        accelerator = SimpleNamespace(
            num_processes=1, distributed_type=DistributedType(kind), prepare_model=prepare, backward=print
        )
        join(accelerator)
        accelerator.prepare_model(torch.nn.Linear(2, 2))
        accelerator.prepare_model(compiled)
        assert wrapped == [True, of_streams]
        wrapped.clear()


@pytest.mark.parametrize("name", some(OF_OTHERS, ("bad row",)))
def test_a_process_that_fails_or_stops_is_named_by_the_others(name: str, two: Processes):
    for text, says in zip(two.run(refused_here, name), OF_OTHERS[name], strict=True):
        assert text.startswith(says), text


def test_a_script_without_use_cpu_would_train_apart_and_is_refused(two: Processes):
    for count, text in two.run(without_cpu_here):
        if count == 2:  # an older accelerate counts what torchrun has started, so the processes train together
            assert text == "nothing was refused"
            continue
        assert count == 1
        assert text.startswith("accelerate counts one process, but torch.distributed has 2.")
        assert text.endswith("On CPUs give TrainingArguments(use_cpu=True).")


@USERS
def test_trainings_that_begin_several_times_are_refused(two: Processes):
    for search in two.run(searches_here):
        assert search.startswith("a trainer that streams can't do hyperparameter_search in several processes")


@USERS
def test_a_loss_may_exchange_values_ahead_of_its_call(two: Processes):
    found = two.run(gathers_ahead_here)
    assert len(found[0]) == 3
    assert found[0] == found[1]


# -- loops of accelerate -----------------------------------------------------------------------------------------------


@USERS
def test_a_prepared_model_trains_as_in_the_stock_loop(two: Processes):
    found, stock = two.run(loop_here, True), two.run(loop_here, False)
    for ours, theirs in zip(found, stock, strict=True):
        assert_same(ours, theirs)


@USERS
def test_training_steps_take_what_a_prepared_loader_gives(two: Processes):
    found = two.run(step_here)
    model, step = stepping(None)
    rows: Any = torch.utils.data.DataLoader(ROWS, batch_size=2)  # pyright: ignore
    batches = list(rows)
    losses = [step(batches[i : i + 2]) for i in range(0, len(batches), 2)]
    for each in found:
        assert_same(each, (losses, dict(model.state_dict())))
