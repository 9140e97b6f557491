"""Boundary: makes each step end in a state where parameters, moments, buffers and generators belong together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.device.out_of_memory import let_go, ran_out
from megatrain.errors import ExecuteError
from megatrain.optim.updates import Updates
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.operations import Run
from megatrain.runtime.random_calls import RngState, moving_in_turn
from megatrain.training.trainer import Running


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


class Boundary:
    """Runs steps so that each ends at its own end, or at the end of the previous step.

    Args:
        on_nonfinite: As in `TrainStep`.
        exchange: Who else takes the steps.

    Attributes:
        progress: The progress of training.
        broken: Why no step can follow; None as long as one can.
        is_undone: The latest step failed and left no trace, so that it may run again.
        has_recovered: The latest step ran out of the device's memory after its first update, and was completed.
    """

    def __init__(self, on_nonfinite: str | None, exchange: Exchange):
        self._on_nonfinite, self._exchange = on_nonfinite, exchange
        self.progress = Progress()
        self.broken: str | None = None
        self.is_undone = self.has_recovered = False

    def check_whole(self) -> None:
        """Tells whether a step can follow.

        Raises:
            ExecuteError: If an earlier step left the model in the middle of a step.
        """
        broken = self._exchange.broken or self.broken
        if broken is not None:
            raise ExecuteError(broken)

    def run(self, run: Run, running: Running, updates: Updates, before: RngState) -> None:
        """Runs a step. One that runs out of the device's memory after its first update is completed, without an error.

        Args:
            run: The operations.
            running: Its trainer.
            updates: Takes its gradients.
            before: The generators when it began.

        Raises:
            ExecuteError: If a gradient isn't finite and `on_nonfinite` is `"raise"`, or an operation fails on its own
                thread.
            BaseException: An error of the caller's code. If the step had begun to update parameters, notes on the error
                say where it ended.
        """
        self.is_undone = self.has_recovered = False
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
                self.is_undone = True
                if running.shares.fault is not None:
                    raise running.shares.fault from None  # found on a transfer's thread
                raise
            if not running.exchange.is_alone:
                self._give_up(run, updates, error)  # others have used its gradients, and don't wait for new ones
                raise
            if lacks_memory:
                let_go(error, run.device)
            self.has_recovered = self._go_on(run, running, updates, error) and lacks_memory
            if not self.has_recovered:
                raise

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
        if self._on_nonfinite == "raise":
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
