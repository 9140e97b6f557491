"""The command line as a whole: its version, its help, and the ways to start it. Commands have tests of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain import cli
from tests.tiers import wide

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
    assert said.split() == [
        "megatrain",
        f"{megatrain.__version__},",
        "torch",
        f"{torch.__version__},",
        "Python",
        python,
    ]


def test_the_help_lists_every_command(capsys):
    status, said, _ = ended(["--help"], capsys)
    assert status == 0
    for command in ("train", "plan", "demo", "verify", "report"):
        assert command in said
    assert "--version" in said


@pytest.mark.parametrize("arguments", [[], ["teach"], ["--versions"]])
def test_what_is_no_command_ends_with_2(arguments, capsys):
    status, said, wrong = ended(arguments, capsys)
    assert (status, said) == (2, "")
    assert "usage: megatrain" in wrong


@pytest.mark.parametrize("module", ["megatrain", wide("megatrain.cli")])
def test_python_m_is_the_command(module, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        timing = ["-X", "importtime"] if module == "megatrain" else []
        command = [sys.executable, *timing, "-m", module, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    if module == "megatrain.cli":  # the same main, and each start takes seconds
        shown = run("--version")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith(f"megatrain {megatrain.__version__}, ")
        return
    refused = run("verify", "nowhere.py:build")
    lines = refused.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert refused.returncode == 2
    assert said[0] == "megatrain: there is no file `nowhere.py`."
    assert "megatrain.compiled.module" in imported
    assert "torch._dynamo" not in imported  # torch's compiler takes a second
