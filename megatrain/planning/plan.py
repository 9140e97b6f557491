"""Plan: a training step on paper, with all questions that one may ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.base.checks import Rule, checked, count, either, function, one_of, optional
from megatrain.base.counts import counted
from megatrain.errors import OptionError
from megatrain.planning.advice import MOST_OF_A_SIZE, Alternatives, Largest, alternatives, largest, refusal
from megatrain.planning.model_sizes import DEPTH, MICRO_BATCH, SEQUENCE
from megatrain.planning.plan_text import device_lines, piece_lines, reasons, reserve_text, time_text, verdict
from megatrain.planning.planned_step import PLAN, UNBOUNDED, PlannedStep, SavedPlan, saved_plan

SIZES: Rule = either(one_of(MICRO_BATCH, SEQUENCE, DEPTH), function(1))


class Plan(PlannedStep):
    """A training step on paper; made by `plan`, printed by `str`.

    Attributes:
        program: The model's blocks.
        schedule: Of the whole step. If `device_memory` is too small, the schedule that takes the least memory.
        host: The host memory that the step takes.
        device_memory: Bytes of the device for the step, or None.
        host_memory: Bytes of the host for the step, or None.
        precision: `"fp32"` or `"bf16"`.
        too_small: Why the device's memory isn't enough, or None.
        kernels: How kernels are launched, and why, in words; empty where eager's calls launch them without a choice.
        why_host: Why the host makes all updates, whatever memory of the device is left; empty if the device may.
        reads: What a step reads of frozen weights that stay in their files; None if they don't.
        moments: What a step moves of optimizer state that is in a file; None if it is in memory.
        step_s: Seconds of a step, predicted; None without `hardware`.
        tokens_per_s: Tokens a second, predicted; None without `hardware`, or if the example has no token ids.
    """

    def check(self) -> None:
        """Refuses a step that doesn't fit. Without `host_memory` it must fit into this machine's free memory.

        The error says how much is missing, what sets it, and the cheapest ways out, each of which is planned: that
        takes some plans' time.

        Raises:
            ScheduleError: If `device_memory` is too small: the bytes needed, where they are needed, and what helps.
            ExecuteError: If the host's memory is too small, likewise.
        """
        error = refusal(self)
        if error is not None:
            raise error

    def saved(self) -> SavedPlan:
        """The plan's choices as a value: `to_json` writes it, `TrainStep(plan=)` takes exactly these.

        Raises:
            ScheduleError: If the step doesn't fit the device.
        """
        return saved_plan(self)

    @checked(other=PLAN)
    def diff(self, other: PlannedStep | SavedPlan) -> str:
        """Says how another plan, or a saved one, differs: in words, each figure before and after.

        Raises:
            ScheduleError: If one of them doesn't fit the device.
        """
        return saved_plan(self).diff(saved_plan(other))

    @property
    def reserve(self) -> str:
        """What the device needs besides, in words; empty if the plan was read from a dump."""
        return reserve_text(self)

    def why(self) -> str:
        """Says in sentences why the plan is as it is.

        That is what bounds the step, what stays on the device and what doesn't, and what 1 GiB more would buy: for
        that the step is planned again.
        """
        return reasons(self)

    @property
    def alternatives(self) -> Alternatives:
        """The step with other budgets, micro-batches, precisions, masters and updates: a table that prints itself.

        Each row is planned when this is read, without tensors; what was planned once isn't planned again.

        Raises:
            OptionError: If the plan was read from a dump, so that it can't be planned again.
        """
        self._need_asked("has no alternatives")
        return alternatives(self)

    @checked(what=SIZES, multiple=optional(count(1, MOST_OF_A_SIZE)), most=optional(count(1, MOST_OF_A_SIZE)))
    def largest(
        self, what: str | Callable[[int], Any], *, multiple: int | None = None, most: int | None = None
    ) -> Largest:
        """The largest size that fits, by bisection over plans; all else stays as it is.

        Args:
            what: `"micro_batch"`, the first dimension of the example's tensors, or `"sequence"`, the second one. An
                example of another size has the rows and columns of this one, again and again. Or a function that makes
                the model and its inputs for a whole number, `(model, inputs)`: then that number. `"depth"` is for
                plans of the command, which makes models from their configuration.
            multiple: Only multiples of it are tried; None is 1, or 128 of sequences that are as long.
            most: No larger size is tried; None is eight times the depth, and no bound of other sizes.

        Raises:
            OptionError: If the plan's example doesn't have such a size.
            ScheduleError: If not even the smallest fits.
        """
        self._need_asked("can't change its sizes")
        return largest(self, what, multiple, most)

    def _need_asked(self, what: str) -> None:
        if self.asked is None:
            raise OptionError(
                f"this plan {what}: it doesn't know its model.\n"
                "  A plan that megatrain.plan has made can be planned again with other options.\n"
                "  Call megatrain.plan."
            )

    def __str__(self) -> str:
        table = self.schedule
        blocks, parameters = len(self.program.blocks), self.host.num_parameters
        model = f"{self.program.name}, {counted(blocks, 'block')}, {counted(parameters, 'parameter')}"
        batches = counted(table.kind.micro_batches, "micro-batch")
        updates = f"updates {table.kind.updates}{', clipped' if table.kind.clip else ''}"
        return "\n".join(
            [
                f"plan: {model}; {self.precision}, {batches}, {updates}",
                f"device: {verdict(table.device_bytes, self.device_memory)}",
                *(f"  {line}" for line in (*device_lines(table, self.hardware), *piece_lines(self.program))),
                *([f"  reserve: {self.reserve}"] if self.reserve else []),
                f"host: {verdict(self.host.total_bytes, None if self.host_memory == UNBOUNDED else self.host_memory)}",
                *(f"  {line}" for line in self.host.lines()),
                *([f"  {self.reads.text(self.hardware)}"] if self.reads is not None else []),
                *([f"  {self.moments.text(self.hardware)}"] if self.moments is not None else []),
                *([f"kernels: {self.kernels}"] if self.kernels else []),
                *time_text(self),
            ]
        )
