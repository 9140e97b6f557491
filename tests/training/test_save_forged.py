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
from tests.saving.forging import content_of, forge
from tests.saving.training import refusal
from tests.training.resuming import CLIP, Case, Run, plateau, points, seed, stack, warm_up

LINEAR = Case(lambda: stack(lambda: nn.Linear(4, 4)), points, step=(CLIP, CLIP))


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


def first_schema(folder: Path) -> None:
    content = content_of(folder)
    del content["torch"], content["extra"]["scheduler_class"]
    forge(folder, content, schema=1)


def test_a_scheduler_of_the_first_schema_is_known_by_the_names_of_its_state(tmp_path: Path):
    folder = saved(tmp_path / "run", replace(LINEAR, scheduler=cosine))
    expected = resumed(replace(LINEAR, scheduler=cosine))
    load(expected, folder)
    first_schema(folder)
    run = resumed(replace(LINEAR, scheduler=cosine))
    load(run, folder)
    assert run.state() == expected.state()
    other = resumed(replace(LINEAR, scheduler=plateau))
    assert "T_max" in refusal(lambda: load(other, folder))
