"""`megatrain report TARGET PAGE`: a report from the command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from megatrain.compiled.compiling import compile as compile_model
from megatrain.hardware.hardware import Hardware
from megatrain.planning.planner import plan
from megatrain.progress import stage
from megatrain.reporting.step_report import StepReport, check_report_path, report
from megatrain.sizes import format_bytes
from megatrain.tracer.arguments import Structure
from megatrain.training.step import TrainStep
from megatrain.verification.command import command_target, importable, users_failures


def run(
    target: str, page: str, *, trace: str | None = None, steps: int = 3, hardware: str | None = None, **given: Any
) -> int:
    """Writes the files and prints the verdict; `given` has options of `compile`.

    Returns:
        0.

    Raises:
        OptionError: If the target can't be used, or a file can't be written.
    """
    files = [page, *([] if trace is None else [trace])]
    for path in files:
        check_report_path(path)
    with importable(target):
        made = (
            _measured(target, page, steps, given)
            if hardware is None
            else _planned(target, page, Hardware.preset(hardware), given)
        )
    if trace is not None:
        made.perfetto(trace)
    print(made)
    for path in files:
        print(f"written: {path} ({format_bytes(Path(path).stat().st_size)})")
    return 0


def _planned(target: str, page: str, hardware: Hardware, given: dict[str, Any]) -> StepReport:
    model, args, kwargs = command_target(target)
    given = {"device_memory" if name == "memory" else name: v for name, v in given.items() if name != "transfer"}
    with stage("planning"):
        planned = plan(
            model, optimizer="AdamW", loss=_loss, hardware=hardware, example_args=args, example_kwargs=kwargs, **given
        )
    return report(planned, page, costs=hardware)


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
