"""What callers give to TrainStep.save and load is refused by name; a load that finds no memory can be repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptionError
from tests.saving.test_arguments import PATHS, refusal
from tests.training.resuming import Case, Run, points, stack

LINEAR = Case(lambda: stack(lambda: nn.Linear(4, 4)), points)

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "user zero": ({"user": 0}, "user=0 is an int"),
    "user list": ({"user": [1]}, "user=[1] is a list"),
    "user text": ({"user": ""}, "user='' is a str"),
    "scheduler": ({"scheduler": 7}, "scheduler=7 is an int"),
    "scheduler dict": ({"scheduler": {}}, "scheduler={} is a dict"),
    "scheduler class": ({"scheduler": torch.optim.lr_scheduler.LambdaLR}, "is the class LambdaLR"),
    "more": ({"more": {"config.json": ""}}, "more={'config.json': ''} is no function"),
    "shard_bytes": ({"shard_bytes": "much"}, "shard_bytes='much' is not a size"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_of_save_that_is_something_else_is_refused(tmp_path: Path, argument: str):
    options, text = ARGUMENTS[argument]
    run = Run(LINEAR)
    run.train(1)
    assert text in refusal(OptionError, lambda: run.step.save(tmp_path / "run", **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_folder_that_is_no_path_is_refused(path: str):
    run = Run(LINEAR)
    assert "folder=" in refusal(OptionError, lambda: run.step.save(PATHS[path]))
    load: Any = megatrain.TrainStep.load
    assert "folder=" in refusal(OptionError, lambda: load(PATHS[path], run.compiled, run.optimizer))


def test_an_argument_of_load_that_is_something_else_is_refused(tmp_path: Path):
    run = Run(LINEAR)
    run.save(tmp_path / "run")
    load: Any = megatrain.TrainStep.load
    for given, text in (
        ((run.model, run.optimizer), "compiled is a model that megatrain.compile made"),
        ((run.compiled, None), "optimizer is None"),
        ((run.compiled, [run.optimizer, run.model]), "optimizer=<list> has item 1, <Sequential>, which is a"),
        ((run.compiled, {"one": run.optimizer}), "optimizer=<dict> is a dict"),
        ((run.compiled, [run.optimizer, None]), "optimizer=<list> has item 1, None, which is None"),
        ((run.compiled, []), "optimizer=[] is empty"),
    ):
        assert text in refusal(OptionError, lambda given=given: load(tmp_path / "run", *given))
    bad: Any = run.optimizer.state_dict
    assert "with state_dict() and load_state_dict()" in refusal(
        OptionError, lambda: load(tmp_path / "run", run.compiled, run.optimizer, scheduler=bad)
    )


STARVING = """
import resource, sys
import psutil, torch
import megatrain
from megatrain.errors import MegatrainError

torch.set_num_threads(1)


def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    return megatrain.compile(model, device="cpu"), torch.optim.AdamW(model.parameters())


def step_of(compiled, optimizer):
    return megatrain.TrainStep(compiled, optimizer, loss=lambda y, _: y.square().mean())


def seen(step, optimizer):
    step.flush()
    return [t for p in optimizer.param_groups[0]["params"] for t in (p.detach(), *optimizer.state[p].values())]


folder = sys.argv[1]
first, optimizer = made(0)
step = step_of(first, optimizer)
step(torch.ones(2, 1024))
step.save(folder)
expected = [tensor.clone() for tensor in seen(step, optimizer)]
second, other = made(1)
refused = 0
for room in range(0, 48, 8):
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room * 2**20, resource.RLIM_INFINITY))
    try:
        megatrain.TrainStep.load(folder, second, other, loss=lambda y, _: y.square().mean())
    except MegatrainError as error:
        refused += 1
        assert len(str(error).splitlines()) > 2, error
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    del other
    other = torch.optim.AdamW(second.parameters())
step = megatrain.TrainStep.load(folder, second, other, loss=lambda y, _: y.square().mean())
assert all(map(torch.equal, expected, seen(step, other)))
print(refused, text)
"""


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_load_that_finds_no_memory_is_refused_and_can_be_repeated(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", STARVING, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    count, text = done.stdout.split(" ", 1)
    assert int(count) > 2
    assert text.startswith("the memory is too small to read the checkpoint: ")
