"""report(): a step in one picture, as planned and as measured."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from megatrain.base.checks import PATH, checked, either, instance_of, optional
from megatrain.base.counts import counted
from megatrain.base.progress import stage
from megatrain.base.sizes import format_bytes
from megatrain.errors import OptionError, ScheduleError
from megatrain.passes.program import Program
from megatrain.planning.plan import Plan
from megatrain.scheduler.bands import band_of
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Costs, Hardware, Measured, TimedRun
from megatrain.tools.command_targets import command_target, importable, users_failures
from megatrain.tools.reporting.drawings import page_text, trace_text
from megatrain.tools.reporting.figures import StepFigures
from megatrain.tracer.arguments import Structure
from megatrain.training.compiled.compiling import compile as compile_model
from megatrain.training.step import TrainStep

_STEP = either(
    instance_of(TrainStep, "a TrainStep", "a TrainStep that was called or prepared"),
    instance_of(Plan, "a Plan"),
    instance_of(Schedule, "a Schedule"),
)
_COSTS = optional(either(instance_of(Hardware, "a Hardware"), instance_of(Measured, "a Measured")))
_RUN = optional(instance_of(TimedRun, "a TimedRun", "measured=step.time(batch)"))


@checked(step=_STEP, path=PATH, costs=_COSTS, measured=_RUN)
def report(
    step: TrainStep | Plan | Schedule,
    path: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    measured: TimedRun | None = None,
) -> StepReport:
    """Writes a step as one page of HTML, which any browser opens without a network.

        megatrain.report(step, "report.html", measured=step.time(batch))

    The page has the streams as lanes, with the plan above the measured step; the bytes that live on the device, and
    what holds the peak; and what each stream does. Times of the plan are modelled: `schedule.simulate` makes them from
    `costs`. Times of the measured step are those of a real run.

    Args:
        step: A TrainStep after its first call, or `prepare`; a `Plan`; or a `Schedule` that knows its workload.
        path: The file to write; one that exists is replaced.
        costs: Times of the plan's ops: rates of a machine, or the times of ops that were measured. None takes those of
            `measured`, or of the machine of a `Plan`.
        measured: A run of the same schedule, from `TrainStep.time`. Without it the page has no measured step.

    Returns:
        The report, which prints the verdict and writes a trace for Perfetto.

    Raises:
        OptionError: If there are neither costs nor a measured run, or the file can't be written.
        ScheduleError: If the schedule doesn't know its workload, or `measured` is of another schedule.
        ExecuteError: If the step has no schedule yet.
    """
    check_report_path(path)
    made = step_report(step, costs, measured)
    made.write(path)
    return made


def step_report(step: TrainStep | Plan | Schedule, costs: Costs | None, measured: TimedRun | None) -> StepReport:
    """Makes what `report` writes."""
    schedule = step if isinstance(step, Schedule) else step.schedule
    program = None if isinstance(step, Schedule) else step.program
    schedule.known_workload()
    if not schedule.ops:
        raise ScheduleError(
            "the schedule has no ops, so there is nothing to draw.\n  A report shows ops in time.\n"
            "  Give the schedule of a step that computes something."
        )
    if costs is None and measured is None and isinstance(step, Plan):
        costs = step.hardware
    if measured is not None and measured.schedule != schedule:
        raise ScheduleError(
            "the measured run is of another schedule.\n  Plan and run are drawn op by op, one above the other.\n"
            "  Time the step again with step.time(batch), or give the run's own schedule."
        )
    if costs is None and measured is None:
        raise OptionError(
            "a report needs times.\n  A schedule orders ops, and says nothing of their durations.\n"
            "  Give costs=megatrain.Hardware(...), or measured=step.time(batch)."
        )
    origin = "modelled from the rates of a machine"
    if not isinstance(costs, Hardware):
        origin = "modelled from measured times of single ops"
    if costs is None:
        assert measured is not None
        costs, origin = measured.measured(), "modelled from the times of the ops in the measured step"
    ran = measured and band_of("measured", "one training step of a real run", schedule, measured.timeline)
    figures = StepFigures(
        "schedule" if program is None else program.name,
        schedule,
        () if program is None else tuple(_source(program, index) for index in range(len(program.blocks))),
        schedule.instructions,
        band_of("plan", origin, schedule, schedule.simulate(costs).timeline),
        ran,
    )
    return StepReport(figures)


def _source(program: Program, index: int) -> str:
    """The user's first line in a block; equal blocks share a template, and with it the line of one of them."""
    graph = program.templates[program.blocks[index].template].graph
    found = (node.meta.get("source") for node in graph.nodes if node.op.startswith("call_"))
    return next((str(line) for line in found if line is not None), "")


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """A step in pictures; made by `report`, printed by `str`."""

    figures: StepFigures

    @property
    def verdict(self) -> tuple[str, ...]:
        """What bounds the step, in words: a line for the plan, and two for the measured step."""
        return self.figures.verdict

    @checked(path=PATH)
    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the page.

        Raises:
            OptionError: If the file can't be written.
        """
        _write(path, page_text(self.figures))

    @checked(path=PATH)
    def perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes the same as a trace that https://ui.perfetto.dev opens: Chrome's JSON format.

        Each band is a process and each stream a thread in it, with a counter of the bytes that live on the device.

        Raises:
            OptionError: If the file can't be written.
        """
        _write(path, trace_text(self.figures))

    def __str__(self) -> str:
        name, table, lines = self.figures.name, self.figures.schedule, (*self.verdict, *self.figures.peak.words())
        ticks, ops = counted(len(table.ticks), "tick"), counted(len(table.ops), "op")
        head = f"report: {name}, {counted(table.num_blocks, 'block')}, {ticks}, {ops}"
        return "\n".join([head, *("  " + line.replace("; ", "\n    ") for line in lines)])

    def __repr__(self) -> str:
        bands = " and ".join(band.name for band in self.figures.bands)
        return f"<StepReport {self.figures.name}: {bands}, {counted(self.figures.schedule.num_blocks, 'block')}>"


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Refuses a path that can't be that of a file, before long work."""
    place = Path(path)
    if not place.parent.is_dir():
        raise _refused(path, "there is no such folder")
    if place.is_dir():
        raise _refused(path, "it is a folder")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise _refused(path, "permission denied")


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


def _refused(path: str | os.PathLike[str], reason: str) -> OptionError:
    return OptionError(
        f'the report "{os.fspath(path)}" can\'t be written: {reason}.\n'
        "  A report is one file in a folder that exists.\n  Give another path, or make room."
    )


# -- `megatrain report TARGET PAGE` -----------------------------------------------------------------------------------


def run(target: str, page: str, *, trace: str | None = None, steps: int = 3, **given: Any) -> int:
    """Writes the files and prints the verdict; `given` has options of `compile`."""
    files = [page, *([] if trace is None else [trace])]
    for path in files:
        check_report_path(path)
    with importable(target):
        made = _measured(target, page, steps, given)
    if trace is not None:
        made.perfetto(trace)
    print(made)
    for path in files:
        print(f"written: {path} ({format_bytes(Path(path).stat().st_size)})")
    return 0


def _measured(target: str, page: str, steps: int, given: dict[str, Any]) -> StepReport:
    model, args, kwargs = command_target(target)
    compiled = compile_model(model, **given)
    step = TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), loss=_loss)
    batch = _batch(model, args, kwargs)
    with users_failures(f"a step of the model of `{target}`"):
        with stage("planning"):
            step.prepare(batch)
        for _ in tqdm(range(steps - 1), desc="training", unit="step", leave=False, disable=None):
            step(batch)
        measured = step.time(batch)
    return report(step, page, measured=measured)


def _loss(result: Any, batch: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of its differentiable outputs."""
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own
    found = [tensor for tensor in Structure.of(result).placeholders if tensor.requires_grad]
    device = found[0].device if found else None
    return sum((t.abs().float().square().mean() for t in found), start=torch.zeros((), device=device))


def _batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as a batch: one mapping, or one tuple."""
    if not kwargs:
        return args
    return dict(inspect.signature(model.forward).bind_partial(*args).arguments) | kwargs
