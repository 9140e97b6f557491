"""Checkpoints of a step that are forged, or whose scheduler is of another class: refused before anything is changed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import megatrain
from megatrain.errors import CheckpointError
from tests.saving.forging import CHANGES, Place, at, changed, content_of, forge, places
from tests.saving.training import refusal
from tests.tiers import diagonal, wide
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
        folder, run.compiled, run.optimizer, scheduler=run.scheduler, loss=run.step._loss, **CLIP
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


def test_what_the_scheduler_itself_refuses_is_one_of_our_errors(tmp_path: Path):
    folder = saved(tmp_path / "run", replace(LINEAR, scheduler=plateau))
    content = content_of(folder)
    content["extra"]["scheduler"]["mode"] = "evil"
    forge(folder, content)
    text = refusal(lambda: load(resumed(replace(LINEAR, scheduler=plateau)), folder))
    assert "lr_scheduler.ReduceLROnPlateau refuses its state in" in text


# -- forged --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("forged") / "run", FULL)


def values(content: Any) -> list[Place]:
    """Where the values of the step are: but one of the many numbers of a generator."""
    found = [place for place in places(content["extra"]) if len(place) < 5 or place[-1] in (0, 624)]
    return [("extra", *place) for place in found if place[:1] != ("user",)]


# Numbers, texts and tags of a kind are refused in one place: one of each kind, and what is missing.
LIKE_OTHERS = {"huge", "object", "surrogate", "no tuple", "no pairs", "no name"}
FORGED = [name for name in CHANGES if name not in ("one more", "up", "absolute", "itself")]
TRIED = [name for name in FORGED[::2] if name not in LIKE_OTHERS]


@pytest.mark.parametrize(
    ("change", "first"),
    [*diagonal(TRIED, range(3)), *map(wide, product((name for name in FORGED if name not in TRIED), range(3)))],
)
def test_a_forged_value_of_the_step_is_refused_before_anything_is_changed(
    whole: Path, tmp_path: Path, change: str, first: int
):
    """At every third place."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    content = content_of(whole)
    run = resumed(FULL)
    before = run.state()
    wrong = {}
    for place in values(content)[first::3]:
        forged = changed(content, place, CHANGES[change])
        if forged == content:
            continue
        forge(folder, forged)
        try:
            load(run, folder)
        except CheckpointError as error:
            if len(str(error).splitlines()) < 3 or run.state() != before:
                wrong[place] = f"changed or too short: {error}"
        except Exception as error:
            wrong[place] = f"raw: {error!r}"
        else:
            if change == "dropped" or not may_say(at(content, place), at(forged, place), place):
                wrong[place] = "accepted"
            run = resumed(FULL)
            before = run.state()
    assert wrong == {}


def may_say(value: Any, forged: Any, place: Place) -> bool:
    """Whether it is a value of the same kind, which a scheduler or a generator may have."""
    numbers = (int, float)
    if isinstance(value, bool) or isinstance(forged, bool):
        return isinstance(value, bool) is isinstance(forged, bool) or None in (value, forged)
    if isinstance(value, numbers) or value is None:
        return isinstance(forged, numbers) or (isinstance(forged, str) and place[2:] == ("nonfinite",))
    return type(value) is type(forged)
