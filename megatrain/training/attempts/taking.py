"""Taking: takes steps: an attempt for each capture that fails in the middle, and more where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from megatrain.compiled.inside import Compiled, Variant
from megatrain.memory.device_budget import DeviceBudget
from megatrain.memory.out_of_memory import Attempts, free_frames
from megatrain.planning.loss_bytes import Loss
from megatrain.runtime.executor import Executor
from megatrain.runtime.random_calls import RngState
from megatrain.runtime.streams.events import Watch
from megatrain.tracer.guards import GuardFailedError
from megatrain.training.attempts.together import AgainError, Together, check_room
from megatrain.training.batch import Counts, FollowingLoss, MicroBatch, Shares
from megatrain.training.boundary import Boundary
from megatrain.training.completion import Completion
from megatrain.training.modes import warn_of_dropout
from megatrain.training.setup import Setting, Setup
from megatrain.training.trainer import Running, spent


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
        self._has_room = self._is_mode_known = False

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Finds what a step with some micro-batches runs, without running or allocating anything."""
        with self._compiled.exclusively("prepare()"), torch.enable_grad(), self._completion.suspended():
            self.setting = self._setup.setting(batches, [{} for _ in batches]).without_tensors()

    def take(self, batches: Sequence[MicroBatch], counts: Counts, watch: Watch | None) -> torch.Tensor:
        """Takes a step; returns its loss. See `TrainStep.__call__`.

        Args:
            batches: The micro-batches of this rank.
            counts: How much each counts.
            watch: Takes the time of each operation.
        """
        if not self._is_mode_known:
            self._is_mode_known = True
            warn_of_dropout(self._compiled.model)
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
                        setting = self._setup.setting(batches, failed)
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
                    self._completion.has_stepped = True
                    return spent(loss)

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
                self._boundary.run(executor.begin(running.inputs(), watch=watch), running, updates, before)
                self._completion.mark()  # here, where Ctrl-C is held back
            finally:
                self.running = None
                self._failed_at = running.micro_batch
        losses = self._together.losses(running.losses)
        if isinstance(self._loss, FollowingLoss):
            self._loss.hear(losses)
        own = [loss.device for loss in running.losses] or [engine.device.torch_device]
        return reduce(torch.add, losses).to(own[0])  # added where they are, and moved to the device once
