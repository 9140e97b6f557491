"""A checkpoint that is damaged or of something else is refused by name, before anything is changed if headers tell."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import megatrain
from megatrain import files as saving
from tests.saving.forging import content_of
from tests.saving.training import refusal
from tests.training.resuming import (
    BF16,
    CASES,
    CLIP,
    OPTIMIZERS,
    ROUNDED,
    Case,
    Counting,
    Run,
    Running,
    muon_adamw,
    plateau,
    points,
    seed,
    split,
    stack,
    two_counts,
    warm_up,
)

LINEAR = Case(lambda: stack(lambda: nn.Linear(4, 4)), points, scheduler=warm_up, step=(CLIP, CLIP))
HIDDEN = replace(CASES["running"], compile=({}, {}))
NARROW = replace(LINEAR, compile=(BF16, BF16))
HALF = replace(NARROW, build=lambda: LINEAR.build().bfloat16(), batch=lambda step: points(step).bfloat16())


def saved(folder: Path, case: Case, **options: Any) -> Path:
    run = Run(case)
    run.train(2)
    run.save(folder, **options)
    return folder


def resumed(case: Case) -> Run:
    """A run with other values, to be read into."""
    seed(5)
    return Run(case)


def load(run: Run, folder: Path, **options: Any) -> None:
    loaded = {"scheduler": run.scheduler, "loss": run.step._run._rules.loss, **options}
    run.step = megatrain.TrainStep.load(folder, run.compiled, run.optimizer, **loaded)


def assert_refused(run: Run, folder: Path, *texts: str, **options: Any) -> None:
    """Asserts that an error has these texts, and that nothing is changed."""
    before = run.state()
    text = refusal(lambda: load(run, folder, **options))
    assert [part for part in texts if part not in text] == [], text
    assert len(text.splitlines()) > 2
    assert run.state() == before


# -- damaged -----------------------------------------------------------------------------------------------------

DAMAGED = replace(HIDDEN, compile=(BF16, BF16), build=lambda: stack(Half), scheduler=warm_up)


class Half(Running):
    """A running mean that fits bf16."""

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return x + torch.tanh(self.fc(x - self.mean.to(x.dtype)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with each kind of file, in several shards."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    more: Callable[[Path], Any] = lambda place: (place / "config.json").write_text('{"a": 1}')  # noqa: E731
    saved(folder, DAMAGED, more=more, shard_bytes=200, user={"t": torch.ones(4)})
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_cut_or_missing_file_is_named_before_anything_is_changed(whole: Path, tmp_path: Path):
    run = resumed(DAMAGED)
    assert len(files_of(whole)) > 12
    for file in files_of(whole):
        folder = tmp_path / "run"
        for keep in (None, -1):
            shutil.copytree(whole, folder)
            path = folder / file.relative_to(whole)
            content = path.read_bytes()
            if keep is None:
                path.unlink()
            else:
                path.write_bytes(content[:keep])
            assert_refused(run, folder, path.name)
            shutil.rmtree(folder)


# -- of something else -------------------------------------------------------------------------------------------


def only_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.ndim == 2], lr=1e-2)


def frozen() -> nn.Module:
    model = stack(lambda: nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    return model


class Wider(Running):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 4), persistent=False)


class Plain(nn.Module):
    """The parameters of `Noted` and `Running`, and nothing else."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


MISMATCHES: dict[str, tuple[Case, Case, tuple[str, ...]]] = {
    "class": (LINEAR, replace(LINEAR, optimizer="sgd"), ("class: torch.optim.adamw.AdamW", "SGD here")),
    "parameters": (LINEAR, replace(LINEAR, optimizer="matrices"), ("unexpected: `0.bias` f32[4]",)),
    "shapes": (LINEAR, replace(LINEAR, build=lambda: nn.Sequential(nn.Linear(3, 5))), ("`0.weight` f32[4, 3]",)),
    "names": (LINEAR, replace(LINEAR, build=lambda: stack(Running)), ("missing: `1.fc.weight`", "`1.weight`")),
    "bf16 into fp32": (NARROW, LINEAR, ("`0.weight` bf16[4, 3]", "f32[4, 3] here")),
    "masters into none": (
        HALF,
        replace(HALF, compile=({}, {})),
        ("unexpected: `0.weight.low`", "i16[4, 3] in"),
    ),
    "exact into rounded": (NARROW, replace(NARROW, compile=(ROUNDED, ROUNDED)), ("missing: `0.bias.generator`",)),
    "frozen": (NARROW, replace(NARROW, build=frozen), ("unexpected: `1.weight",)),
    "no extra state": (
        CASES["noted"],
        replace(CASES["noted"], build=lambda: stack(Plain)),
        ("unexpected: `1._extra_state`",),
    ),
    "buffer of another shape": (HIDDEN, replace(HIDDEN, build=lambda: stack(Wider)), ("differs: `1.mean` f32[4]",)),
    "another scheduler": (LINEAR, replace(LINEAR, scheduler=None), ("/run` has 1 scheduler (",)),
    "a scheduler": (replace(LINEAR, scheduler=None), LINEAR, ("/run` has none",)),
}
OPTIMIZERS["matrices"] = only_matrices


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Checkpoints that are only read, one of each case of `MISMATCHES`."""
    made: dict[int, Path] = {}

    def folder_of(case: Case) -> Path:
        if id(case) not in made:
            made[id(case)] = tmp_path_factory.mktemp("saved") / "run"
            saved(made[id(case)], case)
        return made[id(case)]

    return folder_of


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_checkpoint_of_something_else_is_refused_before_anything_is_changed(
    saved_once: Callable[[Case], Path], name: str
):
    one, other, texts = MISMATCHES[name]
    folder, run = saved_once(one), resumed(other)
    is_of_masters = any(".low" in text or ".generator" in text for text in texts)
    assert_refused(run, folder, *([] if is_of_masters else [str(folder)]), *texts)
    load(run, saved_once(other))


def test_what_step_save_did_not_write_is_refused(tmp_path: Path):
    run = resumed(LINEAR)
    weights = run.model.state_dict(keep_vars=True)
    saving.save(tmp_path / "run", weights, optimizer=run.optimizer, extra={"generators": saving.generators_now()})
    assert_refused(run, tmp_path / "run", "was not written by TrainStep.save: it lacks modules, progress")
    assert_refused(run, tmp_path, "isn't a checkpoint")
    assert_refused(run, tmp_path / "nothing", "isn't a checkpoint")


def test_a_scheduler_that_can_not_be_stored_is_named_and_nothing_is_lost(tmp_path: Path):
    run = Run(LINEAR)
    run.train(1)
    run.save(tmp_path / "run")
    before = {file: file.read_bytes() for file in files_of(tmp_path)}

    class Strange:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1, "b": {"fn": len}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    text = refusal(lambda: run.step.save(tmp_path / "run", scheduler=Strange(), user={"x": object()}))
    assert "`scheduler.b.fn` is a builtins.builtin_function_or_method" in text
    assert "`user.x` is a builtins.object" in text
    assert {file: file.read_bytes() for file in files_of(tmp_path)} == before


# -- several optimizers and schedulers -------------------------------------------------------------------------------

SEVERAL = replace(CASES["several-rounded"], compile=({}, {}))


def exchanged(model: nn.Module) -> list[torch.optim.Optimizer]:
    return muon_adamw(model)[::-1]


def moved(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [Counting(matrices[:-1], lr=0.1, momentum=0.9), Counting([*others, matrices[-1]], lr=1e-2)]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("muon and adamw", exchanged, "class: torch.optim.Muon with 1 group, torch.optim.adamw.AdamW with 2 groups in"),
        ("two counts", moved, "group: `"),
        ("two counts", lambda model: two_counts(model)[:1], "class: "),
    ],
)
def test_other_optimizers_are_refused_before_anything_is_read(tmp_path: Path, before: Any, after: Any, text: str):
    saved(tmp_path / "run", replace(SEVERAL, optimizer=before))
    OPTIMIZERS["after"] = after
    assert_refused(
        resumed(replace(SEVERAL, optimizer="after")), tmp_path / "run", "doesn't fit this optimizer", f"\n  {text}"
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Path]]:
    """Checkpoints without a scheduler, with one, and with two."""
    folder, run = tmp_path_factory.mktemp("several"), Run(SEVERAL)
    run.train(1)
    kinds = torch.optim.lr_scheduler
    first = kinds.ConstantLR(run.optimizers[0])
    run.scheduler = [first, *(kinds.CosineAnnealingLR(run.optimizers[0], 100) for _ in range(2))]
    for name, given in (("none", None), ("one", first), ("list", [first]), ("two", run.scheduler[:2])):
        run.step.save(folder / name, scheduler=given)
    return run, {name: folder / name for name in ("none", "one", "list", "two")}


CONSTANT, COSINE = "torch.optim.lr_scheduler.ConstantLR", "torch.optim.lr_scheduler.CosineAnnealingLR"


@pytest.mark.parametrize(
    ("name", "picked", "text"),
    [
        ("two", [1], f"has 2 schedulers ({CONSTANT}, {COSINE}); load() has 1 scheduler ({COSINE})."),
        ("one", [1, 2], f"has 1 scheduler ({CONSTANT}); load() has 2 schedulers ({COSINE}, {COSINE})."),
        ("two", [], f"has 2 schedulers ({CONSTANT}, {COSINE}); load() has none."),
        ("none", [0, 1], "has none; load() has 2 schedulers ("),
        ("two", [1, 0], f"class of scheduler.0: {CONSTANT} in the checkpoint, but {COSINE} here"),
    ],
)
def test_other_schedulers_are_refused_by_name(several: Any, name: str, picked: list[int], text: str):
    run, folders = several
    assert_refused(run, folders[name], text, scheduler=[run.scheduler[place] for place in picked] or None)


def test_lists_of_one_are_stored_as_one(several: Any):
    _, folders = several
    extras = [content_of(folders[name])["extra"] for name in ("one", "list")]
    assert [extra["scheduler"] for extra in extras] == [extras[0]["scheduler"]] * 2
    assert extras[1]["scheduler_class"] == CONSTANT
    content = content_of(folders["two"])
    assert content["optimizer"]["rest"] == {"0": {"count": 1}, "1": {"count": 1}}


# -- schedulers ------------------------------------------------------------------------------------------------------


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


def multiplied(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)


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
    assert message.startswith(f"the schedulers of `{folder}` don't fit these: 1 difference.\n  class: torch.optim.lr_")
    assert text in message
    assert "Build the scheduler as it was" in message
    assert run.state() == before
    again = resumed(replace(LINEAR, scheduler=one))
    load(again, folder)
    assert again.scheduler.state_dict()["last_epoch"] == 2
