"""plan(): the device memory and host memory that training a model takes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.checks import checked, count, number, optional
from megatrain.device import HOST, Device, find
from megatrain.errors import ExecuteError, OptionError, ScheduleError
from megatrain.garbage import paused_collection
from megatrain.hardware.given import HARDWARE, machine_of
from megatrain.hardware.hardware import Hardware
from megatrain.interrupts import Interrupts
from megatrain.opaque_model import check_opaque
from megatrain.optim.made_over import OPTIMIZER
from megatrain.options import PRECISION
from megatrain.passes.pipeline import PASSES, Rewrite, lower
from megatrain.passes.program import Program
from megatrain.planning.host_plan import HostPlan, OptimizerLike, host_plan, narrow_entries
from megatrain.planning.loss_bytes import Loss, measure_loss
from megatrain.planning.plan_text import device_lines, reserve_text, verdict
from megatrain.runtime.block import outer_hooks_off
from megatrain.scheduler.builder.build import STEP
from megatrain.scheduler.from_program import step_schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.simulate import Simulation
from megatrain.sizes import SIZE, parse_bytes
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.capture.sandbox import swapped_state
from megatrain.tracer.given import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL
from megatrain.tracer.inventory import inventory
from megatrain.tracer.recording.own_code import original
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule


@checked(device_memory=optional(count(1)), host_memory=optional(count(1)), precision=PRECISION)
@dataclass(frozen=True, slots=True)
class Plan:
    """A training step on paper; made by `plan`, printed by `str`.

    Args:
        program: The model's blocks.
        schedule: Of the whole step. If `device_memory` is too small, the schedule that takes the least memory.
        host: The host memory that the step takes.
        device_memory: Bytes of the device for the step, or None.
        host_memory: Bytes of the host for the step, or None.
        precision: `"fp32"` or `"bf16"`.
        too_small: Why the device's memory isn't enough, or None.
        reserve: What the device needs besides, in words.
        hardware: The machine whose time is predicted, or None.
    """

    program: Program
    schedule: Schedule
    host: HostPlan
    device_memory: int | None
    host_memory: int | None
    precision: str
    too_small: str | None = field(default=None, repr=False)
    reserve: str = ""
    hardware: Hardware | None = None

    @property
    def simulation(self) -> Simulation | None:
        """The step on paper, with its seconds; None without `hardware`."""
        return None if self.hardware is None else self.schedule.simulate(self.hardware)

    @property
    def fits(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except (ScheduleError, ExecuteError):
            return False
        return True

    def check(self) -> None:
        """Refuses a step that doesn't fit. Without `host_memory` it must fit into this machine's free memory.

        Raises:
            ScheduleError: If `device_memory` is too small: the bytes needed, where they are needed, and what helps.
            ExecuteError: If the host's memory is too small, likewise.
        """
        if self.too_small is not None:
            raise ScheduleError(self.too_small)
        self.host.check(self.host_memory)

    def __str__(self) -> str:
        table = self.schedule
        model = f"{self.program.name}, {len(self.program.blocks)} blocks, {self.host.num_parameters} parameters"
        batches = f"{table.kind.micro_batches} micro-batch{'es' if table.kind.micro_batches > 1 else ''}"
        updates = f"updates {table.kind.updates}{', clipped' if table.kind.clip else ''}"
        return "\n".join(
            [
                f"plan: {model}; {self.precision}, {batches}, {updates}",
                f"device: {verdict(table.device_bytes, self.device_memory)}",
                *(f"  {line}" for line in device_lines(table)),
                *([f"  reserve: {self.reserve}"] if self.reserve else []),
                f"host: {verdict(self.host.total_bytes, self.host_memory)}",
                *(f"  {line}" for line in self.host.lines()),
                *([] if self.hardware is None else [f"time: {self.simulation}; predicted for {self.hardware.name}"]),
            ]
        )


@checked(
    model=MODEL,
    device=optional(DEVICE),
    device_memory=optional(SIZE),
    host_memory=optional(SIZE),
    optimizer=optional(OPTIMIZER),
    precision=PRECISION,
    micro_batches=STEP["micro_batches"],
    max_grad_norm=optional(number(above=0)),
    activations=STEP["activations"],
    block_bytes=optional(SIZE),
    passes=PASSES,
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
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    overlap: bool = True,
    activations: str = "auto",
    block_bytes: int | str | None = None,
    passes: Sequence[Rewrite] = (),
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
        micro_batches: Number of micro-batches in a step (gradient accumulation).
        max_grad_norm: Any number means that gradients are clipped, so that updates wait for their norm.
        overlap: Updates run during the backward and, unless `device` is the CPU, some during the next forward; if they
            wait for a norm, all do. (See `spread` of `TrainStep`.)
        activations: As for `compile`.
        block_bytes: As for `compile`.
        passes: As for `compile`.
        loss: As for `TrainStep`; it gets the example as its batch.
        hardware: A machine, the name of one in the table (`Hardware.presets()`), or `"measured"` for this machine with
            `device`. The plan is the fastest there of those that fit `device_memory`, and says its time.
        example_args: Another way to give `args`.
        example_kwargs: Example keyword arguments.

    Raises:
        OptionError: If an option has a wrong value, or no example was given.
        TraceError: If the model can't be captured faithfully.
        LowerError: If one of `passes` breaks a rule.
        ScheduleError: If no amount of memory allows this schedule.
        OptimizerError: If an optimizer can't update block by block, or two hold the same parameter.
    """
    model = original(model)
    device_limit = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    host_limit = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    target = None if block_bytes is None else parse_bytes(block_bytes, "block_bytes")
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
    given, named = args or example_args, dict(example_kwargs or {})
    arguments = Arguments.of(model, given, named)
    place = None if device is None else find(device)
    traced, program = _captured(model, arguments, precision, target, passes, place or HOST)
    loss_bytes = 0
    if loss is not None:
        batch = given[0] if len(given) == 1 and not named else given or named
        loss_bytes = measure_loss(program, traced, arguments.tensors, batch, loss, place or HOST)
    clip, on_host = max_grad_norm is not None, place is not None and place.is_host
    updates = _updates(overlap=overlap, clip=clip, on_host=on_host) if optimizer is not None else ("none",)
    machine = None if hardware is None else machine_of(hardware, device)
    for when in updates:
        kind = _step_kind(program, micro_batches, when, clip=clip)
        table, too_small = _scheduled(program, kind, device_limit, activations, loss_bytes, machine)
        host = host_plan(program, table, model, optimizer, precision=precision)
        if host_limit is None or host.total_bytes <= host_limit:
            break
    table.check()
    reserve = reserve_text(place, table.device_bytes if device_limit is None else device_limit)
    return Plan(program, table, host, device_limit, host_limit, precision, too_small, reserve, machine)


def _captured(
    model: nn.Module,
    arguments: Arguments,
    precision: str,
    block_bytes: int | None,
    passes: Sequence[Rewrite],
    device: Device,
) -> tuple[TracedModule, Program]:
    tensors = list(arguments.tensors)
    entries, state = inventory(model)
    narrow = narrow_entries(entries) if precision == "bf16" else entries
    replaced = {key for key, entry in entries.items() if narrow[key].spec.dtype != entry.spec.dtype}
    if replaced:
        tensors = [t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors]
    args, kwargs = arguments.rebuild(tensors)
    # Swapped state comes back whole, wherever Ctrl-C comes.
    swapped = _in_bf16(model, {key: state[key] for key in replaced})
    with Interrupts() as interrupts, swapped, interrupts.released(), paused_collection(), outer_hooks_off():
        with torch.autograd.set_detect_anomaly(False), torch.enable_grad():
            traced = trace(model, args, kwargs, device=device.torch_device)
            check_opaque(traced, "warn", set())
            return traced, lower(traced, block_bytes=block_bytes, rewrites=passes, alignment=device.alignment)


@contextmanager
def _in_bf16(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Replaces these parameters by bf16 parameters without memory."""
    stand_ins: dict[int, torch.Tensor] = {}
    for parameter in parameters.values():
        values = torch.empty_like(parameter, dtype=torch.bfloat16, device="meta", requires_grad=False)
        stand_in = stand_ins[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(stand_in).update(vars(parameter))
    with swapped_state(model, stand_ins):
        yield


def _updates(*, overlap: bool, clip: bool, on_host: bool) -> tuple[str, ...]:
    """When updates may run, the fastest way first, as in `megatrain.TrainStep`; later ways need less host memory."""
    if not overlap:
        return ("serial",)
    if clip:
        return ("deferred",)
    return ("overlap",) if on_host else ("spread", "overlap")


def _step_kind(program: Program, micro_batches: int, updates: str, *, clip: bool) -> StepKind:
    """The kind of a whole training step."""
    if not any(ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs):
        raise OptionError(
            "no result of the model needs a gradient, so there is no training to plan.\n"
            "  A step differentiates the results of the forward with respect to the trainable parameters.\n"
            "  Call requires_grad_() on the parameters to train."
        )
    return StepKind(micro_batches=micro_batches, updates=updates, clip=clip, outputs="release")


def _scheduled(
    program: Program,
    kind: StepKind,
    memory: int | None,
    activations: str,
    loss_bytes: int,
    hardware: Hardware | None,
) -> tuple[Schedule, str | None]:
    """Returns the schedule; if none fits, the schedule that takes the least memory, and the reason."""
    programs = [program] * kind.micro_batches
    made = partial(step_schedule, programs, kind, loss_bytes=loss_bytes)
    free = made(activations=activations)  # raises errors that have nothing to do with memory
    if memory is None:
        return free, None
    try:
        return made(memory=memory, activations=activations, hardware=hardware), None
    except ScheduleError as error:
        least = _LEAST.get(activations, activations)
        return made(num_slots=1, activations=least), str(error)


# The last resort of "auto" and "recompute" is to do the same as "offload".
_LEAST = {"auto": "offload", "recompute": "offload"}
