"""Planner: plans of one model under many options and at many sizes; it captures each size once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from megatrain.device import HOST, Device
from megatrain.errors import MegatrainError, OptionError, TooSmallError, TraceError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.interrupts import Interrupts
from megatrain.optim.blockwise import takes_turns
from megatrain.options import check_opaque
from megatrain.passes.measuring.known_costs import KnownCosts
from megatrain.passes.pipeline import Rewrite
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.fitting_blocks import first_that_fits
from megatrain.planning.host_plan import (
    ExampleSizes,
    HostPlan,
    ModelSizes,
    OptimizerLike,
    host_plan,
    narrow_entries,
    num_tokens,
    over,
)
from megatrain.planning.loss_bytes import Loss, measure_loss
from megatrain.planning.model_and_inputs import model_and_inputs
from megatrain.planning.plan import Plan
from megatrain.planning.plan_text import reserve_text
from megatrain.planning.planned_step import PlannedFor
from megatrain.planning.step_programs import Pieces, StepPrograms, lowered_for, undisturbed
from megatrain.scheduler.builder.search import result_bytes
from megatrain.scheduler.from_program import step_schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.capture.sandbox import swapped_state
from megatrain.tracer.inventory import inventory
from megatrain.tracer.source_line import original
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule


def captured(
    model: nn.Module,
    arguments: Arguments,
    precision: str,
    block_bytes: int | None,
    passes: Sequence[Rewrite],
    chunking: str,
    device: Device,
    *,
    is_own_loss: bool,
    costs: KnownCosts,
) -> tuple[TracedModule, StepPrograms]:
    """Captures a call and cuts it into blocks; model and generators stay as they were.

    Args:
        model: May be on meta.
        arguments: Of the call.
        precision: With `"bf16"`, fp32 weights are replaced by stand-ins without values.
        block_bytes: As in `lower`.
        passes: The user's rewrites.
        chunking: As in `compile`.
        device: Whose layout of weights counts.
        is_own_loss: Whether the step differentiates the model's own loss, and needs no other result.
        costs: Known ones of templates.

    Raises:
        TraceError: If the model can't be captured faithfully.
        LowerError: If one of `passes` breaks a rule.
    """
    tensors = list(arguments.tensors)
    entries, state = inventory(model)
    narrow = narrow_entries(entries) if precision == "bf16" else entries
    replaced = {key for key, entry in entries.items() if narrow[key].spec.dtype != entry.spec.dtype}
    if replaced:
        tensors = [t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors]
    args, kwargs = arguments.rebuild(tensors)
    # Swapped state comes back whole, wherever Ctrl-C comes.
    swapped = _in_bf16(model, {key: state[key] for key in replaced})
    with Interrupts() as interrupts, swapped, interrupts.released(), undisturbed():
        with torch.enable_grad():
            traced = trace(model, args, kwargs, device=device.torch_device)
            check_opaque(traced, "warn", set())
    traced = loss_only(traced) if is_own_loss else traced

    lower = partial(lowered_for, traced, block_bytes, passes, chunking, device.alignment, costs=costs)

    def finer(size: int, pieces: Pieces | None) -> Program:
        return lowered_for(traced, size, passes, chunking, device.alignment, pieces, costs=costs)

    programs = StepPrograms(chunking, lower, finer=finer, may_cut=block_bytes is None)
    programs.at(0)  # raises errors of the model now
    return traced, programs


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


class HostedStep(NamedTuple):
    """A planned step.

    Attributes:
        program: The blocks.
        table: The schedule.
        too_small: Why it doesn't fit the device, or None.
        host: The memory of the host.
    """

    program: Program
    table: Schedule
    too_small: str | None
    host: HostPlan


def with_host_room(plan: Callable[..., HostedStep], updates: Sequence[str], host_memory: int | None) -> HostedStep:
    """The fastest plan, or one that takes less memory of the host if it doesn't fit there.

    Args:
        plan: Plans a step by when its updates run, with other options if they are given.
        updates: When they may run, the fastest first.
        host_memory: Bytes of the host; None is what is free.
    """
    fastest, *others = updates
    made = plan(fastest)
    missing = made.host.missing_bytes(host_memory)
    if made.too_small is None and missing and made.table.results:
        fewer = plan(fastest, most_result_bytes=max(0, _result_bytes(made.table) - missing))
        made = fewer if not fewer.host.missing_bytes(host_memory) else made
    # Without a machine as little as possible is parked on the host; later updates leave less for the next step.
    for each in (fastest, *(others if host_memory is not None else ())):
        if made.too_small is None and made.host.missing_bytes(host_memory):
            less = plan(each, hardware=None)
            made = less if less.host.total_bytes < made.host.total_bytes else made
    return made


def _result_bytes(table: Schedule) -> int:
    workload = table.known_workload()
    return table.kind.micro_batches * sum(result_bytes(workload, block) for block in table.results)


_Value = TypeVar("_Value")
# Captures and schedules of long models are large; a table of alternatives has fewer.
_MOST = 32


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of a plan, read: sizes are bytes, a machine is its rates. See `megatrain.plan`."""

    device: Device | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    optimizer: OptimizerLike | None = None
    precision: str = "fp32"
    masters: str = "exact"
    micro_batches: int = 1
    max_grad_norm: float | None = None
    overlap: bool = True
    activations: str = "auto"
    block_bytes: int | None = None
    passes: Sequence[Rewrite] = ()
    loss: Loss | None = None
    hardware: Hardware | None = None
    chunking: str = "auto"
    most_result_bytes: int | None = None


class _Capture(NamedTuple):
    """A captured step.

    Attributes:
        key: What it is the capture of.
        model: The model.
        programs: Its blocks, as they are and rewritten to take less memory.
        loss_bytes: As in `Workload`.
        num_tokens: Of the example; None if it has none.
    """

    key: Hashable
    model: nn.Module
    programs: StepPrograms
    loss_bytes: int
    num_tokens: int | None


class Planner:
    """Plans steps of one model.

    Args:
        source: The model, and examples of its call.
    """

    def __init__(self, source: ModelSizes) -> None:
        self._source = source
        self._costs = KnownCosts()
        self._captures: OrderedDict[Hashable, _Capture] = OrderedDict()
        self._schedules: OrderedDict[Hashable, tuple[Program, Schedule, str | None]] = OrderedDict()

    def plan(self, options: StepOptions, sizes: Mapping[str, int] | None = None) -> Plan:
        """Plans a step.

        Args:
            options: Of the step.
            sizes: Those of the model and its example that differ from the source's own.

        Raises:
            OptionError: If an option has a wrong value.
            TraceError: If the model can't be captured faithfully.
            LowerError: If one of the passes breaks a rule.
            ScheduleError: If no amount of memory allows this schedule.
            OptimizerError: If an optimizer's `step` needs a closure, or two hold the same parameter.
        """
        self._source.check()
        sizes = {**self._source.sizes, **(sizes or {})}
        found = self._captured(options, sizes)

        def made_with(updates: str, **changes: Any) -> HostedStep:
            return self._of(found, replace(options, **changes), updates)

        made = with_host_room(made_with, _updates(options, found.model), options.host_memory)
        limit = options.device_memory
        return Plan(
            made.program,
            made.table,
            made.host,
            limit,
            options.host_memory,
            options.precision,
            made.too_small,
            reserve_text(options.device, made.table.device_bytes if limit is None else limit, options.hardware),
            options.hardware,
            PlannedFor(
                {part.name: getattr(options, part.name) for part in fields(options)},
                sizes,
                self._source.fixed,
                found.num_tokens,
                partial(self._again, options, sizes),
                partial(_plan_of, options),
            ),
        )

    def _of(self, found: _Capture, options: StepOptions, updates: str) -> HostedStep:
        """Plans a step whose updates run at some time."""
        program, table, too_small = self._scheduled(found, _step_kind(found.programs.at(0), options, updates), options)
        return HostedStep(program, table, too_small, self._host_plan(found, program, table, options))

    def _again(self, options: StepOptions, sizes: Mapping[str, int], changes: Mapping[str, Any]) -> Plan:
        """Plans the same step with other options and other sizes, by name."""
        names = {part.name for part in fields(options)}
        others = {name: value for name, value in changes.items() if name not in names}
        assert set(others) <= set(sizes), f"nothing is called {set(others) - set(sizes)}"
        chosen = replace(options, **{name: value for name, value in changes.items() if name in names})
        return self.plan(chosen, {**sizes, **others})

    def _captured(self, options: StepOptions, sizes: Mapping[str, int]) -> _Capture:
        alignment = (options.device or HOST).alignment
        given = tuple(map(id, (options.loss, *options.passes)))
        key = (*sorted(sizes.items()), options.precision, options.block_bytes, options.chunking, alignment, given)
        return _kept(self._captures, key, lambda: self._capture(key, options, sizes))

    def _capture(self, key: Hashable, options: StepOptions, sizes: Mapping[str, int]) -> _Capture:
        model, arguments = self._source.made(sizes)
        place = options.device or HOST
        with self._of_sizes(sizes):
            traced, programs = captured(
                model,
                arguments,
                options.precision,
                options.block_bytes,
                options.passes,
                options.chunking,
                place,
                is_own_loss=options.loss is None,
                costs=self._costs,
            )
        loss_bytes = 0
        if options.loss is not None:
            batch = _batch(arguments)
            loss_bytes = measure_loss(programs.at(0), traced, arguments.tensors, batch, options.loss, place)
        return _Capture(key, model, programs, loss_bytes, num_tokens(arguments))

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

    def _scheduled(self, found: _Capture, kind: StepKind, options: StepOptions) -> tuple[Program, Schedule, str | None]:
        """Returns the program and its schedule; if none fits, those that take the least memory, and the reason."""
        memory, activations, hardware = options.device_memory, options.activations, options.hardware
        usual = usual_machine(options.device)
        results = {"most_result_bytes": options.most_result_bytes}
        of_machine = hardware if memory else None, usual
        key = found.key, kind, memory, activations, *of_machine, options.masters, *results.values()
        captures = [found.programs] * kind.micro_batches
        masters = options.masters if options.precision == "bf16" else "whole"
        own = {"loss_bytes": found.loss_bytes, "usual": usual, "masters": masters}
        made = partial(step_schedule, kind=kind, **own)

        def schedule() -> tuple[Program, Schedule, str | None]:
            plain = [found.programs.at(0)] * kind.micro_batches
            free = made(plain, activations=activations)  # raises errors that have nothing to do with memory
            if memory is None:
                return plain[0], free, None
            fits = partial(made, memory=memory, activations=activations, hardware=hardware, **results)
            try:
                _, programs, table = first_that_fits(captures, fits, hardware, memory)
            except TooSmallError as error:
                least = partial(made, num_slots=1, activations=_LEAST.get(activations, activations))
                programs = found.programs.extremes
                tables = [(program, least([program] * kind.micro_batches)) for program in programs]
                return (*min(tables, key=lambda pair: pair[1].device_bytes), str(error))
            return programs[0], table, None

        def checked_schedule() -> tuple[Program, Schedule, str | None]:
            program, table, too_small = schedule()
            table.check()
            return program, table, too_small

        return _kept(self._schedules, key, checked_schedule)

    def _host_plan(self, found: _Capture, program: Program, table: Schedule, options: StepOptions) -> HostPlan:
        return host_plan(
            program,
            table,
            found.model,
            options.optimizer,
            precision=options.precision,
            masters=options.masters,
        )


def _plan_of(options: StepOptions, made: Any, changes: Mapping[str, Any]) -> Plan:
    """Plans the same step of another model, made by somebody's function."""
    model, args, kwargs = model_and_inputs(made, "the function")
    if not (options.optimizer is None or isinstance(options.optimizer, str | type)):
        raise OptionError(
            "the optimizer of this plan has the parameters of its own model, not those of another one.\n"
            '  Each size is another model.\n  Plan with the optimizer\'s class or its name, optimizer="AdamW".'
        )
    model = original(model)
    source = ExampleSizes(model, Arguments.of(model, args, kwargs))
    return Planner(source).plan(replace(options, **changes))


# The last resort of "auto" and "recompute" is to do the same as "offload".
_LEAST = {"auto": "offload", "recompute": "offload"}


def _kept(known: OrderedDict[Hashable, _Value], key: Hashable, make: Callable[[], _Value]) -> _Value:
    """What was made for a key before, or is made now; the oldest go."""
    if key not in known:
        known[key] = make()
        if len(known) > _MOST:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def _batch(arguments: Arguments) -> Any:
    """The example as a loss gets it: its one argument, all of them, or those by name."""
    args, kwargs = arguments.rebuild(arguments.tensors)
    return args[0] if len(args) == 1 and not kwargs else args or kwargs


def _updates(options: StepOptions, model: nn.Module) -> tuple[str, ...]:
    """When updates may run, the fastest way first, as in `megatrain.TrainStep`; later ways need less host memory."""
    if options.optimizer is None:
        return ("none",)
    # Code of the user's may look at all gradients: an optimizer's, or hooks on its step.
    if not options.overlap or any(map(takes_turns, over(options.optimizer, *inventory(model))[0])):
        return ("serial",)
    if options.max_grad_norm is not None:
        return ("deferred",)
    return ("overlap",) if options.device is not None and options.device.is_host else ("spread", "overlap")


def _step_kind(program: Program, options: StepOptions, updates: str) -> StepKind:
    """The kind of a whole training step."""
    if not any(ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs):
        raise OptionError(
            "no result of the model needs a gradient, so there is no training to plan.\n"
            "  A step differentiates them by trainable parameters.\n  Call requires_grad_() on the parameters to train."
        )
    return StepKind(
        micro_batches=options.micro_batches,
        updates=updates,
        clip=options.max_grad_norm is not None,
        outputs="release",
    )
