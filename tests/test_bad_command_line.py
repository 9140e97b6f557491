"""Every option of the command line gets every bad text: each ends with status 2 and clear words, before any work.

The words are those of the command: an option is `--lr`, and no keyword of a Python function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.tools import cli
from megatrain.tools.finetune import demo, training_run
from megatrain.tools.sizing import plan_command
from tests.bad_values import outcome

TEXTS = {
    "zero": "0",
    "minus": "-1",
    "half": "1.5",
    "nan": "nan",
    "huge": "1" + "0" * 30,
    "evil": "evil",
    "nul": "\0",
}
# What an option may well be.
RIGHT = {
    "--folder": "zero minus half nan huge evil",
    "--seconds": "half huge",
    "--steps": "huge",
    "--batch-size": "huge",
    "--context": "huge",
    "--seed": "zero",
    "train --out": "zero minus half nan huge evil",
    "train --tokenizer": "zero minus half nan huge evil",
    "train --lora-alpha": "half huge",
    "train --lora-dropout": "zero",
    "train --eval-fraction": "zero",
    "train --epochs": "half",
    "train --lr": "half huge",
    "train --warmup": "zero",
    "train --seed": "zero",
    "plan --lora": "zero",
    "report --trace": "zero minus half nan huge evil",
    "verify --seed": "zero minus",
    "verify --tolerance": "zero half huge",
}
TARGET = """
import torch

def build():
    return torch.nn.Linear(2, 2), torch.ones(2, 2)
"""
DEMO = ("--folder", "--interrupt-at", "--device", "--memory", "--steps")
TRAIN = (
    *("--out", "--tokenizer", "--lora-rank", "--lora-alpha", "--lora-dropout", "--precision", "--device", "--memory"),
    *("--block-bytes", "--length", "--eval", "--eval-fraction", "--epochs", "--steps", "--batch", "--accumulate"),
    *("--tokens-per-step", "--lr", "--warmup", "--save-every", "--seed", "--chunking", "--report-to"),
)
REPORT = (
    *("--trace", "--steps", "--device", "--memory", "--activations", "--transfer", "--block-bytes", "--chunking"),
)
PLAN = (
    *("--hardware", "--memory", "--host-memory", "--sequence", "--tokens-per-step", "--micro-batch", "--lora"),
    *("--devices", "--host-bandwidth"),
    *("--optimizer", "--precision", "--masters", "--activations", "--block-bytes", "--chunking", "--largest"),
)
VERIFY = (
    *("--device", "--memory", "--activations", "--transfer", "--block-bytes", "--chunking", "--steps", "--seed"),
    "--tolerance",
)


def keywords(said: str) -> list[str]:
    """The keywords of Python functions that a message names: `lr=`, which a user of the command doesn't know."""
    return re.findall(r"(?<![-\w])[a-z]\w*=", said)


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command: `refused`, `accepted`, or what else came."""
    status: list[object] = []

    def run() -> None:
        try:
            status.append(cli.main(arguments))
        except SystemExit as end:  # of argparse
            status.append(end.code)

    came = outcome(run)
    said = capsys.readouterr().err
    if came != "accepted":
        return came
    if status == [0]:
        return "accepted"
    if keywords(said):
        return f"names {keywords(said)}: {said}"
    is_clear = ("megatrain: " in said and said.count("\n") >= 2) or "error: argument" in said
    return "refused" if status == [2] and is_clear else f"status {status}: {said}"


def faults(run: Callable[[str, str], str], options: tuple[str, ...], command: str) -> list[str]:
    found: list[str] = []
    for option in options:
        right = RIGHT.get(f"{command}{option}", "").split()
        for name, text in TEXTS.items():
            came = run(option, text)
            if came != ("accepted" if name in right else "refused"):
                found.append(f"{option}={name}: {came[:200]}")
    return found


def test_bad_values_of_the_demo_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_demonstrate", lambda *_: True)
    assert faults(lambda option, text: ended(["demo", f"{option}={text}"], capsys), DEMO, "") == []


def test_bad_values_of_train_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_run, "train", lambda options: None)
    monkeypatch.setattr(cli, "check_found", lambda name: None)
    Path("data.txt").write_text("some text")
    given = ["train", "model", "data.txt", "--out=run"]
    assert faults(lambda option, text: ended([*given, f"{option}={text}"], capsys), TRAIN, "train ") == []
    # Other names may be data sets of the hub: these are refused when they are read.
    wrong = {
        name: ended(["train", "model", text, "--out=run"], capsys) for name, text in {"empty": "", "nul": "\0"}.items()
    }
    assert set(wrong.values()) == {"refused"}


def test_bad_values_of_plan_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan_command, "print_sizing", lambda options: None)
    monkeypatch.setattr(cli, "check_found", lambda name: None)
    given = ["plan", "config.json", "--memory=1GiB"]
    assert faults(lambda option, text: ended([*given, f"{option}={text}"], capsys), PLAN, "plan ") == []
    assert ended(["plan", "config.json"], capsys) == "refused", "there is nothing to plan for"
    assert ended([*given, "--hardware=all", "--why"], capsys) == "refused"
    assert ended([*given, "--masters=rounded", "--precision=fp32"], capsys) == "refused"


def test_bad_values_of_verify_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(TARGET)
    on_cpu = ["verify", "made.py:build", "--device=cpu"]
    assert faults(lambda option, text: ended([*on_cpu, f"{option}={text}"], capsys), VERIFY, "verify ") == []


def test_bad_values_of_report_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(TARGET)
    run = ["report", "made.py:build", "page.html", "--device=cpu"]
    assert faults(lambda option, text: ended([*run, f"{option}={text}"], capsys), REPORT, "report ") == []


def test_a_target_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for target in ("", "\0.py:f", "x" * 300 + ".py:f", "\ud800.py:f", "..:f", "math:pi"):
        assert ended(["verify", target], capsys) == "refused", target
