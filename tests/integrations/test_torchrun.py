"""Scripts that torchrun starts: a trainer, the pages' own code, Lightning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.integrations.hf.newest_whole import newest_whole
from tests.comparing import assert_same
from tests.integrations.runs import run
from tests.integrations.several import SCENARIOS, of_one_process

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def codes(page: str, *parts: str) -> str:
    """The one block of code of a page that has all of these parts."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if all(part in block for part in parts)]
    return found


def torchrun(folder: Path, script: Path, *arguments: str, size: int = 2) -> tuple[int, str, str]:
    """Runs a script in several processes; returns torchrun's exit code, and what all wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [sys.executable, *launcher, str(script), *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_that_a_dying_process_ended_goes_on_with_the_bits_of_one(tmp_path: Path):
    folder = tmp_path / "two"
    code, _, said = torchrun(tmp_path, HERE / "torchrun_script.py", str(folder), "dies")
    assert code != 0
    assert "exitcode  : 7" in said
    found = newest_whole(folder)
    assert found is not None
    assert found.endswith("checkpoint-2")  # the last process died while the fourth update's checkpoint was due
    code, _, said = torchrun(tmp_path, HERE / "torchrun_script.py", str(folder), "resumed")
    assert code == 0, said
    values, log = torch.load(folder / "end.pt", weights_only=False)
    expected = run(of_one_process(SCENARIOS["saved"], 2), tmp_path / "one", streams=True)
    assert_same(values, expected.values)
    assert [row for row in log if "loss" in row] == [row for row in expected.log if "loss" in row]


def test_the_pages_trainer_runs_under_torchrun_with_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = codes("trainers.md", "torchrun", "use_cpu=True")
    script = tmp_path / "train.py"
    script.write_text(f"{code}\nif trainer.args.process_index == 0:\n    trainer.save_model('end')\n")
    status, _, said = torchrun(tmp_path, script)
    assert status == 0, said
    alone = tmp_path / "alone"
    alone.mkdir()
    monkeypatch.chdir(alone)
    exec(compile(code.replace("max_steps=4", "max_steps=4, gradient_accumulation_steps=2"), "page", "exec"), {})
    names = ["checkpoint-2/model.safetensors", "checkpoint-4/model.safetensors"]
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (alone / "run" / name).read_bytes()
    assert (tmp_path / "end" / "model.safetensors").read_bytes() == (alone / "run" / names[1]).read_bytes()


BUILD = """
import torch
import torch.distributed as dist

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Flatten(0), Square())

class Square(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()

rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=2)

def batches_of(rank, size):
    return rows.split(2)[rank::size]
"""


@pytest.mark.parametrize("parts", [("batches_of",), ("Accelerator(cpu=True)",)], ids=["plain", "accelerate"])
def test_the_pages_loops_run_under_torchrun(parts: tuple[str, ...], tmp_path: Path):
    script = tmp_path / "train.py"
    end = "print(f'loss {float(loss)}, {step.progress.count} steps', flush=True)"
    script.write_text(f"{BUILD}\n{codes('several-devices.md', *parts)}\n{end}\n")
    status, shown, said = torchrun(tmp_path, script)
    assert status == 0, said
    lines = re.findall(r"loss [-.e\d]+, \d+ steps", shown)
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].endswith(", 4 steps")


def test_lightning_trains_by_calls_and_by_steps_and_not_apart(tmp_path: Path):
    pytest.importorskip("lightning", reason="needs `pip install -e .[users]`")
    found: dict[str, list[str]] = {}
    for how in ("plain", "calls", "steps", "apart"):
        status, shown, said = torchrun(tmp_path, HERE / "torchrun_lightning.py", how)
        assert status == 0, said
        found[how] = re.findall(r"trained: \d+ steps, [0-9a-f]+|refused: [ \w]+", shown)
        assert len(found[how]) == 2
        assert found[how][0] == found[how][1]
    assert found["plain"][0].startswith("trained: 4 steps")
    assert found["calls"] == found["plain"]
    assert found["steps"] == found["plain"]  # of two numbers there is one sum
    assert found["apart"][0].startswith("refused: this step would train the model apart from the 1 other process")
