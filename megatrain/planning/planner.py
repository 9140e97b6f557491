"""plan(): the device memory, host memory and time that training a model takes, before anything is allocated.

A `Planner` plans one model under many limits and at many sizes, and captures each size once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import checked, number, optional
from megatrain.base.interrupts import Interrupts
from megatrain.base.sizes import MEMORY, SIZE
from megatrain.device import HOST, Device, find
from megatrain.errors import MegatrainError, OptionError, TraceError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import HARDWARE, machine_of
from megatrain.hardware.presets import PRESETS
from megatrain.optim.blockwise import takes_turns
from megatrain.optim.fast.on_device import why_not
from megatrain.optim.masters.halves import RoundedMaster
from megatrain.optim.masters.narrow_model import narrow_entries
from megatrain.optim.moments import moment_layout
from megatrain.optim.need import OPTIMIZER, OptimizerLike
from megatrain.optim.trained_model import TrainedModel
from megatrain.passes.measure import KnownCosts
from megatrain.passes.pipeline import PASSES, Rewrite
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.equal_layers import Repeated
from megatrain.planning.from_files import FileReads, MomentTraffic
from megatrain.planning.host_plan import CACHE, HostPlan, host_plan
from megatrain.planning.host_room import ALL, with_host_room
from megatrain.planning.loss_bytes import Loss, measure_loss
from megatrain.planning.model_sizes import ExampleSizes, ModelSizes, num_tokens
from megatrain.planning.options import COMPILE, PRECISION, Limits, check_masters, check_opaque, given_bytes
from megatrain.planning.plan import Plan
from megatrain.planning.plan_step import IN_FILES, WAITS_FOR_ALL, StepChoices, StepPlans, updates_allowed
from megatrain.planning.planned_step import Asked, StepLimits
from megatrain.planning.step_programs import StepPrograms, undisturbed
from megatrain.scheduler.builder.build import STEP
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.inventory import inventory
from megatrain.tracer.recording.sandbox import swapped_state
from megatrain.tracer.source_line import original
from megatrain.tracer.spec import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule

# Captures and schedules of long models are large; a table of alternatives has fewer.
_MOST = 32


@dataclass(frozen=True, slots=True)
class _Capture:
    """A captured step.

    Args:
        programs: The blocks, as they are and rewritten.
        loss_bytes: The device memory that the loss takes.
        num_tokens: Of the example; None if it has no token ids.
    """

    model: nn.Module
    programs: StepPrograms
    loss_bytes: int
    num_tokens: int | None


class Planner:
    """Plans steps of one model, and of examples of its call."""

    def __init__(self, source: ModelSizes) -> None:
        self._source = source
        self._costs = KnownCosts()
        self._captures: OrderedDict[Hashable, _Capture] = OrderedDict()
        self._plans = StepPlans(_MOST)

    def plan(
        self, limits: StepLimits, sizes: Mapping[str, int] | None = None, source: ModelSizes | None = None
    ) -> Plan:
        """Plans a step, at sizes that may differ from the source's own, or of another source.

        Raises:
            OptionError: If an option has a wrong value.
            TraceError: If the model can't be captured faithfully.
            LowerError: If one of the passes breaks a rule.
            ScheduleError: If no amount of memory allows this schedule.
            OptimizerError: If an optimizer's `step` needs a closure, or two hold the same parameter.
        """
        if source is not None:
            return Planner(source).plan(limits, sizes)
        self._source.check()
        sizes = {**self._source.sizes, **(sizes or {})}
        found = self._captured(limits, sizes)
        model = TrainedModel.of(found.model, limits.master_kind, limits.optimizer)
        updates, why_host = _ways_of_updates(limits, model)
        layout = moment_layout(model) if limits.offload else None
        filed = {} if layout is None else layout.sizes
        least = ALL if filed and not limits.knows_host else 0
        limits = replace(limits, updates_there=not why_host, filed=filed, least_filed_bytes=least)
        made, host, reads = self._with_files(found, model, replace(limits, layout=layout), updates)
        moments = None if layout is None else MomentTraffic.of(made.schedule, layout.nbytes)
        return Plan(
            made.programs[0],
            made.schedule,
            host,
            limits.device_memory,
            limits.host_memory,
            limits.precision,
            made.too_small,
            Asked(limits, sizes, self._source.fixed, found.num_tokens, self.plan),
            made.why_kernels,
            IN_FILES if moments is not None and moments.moved else why_host,
            reads,
            moments,
        )

    def _with_files(
        self, found: _Capture, model: TrainedModel, limits: StepLimits, updates: Sequence[str]
    ) -> tuple[StepChoices, HostPlan, FileReads | None]:
        """The fastest plan; one whose frozen weights stay in their files if the host has no room for them."""
        in_files, memory = _in_files(model, limits), limits.host_memory
        if memory is None or sum(in_files.values()) <= memory:  # else no plan has room
            made, host = self._with_host_room(found, model, limits, updates)
            if memory is None or not in_files or made.too_small is not None or not host.missing_bytes(memory):
                return made, host, None
        room = memory

        def plan(reads: FileReads) -> tuple[StepChoices, HostPlan, FileReads]:
            machine = None if limits.hardware is None else reads.on(limits.hardware)
            made, host = self._with_host_room(found, model, replace(limits, hardware=machine), updates, in_files)
            cached = max(0, room - host.total_bytes + host.bytes_of(CACHE))
            return made, host, FileReads.of(made.programs[0], made.schedule, in_files, cached)

        # What the disk reads is known once there is a plan, and then another one may be faster.
        *_, reads = plan(FileReads(0, 0, 0))
        return plan(reads)

    def _with_host_room(
        self,
        found: _Capture,
        model: TrainedModel,
        limits: StepLimits,
        updates: Sequence[str],
        in_files: Collection[str] = (),
    ) -> tuple[StepChoices, HostPlan]:
        """The fastest plan, or one that takes less memory of the host if it doesn't fit there."""

        def with_host(made: StepChoices) -> tuple[StepChoices, HostPlan]:
            files: Any = {"in_files": in_files, "moments": limits.layout}
            return made, host_plan(made.programs[0], made.schedule, model, on_host=limits.is_on_host, **files)

        def tried(updates: str, **changes: Any) -> tuple[StepChoices, HostPlan]:
            kind = _step_kind(found.programs.at(0), limits, updates)
            captures = [found.programs] * kind.micro_batches
            made = self._plans.plan(captures, kind, replace(limits, **changes), lambda: found.loss_bytes, or_least=True)
            return with_host(made)

        return with_host_room(tried, with_host, limits, updates)

    def _captured(self, limits: StepLimits, sizes: Mapping[str, int]) -> _Capture:
        given = tuple(map(id, (limits.loss, *limits.passes)))
        fuses = limits.kernels == "inductor"
        asked = limits.precision, limits.block_bytes, limits.chunking, limits.device.alignment, fuses
        key = (*sorted(sizes.items()), *asked, given)
        if key not in self._captures:
            self._captures[key] = self._capture(limits, sizes)
            if len(self._captures) > _MOST:
                self._captures.popitem(last=False)
        self._captures.move_to_end(key)
        return self._captures[key]

    def _capture(self, limits: StepLimits, sizes: Mapping[str, int]) -> _Capture:
        model, arguments = self._source.made(sizes)
        few = self._source.few(sizes) if limits.loss is None and not limits.passes else None
        with self._of_sizes(sizes):
            capture = partial(captured, limits=limits, is_own_loss=limits.loss is None)
            if few is None:
                traced = capture(model, arguments)
                programs = StepPrograms(traced, limits, self._costs)
            else:
                traced = capture(*few[:2])
                entries = TrainedModel.of(model, limits.master_kind).entries
                programs = StepPrograms(
                    traced, limits, self._costs, Repeated(few[2], entries).program, partial(capture, model, arguments)
                )
            program = programs.at(0)  # raises errors of the model now
        loss_bytes = 0
        if limits.loss is not None:
            args, kwargs = arguments.rebuild(arguments.tensors)
            batch: Any = args[0] if len(args) == 1 and not kwargs else args or kwargs
            loss_bytes = measure_loss(program, traced, arguments.tensors, batch, list, limits.loss, limits.device)
        return _Capture(model, programs, loss_bytes, num_tokens(arguments))

    @contextmanager
    def _of_sizes(self, sizes: Mapping[str, int]) -> Generator[None]:
        """Turns what a model raises at sizes that nobody gave into an error of ours."""
        try:
            yield
        except MegatrainError:
            raise
        except Exception as error:  # the model's own code may raise anything at a size that nobody tried
            others = {name: size for name, size in sizes.items() if size != self._source.sizes[name]}
            if not others:
                raise
            changed = ", ".join(f"{name} {size}" for name, size in others.items())
            said = " ".join(str(error).split())[:300]
            raise TraceError(
                f"the model can't run at {changed}: {type(error).__name__}: {said}\n"
                "  Its forward was called with an example of this size.\n"
                "  Give a function that makes the model and its inputs of a size."
            ) from error


def captured(model: nn.Module, arguments: Arguments, limits: Limits, *, is_own_loss: bool) -> TracedModule:
    """Captures a call; the model, which may be on meta, and generators stay as they were.

    Where bf16 is computed, fp32 weights are replaced by stand-ins without values. A step that differentiates the
    model's own loss needs no other result.

    Raises:
        TraceError: If the model can't be captured faithfully.
    """
    tensors = list(arguments.tensors)
    entries, state = inventory(model)
    narrow = narrow_entries(entries) if limits.precision == "bf16" else entries
    replaced = {key for key, entry in entries.items() if narrow[key].spec.dtype != entry.spec.dtype}
    if replaced:
        tensors = [t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors]
    args, kwargs = arguments.rebuild(tensors)
    # Swapped state comes back whole, wherever Ctrl-C comes.
    swapped = _in_bf16(model, {key: state[key] for key in replaced})
    with Interrupts() as interrupts, swapped, interrupts.released(), undisturbed(), torch.enable_grad():
        traced = trace(model, args, kwargs, device=limits.device.torch_device)
        check_opaque(traced, "warn", set())
    return loss_only(traced) if is_own_loss else traced


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


def _in_files(model: TrainedModel, limits: StepLimits) -> Mapping[str, int]:
    """Bytes of the frozen parameters that can stay in files, by key: those that have no values yet.

    None without a figure for the host's memory: such a plan says what all weights take. None where the device shares
    that memory.
    """
    machine = None if limits.hardware is None else PRESETS.get(limits.hardware.name)
    is_shared = limits.is_on_host or (machine is not None and machine.is_unified)
    if limits.host_memory is None or is_shared:
        return {}
    frozen = {
        key: entry.spec.nbytes
        for key, entry in model.entries.items()
        if entry.kind == "parameter" and not entry.requires_grad and entry.packed_in is None
    }
    return {key: nbytes for key, nbytes in frozen.items() if model.tensors[key].is_meta}


def _ways_of_updates(limits: StepLimits, model: TrainedModel) -> tuple[tuple[str, ...], str]:
    """When updates may run, the fastest way first; and why the host makes all of them, empty if the device may."""
    if limits.optimizer is None:
        return ("none",), "no optimizer was given"
    waits, clip = any(map(takes_turns, model.optimizers)), limits.max_grad_norm is not None
    device = limits.device if limits.has_device else None
    ways = updates_allowed(overlap=limits.overlap, waits=waits, clip=clip, spread=not limits.is_on_host)
    if limits.is_on_host:
        return ways, "the device is the host"
    if ways[0] == "serial":
        return ways, WAITS_FOR_ALL
    if model.master is RoundedMaster:
        return ways, "masters are rounded at random, by numbers of the host"
    trained = map(model.parameters.__getitem__, model.trained)
    return ways, why_not(model.optimizers, trained, device=device, is_narrow=model.is_narrow)


def _step_kind(program: Program, limits: StepLimits, updates: str) -> StepKind:
    """The kind of a whole training step."""
    if not any(ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs):
        raise OptionError(
            "no result of the model needs a gradient, so there is no training to plan.\n"
            "  A step differentiates them by trainable parameters.\n  Call requires_grad_() on the parameters to train."
        )
    return StepKind(
        micro_batches=limits.micro_batches,
        updates=updates,
        clip=limits.max_grad_norm is not None,
        outputs="release",
    )


@checked(
    model=MODEL,
    device=optional(DEVICE),
    device_memory=optional(MEMORY),
    host_memory=optional(MEMORY),
    optimizer=optional(OPTIMIZER),
    precision=PRECISION,
    masters=COMPILE["masters"],
    micro_batches=STEP["micro_batches"],
    max_grad_norm=optional(number(above=0)),
    activations=STEP["activations"],
    block_bytes=optional(SIZE),
    passes=PASSES,
    chunking=COMPILE["chunking"],
    kernels=COMPILE["kernels"],
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
    kernels: str = "auto",
    loss: Loss | None = None,
    hardware: Hardware | str | None = None,
    offload: bool = False,
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
        kernels: As for `compile`. With `"auto"` the plan is the shorter one of the two on `hardware`, a card unless
            `device` is none.
        loss: As for `TrainStep`; it gets the example as its batch.
        hardware: A machine, the name of one in the table (`Hardware.presets()`), or `"measured"` for this machine with
            `device`. The plan is the fastest found for it that fits `device_memory`, and says its time.
        offload: As with a folder for `TrainStep`, a file has the optimizer's state between updates, and activations as
            far as the host is short. The plan says what a step reads and writes, and how much that wears the drive.
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
    sizes: dict[str, Any] = {
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
        kernels=kernels,
        loss=loss,
        hardware=None if hardware is None else machine_of(hardware, device),
        offload=offload,
    ).with_kernels(None if device is None else find(device))
    return Planner(ExampleSizes(model, arguments)).plan(limits)
