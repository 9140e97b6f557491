"""Taking: takes steps: an attempt for each capture that fails in the middle, and more where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch

from megatrain.compiled.inside import Compiled, Variant
from megatrain.errors import ExecuteError
from megatrain.memory.device_budget import DeviceBudget
from megatrain.memory.out_of_memory import Attempts, free_frames
from megatrain.options import ROUND, SHARD
from megatrain.planning.dealt_tables import DealtTables
from megatrain.planning.loss_bytes import Loss
from megatrain.runtime.executor import Executor
from megatrain.runtime.rng import RngState
from megatrain.runtime.streams.stopwatch import Watch
from megatrain.tracer.expectations import GuardFailedError
from megatrain.training.attempts.finding_way import find_way
from megatrain.training.attempts.ranks_room import check_room
from megatrain.training.attempts.together import AgainError, Together
from megatrain.training.batch import FollowingLoss, MicroBatch
from megatrain.training.boundary import Boundary
from megatrain.training.completion import Completion
from megatrain.training.setup import Setting, Setup
from megatrain.training.shares import Counts, Shares
from megatrain.training.trainer import Running


class Taking:
    """Takes the steps of a `TrainStep`.

    Args:
        compiled: The model.
        setup: Finds what runs.
        boundary: Makes each step end between two steps.
        completion: Looks after due updates.
        together: Agrees with the other ranks.
        loss: The user's.
        looks: Whether a gradient that isn't finite prevents the updates.
        budget: Of the schedules that are made for steps; None where a given plan has the schedule.

    Attributes:
        setting: Of the latest step, or the prepared one.
        running: The step that runs.
    """

    def __init__(
        self,
        compiled: Compiled,
        setup: Setup,
        boundary: Boundary,
        completion: Completion,
        together: Together,
        *,
        loss: Loss | None,
        looks: bool,
        budget: DeviceBudget | None,
    ):
        self._compiled, self._setup, self._boundary, self._completion = compiled, setup, boundary, completion
        self._together = together
        self._loss, self._looks, self._budget = loss, looks, budget
        self.setting: Setting | None = None
        self.running: Running | None = None
        self._failed_at = 0
        self._is_way_taken = self._has_room = False

    def prepare(self, batches: Callable[[], list[MicroBatch]]) -> None:
        """Finds what a step with some micro-batches runs, without running or allocating anything.

        Args:
            batches: Returns those of this rank.

        Raises:
            RanksError: If blocks are dealt, and another rank fails, or makes another call.
        """
        at = "step.prepare"
        with nullcontext() if self._together.dealing is None else self._together.refusing(at):
            self._prepared(self._of_all(batches(), at), at)

    def _prepared(self, batches: Sequence[MicroBatch], at: str) -> Setting:
        with self._compiled.exclusively("prepare()"), torch.enable_grad(), self._completion.suspended():
            again = partial(self._setup.setting, batches, [{} for _ in batches])
            setting, dealing = again(), self._together.dealing
            setting = (
                setting if dealing is None else dealing.tables.agreed(setting, again, self._setup.tables.deal_as, at)
            )
            self.setting = setting.without_tensors()
        return self.setting

    def of_all(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """What this rank runs in a step: its own micro-batches, or where blocks are dealt those of all ranks here."""
        self._choose_way(batches)
        return self._of_all(batches, "a step")

    def _of_all(self, batches: list[MicroBatch], at: str) -> list[MicroBatch]:
        dealing = self._together.dealing
        return batches if dealing is None else dealing.of_all(batches, at)

    def _choose_way(self, batches: Sequence[MicroBatch]) -> None:
        """Has all ranks choose how the work is divided among devices, if `compile` has left that to the first step."""
        compiled, ranks = self._compiled, self._compiled.ranks
        if ranks is None or self._is_way_taken or not compiled.options.chooses_way:
            return
        # Alike on all ranks, whose hosts are known to all, and whose optimizers are alike.
        if not self._setup.division.shares or min(map(len, ranks.hosts)) == 1:
            return
        if compiled.across_devices is None:  # other steps over this model take the same way
            agree = partial(self._together.tell_all, "the choice of how devices divide the work")
            with compiled.exclusively("the step"), torch.enable_grad(), self._completion.suspended():
                compiled.complete_updates(besides=self._completion)
                setting = self._setup.setting(batches, [{} for _ in batches])
                found = find_way(compiled, self._setup, setting, agree, has_loss=self._loss is not None)
            if found.way != SHARD:
                ranks.copy_whole_weights()
            if found.way == ROUND:
                ranks.deal_blocks()
            compiled.across_devices = found
        if compiled.across_devices.way == ROUND and self._loss is not None:
            raise ExecuteError(
                "this step has a loss=, and another step over this model has found dealt blocks to be the fastest.\n"
                "  One rank would make the losses of all, and such a function may use values of its own rank.\n"
                '  Compile with across_devices="round" if it uses its batch alone, or with "replicate".'
            )
        self._is_way_taken = True
        assert ranks.host is not None
        if compiled.across_devices.way == SHARD:
            self._setup.tables.take_shards(ranks.host.size)
        elif compiled.across_devices.way == ROUND:
            dealing = DealtTables.of(ranks, is_shared=True)
            assert dealing is not None
            self._setup.tables.deal_blocks(dealing, ranks.place)

    def get_ready(self, batches: Sequence[MicroBatch]) -> None:
        """Gets the user's loss ready for a step with these micro-batches, on the rank that makes it.

        Not within the step: what makes the loss may call the model. So where blocks are dealt all ranks agree on the
        tables here, which tell who makes it, and once more in the step.
        """
        if isinstance(self._loss, FollowingLoss):
            if self._together.dealing is None or self._prepared(batches, "a step").kind.has_losses:
                self._loss.get_ready(batches)

    def take(self, batches: Sequence[MicroBatch], counts: Counts, watch: Watch | None) -> torch.Tensor:
        """Takes a step; returns its loss. See `TrainStep.__call__`.

        Args:
            batches: The micro-batches of this rank.
            counts: How much each counts.
            watch: Takes the time of each operation.
        """
        alone = None if self._together.is_shared else Shares(counts)
        failed: list[dict[Variant, str]] = [{} for _ in batches]
        attempts = Attempts("the step", self._compiled.options.device, self._budget)
        with self._compiled.exclusively("the step"), torch.enable_grad(), self._completion.suspended():
            self._compiled.complete_updates(besides=self._completion)  # of other steps over this model
            while True:
                # Not before there is an executor: what is refused until then leaves no trace.
                setting: Setting | None = None
                executor: Executor | None = None
                try:
                    with self._together.attempt():
                        setting = self._agreed(batches, failed)
                        self._check_room(setting)
                        while (executor := self._setup.executor(setting)) is None:
                            self._setup.complete()
                            setting = self._setup.setting(batches, failed)
                        shares = alone or self._together.meet(
                            setting, executor, counts, self._boundary.progress, is_timed=watch is not None
                        )
                        loss = self._run(setting, executor, shares, watch)
                except AgainError as again:
                    free_frames(again)
                except GuardFailedError as failure:
                    if setting is None or executor is None:
                        raise
                    free_frames(failure)
                    at = self._failed_at
                    failed[at][setting.variants[at]] = str(failure)
                    self._compiled.learn(failure, setting.arguments[at], failed[at])
                except Exception as error:
                    has_begun = setting is not None and executor is not None and not self._together.is_shared
                    figures = executor.memory_figures if executor is not None and has_begun else None
                    if not attempts.may_repeat(error, figures, is_undone=self._boundary.is_undone):
                        raise
                else:
                    attempts.over(executor.memory_figures, is_half=self._boundary.has_recovered)
                    return loss

    def _agreed(self, batches: Sequence[MicroBatch], failed: Sequence[dict[Variant, str]]) -> Setting:
        """What this rank runs; where blocks are dealt once all agree on that."""
        again = partial(self._setup.setting, batches, failed)
        setting, dealing = again(), self._together.dealing
        return (
            setting if dealing is None else dealing.tables.agreed(setting, again, self._setup.tables.deal_as, "a step")
        )

    def _check_room(self, setting: Setting) -> None:
        """Looks before the first step whether the ranks of this host fit its memory together."""
        ranks = self._compiled.ranks
        if ranks is not None and not self._has_room:
            agree = partial(self._together.tell_all, "the memory of the hosts")
            shared = self._compiled.engine.shared
            is_shared = shared is not None and bool(shared.twins)
            check_room(ranks, setting, self._setup.host_plan(setting), agree, is_shared=is_shared)
        self._has_room = True

    def _run(self, setting: Setting, executor: Executor, shares: Shares, watch: Watch | None) -> torch.Tensor:
        self.setting = setting.without_tensors()
        engine, updates = executor.engine, self._setup.updates
        assert updates is not None
        options: dict[str, Any] = {"looks": self._looks, "together": self._together}
        running = Running(setting, shares, self._loss, updates, engine.tensors, self._setup.threads, **options)
        before = RngState.now(engine.device, [call for variant in setting.variants for call in variant.opaque])
        with engine.turn.run(differentiates=True), running.interrupts:
            self.running = running
            try:
                # No name keeps the run alive: it must end while Ctrl-C is held back, as a `__del__` loses one.
                options = {"watch": watch, "rank_draws": self._together.draws}
                self._boundary.run(executor.begin(running.inputs(), **options), running, updates, before)
                self._completion.mark()  # here, where Ctrl-C is held back
            finally:
                self.running = None
                self._failed_at = running.micro_batch
        losses = self._together.losses(running.losses)
        if self._together.dealing is not None:
            updates.note_others()
            self._together.dealing.leave(setting)
        if isinstance(self._loss, FollowingLoss):
            self._loss.hear(losses)
        own = [loss.device for loss in running.losses] or [engine.device.torch_device]
        return reduce(torch.add, losses).to(own[0])  # added where they are, and moved to the device once
