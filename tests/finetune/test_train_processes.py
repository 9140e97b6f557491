"""`megatrain train` in several processes, as torchrun starts them: the numbers, files and words of one process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from megatrain.device import find
from megatrain.errors import ExecuteError, OptionError, RanksError
from megatrain.finetune.dealt_batches import DealtBatches
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.finetune.pace import Pace
from megatrain.finetune.step_on_paper import host_of_several
from megatrain.planning.host_plan import HostPlan, HostRow
from megatrain.ranks import command_processes
from megatrain.ranks.command_processes import ALONE, CommandProcesses
from tests.comparing import assert_same
from tests.finetune.commands import ROOT, log_of, train, weights_of
from tests.finetune.materials import data, save_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("one_thread", "lowered_once"),
    pytest.mark.skipif(sys.platform != "linux", reason="torchrun finds its own host by name elsewhere"),
]
PAGE = (ROOT / "docs" / "finetuning.md").read_text()
(GIVEN,) = re.findall(r"torchrun --standalone [^\n]*\\\n *-m megatrain train ([^\n]*)$", PAGE, re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page's command names."""
    save_model(tmp_path / "model", attention_dropout=0.0)  # each process draws for itself
    data(tmp_path, "messages", 21).rename(tmp_path / "chats.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def torchrun(*arguments: object, size: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    """Starts the command in several processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *launcher, "-m", "megatrain", "train", *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, wrong = process.communicate(timeout=300)
    return process.returncode, said, wrong


def assert_as_one(out: Path, one: Path) -> None:
    """Losses, held-out losses, norms, rates, weights, the record and the names of files are those of one process."""
    assert log_of(out) == log_of(one)
    assert any("eval_loss" in row for row in log_of(one))
    assert_same(weights_of(out), weights_of(one))
    files = [sorted(path.name for path in each.iterdir()) for each in (out, one)]
    assert files[0] == files[1]
    assert (out / "megatrain_train.json").read_bytes() == (one / "megatrain_train.json").read_bytes()


def test_the_pages_command_has_the_numbers_and_files_of_one_process(here: Path) -> None:
    given = [*shlex.split(GIVEN), "--device=cpu", "--save-every=3"]
    status, said, wrong = ended(torchrun(*given))
    assert status == 0, wrong
    assert "run     5 steps of 4 x 1 sequence of 16 tokens, 64 tokens; a checkpoint every 3\n" in said
    assert "ranks   2 processes, each takes 2 x 1 sequence of a step, 32 tokens\n" in said
    assert "once more" not in said  # of micro-batches
    for words in ("data ", "plan: ", "host    2 processes", "trained 5 steps, 320 tokens", "result ", "saved "):
        assert len(re.findall(f"^{words}", said, re.MULTILINE)) == 1, words
    assert train(*given, "--out", "runs/one") == 0
    assert_as_one(here / "runs" / "two", here / "runs" / "one")


# -- many processes ----------------------------------------------------------------------------------------------------


def killed(process: subprocess.Popen[str], size: int, sign: Path) -> None:
    """Kills the last rank when a file is there."""
    while not sign.exists() and process.poll() is None:
        time.sleep(0.002)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (last,) = [pid for pid in listed if f"\0RANK={size - 1}\0" in Path(f"/proc/{pid}/environ").read_text()]
    os.kill(int(last), signal.SIGKILL)


@pytest.mark.wide
def test_a_killed_process_is_named_and_all_go_on_by_themselves(here: Path) -> None:
    given = [*shlex.split(GIVEN), "--device=cpu", "--save-every=2", "--epochs=2"]
    process = torchrun(*given, restarts=1)
    killed(process, 2, here / "runs" / "two" / "checkpoint-4")
    status, said, wrong = ended(process)
    assert status == 0, wrong
    assert "failed (exitcode: -9) local_rank: 1" in wrong
    assert re.search(r"^resume  step [24] of 10, from `runs/two/checkpoint-[24]`$", said, re.MULTILINE)
    assert len(re.findall("^trained ", said, re.MULTILINE)) == 1
    assert train(*given, "--out", "runs/one") == 0
    assert_as_one(here / "runs" / "two", here / "runs" / "one")


@pytest.mark.wide
def test_ctrl_c_saves_and_another_number_of_processes_goes_on(here: Path) -> None:
    given = [*shlex.split(GIVEN), "--device=cpu", "--save-every=2", "--epochs=2"]
    process = torchrun(*given)
    while process.poll() is None and not (here / "runs" / "two" / "checkpoint-4").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, _, wrong = ended(process)
    saved = max(int(path.name.partition("-")[2]) for path in (here / "runs" / "two").glob("checkpoint-*"))
    assert wrong.count("the step is finished and saved first") == 1
    assert wrong.count(f"megatrain: interrupted; step {saved} of 10 is saved in `runs/two`") == 1
    status, said, wrong = ended(torchrun(*given, size=4))
    assert status == 0, wrong
    assert f"resume  step {saved} of 10, from" in said
    assert train(*given, "--out", "runs/one") == 0
    assert_as_one(here / "runs" / "two", here / "runs" / "one")
    status, said, wrong = ended(torchrun(*given))
    assert (status, said) == (0, "the training in `runs/two` is finished; there is nothing left to do.\n"), wrong


@pytest.mark.wide
def test_an_error_of_all_is_printed_once(here: Path) -> None:
    for wrong_option, words in (
        ("--accumulate=3", "megatrain: 2 processes can't divide a step of 3 micro-batches."),
        ("--lr=1e30", "megatrain: the gradient of `model."),
    ):
        given = [*shlex.split(GIVEN), "--device=cpu", wrong_option, "--warmup=0"]
        status, _, wrong = ended(torchrun(*given))
        assert status == 1
        assert wrong.count("megatrain: ") == 1, wrong
        assert words in wrong


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [24, 23, 19, 13, 12])
@pytest.mark.parametrize(("count", "size"), [(4, 2), (6, 3), (3, 3)])
def test_batches_are_dealt_in_the_order_of_one_process(num_samples: int, count: int, size: int) -> None:
    of_all = BatchSampler(SequentialSampler(range(num_samples)), 2, drop_last=False)
    dealt = [DealtBatches(of_all, count, rank, size) for rank in range(size)]
    found, each = [list(one) for one in dealt], count // size
    assert {len(one) for one in found} == {len(one) for one in dealt} == {-(-len(of_all) // size)}
    steps = [[one[i : i + each] for one in found] for i in range(0, len(found[0]), each)]
    joined = [batch for step in steps for part in step for batch in part]
    if len(of_all) % size == 0:
        assert joined == list(of_all)
        return
    samples = [sample for batch in joined for sample in batch]
    more = len(samples) - num_samples
    assert samples == [*range(num_samples), *range(more)]  # filled up from the beginning
    assert more < 2 * size
    assert {len(batch) for batch in joined} == {2}


def pace(num_sequences: int, processes: int, **given: Any) -> Pace:
    return Pace.of(FineTuning("model", __file__.replace(".py", ".txt"), "out", **given), num_sequences, 16, processes)


@pytest.fixture
def any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.finetune.fine_tuning._check_file", lambda text: None)


@pytest.mark.usefixtures("any_file")
@pytest.mark.parametrize(
    ("num_sequences", "processes", "given", "says"),
    [
        (24, 2, {"accumulate": 3}, "2 processes can't divide a step of 3 micro-batches.\n"),
        (24, 2, {"accumulate": 3}, "Give --accumulate 2 or 4, or start another number of processes."),
        (24, 3, {"tokens_per_step": 130}, "Give --tokens-per-step 96 or 144, or start"),
        (5, 2, {"steps": 1}, "divide a step of 5 micro-batches, all that the data has.\n"),
        (5, 2, {"steps": 1}, "Give --accumulate 4, or start another number of processes."),
        (24, 2, {"accumulate": 1}, "Give --accumulate 2, or start another number of processes."),
        (3, 2, {"batch": 4}, "the data has 1 micro-batch, and there are 2 processes.\n"),
    ],
)
def test_steps_that_processes_cant_divide_are_refused(
    num_sequences: int, processes: int, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        pace(num_sequences, processes, **given)


@pytest.mark.usefixtures("any_file")
def test_what_is_left_of_an_epoch_is_said_where_it_cant_be_divided() -> None:
    again = "the last step of an epoch takes 1 micro-batch once more, so that each has as many"
    parts = "2 processes, each takes 2 x 1 sequence of a step, 32 tokens"
    assert pace(23, 2, accumulate=4).parts() == [parts, again]
    assert pace(22, 2, accumulate=4).parts() == [parts]
    assert pace(23, 2, accumulate=4, steps=5).parts() == [parts]  # its end isn't reached
    assert pace(23, 1, accumulate=4).parts() == []
    assert [pace(num, 3).accumulate for num in (5, 100, 200)] == [3, 3, 9]  # by default what they can divide


class Group:
    """A process group, as far as it says who is in it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What other ranks tell; the rest tell the same as this one."""
    others: dict[int, Any] = {}

    def gather(found: list[Any], value: Any, group: Any) -> None:
        found[:] = [others.get(rank, value) for rank in range(len(found))]

    monkeypatch.setattr(command_processes.dist, "all_gather_object", gather)
    monkeypatch.setattr(command_processes.time, "sleep", lambda seconds: None)
    return others


def fails() -> None:
    raise OptionError("no file")


def test_a_stage_fails_in_all_processes_and_says_whose_it_was(told: dict[int, Any]) -> None:
    first, second = CommandProcesses(Group(0, 3)), CommandProcesses(Group(1, 3))
    assert first.together(lambda: 5) == 5 or told
    told[2] = "OptionError: the disk is gone\nmore"
    for here in (first, second):
        with pytest.raises(RanksError, match=r"^rank 2 failed: OptionError: the disk is gone\n"):
            here.together(lambda: 5)
    told.clear()
    with pytest.raises(OptionError, match="no file"):
        first.together(fails)
    with pytest.raises(SystemExit) as quiet:  # the first one prints it
        second.together(fails)
    assert quiet.value.code == 2
    told.update({0: None, 2: None})
    with pytest.raises(OptionError, match="no file"):
        second.together(fails)


def test_processes_compare_what_they_read(told: dict[int, Any]) -> None:
    here = CommandProcesses(Group(0, 2))
    here.compare({"data": "abc"})
    told[1] = {"data": "abd"}
    with pytest.raises(RanksError, match="the ranks differ: data is abc on rank 0, but abd on rank 1"):
        here.compare({"data": "abc"})


def test_a_process_that_is_gone_is_no_bare_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(command_processes.dist, "all_gather_object", gather)
    with pytest.raises(RanksError, match="another one of the 2 processes has ended: RuntimeError: Conn"):
        CommandProcesses(Group(0, 2)).of_first(lambda: 3)


def test_each_process_has_a_place_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [CommandProcesses(Group(rank, 3)).place for rank in range(3)] == ["first", "middle", "last"]
    assert ALONE.place == "alone"
    taken: list[int] = []
    cards: Any = SimpleNamespace(is_host=False)
    monkeypatch.setattr(command_processes, "find", lambda name: find(name) if name == "cpu" else cards)
    monkeypatch.setattr(command_processes, "usable", lambda name: name)
    monkeypatch.setattr(command_processes, "num_accelerators", lambda: 2)
    monkeypatch.setattr(command_processes, "take_accelerator", taken.append)
    for local in (1, 2):
        monkeypatch.setattr(command_processes.dist, "get_node_local_rank", lambda local=local: local)
        here = CommandProcesses(Group(local, 3))
        if local == 1:
            assert here.device("cuda") == "cuda"
            with pytest.raises(OptionError, match="--device cuda:0 is one device, and there are 3 processes"):
                here.device("cuda:0")
        else:
            with pytest.raises(OptionError, match="process 2 of this host has no device of its own: there are 2"):
                here.device(None)
        assert here.device("cpu") == "cpu"
    assert taken == [1]


def test_the_memory_of_all_processes_of_a_host_is_said_or_refused() -> None:
    host = HostPlan((HostRow("parameters", 2**20), HostRow("parks", 2**19)), 2**18)
    model = torch.nn.Linear(2**9, 2**9, bias=False)
    assert host_of_several(host, model, 1) == []
    (line,) = host_of_several(host, model, 4, lambda: 2**22)
    assert line.startswith("4 processes of this host: 3.00 MiB, of which each has 512.00 KiB of its own")
    assert line.endswith("until the first step 4.00 MiB of weights")
    with pytest.raises(ExecuteError, match=r"4 processes of this host need 4.00 MiB of host memory, 4.00 MiB are"):
        host_of_several(host, model, 4, lambda: 2**22 - 1)
