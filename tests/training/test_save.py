"""A run that stops at a checkpoint goes on as if it had never stopped, to the bit; and what its files are good for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.files import load
from tests.training.hazards import TRAP, WIDTH, hazardous
from tests.training.resuming import (
    BF16,
    CASES,
    CLIP,
    STEPS_BEFORE,
    Case,
    Run,
    after,
    differences,
    points,
    stack,
    warm_up,
)
from tests.training.test_failures import first_update

ROOT = Path(__file__).parents[2]
SMALL = Case(lambda: stack(lambda: nn.Linear(4, 4)), points, scheduler=warm_up, step=(CLIP, CLIP))


def content(folder: Path) -> dict[str, bytes]:
    """Every tensor file of a checkpoint."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


BY_NIGHT = ("noted", "drawing", "meta", "running", "rounded-gpt-adamw")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else ()) for name in CASES]
)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, name: str):
    """In another plan; and a checkpoint that is saved again directly after its load is the same one."""
    run = Run(CASES[name])
    run.train(STEPS_BEFORE)
    if run.case.between is not None:
        run.case.between(run.model)
    run.save(tmp_path / "run", user={"epoch": 2})
    expected = after(run)
    resumed = Run(CASES[name], tmp_path / "run")
    assert resumed.step.user == {"epoch": 2}
    resumed.save(tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "run")
    assert differences(expected, after(resumed)) == []


def test_a_fresh_process_goes_on_to_the_bit(tmp_path: Path):
    expected: dict[str, dict[str, object]] = {}
    for name in ("running", "rounded-gpt-adamw"):  # in one process, which takes seconds to begin
        run = Run(CASES[name])
        run.train(STEPS_BEFORE)
        run.save(tmp_path / name)
        expected[name] = after(run)
    code = [sys.executable, "-m", "tests.training.resuming", str(tmp_path), str(torch.get_num_threads()), *expected]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(code, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in expected}
    assert {name: differences(expected[name], found[name])[:5] for name in expected} == {name: [] for name in expected}


def again(run: Run, folder: Path, **options: Any) -> None:
    """Reads a checkpoint into the model and the optimizer that are in use."""
    settings = {"loss": run.step._run._rules.loss, **run.case.step[0], **options}
    run.step = megatrain.TrainStep.load(folder, run.compiled, run.optimizer, scheduler=run.scheduler, **settings)


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_a_model_and_an_optimizer_in_use_go_back(tmp_path: Path, options: Any):
    """Also if updates are due that the checkpoint makes void, in whatever modes of torch the caller is."""
    run = Run(replace(SMALL, compile=(options, options)))
    run.train(2)
    with torch.device("meta"):
        run.save(tmp_path / "run")
    expected = after(run)
    run.train(1)
    with torch.inference_mode():
        again(run, tmp_path / "run")
    assert differences(expected, after(run)) == []


def test_a_model_in_the_middle_of_a_step_goes_on_from_a_checkpoint(tmp_path: Path):
    """The way out that the error of a broken step names."""
    batch = lambda step: torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))  # noqa: E731
    run = Run(Case(hazardous, batch, compile=({"transfer": "copy"}, {})))
    run.train(1)
    run.save(tmp_path / "run")
    expected = after(run)
    with first_update() as fail:
        TRAP.arm(("backward", 0), fail, always=True)
        with pytest.raises(KeyError, match="my own error"):
            run.train(1)
    with pytest.raises(ExecuteError, match="Load a checkpoint"):
        run.save(tmp_path / "broken")
    TRAP.clear()
    again(run, tmp_path / "run")
    assert differences(expected, after(run)) == []
    assert not (tmp_path / "broken").exists()


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


# -- files -----------------------------------------------------------------------------------------------------------


class Configured(nn.Module):
    """A model with a configuration, as libraries have them."""

    class Config:
        def __init__(self, width: Any):
            self.width = width

        def to_json_file(self, path: Path) -> None:
            path.write_text(json.dumps({"width": self.width}))

    config_class: Any = Config

    def __init__(self, width: Any = 4):
        super().__init__()
        self.config = Configured.Config(width)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_config_of_any_library_is_written_unless_the_caller_did(tmp_path: Path):
    batch = lambda step: torch.ones(2, 4) * step  # noqa: E731
    run = Run(Case(Configured, batch))
    run.save(tmp_path / "run")
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert written == {"width": 4, "architectures": ["Configured"], "torch_dtype": "float32"}
    run.save(tmp_path / "run", more=lambda folder: (folder / "config.json").write_text("mine"))
    assert (tmp_path / "run/config.json").read_text() == "mine"
    assert not (tmp_path / "run/generation_config.json").exists()
    load(tmp_path / "run").check()
    # What isn't the model's own is nobody's: an adapter around a model has other names of weights.
    run = Run(Case(lambda: nn.Sequential(Configured()), batch))
    run.model.config = Configured.Config(4)
    run.save(tmp_path / "other")
    assert not (tmp_path / "other/config.json").exists()
