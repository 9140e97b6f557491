"""megatrain.report and `megatrain report`: what they take, what they write, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.schedule import Schedule
from megatrain.tools import cli
from tests.reporting.steps import CARD, run_of, small

MODEL = """
import torch
from types import SimpleNamespace

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"y": x * scale, "count": 3}

class WithLoss(Layers):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x)["y"].sum(), y=x)

def build():
    return Layers(), torch.randn(4, 8)

def named():
    return Layers(), ((torch.randn(4, 8),), {"scale": 2.0})

def with_loss():
    return WithLoss(), (torch.randn(4, 8),)

def fails():
    raise RuntimeError("not today")
"""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))  # the line of each block
        return x


@pytest.fixture
def step() -> megatrain.TrainStep:
    compiled = megatrain.compile(Layers(), device="cpu", transfer="copy")
    optimizer = torch.optim.AdamW(compiled.parameters())
    return megatrain.TrainStep(compiled, optimizer, loss=lambda y, _: y.square().mean())


def test_a_step_is_drawn_as_it_ran(step: megatrain.TrainStep, tmp_path: Path):
    for _ in range(2):
        run = step.time(torch.randn(4, 8))
    made = megatrain.report(step, tmp_path / "report.html", measured=run)
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "test_report.py" in page
    assert "# the line of each block" in page
    assert [band.name for band in made.figures.bands] == ["plan", "measured"]
    assert made.figures.name == "Layers"
    assert made.figures.plan.origin == "modelled from the times of the ops in the measured step"
    assert made.figures.measured is not None
    assert made.figures.measured.timeline == run.timeline
    assert (
        str(made).splitlines()[0]
        == f"report: Layers, 3 blocks, {len(run.schedule.ticks)} ticks, {len(run.timeline)} ops"
    )
    assert repr(made) == "<StepReport Layers: plan and measured, 3 blocks>"
    made.perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any("test_report.py" in event["args"].get("source", "") for event in trace["traceEvents"] if "args" in event)


def test_a_plan_and_a_schedule_are_drawn(tmp_path: Path):
    plan = megatrain.plan(Layers(), torch.randn(4, 8), optimizer="AdamW")
    made = megatrain.report(plan, tmp_path / "plan.html", costs=CARD)
    assert made.figures.schedule is plan.schedule
    assert len(made.figures.sources) == 3
    alone = megatrain.report(plan.schedule, tmp_path / "schedule.html", costs=CARD)
    assert alone.figures.plan == made.figures.plan
    assert alone.figures.sources == ()
    measured = megatrain.report(small(), tmp_path / "measured.html", costs=run_of(small()).measured())
    assert measured.figures.plan.origin == "modelled from measured times of single ops"


def refused(call: Callable[[], object], kind: type[Exception], first: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert lines[0] == first
    assert len(lines) == 3


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    plan, page = small(), tmp_path / "report.html"
    refused(lambda: megatrain.report(plan, page), OptionError, "a report needs times.")
    other = run_of(small(clip=True))
    refused(
        lambda: megatrain.report(plan, page, measured=other), ScheduleError, "the measured run is of another schedule."
    )
    with pytest.raises(ScheduleError, match=r"^this schedule doesn't know its workload"):
        megatrain.report(Schedule.parse(str(plan)), page, costs=CARD)
    assert not page.exists()
    missing = tmp_path / "missing" / "report.html"
    refused(
        lambda: megatrain.report(plan, missing, costs=CARD),
        OptionError,
        f'the report "{missing}" can\'t be written: there is no such folder.',
    )
    # Before any work: the schedule has no times either.
    refused(
        lambda: megatrain.report(plan, tmp_path),
        OptionError,
        f'the report "{tmp_path}" can\'t be written: it is a folder.',
    )
    made = megatrain.report(plan, page, costs=CARD)
    refused(
        lambda: made.perfetto(missing),
        OptionError,
        f'the report "{missing}" can\'t be written: No such file or directory.',
    )


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(MODEL)
    return tmp_path


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(["report", *arguments])
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.mark.parametrize("function", ["build", "named", "with_loss"])
def test_the_command_trains_measures_and_draws(folder: Path, function: str, capsys: pytest.CaptureFixture[str]):
    arguments = [
        f"made.py:{function}",
        "page.html",
        "--trace=trace.json",
        "--device=cpu",
        "--transfer=copy",
        "--steps=2",
    ]
    status, out, _ = said(arguments, capsys)
    assert status == 0
    assert "\n  measured: " in out
    assert "written: page.html (" in out
    assert "one training step of a real run" in (folder / "page.html").read_text()
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["made.py:fails", "page.html"], "`made.py:fails` failed: RuntimeError: not today."),
        (["made.py:fails", "no/page.html"], 'the report "no/page.html" can\'t be written'),
        (["made.py:fails", "page.html", "--trace=no/trace.json"], 'the report "no/trace.json" can\'t be written'),
        (["made.py:build", "page.html", "--steps=0"], "--steps=0 is less than 1."),
        (["made.py", "page.html"], "`made.py` doesn't name a function."),
    ],
)
def test_what_the_command_refuses(folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = said(arguments, capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"megatrain: {words}"), err
    assert err.count("\n") >= 3
    assert not (folder / "page.html").exists()
