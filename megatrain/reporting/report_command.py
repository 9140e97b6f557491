"""`megatrain report TARGET PAGE`: a report from the command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from megatrain.checks import PATH, count, one_of
from megatrain.compiled.compiling import compile as compile_model
from megatrain.hardware.hardware import Hardware
from megatrain.options import COMPILE
from megatrain.planning.planner import plan
from megatrain.progress import stage
from megatrain.reporting.step_report import StepReport, check_report_path, report
from megatrain.sizes import format_bytes
from megatrain.tracer.arguments import Structure
from megatrain.training.step import TrainStep
from megatrain.verification.command import add_compile_options, command_target, importable, users_failures

_OF_COMPILE = ("device", "memory", "activations", "transfer", "block_bytes", "chunking")
_RULES = {
    **{name: COMPILE[name] for name in _OF_COMPILE},
    "trace": PATH,
    "steps": count(1, 10_000),
    "hardware": one_of(*Hardware.presets()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain report` takes."""
    add = parser.add_argument
    add("target", help="module:function or file.py:function, which returns (model, inputs)")
    add("page", help="the HTML file to write")
    add("--trace", help="also write the trace for https://ui.perfetto.dev here")
    add("--steps", type=int, default=3, help="training steps, of which the last is measured (default: 3)")
    add_compile_options(parser)
    add("--hardware", help="a machine such as rtx-4090: the step is only planned for it, and nothing runs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the files and prints the verdict.

    Returns:
        0.

    Raises:
        OptionError: If the target can't be used, an option has a wrong value, or a file can't be written.
    """
    PATH.check_flag("page", options.page, has_default=False)
    for name, rule in _RULES.items():
        if getattr(options, name) is not None:
            rule.check_flag(f"--{name.replace('_', '-')}", getattr(options, name))
    for path in (options.page, options.trace):
        if path is not None:
            check_report_path(path)
    hardware = None if options.hardware is None else Hardware.preset(options.hardware)
    with importable(options.target):
        made = _of_model(options, hardware)
    print(made)
    print(f"written: {options.page} ({format_bytes(Path(options.page).stat().st_size)})")
    if options.trace is not None:
        made.perfetto(options.trace)
        print(f"written: {options.trace} ({format_bytes(Path(options.trace).stat().st_size)})")
    return 0


def _of_model(options: argparse.Namespace, hardware: Hardware | None) -> StepReport:
    model, args, kwargs = command_target(options.target)
    given = {name: getattr(options, name) for name in _OF_COMPILE if getattr(options, name) is not None}
    if hardware is not None:
        given.pop("transfer", None)
        memory = given.pop("memory", None)
        given |= {"example_args": args, "example_kwargs": kwargs, "device_memory": memory, "hardware": hardware}
        with stage("planning"):
            planned = plan(model, optimizer="AdamW", loss=_loss, **given)
        return report(planned, options.page, costs=hardware)
    compiled = compile_model(model, **given)
    step = TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), loss=_loss)
    batch = _batch(model, args, kwargs)
    with users_failures(f"a step of the model of `{options.target}`"):
        with stage("planning"):
            step.prepare(batch)
        for _ in tqdm(range(options.steps - 1), desc="training", unit="step", leave=False, disable=None):
            step(batch)
        measured = step.time(batch)
    return report(step, options.page, measured=measured)


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
