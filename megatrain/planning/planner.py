"""Planner: plans of one model under many limits and at many sizes; it captures each size once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatrain.errors import MegatrainError, OptionError, TraceError
from megatrain.interrupts import Interrupts
from megatrain.optim.blockwise import takes_turns
from megatrain.options import Limits, check_opaque
from megatrain.passes.measuring.known_costs import KnownCosts
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.host_plan import HostPlan, ModelSizes, host_plan, narrow_entries, num_tokens, over
from megatrain.planning.loss_bytes import measure_loss
from megatrain.planning.plan import Plan
from megatrain.planning.plan_step import StepChoices, StepPlans
from megatrain.planning.plan_text import reserve_text
from megatrain.planning.planned_step import Asked, StepLimits
from megatrain.planning.step_programs import StepPrograms, undisturbed
from megatrain.scheduler.builder.search import result_bytes
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.capture.sandbox import swapped_state
from megatrain.tracer.inventory import inventory
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule

# Captures and schedules of long models are large; a table of alternatives has fewer.
_MOST = 32


@dataclass(frozen=True, slots=True)
class _Capture:
    """A captured step.

    Args:
        model: The model.
        programs: Its blocks, as they are and rewritten to take less memory.
        loss_bytes: As in `Workload`.
        num_tokens: Of the example; None if it has none.
    """

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
        self._plans = StepPlans(_MOST)

    def plan(
        self, limits: StepLimits, sizes: Mapping[str, int] | None = None, source: ModelSizes | None = None
    ) -> Plan:
        """Plans a step.

        Args:
            limits: What is given.
            sizes: Those of the model and its example that differ from the source's own.
            source: Another model; None for the planner's own.

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
        made, host = self._with_host_room(found, limits)
        table, memory = made.schedule, limits.device_memory
        device, size = limits.device if limits.has_device else None, table.device_bytes if memory is None else memory
        return Plan(
            made.programs[0],
            table,
            host,
            memory,
            limits.host_memory,
            limits.precision,
            made.too_small,
            reserve_text(device, size, limits.hardware),
            limits.hardware,
            Asked(limits, sizes, self._source.fixed, found.num_tokens, self.plan),
        )

    def _with_host_room(self, found: _Capture, limits: StepLimits) -> tuple[StepChoices, HostPlan]:
        """The fastest plan, or one that takes less memory of the host if it doesn't fit there."""

        def plan(updates: str, **changes: Any) -> tuple[StepChoices, HostPlan]:
            kind = _step_kind(found.programs.at(0), limits, updates)
            captures, least = [found.programs] * kind.micro_batches, replace(limits, **changes)
            made = self._plans.plan(captures, kind, least, lambda: found.loss_bytes, or_least=True)
            return made, _host_plan(found, made, limits)

        def missing(host: HostPlan) -> int:
            return host.missing_bytes(limits.host_memory)

        fastest, *others = _updates(limits, found.model)
        made, host = plan(fastest)
        if made.too_small is None and missing(host) and made.schedule.results:
            most = max(0, _result_bytes(made) - missing(host))
            fewer = plan(fastest, most_result_bytes=most)
            made, host = fewer if not missing(fewer[1]) else (made, host)
        # Without a machine as little as possible is parked on the host; later updates leave less for the next step.
        for each in (fastest, *(others if limits.host_memory is not None else ())):
            if made.too_small is None and missing(host):
                less = plan(each, hardware=None)
                made, host = less if less[1].total_bytes < host.total_bytes else (made, host)
        return made, host

    def _captured(self, limits: StepLimits, sizes: Mapping[str, int]) -> _Capture:
        given = tuple(map(id, (limits.loss, *limits.passes)))
        asked = limits.precision, limits.block_bytes, limits.chunking, limits.device.alignment
        key = (*sorted(sizes.items()), *asked, given)
        if key not in self._captures:
            self._captures[key] = self._capture(limits, sizes)
            if len(self._captures) > _MOST:
                self._captures.popitem(last=False)
        self._captures.move_to_end(key)
        return self._captures[key]

    def _capture(self, limits: StepLimits, sizes: Mapping[str, int]) -> _Capture:
        model, arguments = self._source.made(sizes)
        with self._of_sizes(sizes):
            traced = captured(model, arguments, limits, is_own_loss=limits.loss is None)
            programs = StepPrograms(traced, limits, self._costs)
            programs.at(0)  # raises errors of the model now
        loss_bytes = 0
        if limits.loss is not None:
            args, kwargs = arguments.rebuild(arguments.tensors)
            batch: Any = args[0] if len(args) == 1 and not kwargs else args or kwargs
            loss_bytes = measure_loss(programs.at(0), traced, arguments.tensors, batch, limits.loss, limits.device)
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

    Args:
        model: Its fp32 weights are replaced by stand-ins without values where bf16 is computed.
        arguments: Of the call.
        limits: What is given.
        is_own_loss: Whether the step differentiates the model's own loss, and needs no other result.

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


def _host_plan(found: _Capture, made: StepChoices, limits: StepLimits) -> HostPlan:
    options = {"precision": limits.precision, "masters": limits.masters}
    return host_plan(made.programs[0], made.schedule, found.model, limits.optimizer, **options)


def _result_bytes(made: StepChoices) -> int:
    workload = made.schedule.known_workload()
    return len(made.captures) * sum(result_bytes(workload, block) for block in made.schedule.results)


def _updates(limits: StepLimits, model: nn.Module) -> tuple[str, ...]:
    """When updates may run, the fastest way first, as in `megatrain.TrainStep`; later ways need less host memory."""
    if limits.optimizer is None:
        return ("none",)
    # Code of the user's may look at all gradients: an optimizer's, or hooks on its step.
    if not limits.overlap or any(map(takes_turns, over(limits.optimizer, *inventory(model))[0])):
        return ("serial",)
    if limits.max_grad_norm is not None:
        return ("deferred",)
    return ("overlap",) if limits.has_device and limits.device.is_host else ("spread", "overlap")


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
