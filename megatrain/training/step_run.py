"""StepRun: takes steps: an attempt for each capture that fails in the middle, and more where memory runs out.

Each step ends where parameters, moments, buffers and generators belong together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_private import DropoutNd
from megatrain.device.device_budget import Attempts, DeviceBudget, free_frames, let_go, ran_out
from megatrain.errors import ExecuteError, TrainStepWarning
from megatrain.optim.updates import Updates
from megatrain.planning.loss_bytes import Loss
from megatrain.ranks.processes import refuse_apart
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.executor import Executor
from megatrain.runtime.operations import Run
from megatrain.runtime.random_calls import RngState, moving_in_turn
from megatrain.runtime.streams.events import Watch
from megatrain.tracer.arguments import naming_inputs
from megatrain.tracer.guards import GuardFailedError
from megatrain.training.batch import Counts, FollowingLoss, MicroBatch, Shares, Weight, micro_batches, untrained
from megatrain.training.compiled.inside import Compiled, Variant
from megatrain.training.completion import Completion
from megatrain.training.setup import Setting, Setup
from megatrain.training.trainer import Running, spent


@dataclass(slots=True)
class Progress:
    """The progress of training.

    Args:
        count: Steps that were completed, skipped ones included.
        skipped: Steps whose gradients weren't finite.
        nonfinite: The gradient that wasn't finite in the latest of these steps; None if there was none.
        grad_norm: The norm of the latest step's gradients, before clipping; None if nobody asked.
    """

    count: int = 0
    skipped: int = 0
    nonfinite: str | None = None
    grad_norm: torch.Tensor | None = None


class NotFiniteError(ExecuteError):
    """A gradient isn't finite, and nothing was updated; all processes that train together find the same.

    Args:
        what: The gradient.
        way: The way out.
    """

    is_on_all = True

    def __init__(self, what: str, way: str) -> None:
        super().__init__(
            f"{what} is not finite.\n"
            "  Parameters, buffers, the optimizer and the generators are as before the call.\n"
            f"  {way}"
        )
        self.what = what


@dataclass(frozen=True, slots=True)
class StepRules:
    """What is the same in all steps of a `TrainStep`.

    Args:
        loss: The user's.
        weight: How much a micro-batch counts.
        is_sum: Losses are added up as they are.
        on_nonfinite: What follows if a gradient isn't finite, which prevents the updates; None if nobody looks.
        budget: Of the schedules that are made for steps; None where a given plan has the schedule.
        facts: Options that must be the same in all processes that train together.
    """

    loss: Loss | None
    weight: Weight | None
    is_sum: bool
    on_nonfinite: str | None
    budget: DeviceBudget | None
    facts: Mapping[str, object]


@dataclass(slots=True)
class _Try:
    """One try at a step, as far as it came.

    Args:
        batches: The micro-batches.
        counts: How much each counts.
        failed: Of each, the captures that failed in the middle of this step, with the failures.
        watch: Takes the time of each operation.
    """

    batches: Sequence[MicroBatch]
    counts: Counts
    failed: Sequence[dict[Variant, str]]
    watch: Watch | None
    shares: Shares | None = None
    setting: Setting | None = None
    executor: Executor | None = None
    has_recovered: bool = False


class StepRun:
    """Takes the steps of a `TrainStep`.

    Args:
        compiled: The model.
        setup: Finds what runs.
        completion: Looks after due updates.
        exchange: Who else takes the steps.
        rules: What is the same in all steps.

    Attributes:
        setting: Of the latest step, or the prepared one.
        running: The step that runs.
        progress: The progress of training.
        broken: Why no step can follow; None as long as one can.
    """

    def __init__(
        self,
        compiled: Compiled,
        setup: Setup,
        completion: Completion,
        exchange: Exchange,
        rules: StepRules,
    ):
        self._compiled, self._setup, self._completion = compiled, setup, completion
        self._exchange, self._rules = exchange, rules
        self.setting: Setting | None = None
        self.running: Running | None = None
        self.progress = Progress()
        self.broken: str | None = None
        self._is_undone = False  # the latest run failed and left no trace, so that it may run again
        self._failed_at = 0
        self._is_mode_known = False

    def check_whole(self) -> None:
        """Tells whether a step can follow.

        Raises:
            ExecuteError: If an earlier step left the model in the middle of a step.
        """
        broken = self._exchange.broken or self.broken
        if broken is not None:
            raise ExecuteError(broken)

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Finds what a step with some micro-batches runs, without running or allocating anything.

        With `lengths=`, the model's own code runs on a few tokens before its first capture.
        """
        if self._compiled.lengths is not None:
            self._try_lengths(batches)
        with self._compiled.exclusively("prepare()"), torch.enable_grad(), self._completion.suspended():
            self.setting = self._setup.setting(batches, [{} for _ in batches]).without_tensors()

    def take(self, batch: Any, watch: Watch | None) -> torch.Tensor:
        """Takes a step; returns its loss. See `TrainStep.__call__`.

        Args:
            batch: The micro-batches of this process.
            watch: Takes the time of each operation.
        """
        if not self._compiled.has_group:
            refuse_apart()
        self.check_whole()
        if not self._is_mode_known:
            self._is_mode_known = True
            _warn_of_dropout(self._compiled.model)
        # With several processes there are no lengths, and the others hear below of a batch that is refused.
        if self._compiled.lengths is not None:
            self._try_lengths(micro_batches(batch))
        rules, repeated = self._rules, Attempts("the step", self._compiled.options.device, self._rules.budget)
        with (
            self._compiled.exclusively("the step"),
            torch.enable_grad(),
            self._exchange.taking(),
        ):
            batches = micro_batches(batch)
            counts = Counts(batches, rules.weight, is_sum=rules.is_sum)
            shares = Shares(counts) if self._exchange.is_alone else None
            failed: list[dict[Variant, str]] = [{} for _ in batches]
            with self._completion.suspended():
                self._compiled.complete_updates(besides=self._completion)  # of other steps over this model
                while True:
                    attempt = _Try(batches, counts, failed, watch, shares)
                    try:
                        with naming_inputs(self._compiled.model, batches[0].values):
                            loss = self._run(attempt)
                    except Exception as error:
                        if not self._may_repeat(error, attempt, repeated):
                            raise
                        shares = attempt.shares
                    else:
                        assert attempt.executor is not None
                        repeated.over(attempt.executor.memory_figures, is_half=attempt.has_recovered)
                        self._completion.has_stepped = True
                        return spent(loss)

    def _try_lengths(self, batches: Sequence[MicroBatch]) -> None:
        """Tries the padding of new kinds of calls, while nobody else may want to see the model between two steps."""
        for batch in batches:
            self._compiled.padded(untrained(self._compiled.model, batch))

    def _run(self, attempt: _Try) -> torch.Tensor:
        """Runs a step; what is refused before it has an executor leaves no trace."""
        attempt.setting = setting = self._setup.setting(attempt.batches, attempt.failed)
        if not self._exchange.is_alone:
            self._exchange.check_room(setting.schedule, lambda: self._setup.host_plan(setting).by_use)
        while (executor := self._setup.executor(setting)) is None:
            self._setup.complete()
            attempt.setting = setting = self._setup.setting(attempt.batches, attempt.failed)
        attempt.executor = executor
        shares = self._agreed(attempt, setting)
        self.setting = setting.without_tensors()
        engine, updates = executor.engine, self._setup.updates
        assert updates is not None
        parts = setting, shares, self._rules.loss, updates, engine.tensors, self._setup.threads
        there, marked = self._setup.there, self._completion.marked
        looks = self._rules.on_nonfinite is not None
        running = Running(*parts, looks=looks, exchange=self._exchange, there=there, marked=marked)
        before = RngState.now(engine.device, [call for variant in setting.variants for call in variant.opaque])
        with engine.turn.run(differentiates=True), running.interrupts:
            self.running = running
            try:
                # No name keeps the run alive: it must end while Ctrl-C is held back, as a `__del__` loses one.
                attempt.has_recovered = self._do_operations(
                    executor.begin(running.inputs(), watch=attempt.watch, file=self._setup.activations),
                    running,
                    updates,
                    before,
                )
                self._setup.write_changed()  # what was completed after a failure; else the step's ops have written all
                self._completion.mark()  # here, where Ctrl-C is held back
            except BaseException as error:
                self._setup.write_changed(noting=error)
                raise
            finally:
                self.running = None
                self._failed_at = running.micro_batch
        losses = self._exchange.losses(running.losses)
        if isinstance(self._rules.loss, FollowingLoss):
            self._rules.loss.hear(losses)
        own = [loss.device for loss in running.losses] or [engine.device.torch_device]
        return reduce(torch.add, losses).to(own[0])  # added where they are, and moved to the device once

    def _agreed(self, attempt: _Try, setting: Setting) -> Shares:
        """All processes take this step next; returns the shares of this one's micro-batches."""
        if self._exchange.is_alone:
            assert attempt.shares is not None
            return attempt.shares
        progress = self.progress
        facts = {
            **self._rules.facts,
            "the call": "step(batch)" if attempt.watch is None else "step.time(batch)",
            "the number of steps": progress.count,
            "the number of skipped steps": progress.skipped,
            "the norm of the latest gradients": "none" if progress.grad_norm is None else progress.grad_norm.item(),
        }
        told = self._exchange.agree(setting.programs, setting.schedule, facts, attempt.counts.said())
        if told:
            attempt.shares = Shares(attempt.counts, others=told, rank=self._exchange.rank)
        assert attempt.shares is not None
        return attempt.shares

    def _may_repeat(self, error: Exception, attempt: _Try, repeated: Attempts) -> bool:
        """Tells whether the step may be tried again after an error, once that is prepared."""
        setting, executor = attempt.setting, attempt.executor
        if isinstance(error, GuardFailedError):
            if setting is None or executor is None:
                return False
            if not self._exchange.may_repeat():
                raise ExecuteError(
                    "a value that the model's Python code reads has changed after other ranks had used gradients of "
                    "this step.\n  Such a step can't run again.\n  Give this rank one micro-batch, or train alone."
                ) from error
            free_frames(error)
            at = self._failed_at
            attempt.failed[at][setting.variants[at]] = str(error)
            self._compiled.learn(error, setting.arguments[at], attempt.failed[at])
            return True
        is_known = setting is not None and executor is not None and self._exchange.is_alone
        figures = executor.memory_figures if executor is not None and is_known else None
        return repeated.may_repeat(error, figures, is_undone=self._is_undone)

    def _do_operations(self, run: Run, running: Running, updates: Updates, before: RngState) -> bool:
        """Does all operations of a step, which then ends at its own end, or at the end of the previous step.

        Args:
            run: The operations.
            running: Its trainer.
            updates: Takes its gradients.
            before: The generators when it began.

        Returns:
            Whether the step ran out of the device's memory after its first update, and was completed.

        Raises:
            ExecuteError: If a gradient isn't finite and `on_nonfinite` is `"raise"`, or an operation fails on its own
                thread.
            BaseException: An error of the caller's code. If the step had begun to update parameters, notes on the error
                say where it ended.
        """
        self._is_undone = False
        try:
            with moving_in_turn(running.drawing):
                run.go(running)
            running.check()  # there may have been no update
            self._end(run, running, updates)
        except BaseException as error:
            lacks_memory = ran_out(error, run.device)
            if not running.has_updated:
                self._go_back(run, running, updates, error)
                before.restore(run.device)
                self._is_undone = True
                if running.shares.fault is not None:
                    raise running.shares.fault from None  # found on a transfer's thread
                raise
            if not running.exchange.is_alone:
                self._give_up(run, updates, error)  # others have used its gradients, and don't wait for new ones
                raise
            if lacks_memory:
                let_go(error, run.device)
            if not (self._go_on(run, running, updates, error) and lacks_memory):
                raise
            return True
        return False

    def _end(self, run: Run, running: Running, updates: Updates) -> None:
        """Does what follows the last operation."""
        found = updates.arriving
        run.leave_generators()  # before code of the user's that may draw: an optimizer's step, hooks on it
        running.finish()
        self.progress.grad_norm = found.norm
        if running.is_skipped:
            self._skip(updates)
        elif not running.has_begun:
            updates.begin()
        self._close(run, running, updates)

    def _skip(self, updates: Updates) -> None:
        text = updates.describe_nonfinite()
        if self._rules.on_nonfinite == "raise":
            raise NotFiniteError(text, 'Lower the learning rate, look at the batch, or set on_nonfinite="skip".')
        self.progress.nonfinite = text
        self.progress.skipped += 1

    def _close(self, run: Run, running: Running, updates: Updates) -> None:
        updates.drop_arriving()
        run.commit()
        self.progress.count += 1
        running.interrupts.note = "  The step was completed."

    def _go_back(self, run: Run, running: Running, updates: Updates, error: BaseException) -> None:
        """Leaves no trace of a step that has not updated anything; updates of the previous step are completed."""
        run.close()
        if running.has_begun or running.kind.updates not in ("deferred", "spread"):
            updates.abandon()
            updates.drop_arriving()
            return
        updates.drop_arriving()
        try:
            if updates.is_under_way:
                updates.finish()
        except BaseException as again:
            error.add_note(_still_due(updates, again))

    def _go_on(self, run: Run, running: Running, updates: Updates, error: BaseException) -> bool:
        """Completes a step after some of its updates; tells whether nothing of it is still due."""
        try:
            with moving_in_turn(running.drawing):
                run.complete(running)
        except BaseException as again:
            if ran_out(again, run.device):
                let_go(again, run.device)
            self._give_up(run, updates, again)
            error.add_note(f"  {self.broken}")
            return False
        try:
            self._end(run, running, updates)
            error.add_note("  Parameters had been updated before it failed, so the step was completed.")
        except BaseException as again:
            self._close(run, running, updates)
            error.add_note(_still_due(updates, again))
            return False
        return True

    def _give_up(self, run: Run, updates: Updates, error: BaseException) -> None:
        self.broken = (
            f"the model is in the middle of a step: blocks {updates.due} are not updated, all others are.\n"
            f"  The gradients of these blocks can't be computed: {type(error).__name__}: {error}\n"
            "  Load a checkpoint. With max_grad_norm, on_nonfinite or overlap=False no update comes before the last\n"
            "  gradient, and a step that fails leaves no trace."
        )
        run.close()
        updates.abandon()
        updates.drop_arriving()


def _still_due(updates: Updates, error: BaseException) -> str:
    return (
        f"  The updates of blocks {updates.due} are still due, because they failed again: {type(error).__name__}: "
        f"{error}\n  flush() and the next step try them again."
    )


def _warn_of_dropout(model: nn.Module) -> None:
    """Warns of dropout that is off because the model is in eval mode, as `from_pretrained` returns it.

    What is in eval mode and has nothing to train (a frozen encoder, a dropout alone) is taken to be so on purpose.
    """
    for place, module in model.named_modules():
        if module.training or not any(p.requires_grad for p in module.parameters()):
            continue
        off = [name for name, each in module.named_modules(prefix=place) if not each.training and _probability(each)]
        if off:
            more = f" and {len(off) - 1} more" if len(off) > 1 else ""
            warnings.warn(
                f"the model trains without dropout: `{off[0]}`{more} is in eval mode, as from_pretrained() leaves it.\n"
                "  A step computes what the model computes in its present mode, as eager PyTorch does.\n"
                "  Call model.train() before the steps; for a training without dropout, set its probability to 0.",
                TrainStepWarning,
                stacklevel=4,
            )
            return


def _probability(module: nn.Module) -> float:
    """With which probability a module of torch drops values in training mode."""
    if isinstance(module, DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0
