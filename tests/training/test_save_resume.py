"""A run that stops at a checkpoint goes on in a fresh process as if it had never stopped, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiers import wide
from tests.training.resuming import CASES, STEPS_BEFORE, Run, after, differences

ROOT = Path(__file__).parents[2]
# Of several optimizers and kinds of masters, of models that state dicts don't tell whole; the others are wide.
TRIED = [
    "matrices-muon",
    "running",
    "bf16-own-norms",
    "rounded-gpt-adamw",
]
OTHERS = [name for name in CASES if name not in TRIED]


@pytest.mark.parametrize("names", [TRIED, *(wide((OTHERS[start::2],)) for start in range(2))])
def test_a_fresh_process_goes_on_to_the_bit(tmp_path: Path, names: list[str]):
    expected: dict[str, dict[str, object]] = {}
    for name in names:  # in one process, which takes seconds to begin
        run = Run(CASES[name])
        run.train(STEPS_BEFORE)
        if run.case.between is not None:
            run.case.between(run.model)
        run.save(tmp_path / name)
        expected[name] = after(run)
    code = [sys.executable, "-m", "tests.training.resuming", str(tmp_path), str(torch.get_num_threads()), *expected]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(code, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in expected}
    assert {name: differences(expected[name], found[name])[:5] for name in expected} == {name: [] for name in expected}
