"""The commands of docs/finetuning.md and of the README train, and what they leave is read as the page says."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.finetune.fine_tuning import FineTuning, flag
from tests.finetune.commands import ROOT, train
from tests.finetune.materials import data, save_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]
HAS_DATASETS = importlib.util.find_spec("datasets") is not None
PAGE = (ROOT / "docs" / "finetuning.md").read_text()
COMMAND = re.compile(r"^ *megatrain train (.*)$", re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name."""
    save_model(tmp_path / "model")
    for kind, name in (("messages", "chats.jsonl"), ("prompt", "prompts.jsonl"), ("txt", "book.txt")):
        data(tmp_path, kind).rename(tmp_path / name)
    data(tmp_path, "prompt", 4).rename(tmp_path / "held_out.jsonl")
    (tmp_path / "prompt_set").mkdir()
    data(tmp_path / "prompt_set", "prompt").rename(tmp_path / "prompt_set" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_train_and_what_they_leave_is_read(here: Path) -> None:
    commands = COMMAND.findall(PAGE)
    assert len(commands) == 4
    for command in commands:
        assert train(*shlex.split(command), "--device=cpu") == (0 if HAS_DATASETS or "_set" not in command else 2)
    found: dict[str, Any] = {}
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "finetuning.md", "exec"), found)
    ids = torch.arange(8).reshape(1, 8)
    assert not torch.equal(found["adapted"](ids).logits, found["adapted"].get_base_model()(ids).logits * 0)
    assert len(found["tokenizer"]) == 64


@pytest.mark.wide
def test_the_command_of_the_readme_trains(here: Path) -> None:
    (command,) = COMMAND.findall((ROOT / "README.md").read_text())
    assert train(*shlex.split(command.partition("#")[0]), "--device=cpu") == 0


def test_the_page_has_each_option() -> None:
    places = {"model", "data", "out"}
    missing = [
        flag(each.name) for each in fields(FineTuning) if each.name not in places and flag(each.name) not in PAGE
    ]
    assert missing == []
