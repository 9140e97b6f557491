"""The demo: interrupted in mid-step and resumed it trains what an undisturbed one does; others' files are safe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain import files as saving
from megatrain.errors import OptionError
from megatrain.tools import cli
from megatrain.tools.finetune import demo
from tests.saving.training import same

ROOT = Path(__file__).parent.parent
THREADS = {"OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"DEPTH": 2, "WIDTH": 64, "MICRO_BATCHES": 2, "SAMPLES": 4, "SCORED": 8, "SAVE_EVERY": 3}
    for name, size in sizes.items():
        monkeypatch.setattr(demo, name, size)


def run(folder: Path, *options: str) -> int:
    return cli.main(["demo", "--folder", str(folder), "--device=cpu", *options])


def assert_same_training(one: Path, other: Path) -> None:
    """Asserts equal bits of parameters and moments, equal counts and options."""
    first, second = saving.load(one), saving.load(other)
    assert first.manifest.optimizer == second.manifest.optimizer
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors") if "extra" not in path.name)
    assert len(files) == 2
    for path in files:
        assert same(load_file(one / path), load_file(other / path))
    assert same(first.extra["generators"], second.extra["generators"])
    assert first.extra["progress"]["count"] == second.extra["progress"]["count"]


def test_numbers_are_sorted_and_those_that_score_are_in_no_step():
    drawn = [demo.numbers(4, torch.Generator().manual_seed(seed)) for seed in (0, demo._NEW)]
    for rows in drawn:
        for row in rows.tolist():
            assert row[demo.DIGITS + 1 :] == sorted(row[: demo.DIGITS])
    assert not torch.equal(*drawn)


def test_an_interrupted_and_resumed_demo_is_as_an_undisturbed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    assert run(undisturbed, "--steps=8") in (0, 1)
    shown = capsys.readouterr().out
    parts = (
        "model  ",
        "memory  ",
        "plan ",
        "step    8 of 8",
        "8 steps in",
        "loss   ",
        "sorted ",
        "verify ",
        "written ",
    )
    assert [shown.index(part) for part in parts] == sorted(shown.index(part) for part in parts)
    assert "equal to eager PyTorch" in shown
    assert (tmp_path / "undisturbed-report.html").exists()
    assert run(folder, "--steps=8", "--interrupt-at=0.5") == 130
    said = capsys.readouterr().err
    assert f"interrupted; step 4 of 8 is saved in `{folder}`, and nothing is still running" in said
    assert f"Continue with: megatrain demo --resume --folder {folder}\n" in said
    assert run(folder, "--resume", "--memory=14MiB") in (0, 1)
    assert "step 4 of 8" in capsys.readouterr().out
    assert_same_training(folder, undisturbed)
    before = (folder / "checkpoint.json").read_bytes()
    assert run(folder, "--resume") in (0, 1)  # no step is left
    assert (folder / "checkpoint.json").read_bytes() == before
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    saved = load_file(next(folder.glob("*.safetensors")))
    assert same({name: model.state_dict()[name] for name in saved}, saved)
    with pytest.raises(OptionError, match="--steps 9 is given, but the training"):
        demo.demonstrate(folder=folder, resume=True, steps=9)


@pytest.mark.nightly
def test_the_demo_as_a_command_learns_within_its_budget(tmp_path: Path):
    """The whole of it; a shell starts jobs in the background with SIGINT ignored, and the demo hears its own."""
    command = [sys.executable, "-m", "megatrain.tools.cli", "demo", "--device=cpu", "--folder", str(tmp_path / "run")]

    def ended(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options], cwd=ROOT, env={**os.environ, **THREADS}, capture_output=True, text=True, timeout=600
        )

    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        first = ended("--steps=60", "--interrupt-at=0.5")
    finally:
        signal.signal(signal.SIGINT, former)
    assert first.returncode == 130, first.stderr
    second = ended("--resume")
    assert second.returncode == 0, second.stdout + second.stderr
    peak, weights = (float(re.findall(rf"{name} ([\d.]+) MiB", second.stdout)[0]) for name in ("device", "alone take"))
    assert peak < weights


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps=0"], "steps=0 is less than 1."),
        (["--interrupt-at=1"], "--interrupt-at=1.0 is not below 1."),
        (["--memory=10 quux"], "10 quux"),
        (["--resume"], "there is no checkpoint in"),
    ],
)
def test_a_wrong_value_ends_with_status_2_and_the_rule(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(tmp_path / "run", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_missing_transformers_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"(?s)transformers is not installed.*pip install"):
        demo.build_model()
