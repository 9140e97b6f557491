"""The public functions of megatrain, each with arguments that are right, to be made wrong one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.call_trial import Site
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import TimedRun


class Target(NamedTuple):
    """A function and arguments that it takes.

    Args:
        name: As a user writes it.
        make: Returns `(function, arguments by name)`, made anew for each case.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]


INPUT = torch.ones(2, 2)
HARDWARE = megatrain.Hardware(1e9, 1e9, 1e9)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
    return result.mean()


@functools.wraps(megatrain.verify)
def verify(model: Any, **options: Any) -> megatrain.Report:
    return megatrain.verify(model, INPUT, **options)


class Made:
    """What one function makes and the next one takes; nothing here is changed by a case."""

    def __init__(self) -> None:
        self.model = model()
        self.traced = megatrain.trace(self.model, (INPUT,))
        self.program = megatrain.lower(self.traced)
        self.schedule = megatrain.schedule(self.program)
        assert self.schedule.workload is not None
        self.workload = self.schedule.workload
        self.plan = megatrain.plan(self.model, INPUT)
        self.values = (HARDWARE, megatrain.Chaos(), self.schedule.kind, self.plan.saved())


def targets(made: Made) -> Iterator[Target]:
    """All that is swept."""
    yield from _functions(made)
    yield from _constructors(made)
    yield from _training()
    yield from _runtime(made)
    yield from _rewriting(made)
    for name, owner, arguments in _methods(made):
        yield Target(name, lambda owner=owner, name=name, a=arguments: (getattr(owner, name.split(".")[1]), dict(a)))


def _functions(made: Made) -> Iterator[Target]:
    yield Target("compile", lambda: (megatrain.compile, {"model": model(), "device": "cpu", "example_args": (INPUT,)}))
    yield Target("trace", lambda: (megatrain.trace, {"model": made.model, "args": (INPUT,)}))
    yield Target("lower", lambda: (megatrain.lower, {"traced": made.traced}))
    yield Target("schedule", lambda: (megatrain.schedule, {"program": made.program}))
    yield Target("workload", lambda: (megatrain.workload, {"program": made.program}))
    yield Target("plan", lambda: (megatrain.plan, {"model": made.model, "example_args": (INPUT,)}))
    yield Target("verify", lambda: (verify, {"model": made.model, "device": "cpu", "steps": 1}))
    timings = made.schedule.simulate(HARDWARE).timeline
    run = TimedRun.of(made.schedule, {t.position: (t.start_s, t.end_s) for t in timings})
    drawn = {"step": made.schedule, "path": "report.html", "costs": HARDWARE, "measured": run}
    yield Target("report", lambda: (megatrain.report, drawn))


def _constructors(made: Made) -> Iterator[Target]:
    for value in made.values:
        kind, arguments = type(value), {field.name: getattr(value, field.name) for field in fields(value)}
        yield Target(kind.__name__, lambda kind=kind, arguments=arguments: (kind, dict(arguments)))


def _training() -> Iterator[Target]:
    def step() -> tuple[megatrain.CompiledModule, torch.optim.Optimizer]:
        compiled = megatrain.compile(model(), device="cpu")
        return compiled, torch.optim.SGD(compiled.parameters(), lr=0.1)

    def make() -> tuple[Any, dict[str, Any]]:
        compiled, optimizer = step()
        return megatrain.TrainStep, {"compiled": compiled, "optimizer": optimizer, "loss": loss}

    yield Target("TrainStep", make)
    for method in ("__call__", "prepare", "measure", "time"):
        taken = megatrain.TrainStep(*step(), loss=loss)
        yield Target(f"TrainStep.{method}", lambda taken=taken, m=method: (getattr(taken, m), {"batch": INPUT}))
    line = {"num_steps": 2, "tokens_per_step": 8}
    yield Target("TrainStep.progress_line", lambda: (megatrain.TrainStep(*step(), loss=loss).progress_line, dict(line)))
    yield Target("TrainStep.save", lambda: (megatrain.TrainStep(*step(), loss=loss).save, {"folder": "run"}))

    def load() -> tuple[Any, dict[str, Any]]:
        compiled, optimizer = step()
        megatrain.TrainStep(compiled, optimizer).save("run")
        return megatrain.TrainStep.load, {"folder": "run", "compiled": compiled, "optimizer": optimizer}

    yield Target("TrainStep.load", load)


def _rewriting(made: Made) -> Iterator[Target]:
    yield Target("Rewriter", lambda: (megatrain.Rewriter, {"traced": made.traced}))

    def rewriter() -> tuple[megatrain.Rewriter, Any]:
        rewriter = megatrain.Rewriter(made.traced)
        return rewriter, rewriter.calls(F.linear)[-1]

    def call() -> tuple[Any, dict[str, Any]]:
        own, like = rewriter()

        @functools.wraps(own.call)
        def called(like: Any, target: Any) -> Any:
            return own.call(like, target, like.args[0] if isinstance(like, torch.fx.Node) else like)

        return called, {"like": like, "target": torch.neg}

    yield Target("Rewriter.call", call)

    def with_node(method: str, **arguments: Callable[[Any], Any]) -> Target:
        def make() -> tuple[Any, dict[str, Any]]:
            own, node = rewriter()
            return getattr(own, method), {name: of(node) for name, of in arguments.items()}

        return Target(f"Rewriter.{method}", make)

    yield with_node("calls", target=lambda _: F.linear)
    yield with_node("add", site=Site.of, target=lambda _: torch.neg, args=lambda node: (node.args[0],))
    yield with_node("replace", old=lambda node: node, new=lambda node: node)
    yield with_node("erase", node=lambda node: node)
    yield with_node("matches", pattern=lambda _: lambda x: x + 1, through=lambda _: ())
    yield with_node("done")


def _runtime(made: Made) -> Iterator[Target]:
    cpu = torch.device("cpu")
    yield Target("Engine", lambda: (megatrain.Engine, {"model": model(), "device": cpu}))
    arguments = {"program": made.program, "schedule": made.schedule}
    yield Target("Executor", lambda: (megatrain.Executor, {**arguments, "model": model()}))

    def backward() -> tuple[Any, dict[str, Any]]:
        executor = megatrain.Executor(made.program, made.schedule, model())
        return executor.backward, {"call": executor.forward([INPUT]), "gradients": [INPUT]}

    yield Target("Executor.backward", backward)

    def begin() -> tuple[Any, dict[str, Any]]:
        planned = megatrain.schedule(made.program, updates="overlap")
        return megatrain.Executor(made.program, planned, model()).begin, {"inputs": [[INPUT]]}

    yield Target("Executor.begin", begin)


def _methods(made: Made) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    executor = megatrain.Executor(made.program, made.schedule, model())
    yield "Executor.forward", executor, {"inputs": [INPUT]}
    yield "Schedule.parse", Schedule, {"text": str(made.schedule), "workload": made.workload}
    yield "Schedule.check", made.schedule, {"workload": made.workload}
    yield "Schedule.simulate", made.schedule, {"costs": HARDWARE}
    yield "Schedule.why", made.schedule, {"op": "F0"}
    yield "Schedule.diff", made.schedule, {"other": made.schedule}
    yield "Schedule.gantt", made.schedule, {"costs": HARDWARE}
    yield "Workload.from_dict", megatrain.Workload, {"data": made.workload.to_dict()}
    yield "Hardware.preset", megatrain.Hardware, {"name": "h200"}
    yield "Hardware.product_rate", HARDWARE, {"name": "bf16"}
    yield "HostPlan.check", made.plan.host, {"available_bytes": 2**40}
    yield "HostPlan.missing_bytes", made.plan.host, {"available_bytes": 2**40}
    saved = made.plan.saved()
    yield "Plan.diff", made.plan, {"other": saved}
    yield "SavedPlan.from_json", megatrain.SavedPlan, {"text": saved.to_json()}
    yield "SavedPlan.diff", saved, {"other": saved}
    yield "Plan.largest", made.plan, {"what": "micro_batch", "multiple": 1, "most": 2}
