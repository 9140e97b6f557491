"""Saving changes nothing, takes what is due first, and brings back all that `save` was given."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.saving.training import refusal, same
from tests.tiers import every_other, one_in
from tests.training.resuming import (
    BF16,
    CASES,
    CLIP,
    PARKED,
    ROUNDED,
    SERIAL,
    Case,
    Run,
    after,
    differences,
    points,
    seed,
    stack,
    warm_up,
)

SMALL = Case(lambda: stack(lambda: nn.Linear(4, 4)), points, scheduler=warm_up, step=(CLIP, CLIP))
MODES: dict[str, Case] = {
    "deferred": replace(SMALL, compile=(PARKED, {})),
    "serial": replace(SMALL, step=(SERIAL, {})),
    "overlap": replace(SMALL, step=({}, SERIAL)),
    "bf16": replace(SMALL, compile=(BF16, {**BF16, **PARKED})),
    "rounded": replace(SMALL, compile=(ROUNDED, ROUNDED)),
    "running": replace(CASES["running"], compile=({}, {})),
}


def content(folder: Path) -> dict[str, bytes]:
    """Every tensor file of a checkpoint."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("mode", every_other(MODES))
def test_saves_in_a_row_change_nothing_and_each_can_be_gone_on_from(tmp_path: Path, mode: str):
    undisturbed = Run(MODES[mode])
    losses = undisturbed.train(4)
    expected = undisturbed.state()
    run = Run(MODES[mode])
    for i in range(4):
        assert run.train(1) == losses[i : i + 1]
        run.save(tmp_path / "run")
        run.save(tmp_path / f"run{i}")
    assert differences(expected, run.state()) == []
    assert content(tmp_path / "run") == content(tmp_path / "run3")
    resumed = Run(MODES[mode], tmp_path / "run1")
    assert resumed.train(2) == losses[2:]
    assert differences(expected, resumed.state()) == []


@pytest.mark.parametrize("mode", one_in(2, MODES, first=1))  # the others save in a row
def test_a_save_directly_after_load_writes_the_same_checkpoint(tmp_path: Path, mode: str):
    run = Run(MODES[mode])
    run.train(2)
    run.save(tmp_path / "run", user={"epoch": 2})
    expected = after(run)
    Run(MODES[mode], tmp_path / "run").save(tmp_path / "again")  # no step in between, the user's values go along
    assert content(tmp_path / "again") == content(tmp_path / "run")
    resumed = Run(MODES[mode], tmp_path / "again")
    assert resumed.step.user == {"epoch": 2}
    assert differences(expected, after(resumed)) == []


def test_updates_that_are_due_are_taken_before(tmp_path: Path):
    """Deferred and serial steps leave the same checkpoint."""
    for name, options in {"deferred": CLIP, "serial": {**CLIP, **SERIAL}}.items():
        run = Run(replace(SMALL, step=(options, {})))
        run.train(3)
        assert run.step._setup.is_due == (name == "deferred")
        run.save(tmp_path / name)
        assert not run.step._setup.is_due
    assert content(tmp_path / "deferred") == content(tmp_path / "serial")


@pytest.mark.parametrize("mode", one_in(2, MODES, first=1))
def test_a_model_and_an_optimizer_in_use_go_back(tmp_path: Path, mode: str):
    """Also if updates are due that the checkpoint makes void."""
    run = Run(MODES[mode])
    run.train(2)
    run.save(tmp_path / "run")
    expected = after(run)
    run.train(1)
    settings = {"loss": run.step._loss, **run.case.step[0]}
    run.step = megatrain.TrainStep.load(
        tmp_path / "run", run.compiled, run.optimizer, scheduler=run.scheduler, **settings
    )
    assert differences(expected, after(run)) == []


def test_a_model_in_the_middle_of_a_step_goes_on_from_a_checkpoint(tmp_path: Path):
    """The way out that the error of a broken step names."""

    class Failing(torch.autograd.Function):
        on = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Failing.on:
                raise RuntimeError("no gradient today")
            return gradient

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return Failing.apply(self.fc(x))

    run = Run(replace(SMALL, build=lambda: nn.Sequential(First(), stack(lambda: nn.Linear(4, 4))), step=({}, {})))
    run.train(1)
    run.save(tmp_path / "run")
    expected = after(run)
    Failing.on = True  # the blocks behind it have their updates by then
    with pytest.raises(RuntimeError, match="no gradient today"):
        run.train(1)
    with pytest.raises(ExecuteError, match="Load a checkpoint"):
        run.save(tmp_path / "broken")
    Failing.on = False
    run.step = megatrain.TrainStep.load(
        tmp_path / "run", run.compiled, run.optimizer, scheduler=run.scheduler, loss=run.step._loss
    )
    assert differences(expected, after(run)) == []
    assert not (tmp_path / "broken").exists()


def test_a_save_from_within_a_step_is_refused(tmp_path: Path):
    run = Run(replace(SMALL, step=({}, {})))
    run.optimizer.register_step_post_hook(lambda *_: run.save(tmp_path / "run"))
    with pytest.raises(ExecuteError, match=r"^save\(\) was called while the model runs"):
        run.train(1)
    assert not (tmp_path / "run").exists()


# -- what comes back ---------------------------------------------------------------------------------------------


def test_progress_comes_back(tmp_path: Path):
    run = Run(replace(SMALL, step=({"on_nonfinite": "skip", **CLIP}, {"on_nonfinite": "skip", **CLIP}), scheduler=None))
    run.train(2)
    run.step(points(0) * float("inf"))
    run.train(1)
    run.save(tmp_path / "run")
    progress = Run(run.case, tmp_path / "run").step.progress
    assert (progress.count, progress.skipped) == (4, 1)
    assert progress.nonfinite == run.step.progress.nonfinite is not None
    assert progress.grad_norm is not None
    assert same(progress.grad_norm, run.step.progress.grad_norm)


def test_what_the_user_gives_comes_back(tmp_path: Path):
    user: dict[Any, Any] = {
        "epoch": 3,
        "best": float("inf"),
        "text": 'é \ud800 "',
        "tensor": torch.tensor([1.0, float("nan"), -0.0]),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "scalar": torch.tensor(3),
        "nested": {"a": [1, (2.5, None, [True, {}])], 7: ("x", torch.zeros(0, 3)), ("k", 1): Counter("abca")},
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "sampler": torch.Generator().manual_seed(5).get_state(),
    }
    run = Run(SMALL)
    run.train(1)
    run.save(tmp_path / "run", user=user)
    assert same(Run(SMALL, tmp_path / "run").step.user, user)
    run.step.save(tmp_path / "run", scheduler=run.scheduler)
    assert Run(SMALL, tmp_path / "run").step.user == {}


def test_generators_come_back(tmp_path: Path):
    run = Run(SMALL)
    run.train(1)
    run.save(tmp_path / "run")

    def draw() -> list[Any]:
        return [torch.rand(3), random.gauss(0, 1), np.random.standard_normal(3)]

    expected = draw()
    seed(8)
    Run(SMALL, tmp_path / "run")
    assert same(draw(), expected)


def test_what_a_user_sets_by_hand_comes_back(tmp_path: Path):
    run = Run(replace(SMALL, scheduler=None))
    run.train(1)
    run.optimizer.param_groups[1].update(lr=0.5, weight_decay=0.25, betas=(0.5, 0.75), note="mine")
    run.model[0].bias.data.fill_(2.0)
    run.save(tmp_path / "run")
    expected = after(run)
    resumed = Run(run.case, tmp_path / "run")
    assert resumed.optimizer.param_groups[1]["note"] == "mine"
    assert differences(expected, after(resumed)) == []


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "inference"])
def test_the_callers_modes_do_not_matter(tmp_path: Path, mode: Any):
    run = Run(MODES["bf16"])
    run.train(1)
    with mode():
        run.save(tmp_path / "run")
    expected = after(run)
    run = Run(MODES["bf16"])
    with mode():
        run.step = megatrain.TrainStep.load(
            tmp_path / "run", run.compiled, run.optimizer, scheduler=run.scheduler, loss=run.step._loss, **CLIP
        )
    assert differences(expected, after(run)) == []


def test_saves_on_another_thread_wait_for_the_end_of_a_step(tmp_path: Path):
    case = replace(SMALL, scheduler=None)
    undisturbed = Run(case)
    undisturbed.train(6)
    run, is_over = Run(case), threading.Event()

    def save() -> int:
        count = 0
        while not is_over.is_set() or not count:
            run.save(tmp_path / "run")
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        saves = pool.submit(save)
        run.train(6)
        is_over.set()
        assert saves.result() > 0
    assert differences(undisturbed.state(), run.state()) == []
    resumed = Run(case, tmp_path / "run")
    resumed.train(6 - resumed.step.progress.count)
    assert differences(undisturbed.state(), resumed.state()) == []


# -- weights that are not read yet -------------------------------------------------------------------------------


def small() -> nn.Module:
    seed(3)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_files_of_compile_that_are_read_later_do_not_undo_a_checkpoint(tmp_path: Path, where: str):
    def made() -> tuple[Any, torch.optim.Optimizer]:
        with torch.device(where):
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        compiled = megatrain.compile(
            model, device="cpu", weights=tmp_path / "first.safetensors", example_args=(points(0),)
        )
        return compiled, torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)

    save_file(small().state_dict(), tmp_path / "first.safetensors")
    loss: dict[str, Any] = {"loss": lambda result, _: result.square().mean()}
    run = megatrain.TrainStep(*made(), **loss)
    run.save(tmp_path / "begin")  # before any step: what the files hold
    run(points(1))
    run.save(tmp_path / "run")
    expected = [run(points(2)).item(), run(points(3)).item()]
    for folder, first in (("begin", 1), ("run", 2)):
        again = megatrain.TrainStep.load(tmp_path / folder, *made(), **loss)
        losses = [again(points(step)).item() for step in range(first, 4)]
        assert losses[-2:] == expected


def test_a_checkpoint_between_its_two_renames_is_resumed_on_meta(tmp_path: Path):
    """A process was killed just there: `weights=` and `load` both find the new one."""
    run = Run(CASES["meta"])
    run.train(1)
    run.save(tmp_path / "run")
    expected = after(run)
    (tmp_path / "run").rename(tmp_path / "run.partial-0123456789ab")
    (tmp_path / "run.old-0123456789ab").mkdir()
    assert differences(expected, after(Run(CASES["meta"], tmp_path / "run"))) == []


def test_parameters_beside_the_model_are_refused(tmp_path: Path):
    run = Run(SMALL)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert refusal(lambda: run.save(tmp_path / "run")).startswith(
        "the optimizer has 1 parameter that the model doesn't have"
    )
