"""A demo that is interrupted and resumed trains what an undisturbed one does, to the bit; others' files are safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatrain
from megatrain import cli, saving
from megatrain.demo import course as course_module
from megatrain.demo import demonstrate as demonstrate_module
from megatrain.demo import training as training_module
from megatrain.demo.course import Course
from megatrain.demo.demonstrate import demonstrate
from megatrain.demo.model import build_model
from megatrain.demo.recipe import Recipe
from megatrain.demo.text import read_corpus
from megatrain.demo.training import Training
from megatrain.errors import CheckpointError, OptionError
from tests.saving.training import same
from tests.tiers import wide

pytestmark = pytest.mark.usefixtures("lowered_once")  # of few models

ROOT = Path(__file__).parent.parent
TINY = Recipe(
    device="cpu", memory="1200KiB", steps=8, seconds=1e6, context=16, width=64, depth=2, warmup_steps=3, sample_bytes=2
)
TEXT = read_corpus()[0]


def training_of(course: Course, interrupt_at: float | None = None) -> Training:
    recipe = course.recipe
    compiled = megatrain.compile(build_model(recipe), device="cpu", memory=recipe.memory, transfer="copy")
    return Training(compiled, course, TEXT, interrupt_at=interrupt_at)


def run_to_the_end(course: Course) -> None:
    assert training_of(course).run() > 0


def assert_same_training(one: Path, other: Path) -> None:
    """Asserts equal bits of parameters and moments, equal counts and options."""
    first, second = saving.load(one), saving.load(other)
    assert first.manifest.optimizer == second.manifest.optimizer
    for mine, theirs in zip(tensor_files(one), tensor_files(other), strict=True):
        assert same(load_file(mine), load_file(theirs))
    assert same(first.extra["generators"], second.extra["generators"])
    assert first.extra["progress"]["count"] == second.extra["progress"]["count"]


def tensor_files(folder: Path) -> list[Path]:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("training/optimizer-*.safetensors")])
    assert len(files) == 2
    return files


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_the_end(Course.begin(TINY, folder))
    return folder


@pytest.mark.parametrize("part", [0.2, wide(0.5), 0.9])  # in the warm-up, in the middle, in the last step
def test_interrupted_in_mid_step_and_resumed_is_as_undisturbed(part: float, undisturbed: Path, tmp_path: Path):
    folder = tmp_path / "run"
    course = Course.begin(TINY, folder)
    training = training_of(course, part)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    count = training.step.progress.count
    assert count == course.saved == int(part * TINY.steps)
    resumed = Course.resume(folder, {})
    assert (resumed.recipe, resumed.saved, resumed.num_steps) == (TINY, count, course.num_steps)
    assert resumed.seconds == course.seconds
    run_to_the_end(resumed)
    assert resumed.seconds > course.seconds
    assert_same_training(folder, undisturbed)


def test_a_resumed_demo_may_have_another_budget(undisturbed: Path, tmp_path: Path):
    course = Course.begin(TINY, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        training_of(course, 0.5).run()
    resumed = Course.resume(tmp_path / "run", {"memory": "4MiB", "steps": TINY.steps})
    assert resumed.recipe == replace(TINY, memory="4MiB")
    run_to_the_end(resumed)
    assert_same_training(tmp_path / "run", undisturbed)


def test_a_process_that_begins_behind_its_interruption_runs_to_the_end(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        training_of(Course.begin(TINY, tmp_path / "run"), 0.5).run()
    resumed = Course.resume(tmp_path / "run", {})
    assert training_of(resumed, 0.5).run() == 4


def test_checkpoints_now_and_then_change_nothing_and_an_interrupt_waits_for_them(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training_module, "SAVE_EVERY_S", 0.0)
    course = Course.begin(TINY, tmp_path / "run")
    training = training_of(course)
    saves: list[int] = []
    save = training.step.save

    def interrupted_save(folder: Path, **options: Any) -> None:
        saves.append(training.step.progress.count)
        if len(saves) == 3:
            signal.raise_signal(signal.SIGINT)
        save(folder, **options)

    monkeypatch.setattr(training.step, "save", interrupted_save)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert saves == [1, 2, 3]
    assert course.saved == 3
    run_to_the_end(Course.resume(tmp_path / "run", {}))
    assert_same_training(tmp_path / "run", undisturbed)


def test_the_command_is_interrupted_and_resumed_in_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--device=cpu", "--steps=4", "--batch-size=4", "--width=64", "--depth=2", "--sample-bytes=2"]
    folder = tmp_path / "run"
    assert cli.main(["demo", "--folder", str(folder), *options, "--seconds=1e6", "--interrupt-at=0.5"]) == 130
    shown = capsys.readouterr().err
    assert f"interrupted; step 2 of 4 is saved in `{folder}`, and nothing is still running" in shown
    assert f"Continue with: megatrain demo --resume --folder {folder}\n" in shown
    command = [sys.executable, "-m", "megatrain.cli", "demo", "--resume", "--folder", str(folder)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    second = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True, timeout=900
    )
    assert second.returncode == 1, second.stderr  # all went well, but nothing is learnt in 4 steps
    assert f"resume  from `{folder}`: step 2 of 4, after " in second.stdout
    assert "equal to eager PyTorch" in second.stdout
    recipe = Recipe(device="cpu", steps=4, batch_size=4, width=64, depth=2, sample_bytes=2, seconds=1e6)
    run_to_the_end(Course.begin(recipe, tmp_path / "undisturbed"))
    assert_same_training(folder, tmp_path / "undisturbed")


def test_transformers_loads_what_the_demo_saved(undisturbed: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(undisturbed)
    saved = load_file(tensor_files(undisturbed)[0])
    assert same({name: model.state_dict()[name] for name in saved}, saved)


def test_an_interrupt_behind_the_training_is_resumed_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    recipe = replace(TINY, steps=3, batch_size=8, context=64, memory="18MiB")
    with monkeypatch.context() as patch:
        patch.setattr(demonstrate_module, "held_out_loss", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"step 3 of 3 is saved in `.*run`(?s:.*)--resume --folder"):
            demonstrate(Course.begin(recipe, tmp_path / "run"))
    before = (tmp_path / "run" / "checkpoint.json").read_bytes()
    # The command above has compared with eager PyTorch.
    monkeypatch.setattr(demonstrate_module, "_verify", lambda *_: SimpleNamespace(ok=True))
    demonstrate(Course.resume(tmp_path / "run", {}))
    assert (tmp_path / "run" / "checkpoint.json").read_bytes() == before
    assert "none: all steps ran in an earlier process" in capsys.readouterr().out


def test_a_new_demo_replaces_the_checkpoint_of_an_older_one(undisturbed: Path, tmp_path: Path):
    for changed in ({"seed": 1, "steps": 1}, {}):
        run_to_the_end(Course.begin(replace(TINY, **changed), tmp_path / "run"))
    assert_same_training(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    "given", [{"steps": 9}, {"seed": 1, "width": 128}, {"seconds": 1.0}], ids=["steps", "several", "seconds"]
)
def test_options_that_contradict_the_checkpoint_are_refused(given: dict[str, float], undisturbed: Path):
    with pytest.raises(OptionError, match="the options contradict the checkpoint") as caught:
        Course.resume(undisturbed, {"context": TINY.context, **given})
    found = [line.split()[0] for line in str(caught.value).splitlines() if line.startswith("  --")]
    assert found == [f"--{name}" for name in given]


def test_options_that_contradict_are_refused_on_the_command_line(undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", "--resume", "--folder", str(undisturbed), "--batch-size", "3"]) == 2
    assert "--batch-size 3 is given, but 1 was" in capsys.readouterr().err


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", "--resume", "--folder", str(tmp_path / "nothing")]) == 2
    assert f"there is no checkpoint in `{tmp_path / 'nothing'}`" in capsys.readouterr().err


def test_what_the_demo_did_not_write_is_neither_resumed_nor_replaced(tmp_path: Path):
    foreign, stray = tmp_path / "foreign", tmp_path / "stray"
    saving.save(foreign, {"weight": torch.ones(2)}, extra={"user": {"recipe": {"steps": 3}}})
    stray.mkdir()
    (stray / "thesis.txt").write_text("years of work")
    for folder in (foreign, stray):
        before = {path: path.read_bytes() for path in folder.rglob("*.*")}
        for action in (lambda f=folder: Course.resume(f, {}), lambda f=folder: Course.begin(TINY, f)):
            with pytest.raises(CheckpointError):
                action()
        assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
    with pytest.raises(CheckpointError, match="a checkpoint, but not of this version"):
        Course.begin(TINY, foreign)


def test_another_text_is_refused(undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(course_module, "read_corpus", lambda: (b"help pages of another Python", b""))
    with pytest.raises(CheckpointError, match="used another text"):
        Course.resume(undisturbed, {})


def test_a_demo_in_the_background_hears_its_own_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell starts jobs in the background with SIGINT ignored."""
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    training = training_of(Course.begin(TINY, tmp_path / "demo"), interrupt_at=0.5)
    with pytest.raises(KeyboardInterrupt):
        training.run()
