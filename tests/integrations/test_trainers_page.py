"""The code of docs/trainers.md runs, and leaves what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.comparing import assert_same

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
def test_the_snippets_train_save_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script, mixin, resumed, _ = SNIPPETS  # the last one runs under torchrun: test_torchrun.py
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(script, "trainers.md", "exec"), found)
    assert found["trainer"].train_step.progress.count == 4
    weights = dict(LlamaForCausalLM.from_pretrained("run/checkpoint-4").state_dict())
    assert_same(weights, {k: t.detach() for k, t in found["trainer"].model.state_dict().items()})
    exec(compile(mixin, "trainers.md", "exec"), found)
    assert found["StreamedTrainer"].__mro__[1].__name__ == "Streamed"
    found["arguments"].max_steps = 6
    exec(compile(resumed, "trainers.md", "exec"), found)
    assert found["again"].state.global_step == 6
    assert found["again"].train_step.progress.count == 6
