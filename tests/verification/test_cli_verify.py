"""`megatrain verify`: what it takes, what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain.tools import cli

SOURCE = """
import torch
from torch import nn
import neighbour

COUNTS = {"calls": 0}


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, y=None, *, memory=None, steps=1):
        return self.fc(x) * steps + (0 if y is None else y) + (0 if memory is None else memory)


class Counts(Adds):
    def forward(self, x):
        COUNTS["calls"] += 1
        return super().forward(x) * COUNTS["calls"]


class Fails(Adds):
    def forward(self, x):
        raise ValueError("in the forward")


X = torch.ones(2, 3)

def positional(): return Adds(), (X, X)
def keywords(): return Adds(), {"x": X, "memory": X, "steps": 3}
def both(): return Adds(), ((X,), {"y": X})
def different(): return Counts(), (X,)
def in_forward(): return Fails(), (X,)
def leaves(): raise SystemExit(0)
def a_list(): return Adds(), [X]
def no_pair(): return Adds()
def three(): return Adds(), (X,), {}
def arguments(x): return Adds(), (x,)
class Holder:
    build = staticmethod(positional)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in {
        "json": SOURCE, "neighbour": "", "verify_a_module": SOURCE,
        "broken": "import no_such_package_at_all\n", "syntax": "def build(:\n",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield
    monkeypatch.undo()
    assert sys.path == path
    for name in set(sys.modules) - before:
        if name in ("neighbour", "broken", "syntax") or name.startswith("verif"):
            del sys.modules[name]


def verify(*arguments: str) -> int:
    return cli.main(["verify", *arguments, "--device", "cpu"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("positional", "doesn't name a function"),
        ("no_such_module:build", "there is no module `no_such_module`"),
        ("no/such/file.py:build", "there is no file `no/such/file.py`"),
        ("json.py:nope", "`json.py` has no `nope`"),
        ("json.py:a_list", "inputs of type list"),
        ("json.py:no_pair", "returned a Adds"),
        ("json.py:three", "returned (Adds, tuple, dict)"),
        ("json.py:leaves", "`json.py:leaves` failed: SystemExit"),
        ("json.py:arguments", "missing 1 required positional argument"),
    ],
)
def test_a_wrong_target_ends_with_2_and_says_why(name, said, capsys):
    assert verify(name) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) >= 3, "what is wrong, the rule, the way out"


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("json.py:in_forward", "ValueError: in the forward", 'raise ValueError("in the forward")'),
        ("broken.py:build", "No module named 'no_such_package_at_all'", "import no_such_package_at_all"),
        ("syntax.py:build", "SyntaxError", "def build(:"),
    ],
)
def test_failures_of_the_users_code_show_their_traceback_alone(name, said, line, capsys):
    assert verify(name) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert line in shown
    assert "syntax" in name or "Traceback (most recent call last)" in shown
    assert str(Path(megatrain.__file__).parent) not in shown
    assert str(Path(torch.__file__).parent) not in shown


@pytest.mark.parametrize(
    "name", ["json.py:keywords", "json.py:both", "json.py:Holder.build", "verify_a_module:positional"]
)
def test_an_equal_model_ends_with_0(name, capsys):
    assert verify(name, "--memory", "1MiB", "--activations", "recompute", "--steps", "1") == 0
    assert "verify Adds: equal to eager PyTorch" in capsys.readouterr().out
    assert sys.modules["json"] is json


@pytest.mark.filterwarnings("ignore::megatrain.OpaqueModelWarning")
def test_a_different_model_ends_with_1_and_names_the_module(capsys):
    assert verify("json.py:different") == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown
    assert "first difference: the whole model" in shown
    assert verify("json.py:different", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["model"], found["first_difference"]["culprit"]) == (False, "Counts", "model")
    assert verify("json.py:positional", "--json", "--tolerance", "0") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["max_error"], found["tolerance"], found["first_difference"]) == (True, 0, 0, None)
    assert {d["kind"] for d in found["differences"]} == {"output", "gradient", "parameter", "rng"}
