"""The examples run as a reader would run them, and print what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MOST_LINES = 72


def printed_here(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs an example in this process, which has imported all that takes long, in an empty folder."""
    monkeypatch.chdir(folder)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("default")
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert list(folder.iterdir()) == [], "an example leaves nothing behind"
    return shown.getvalue()


def printed(name: str, folder: Path, *launcher: str) -> str:
    """Runs an example in an empty folder, without network for the Hugging Face libraries."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py")]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    assert list(folder.iterdir()) == [], "an example leaves nothing behind"
    return ended.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """What the pattern's groups match, all of it."""
    found = [
        value for groups in re.findall(pattern, text) for value in ([groups] if isinstance(groups, str) else groups)
    ]
    assert found, f"nothing matches {pattern} in:\n{text}"
    return [float(value) for value in found]


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def test_examples_are_short_and_each_is_named_by_a_test():
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    examples = list((ROOT / "examples").glob("*.py"))
    assert len(examples) >= 4
    for path in examples:
        assert len(path.read_text().splitlines()) < MOST_LINES, path.name
        assert any(path.stem in text for text in tests), path.name


def test_minimal_learns_within_a_budget_below_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = printed_here("minimal", tmp_path, monkeypatch)
    losses = numbers(r"step \d+: loss ([\d.]+)", shown)
    assert losses[-1] < losses[0] / 100
    weights, held, budget = numbers(r"weights (\d+) B, most that the device held (\d+) B, budget (\d+) B", shown)
    assert held <= budget < weights
    assert "schedule: 8 blocks" in shown


@pytest.mark.skipif(is_missing("diffusers"), reason="needs diffusers: pip install -e .[users]")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["diffusion", "diffusion_lora"])
def test_diffusion_models_learn_within_a_budget_below_their_weights(name: str, tmp_path: Path):
    shown = printed(name, tmp_path)
    losses = numbers(r"step \d+: loss ([\d.]+)", shown)
    assert losses[-1] < 0.9 * losses[0]
    weights, held = numbers(r"weights (\d+) B, the step takes (\d+) B", shown)
    assert held < weights
    if name == "diffusion":
        errors = numbers(r"error of sampled images ([\d.]+)", shown)
        assert errors[-1] < 0.5 * errors[0]


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_have_the_bits_of_one(size: int, tmp_path: Path):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    shown = printed("several_processes", tmp_path, *launcher)
    losses = numbers(r"epoch \d: loss ([\d.]+)", shown)
    assert losses[-1] < losses[0]
    assert f"{size} processes, {36 // size} steps; the bits of one: True" in shown


@pytest.mark.nightly
@pytest.mark.skipif(is_missing("transformers"), reason="transformers isn't installed")
def test_hf_llama_learns_and_its_checkpoint_is_a_hugging_face_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = printed_here("hf_llama", tmp_path, monkeypatch)
    losses = numbers(r"step \d+: loss ([\d.]+)", shown)
    assert losses[-1] < losses[0] - 0.5
    weights, taken = numbers(r"weights (\d+) B, the step takes (\d+) B", shown)
    assert taken < weights / 2
    assert "the same weights: True" in shown
    assert re.search(r"verify LlamaForCausalLM: equal to eager PyTorch; (\d+) of \1 tensors bit for bit", shown)


@pytest.mark.nightly
@pytest.mark.skipif(is_missing("peft") or is_missing("transformers"), reason="peft or transformers isn't installed")
def test_lora_trains_adapters_and_nothing_else(tmp_path: Path):
    shown = printed("lora", tmp_path)
    losses = numbers(r"step \d+: loss ([\d.]+)", shown)
    assert losses[-1] < losses[0] - 0.5
    assert "frozen weights unchanged: True" in shown
    weights, taken = numbers(r"weights (\d+) B, the step takes (\d+) B", shown)
    assert taken < weights / 2
    moved, back = numbers(r"moves (\d+) B to the device and (\d+) B back", shown)
    assert back < weights / 4 < moved


@pytest.mark.nightly
@pytest.mark.skipif(is_missing("transformers"), reason="transformers isn't installed")
def test_the_plan_fits_the_card_and_one_of_two_machines(tmp_path: Path):
    shown = printed("plan_before_you_rent", tmp_path)
    assert re.search(r"^plan: LlamaForCausalLM, \d+ blocks, 6738415616 parameters; bf16", shown)
    assert numbers(r"device: ([\d.]+) GiB of 9.00 GiB: fits", shown)[0] < 9
    assert re.search(r"64GiB: it does not fit\na step needs [\d.]+ GiB of host memory, 64.00 GiB are available", shown)
    assert shown.rstrip().endswith("128GiB: it fits")


def test_the_notebook_runs_from_plan_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.chdir(tmp_path)
    shown, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(shown), torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(cells):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    text = shown.getvalue()
    losses = [float(loss) for loss in re.findall(r"^([\d.]+(?: -> [\d.]+)+)$", text, re.MULTILINE)[0].split(" -> ")]
    assert losses[-1] < losses[0] / 100
    weights, held = numbers(r"(?:weights take|device held) (\d+) KiB", text)
    assert held < weights
    assert "\nverify Sequential: equal to eager PyTorch; " in text
    assert text.endswith("the same loss: True\n")
