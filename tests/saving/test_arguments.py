"""What callers give to saving and loading is refused by name, before anything is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import CheckpointError, MegatrainError, OptionError
from megatrain.files import load, save
from tests.saving.training import Tied, adamw, known, save_trained, state_of

PATHS: dict[str, Any] = {
    "number": 7,
    "None": None,
    "bytes": b"run",
    "list": ["run"],
    "empty": "",
    "NUL": "a\0b",
    "surrogate": "a\ud800",
    "long name": "x" * 300,
    "long": "x/" * 3000,
}


def refusal(kind: type[MegatrainError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert len(text.splitlines()) > 2, text
    return text


@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_path_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for action in (lambda: save(PATHS[path], {}), lambda: load(PATHS[path])):
        assert refusal(OptionError, action).startswith("folder=")
    assert list(tmp_path.iterdir()) == []


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": 7}, "weights=7 is an int"),
    ({"weights": Tied()}, "weights=<Tied> is a Tied"),
    ({"weights": {7: torch.ones(1)}}, "has the key 7, which is an int"),
    ({"weights": {"a": [1.0]}}, "has at 'a' [1.0], which is a list"),
    ({"tensors": {"a": None}}, "has at 'a' None, which is None"),
    ({"tensors": 0}, "tensors=0 is an int"),
    ({"optimizer": 0}, "optimizer=0 is an int"),
    ({"optimizer": torch.optim.AdamW}, "is the class itself, not an object of it"),
    ({"names": ["a"]}, "names=['a'] is a list"),
    ({"extra": [1]}, "extra=[1] is a list"),
    ({"more": "config.json"}, "more='config.json' is no function"),
    ({"shard_bytes": True}, "shard_bytes=True is not a size"),
    ({"shard_bytes": 0}, "shard_bytes=0 is less than one byte"),
]


def test_an_argument_of_save_that_is_something_else_is_refused(tmp_path: Path):
    given: dict[str, Any] = {"weights": state_of(known(0)[0])}
    for options, text in ARGUMENTS:
        assert text in refusal(OptionError, lambda o=options: save(tmp_path / "run", **given | o)).split("\n")[0]
    assert list(tmp_path.iterdir()) == []


def test_what_a_checkpoint_is_read_into_is_refused_if_it_is_something_else(tmp_path: Path):
    save_trained(tmp_path / "run")
    checkpoint: Any = load(tmp_path / "run")
    model = Tied()
    for action, text in (
        (lambda: checkpoint.read_weights(model), "tensors=<Tied> is a Tied"),
        (lambda: checkpoint.read_weights({"a": 1}), "has at 'a' 1, which is an int"),
        (lambda: checkpoint.read_optimizer(None, {}), "optimizer is None"),
        (lambda: checkpoint.read_optimizer(adamw(model), list(model.parameters())), "is a list"),
    ):
        assert text in refusal(OptionError, action)


def test_a_path_that_the_system_refuses_is_one_of_our_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for path in ("loop", "loop/run"):
        for action in (lambda path=path: save(path, {}), lambda path=path: load(path)):
            assert "can't be a folder" in refusal(CheckpointError, action)
    assert os.listdir() == ["loop"]
