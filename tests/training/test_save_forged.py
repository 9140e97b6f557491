"""Checkpoints of a step that are forged, or whose scheduler is of another class: refused before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import megatrain
from tests.saving.forging import changed, content_of, forge
from tests.saving.training import refusal
from tests.training.resuming import BF16, CLIP, Case, Run, in_sequence, plateau, points, seed, stack, warm_up

LINEAR = Case(lambda: stack(lambda: nn.Linear(4, 4)), points, step=(CLIP, CLIP))
FULL = replace(LINEAR, scheduler=in_sequence, compile=(BF16, BF16))


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


def multiplied(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)


def saved(folder: Path, case: Case) -> Path:
    run = Run(case)
    run.train(2)
    run.save(folder, user={"epoch": 3})
    return folder


def resumed(case: Case) -> Run:
    seed(5)
    return Run(case)


def load(run: Run, folder: Path) -> None:
    run.step = megatrain.TrainStep.load(
        folder, run.compiled, run.optimizer, scheduler=run.scheduler, loss=run.step._run._rules.loss, **CLIP
    )


OTHERS = {
    "cosine in plateau": (cosine, plateau, "CosineAnnealingLR in the checkpoint, but torch.optim.lr_scheduler.Reduce"),
    "plateau in cosine": (plateau, cosine, "ReduceLROnPlateau in the checkpoint, but torch.optim.lr_scheduler.Cosine"),
    "same names": (warm_up, multiplied, "LambdaLR in the checkpoint, but torch.optim.lr_scheduler.Multiplicative"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_scheduler_of_another_class_is_refused_before_anything_is_changed(tmp_path: Path, name: str):
    one, other, text = OTHERS[name]
    folder = saved(tmp_path / "run", replace(LINEAR, scheduler=one))
    run = resumed(replace(LINEAR, scheduler=other))
    before = run.state()
    message = refusal(lambda: load(run, folder))
    assert message.startswith(
        f"the scheduler of `{folder}` doesn't fit this scheduler: 1 difference.\n  class: torch.optim.lr_"
    )
    assert text in message
    assert "Build the scheduler as it was" in message
    assert run.state() == before
    again = resumed(replace(LINEAR, scheduler=one))
    load(again, folder)
    assert again.scheduler.state_dict()["last_epoch"] == 2


def test_schedulers_in_another_order_are_refused(tmp_path: Path):
    def reversed_sequence(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.CosineAnnealingLR(optimizer, 5), lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])

    folder = saved(tmp_path / "run", replace(LINEAR, scheduler=in_sequence))
    run = resumed(replace(LINEAR, scheduler=reversed_sequence))
    assert "`scheduler._schedulers.0.T_max` is not in the checkpoint" in refusal(lambda: load(run, folder))


def test_what_the_scheduler_itself_refuses_is_one_of_our_errors(tmp_path: Path):
    folder = saved(tmp_path / "run", replace(LINEAR, scheduler=plateau))
    content = content_of(folder)
    content["extra"]["scheduler"]["mode"] = "evil"
    forge(folder, content)
    text = refusal(lambda: load(resumed(replace(LINEAR, scheduler=plateau)), folder))
    assert "lr_scheduler.ReduceLROnPlateau refuses its state in" in text


WRONG: dict[tuple[Any, ...], Any] = {
    ("progress", "count"): -1,
    ("progress", "grad_norm"): 0.5,
    ("progress",): [],
    ("generators", "torch"): "evil",
    ("modules",): [],
    ("scheduler",): "evil",
    ("scheduler_class",): 7,
    ("user",): {"!tensor": "evil"},
}


def test_a_wrong_value_of_the_step_is_refused_before_anything_is_changed(tmp_path: Path):
    folder = saved(tmp_path / "run", FULL)
    content, run = content_of(folder), resumed(FULL)
    before = run.state()
    for place, value in WRONG.items():
        forge(folder, changed(content, ("extra", *place), lambda _, value=value: value))
        text = refusal(lambda: load(run, folder))
        assert len(text.splitlines()) > 2
        assert place[0] in text or place == ("user",)
        assert run.state() == before
