"""plan(): the device memory, host memory and time that training a model takes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.checks import checked, number, optional
from megatrain.device import HOST, Device, find
from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import HARDWARE, machine_of
from megatrain.optim.need import OPTIMIZER
from megatrain.options import COMPILE, PRECISION, check_masters, given_bytes
from megatrain.passes.pipeline import PASSES, Rewrite
from megatrain.planning.host_plan import ExampleSizes, OptimizerLike
from megatrain.planning.loss_bytes import Loss
from megatrain.planning.plan import Plan
from megatrain.planning.planned_step import StepLimits
from megatrain.planning.planner import Planner
from megatrain.scheduler.builder.build import STEP
from megatrain.sizes import SIZE
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.source_line import original
from megatrain.tracer.spec import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL


@checked(
    model=MODEL,
    device=optional(DEVICE),
    device_memory=optional(SIZE),
    host_memory=optional(SIZE),
    optimizer=optional(OPTIMIZER),
    precision=PRECISION,
    masters=COMPILE["masters"],
    micro_batches=STEP["micro_batches"],
    max_grad_norm=optional(number(above=0)),
    activations=STEP["activations"],
    block_bytes=optional(SIZE),
    passes=PASSES,
    chunking=COMPILE["chunking"],
    hardware=optional(HARDWARE),
    example_args=EXAMPLE_ARGS,
    example_kwargs=EXAMPLE_KWARGS,
)
def plan(  # noqa: PLR0913  # as for `compile`
    model: nn.Module,
    *args: Any,
    device: Device | torch.device | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    optimizer: OptimizerLike | None = None,
    precision: str = "fp32",
    masters: str = "exact",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    overlap: bool = True,
    activations: str = "auto",
    block_bytes: int | str | None = None,
    passes: Sequence[Rewrite] = (),
    chunking: str = "auto",
    loss: Loss | None = None,
    hardware: Hardware | str | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """Captures a model and schedules a whole training step, to say how much memory the step takes.

    Allocates nothing: parameters and inputs may be on meta. (A forward that reads values of weights needs them. With
    `precision="bf16"`, fp32 weights are replaced by stand-ins without values.) The model and all generators stay as
    they were.

    Args:
        model: Any nn.Module.
        args: Example arguments of a call of one micro-batch.
        device: A device of this machine, whose layout of weights and whose reserve are planned for; as for `compile`.
            None plans with the layout of the CPU, and states the reserve that a card needs.
        device_memory: Memory of the device for the step, as `memory` of `compile`: bytes, or text like `"10GiB"`. None
            doesn't bound the step.
        host_memory: Memory of the host, likewise. With None `Plan.check` asks this machine.
        optimizer: Over the model's parameters, or several; or a class, or its name in `torch.optim`; None for none.
        precision: `"fp32"`, or `"bf16"` for bf16 compute over fp32 masters.
        masters: As for `compile`.
        micro_batches: Number of micro-batches in a step (gradient accumulation).
        max_grad_norm: Any number means that gradients are clipped, so that updates wait for their norm.
        overlap: Updates run during the backward and, unless `device` is the CPU, some during the next forward; if they
            wait for a norm, all do. (See `spread` of `TrainStep`.)
        activations: As for `compile`.
        block_bytes: As for `compile`.
        passes: As for `compile`.
        chunking: As for `compile`.
        loss: As for `TrainStep`; it gets the example as its batch.
        hardware: A machine, the name of one in the table (`Hardware.presets()`), or `"measured"` for this machine with
            `device`. The plan is the fastest found for it that fits `device_memory`, and says its time.
        example_args: Another way to give `args`.
        example_kwargs: Example keyword arguments.

    Raises:
        OptionError: If an option has a wrong value, or no example was given.
        TraceError: If the model can't be captured faithfully.
        LowerError: If one of `passes` breaks a rule.
        ScheduleError: If no amount of memory allows this schedule.
        OptimizerError: If an optimizer's `step` needs a closure, or two hold the same parameter.
    """
    model = original(model)
    sizes = {
        "device_memory": given_bytes(device_memory, "device_memory"),
        "host_memory": given_bytes(host_memory, "host_memory"),
        "block_bytes": given_bytes(block_bytes, "block_bytes"),
    }
    check_masters(masters, precision)
    if not (args or example_args or example_kwargs):
        raise OptionError(
            "plan needs an example of a call.\n  A capture needs inputs; on meta they take no memory.\n"
            "  Give the arguments of one micro-batch: plan(model, ids), or plan(model, example_kwargs={...})."
        )
    if args and example_args:
        raise OptionError(
            "plan got the positional arguments of an example twice.\n  `example_args` means the same as the "
            "arguments after the model.\n"
            "  Leave out `example_args`, or the arguments after the model."
        )
    arguments = Arguments.of(model, args or example_args, dict(example_kwargs or {}))
    limits = StepLimits(
        **sizes,
        device=HOST if device is None else find(device),
        has_device=device is not None,
        optimizer=tuple(optimizer) if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else optimizer,
        precision=precision,
        masters=masters,
        micro_batches=micro_batches,
        max_grad_norm=max_grad_norm,
        overlap=overlap,
        activations=activations,
        passes=tuple(passes),
        chunking=chunking,
        loss=loss,
        hardware=None if hardware is None else machine_of(hardware, device),
    )
    return Planner(ExampleSizes(model, arguments)).plan(limits)
