"""Every option of every public function gets every bad value: each is refused in clear words, before any work.

`RIGHT` says which of the values are no bad ones for an option. What the model itself refuses, it refuses as it does
eagerly.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, OptionError
from tests import bad_targets
from tests.bad_targets import INPUT, Made, Target
from tests.bad_values import outcome, values

TEXTS = "evil nul digits"
# What an option may well be, besides None and True where its default is None or a bool; `!true` says that True may not.
# The last match counts.
RIGHT = {
    # Without an optimizer nothing could be in a file.
    "plan.offload": "!true",
    "Rewriter.done.state": "dict",
    "Rewriter.matches.through": "list",
    # A norm is reported where updates are, and they don't wait for it.
    "TrainStep.spread": "true",
    "schedule.reports_norm": "!true",
    "StepKind.reports_norm": "!true",
    "SavedPlan.model": TEXTS,
    "SavedPlan.hardware": TEXTS,
    "SavedPlan.device_memory": "huge",
    "SavedPlan.step_s": "zero huge half",
    "HostPlan.check.available_bytes": "huge",
    "HostPlan.missing_bytes.available_bytes": "zero huge",
    # Any rate and time.
    "Hardware.*_per_s": "half huge",
    "Hardware.launch_s": "zero half huge",
    "Hardware.issue_s": "zero half huge",
    "Hardware.op_s": "zero half huge",
    "Hardware.update_s": "zero half huge",
    "Hardware.wake_s": "zero half huge",
    "Hardware.*memory_bytes": "huge None",
    "Hardware.*locked_bytes": "huge None",
    "Hardware.*disk_rating_bytes": "huge None",
    "Hardware.name": TEXTS,
    "Hardware.origins": "dict",
    "Hardware.further_rates": "dict",
    # Any label; one that no operation has is never met.
    "Chaos.seed": "zero minus huge",
    "Chaos.max_delay_s": "zero half",
    "Chaos.fail": TEXTS,
    # No example: the first call compiles.
    "compile.example_args": "list",
    "*.example_kwargs": "dict",
    # No pass of one's own.
    "compile.passes": "list",
    "plan.passes": "list",
    # Any function: none of the graph's calls may be of it.
    "Rewriter.calls.target": "lambda",
    "Rewriter.add.kwargs": "dict",
    "Rewriter.add.storage": "zero huge",
    "Rewriter.add.name": TEXTS,
    "lower.rewrites": "list",
    "trace.kwargs": "dict",
    "trace.opaque": "dict",
    "verify.compile_options": "dict",
    # More than there are blocks keeps them all.
    "schedule.keep": "zero huge",
    "*.max_grad_norm": "half huge",
    "report.path": "evil",
    "verify.seed": "zero minus",
    "verify.learning_rate": "zero half huge",
    "verify.tolerance": "zero half huge",
    "TrainStep.*.batch": "tensor",
    "TrainStep.save.folder": "evil",
    "TrainStep.save.user": "dict",
}
# Where arguments of the model come in.
MODELS = {
    "compile.example_args": lambda model, value: model(*value),
    "plan.example_args": lambda model, value: model(*value),
    "trace.args": lambda model, value: model(*value),
}
# Values that our own passes make, and what our runtime asks of them: these trust their types, and their checkers find
# what doesn't fit together (Schedule.check, Workload.check, verify_program, TracedModule.check). A compiled model is
# the model's own class, and its methods are torch's own, as are the checks of an optimizer's options. What measures for
# seconds has its test in tests/hardware.
TRUSTED = (
    *("Block", "HostPlan", "Plan", "Program", "Report", "Schedule", "Template", "TensorSpec", "TracedModule"),
    *("Workload", "Workload.[bhu]*", "Chaos.*", "Engine.*", "Program.*", "Recording.*", "TensorSpec.*"),
    *("TracedModule.*", "Executor.in_order", "Executor.handed_through", "Hardware.seconds", "HostPlan.bytes_of"),
    *("CompiledModule.*", "GradScaler.*", "Hardware.measure", "AdamW8bit", "AdamW8bit.*"),
)


@functools.cache  # no case changes it
def made() -> Made:
    return Made()


def eager_error(option: str, value: Any) -> str | None:
    """What the model raises eagerly for a value that is meant for it."""
    call: Callable[[Any, Any], Any] | None = MODELS.get(option)
    if option.endswith(".batch"):
        micro_batch = value[0] if isinstance(value, list) and value else value
        call = _call_of(micro_batch)
        value = micro_batch
    return None if call is None else outcome(lambda: call(bad_targets.model(), value))


def _call_of(batch: Any) -> Callable[[Any, Any], Any]:
    if isinstance(batch, Mapping):
        return lambda model, given: model(**given)
    return (lambda model, given: model(*given)) if isinstance(batch, tuple) else lambda model, given: model(given)


def right_values(option: str, parameter: inspect.Parameter) -> set[str]:
    found = next((words for pattern, words in reversed(RIGHT.items()) if fnmatch.fnmatchcase(option, pattern)), "")
    right = set(found.split())
    right |= {"None"} if parameter.default is None else set()
    right |= {"true"} if isinstance(parameter.default, bool) else set()
    return right - {word.removeprefix("!") for word in right if word.startswith("!")}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]


def faults(target: Target) -> Iterator[str]:
    """Every case of a function that didn't go as it should."""
    for parameter in parameters_of(target.make()[0]):
        option = f"{target.name}.{parameter.name}"
        right = right_values(option, parameter)
        for name in values():
            function, arguments = target.make()
            value = values()[name]
            came = outcome(lambda f=function, a={**arguments, parameter.name: value}: f(**a))
            expected = ["accepted"] if name in right else ["clear", eager_error(option, value)]
            if came not in expected:
                yield f"{option}={name}: {came}"


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {target.name: target for target in bad_targets.targets(made())}


NAMES = [target.name for target in bad_targets.targets(made())]


@pytest.mark.parametrize("name", NAMES)
def test_every_bad_value_of_every_option_is_refused_in_clear_words(
    name: str, targets: dict[str, Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(faults(targets[name])) == []


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All that `megatrain` offers, and the methods of its classes, as far as they take anything."""
    for name in megatrain.__all__:
        made: Any = getattr(megatrain, name)
        if isinstance(made, type) and issubclass(made, Exception):
            continue
        yield name, made
        for method, function in inspect.getmembers(made, callable) if isinstance(made, type) else ():
            is_code = inspect.isroutine(function) or hasattr(function, "__wrapped__")
            if is_code and (not method.startswith("_") or method == "__call__"):
                yield f"{name}.{method}", function


def test_no_public_function_is_left_out() -> None:
    found = {name for name, function in public_functions() if parameters_of(function)}
    assert [pattern for pattern in TRUSTED if not fnmatch.filter(found, pattern)] == []
    assert {name for name in found if not any(fnmatch.fnmatchcase(name, p) for p in TRUSTED)} == set(NAMES)


def test_every_right_value_stands_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some targets write a checkpoint
    options = {f"{t.name}.{p.name}" for t in bad_targets.targets(made()) for p in parameters_of(t.make()[0])}
    assert [pattern for pattern in RIGHT if not fnmatch.filter(options, pattern)] == []


@pytest.mark.parametrize("device", ["cuda:99", "meta", torch.device("xpu", 3)])
def test_a_device_that_is_not_there_is_refused_before_torch_aborts(device: str | torch.device) -> None:
    for call in (megatrain.trace, megatrain.compile, megatrain.verify):
        with pytest.raises(OptionError, match=r"^device=.* (is not available here|has no values)"):
            call(bad_targets.model(), device=device)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"^device=.* (is not available here|has no values)"):
        megatrain.Engine(bad_targets.model(), torch.device(device))


def test_a_program_runs_by_its_own_schedule_over_its_own_model() -> None:
    own, deeper = made(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    program = megatrain.lower(megatrain.trace(deeper, (INPUT,)), block_bytes=1)
    with pytest.raises(ExecuteError, match=r"the schedule has \d blocks, the program has 3\."):
        megatrain.Executor(program, own.schedule, deeper)
    with pytest.raises(ExecuteError, match=r"the model has no parameter `2.weight`\."):
        megatrain.Executor(program, megatrain.schedule(program), own.model)


@pytest.mark.parametrize("wrong", [None, -1, [], 10**30])
def test_a_plan_whose_data_were_changed_is_a_schedule_error(wrong: object) -> None:
    """Read from JSON with one figure after another replaced, and checked: refused, or as good as it was."""
    written = json.loads(megatrain.SavedPlan("Model", "fp32", made().schedule).to_json())
    for holder, key in _places(written):
        before, holder[key] = holder[key], wrong
        came = outcome(lambda: megatrain.SavedPlan.from_json(json.dumps(written)))
        # The checker may say in one line which rule of schedules is broken.
        assert came in ("clear", "accepted") or came.startswith("one line"), (key, came)
        holder[key] = before


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a nested structure: its container, and where it is there."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


def test_both_ways_to_give_an_example_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match="of an example twice"):
        megatrain.plan(bad_targets.model(), INPUT, example_args=(INPUT,))
