"""`megatrain verify`: what it takes, what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain import cli
from megatrain.verification.command import command_target as load

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
def pair_of_tensors(): return Adds(), (X, X)
def different(): return Counts(), (X,)
def in_forward(): return Fails(), (X,)
def raises(): raise ValueError("while building")
def leaves(): raise SystemExit(0)
def one_tensor(): return Adds(), X
def a_list(): return Adds(), [X]
def no_pair(): return Adds()
def no_model(): return "Adds", (X,)
def three(): return Adds(), (X,), {}
def odd_keys(): return Adds(), {1: X}
def arguments(x): return Adds(), (x,)
class Holder:
    build = staticmethod(positional)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    (tmp_path / "json.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "verify_a_module.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "syntax.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    path = list(sys.path)
    yield lambda name: f"json.py:{name}"
    monkeypatch.undo()
    assert sys.path == path
    for name in set(sys.modules) - before:
        if name in ("neighbour", "broken", "syntax") or name.startswith("verif"):
            del sys.modules[name]


def verify(*arguments: str) -> int:
    return cli.main(["verify", *arguments, "--device", "cpu"])


@pytest.mark.parametrize("name", ["positional", "keywords", "both", "Holder.build"])
def test_an_equal_model_ends_with_0(name, target, capsys):
    assert verify(target(name), "--memory", "1MiB", "--activations", "recompute", "--steps", "1") == 0
    assert "verify Adds: equal to eager PyTorch" in capsys.readouterr().out
    assert sys.modules["json"] is json


@pytest.mark.filterwarnings("ignore::megatrain.OpaqueModelWarning")
def test_a_different_model_ends_with_1_and_names_the_module(target, capsys):
    assert verify(target("different")) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown
    assert "first difference: the whole model" in shown


@pytest.mark.filterwarnings("ignore::megatrain.OpaqueModelWarning")
def test_the_report_as_json(target, capsys):
    assert verify(target("different"), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["model"] == "Counts"
    assert found["first_difference"]["culprit"] == "model"
    assert verify(target("positional"), "--json", "--tolerance", "0") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["max_error"], found["tolerance"], found["first_difference"]) == (True, 0, 0, None)
    assert {d["kind"] for d in found["differences"]} == {"output", "gradient", "parameter", "rng"}


def test_a_module_of_the_current_folder(target, capsys):
    assert verify("verify_a_module:positional") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("positional", "doesn't name a function"),
        (":positional", "doesn't name a function"),
        ("json.py:", "doesn't name a function"),
        ("no_such_module:build", "there is no module `no_such_module`"),
        ("no_such.module:build", "there is no module `no_such.module`"),
        ("no/such/file.py:build", "there is no file `no/such/file.py`"),
        ("json.py:nope", "`json.py` has no `nope`"),
        ("json.py:X", "is a Tensor, not a function"),
        ("json.py:a_list", "inputs of type list"),
        ("json.py:odd_keys", "inputs of type dict"),
        ("json.py:no_pair", "returned a Adds"),
        ("json.py:no_model", "returned (str, tuple)"),
        ("json.py:three", "returned (Adds, tuple, dict)"),
        ("json.py:leaves", "`json.py:leaves` failed: SystemExit"),
        ("json.py:arguments", "missing 1 required positional argument"),
    ],
)
def test_a_wrong_target_ends_with_2_and_says_why(name, said, target, capsys):
    assert verify(name) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) >= 3, "what is wrong, the rule, the way out"


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("json.py:raises", "ValueError: while building", "def raises()"),
        ("json.py:in_forward", "ValueError: in the forward", 'raise ValueError("in the forward")'),
        ("broken:build", "No module named 'no_such_package_at_all'", "import no_such_package_at_all"),
        ("broken.py:build", "No module named 'no_such_package_at_all'", "import no_such_package_at_all"),
        ("syntax.py:build", "SyntaxError", "def build(:"),
    ],
)
def test_failures_of_the_users_code_show_their_traceback_alone(name, said, line, target, capsys):
    assert verify(name) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert line in shown
    assert "syntax" in name or "Traceback (most recent call last)" in shown
    assert str(Path(megatrain.__file__).parent) not in shown
    assert str(Path(torch.__file__).parent) not in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "10 quux"], "10 quux"),
        (["--memory", "10"], "10 B"),
        (["--activations", "hope"], 'activations is "auto", "recompute"'),
        (["--steps", "0"], "steps=0"),
        (["--tolerance", "nan"], "tolerance=nan"),
    ],
)
def test_refused_options_end_with_2(options, said, target, capsys):
    assert verify(target("positional"), *options) == 2
    assert said in capsys.readouterr().err


def test_a_usage_error_ends_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", "x:y", "--steps", "two"])
    assert caught.value.code == 2


def test_only_a_tuple_and_a_dict_are_arguments_and_keywords(target, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    _, args, kwargs = load(target("both"))
    assert (len(args), list(kwargs)) == (1, ["y"])
    _, args, kwargs = load(target("pair_of_tensors"))
    assert (len(args), kwargs) == (2, {})


@pytest.mark.wide
def test_in_a_process_of_its_own(target, tmp_path):
    (tmp_path / "json.py").unlink()  # what Python itself would stumble over
    root = str(Path(megatrain.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from megatrain.cli import main; sys.exit(main())"
    run = [sys.executable, "-c", code, "verify", "verify_a_module.py:positional", "--device", "cpu"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal to eager PyTorch" in done.stdout
