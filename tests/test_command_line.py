"""The command line as a whole: its version, its help, and the ways to start it. Commands have tests of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain.tools import cli

ROOT = Path(__file__).parent.parent


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """The status with which argparse ends the command, and what was printed."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_the_version_names_all_that_a_report_of_a_fault_needs(capsys):
    status, said, _ = ended(["--version"], capsys)
    python = sys.version.split()[0]
    assert status == 0
    assert said == f"megatrain {megatrain.__version__}, torch {torch.__version__}, Python {python}\n"


@pytest.mark.parametrize("command", ["", "train", "plan", "demo", "doctor", "verify", "report"])
def test_help_needs_no_torch(command):
    code = (
        f"import sys; from megatrain.tools import cli; sys.argv[1:] = {[*command.split(), '--help']}\ntry: cli.main()\n"
    )
    code += "except SystemExit: print(*{'torch', 'numpy', 'networkx'} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith(f"usage: megatrain {command}".rstrip())
    assert done.stderr == "\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--learning-rate", "--lr"), ("--lora_rnk=8", "--lora-rank"), ("--device-memory=8GiB", "--memory")],
)
def test_an_unknown_option_names_the_nearest_one(given, meant, capsys):
    status, _, wrong = ended(["train", "model", "data.txt", "--out", "out", given], capsys)
    assert status == 2
    assert wrong.endswith(f"unrecognized arguments: {given}\n  Did you mean {meant}?\n")


def test_the_help_lists_every_command(capsys):
    status, said, _ = ended(["--help"], capsys)
    assert status == 0
    for command in ("train", "plan", "demo", "doctor", "verify", "report"):
        assert command in said
    assert "--version" in said


@pytest.mark.parametrize("arguments", [[], ["teach"], ["--versions"]])
def test_what_is_no_command_ends_with_2(arguments, capsys):
    status, said, wrong = ended(arguments, capsys)
    assert (status, said) == (2, "")
    assert "usage: megatrain" in wrong


def test_python_m_is_the_command(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "megatrain", "verify", "nowhere.py:build"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    lines = refused.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert refused.returncode == 2
    assert said[0] == "megatrain: there is no file `nowhere.py`."
    assert "megatrain.training.compiled.module" in imported
    assert "torch._dynamo" not in imported  # torch's compiler takes a second
