"""Scripts in several processes: the bits of one process with a micro-batch each, else of the stock run of two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.errors import OptionError
from megatrain.integrations.hf.newest_whole import newest_whole
from megatrain.integrations.hf.several import refuse_several
from tests.comparing import assert_same
from tests.integrations import several
from tests.integrations.runs import codes, fast_or_nightly, run
from tests.integrations.several import (
    SCENARIOS,
    of_one_process,
    refused_here,
    train_here,
    without_cpu_here,
)
from tests.ranks.processes import Processes, processes_fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("one_thread"),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
two = processes_fixture(2)


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


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["log"] == theirs["log"]
        assert_same([ours["values"], ours["after"]], [theirs["values"], theirs["after"]])


OF_ONE = "ragged", "masters"


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_ONE)
def test_two_processes_train_with_the_bits_of_one(name: str, two: Processes, tmp_path: Path):
    found = in_several(two, name, tmp_path / "two")
    assert_as_one(found, in_one(name, 2, tmp_path / "one"))


@pytest.mark.nightly
def test_two_processes_train_and_evaluate_as_the_stock_run_does(two: Processes, tmp_path: Path):
    # Of two numbers there is one sum, so an all-reduce of one micro-batch from each process has the same bits.
    found = in_several(two, "evaluated", tmp_path / "streams")
    assert_alike(found, in_several(two, "evaluated", tmp_path / "stock", streams=False))
    assert sum("eval_loss" in row for row in found[0]["log"]) == 3


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
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


# -- what is refused, and what fails -----------------------------------------------------------------------------------

OTHER = "RanksError, 0 updates: the ranks differ: "
SAYS = {
    "auto_find_batch_size": "OptionError, 0 updates: a trainer that streams can't use auto_find_batch_size in several",
    "a search": "OptionError, 0 updates: a trainer that streams can't do hyperparameter_search in several processes",
    "uneven": OTHER + "the number of batches in an epoch is 2 on rank 0, but",
    "callback": "ExecuteError, 0 updates: the callback Looks may read gradients before the optimizer's step, so",
    "gathers": "ExecuteError, 0 updates: the loss exchanges values with other processes (",
    "other weights": OTHER + "the value of ",
}
OF_OTHERS = {
    "bad row": ("RanksError, 1 updates: rank 1 failed: ValueError: a bad row", "ValueError, 1 updates: a bad row"),
    "stops one": ("RanksError, 1 updates: the ranks differ: control.should_training_stop, which callbacks set, is",)
    * 2,
}


@pytest.mark.parametrize("name", fast_or_nightly(SAYS, ("gathers", "callback", "uneven", "a search")))
def test_what_cant_be_right_is_refused_before_the_first_update(name: str, two: Processes):
    found = two.run(refused_here, name)
    others = "RanksError, 0 updates: rank 0 failed: ", "RanksError, 0 updates: rank 1 failed: "
    said = [text.startswith(SAYS[name]) for text in found]
    assert any(said), found
    assert all(is_said or text.startswith(others) for text, is_said in zip(found, said, strict=True)), found


@pytest.mark.parametrize("name", fast_or_nightly(OF_OTHERS, ("bad row",)))
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


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("DistributedType.FSDP", {}, "can't use FSDP"),
        ("DEEPSPEED", {}, "can't use DEEPSPEED"),
        ("MULTI_CPU", {"parallelism_config": object()}, "can't use parallelism_config"),
        ("MULTI_GPU", {"scaler": object()}, "can't use fp16 in several processes"),
        ("MULTI_GPU", {"save_on_each_node": True}, "can't use save_on_each_node in several processes"),
    ],
)
def test_what_accelerate_is_told_elsewhere_is_refused_by_name(kind: str, given: dict[str, Any], says: str):
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=2, scaler=given.pop("scaler", None))
    settings = {"parallelism_config": None, "auto_find_batch_size": False, "save_on_each_node": False, **given}
    with pytest.raises(OptionError, match=says):
        refuse_several(SimpleNamespace(args=SimpleNamespace(**settings), accelerator=accelerator))


# -- torchrun ----------------------------------------------------------------------------------------------------------


def torchrun(folder: Path, script: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs a script in two processes; returns torchrun's exit code, and what all wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(script), *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.nightly
def test_a_run_that_a_dying_process_ended_goes_on_with_the_bits_of_one(tmp_path: Path):
    folder = tmp_path / "two"
    code, _, said = torchrun(tmp_path, HERE / "several.py", str(folder), "dies")
    assert code != 0
    assert "exitcode  : 7" in said
    found = newest_whole(folder)
    assert found is not None
    assert found.endswith("checkpoint-2")  # the last process died while the fourth update's checkpoint was due
    code, _, said = torchrun(tmp_path, HERE / "several.py", str(folder), "resumed")
    assert code == 0, said
    values, log = torch.load(folder / "end.pt", weights_only=False)
    expected = run(of_one_process(SCENARIOS["saved"], 2), tmp_path / "one", streams=True)
    assert_same(values, expected.values)
    assert [row for row in log if "loss" in row] == [row for row in expected.log if "loss" in row]


@pytest.mark.nightly
def test_the_pages_trainer_runs_under_torchrun_with_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = codes("trainers.md", "torch.manual_seed", "megatrain_memory")[0]
    assert "max_steps=4" in code
    script = tmp_path / "train.py"
    script.write_text(code.replace("gradient_accumulation_steps=2", "use_cpu=True"))
    status, _, said = torchrun(tmp_path, script)
    assert status == 0, said
    alone = tmp_path / "alone"
    alone.mkdir()
    monkeypatch.chdir(alone)
    exec(compile(code.replace("max_steps=4", "max_steps=4, use_cpu=True"), "page", "exec"), {})
    for name in ("checkpoint-2/model.safetensors", "checkpoint-4/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (alone / "run" / name).read_bytes()
