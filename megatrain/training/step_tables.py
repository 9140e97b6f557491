"""StepTables: the schedules of a model's training steps, and an executor for each order of their micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar
from weakref import WeakKeyDictionary

from megatrain.device.bus import GrowingArena
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import ScheduleError
from megatrain.passes.program import Program
from megatrain.planning.kernel_choice import RECORDED_FROM
from megatrain.planning.options import Limits
from megatrain.planning.plan_step import StepChoices, StepPlans
from megatrain.planning.planned_step import AnyPlan, saved_plan
from megatrain.planning.step_programs import StepPrograms
from megatrain.runtime.engine import Engine
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.executor import Executor
from megatrain.scheduler.builder.moments import spared_in_file
from megatrain.scheduler.builder.search import spared_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind

# Steps may differ in sizes and numbers of micro-batches: the schedules used last are kept.
_MOST = 16

_Executors = OrderedDict[tuple[int, ...], Executor]
"""By the order of the captures."""


class StepTables:
    """Makes schedules of whole steps, and keeps them.

    With `lengths=` the micro-batches of nearly each step have other lengths. So a step is planned for all captures
    that came so far and are no larger than its own, and serves each step of these with as large a one.

    Args:
        options: The options of `compile`.
        budget: The bound of the device memory that schedules take.
        plan: A plan whose schedule all steps take, or None.
        exchange: Who else takes the steps; its ops go into their schedules.

    Attributes:
        is_planned: Whether a plan was given.
        updates_there: Whether the device may update blocks in the next step; set before its schedule is asked for.
    """

    def __init__(
        self,
        options: Limits,
        budget: DeviceBudget,
        plan: AnyPlan | None = None,
        exchange: Exchange | None = None,
    ):
        self._exchange = Exchange() if exchange is None else exchange
        self._limits = options
        self._budget = budget
        self._plans = StepPlans(_MOST, None if plan is None else saved_plan(plan), self._exchange)
        self.is_planned = plan is not None
        self.updates_there = False
        self._arena: GrowingArena | None = None
        self._executors: OrderedDict[int, tuple[StepChoices, _Executors]] = OrderedDict()
        self._loss_bytes: WeakKeyDictionary[StepPrograms, int] = WeakKeyDictionary()

    def spare(self, schedule: Schedule, nbytes: int) -> bool:
        """Has the device update more blocks from now on, because the host lacks so many bytes for a schedule.

        Returns:
            False if that was asked for already, or the device can't.
        """
        workload, known = schedule.known_workload(), self._limits.least_spared_bytes
        spared = sum(spared_bytes(workload, schedule.kind, block) for block in schedule.device_updates)
        if not self.updates_there or not schedule.kind.may_update_there or spared < known or spared + nbytes <= known:
            return False
        self._limits = replace(self._limits, least_spared_bytes=spared + nbytes)
        return True

    @property
    def has_file(self) -> bool:
        """Whether steps have optimizer state in a file between the host's updates."""
        return self._limits.least_filed_bytes > 0

    def file_more(self, schedule: Schedule, nbytes: int) -> bool:
        """Has more optimizer state in the file from now on, because the host lacks so many bytes for a schedule.

        Returns:
            False if that was asked for already, or there is no more.
        """
        least = spared_in_file(schedule) + nbytes
        if not self._limits.filed or least <= self._limits.least_filed_bytes:
            return False
        self._limits = replace(self._limits, least_filed_bytes=least)
        return True

    def take_less(self, schedule: Schedule, nbytes: int) -> bool:
        """Has later steps take so many bytes less of the host than a schedule, in the first way that there is."""
        return any(way(schedule, nbytes) for way in (self.file_more, self.spare, self.evict))

    def evict(self, schedule: Schedule, nbytes: int) -> bool:
        """Has a file take more parked values from now on, because the host lacks so many bytes for a schedule.

        Returns:
            False if that was asked for already, or there is no file.
        """
        known, most = self._limits.most_park_bytes, max(0, schedule.park_bytes - nbytes)
        if not self._limits.filed or (known is not None and known <= most):
            return False
        self._limits = replace(self._limits, most_park_bytes=most)
        return True

    def kind(self, micro_batches: int, updates: str, *, clip: bool, reports_norm: bool) -> StepKind:
        """Returns the kind of a training step of the compiled model."""
        return StepKind(
            transfer=self._limits.transfer,
            micro_batches=micro_batches,
            updates=updates,
            clip=clip,
            outputs="release",
            reports_norm=reports_norm,
        )

    def schedule(
        self, captures: Sequence[StepPrograms], kind: StepKind, loss_bytes: Callable[[StepPrograms], int]
    ) -> tuple[Sequence[Program], Schedule]:
        """Plans a step, with as little rewritten as fits.

        Args:
            captures: One per micro-batch.
            kind: The kind of the step.
            loss_bytes: Measures the loss of a capture; called once for each.

        Returns:
            The program of each capture, and the checked schedule of a step with these.

        Raises:
            ScheduleError: If the memory is too small, or the micro-batches can't share blocks.
            ExecuteError: If there is nothing to train.
        """
        for capture in captures:
            if capture not in self._loss_bytes:
                self._loss_bytes[capture] = loss_bytes(capture)
        choices = self._chosen(captures, kind)
        why = choices.why_kernels
        if self._limits.kernels == "auto" and not self.is_planned and not why:
            gave_up = next(filter(None, (each.why_eager for each in captures)), "")
            why = f"one by one{f': {gave_up}' if gave_up else f' until run {RECORDED_FROM} of this shape'}"
        for capture in captures:
            capture.why_kernels = why
        return choices.programs_of(captures), choices.schedule

    def _chosen(self, captures: Sequence[StepPrograms], kind: StepKind) -> StepChoices:
        # The budget may have been lowered since the last step, or restored.
        if self._limits.device_memory != self._budget.nbytes:
            self._limits = replace(self._limits, device_memory=self._budget.nbytes)
        if self._limits.updates_there != self.updates_there:
            self._limits = replace(self._limits, updates_there=self.updates_there)
        limits = self._limits
        if limits.kernels == "auto" and not self.is_planned and not self._may_record(captures):
            limits = limits.launching_each
        if limits.lengths is None or self.is_planned:
            return self._planned(captures, kind, limits)
        largest = max(each.input_bytes for each in captures)
        known = self._plans.known(captures, kind, limits, largest)
        if known is not None:
            return known
        others = [each for each in self._loss_bytes if each.input_bytes <= largest and each not in captures]
        try:
            return self._planned([*captures, *others], kind, limits)
        except ScheduleError:  # what others need may not fit, or they have other blocks
            return self._planned(captures, kind, limits)

    def _planned(self, captures: Sequence[StepPrograms], kind: StepKind, limits: Limits) -> StepChoices:
        return self._plans.plan(captures, kind, limits, lambda: max(self._loss_bytes[each] for each in captures))

    def _may_record(self, captures: Sequence[StepPrograms]) -> bool:
        """Whether kernels of a step may be recorded: shapes that don't come again aren't worth it."""
        for choices, executors in self._executors.values():
            for executor in executors.values() if choices.serves(captures) else ():
                if executor.why_unrecorded:  # as they are launched one by one after all, nothing need be recomputed
                    for capture in captures:
                        capture.why_eager = executor.why_unrecorded
        return all(each.num_steps >= RECORDED_FROM - 1 and not each.why_eager for each in captures)

    def has_executor(self, captures: Sequence[StepPrograms], kind: StepKind) -> bool:
        """Tells whether `executor` was called for these, in any order, or for others with the same schedule."""
        choices = self._chosen(captures, kind)
        known = self._executors.get(id(choices))
        return known is not None and known[0] is choices

    def executor(self, captures: Sequence[StepPrograms], kind: StepKind, engine: Engine) -> Executor:
        """Returns the executor of a known schedule; the first one moves the model into the engine's store."""
        choices = self._chosen(captures, kind)
        if not self.has_executor(captures, kind):
            self._executors[id(choices)] = choices, OrderedDict()
        _, executors = _latest(self._executors, id(choices))
        order = tuple(map(id, captures))
        if order not in executors:
            if self._arena is None:
                self._arena = self._exchange.landing(engine.bus)
                engine.gradients.clear()  # gradients land there from now on
            programs = choices.programs_of(captures)
            if executors:
                executors[order] = next(iter(executors.values())).in_order(programs)
            else:
                merged = choices.programs
                executors[order] = Executor(programs, choices.schedule, engine, arena=self._arena, merged=merged)
        for capture in {id(each): each for each in captures}.values():
            capture.num_steps += 1
        return _latest(executors, order)


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _latest(known: OrderedDict[_Key, _Value], key: _Key) -> _Value:
    """Takes a value, so that it is the last to be forgotten."""
    known.move_to_end(key)
    while len(known) > _MOST:
        known.popitem(last=False)
    return known[key]
