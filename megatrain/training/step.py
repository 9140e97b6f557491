"""TrainStep: forward, backward, clipping and update of one batch, as one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.compiled import CompiledModule, Variant
from megatrain.errors import ExecuteError, OptimizerError, OptionError
from megatrain.optim.blockwise import has_hooks
from megatrain.optim.per_parameter import check_per_parameter
from megatrain.optim.threads import update_threads
from megatrain.optim.updates import Updates, check_max_norm
from megatrain.optim.whole_step import Optimizer
from megatrain.runtime.interrupts import Interrupts
from megatrain.runtime.rng import RngState
from megatrain.runtime.whole_step import StepExecutor
from megatrain.scheduler.costs import Measured
from megatrain.scheduler.table import Position, Schedule
from megatrain.tracer.expect import GuardFailedError
from megatrain.tracer.structure import Arguments
from megatrain.training.batch import Loss, MicroBatch, Weight, micro_batches, shares
from megatrain.training.boundary import Boundary, Progress
from megatrain.training.completion import Completion
from megatrain.training.running import Running
from megatrain.training.table import Mode, StepTables

ON_NONFINITE = (None, "raise", "skip")


@dataclass(frozen=True, slots=True)
class _Ready:
    """What one attempt at a step runs."""

    arguments: Sequence[Arguments]
    variants: Sequence[Variant]
    mode: Mode


class TrainStep:
    """Trains a compiled model, a batch at a time.

        step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)
        for batch in batches:
            loss = step(batch)

    A call is what the loop `zero_grad`, forward, `backward`, `clip_grad_norm_`, `optimizer.step` is, with the same
    numbers, but one schedule: each block's weights cross to the device at most twice however many micro-batches there
    are, and updates run on the host beside the device's work.

    * Without clipping a block is updated as soon as its gradients have left. Gradients never exist all at once.
    * With `max_grad_norm` or `on_nonfinite` the updates need all gradients. They are due when the call returns, and run
      in the next call, each ahead of its block's weights; `flush` takes them at once, and so does whatever reads
      parameters through the compiled model, or the state dict of model or optimizer.
    * With `overlap=False`, or hooks on the optimizer's step, all updates follow all gradients, within the call.

    All three leave the same bits. A call that fails before its first update leaves parameters, buffers, state of the
    optimizer and generators as they were before it; one that fails later (only where updates overlap, or from an
    optimizer's own error) is completed, and says so in the note of the error.

    Args:
        compiled: From `megatrain.compile`.
        optimizer: Any optimizer of torch, or a subclass, over the model's parameters, that updates each from its
            gradient and its state alone. LR schedulers and changes of `param_groups` between calls work as ever.
        loss: `loss(result, batch)` makes the scalar to differentiate; None takes the result itself, or its `loss`.
        weight: `weight(batch)` says how much a micro-batch counts, such as its number of targets; None counts all the
            same. Losses and gradients are those of the weighted mean.
        max_grad_norm: Largest norm of the gradients of all parameters, as in `clip_grad_norm_`; None doesn't clip.
        overlap: Whether updates may run beside the device's work.
        on_nonfinite: What happens if a gradient has an infinite or undefined element: `"raise"` an error, `"skip"` the
            update; None doesn't look.

    Raises:
        OptimizerError: If the optimizer needs all parameters at once, or holds none of the model's.
        OptionError: If an option is unknown.
    """

    def __init__(
        self,
        compiled: CompiledModule,
        optimizer: Optimizer,
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        max_grad_norm: float | None = None,
        overlap: bool = True,
        on_nonfinite: str | None = None,
    ):
        if not isinstance(compiled, CompiledModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                f"TrainStep takes a compiled model, not a {type(compiled).__qualname__}.\n"
                "  It runs the model's schedule.\n  Pass megatrain.compile(model)."
            )
        if on_nonfinite not in ON_NONFINITE:
            raise OptionError(
                f'on_nonfinite={on_nonfinite!r} is not known.\n  on_nonfinite is one of None, "raise", "skip".'
            )
        check_per_parameter(optimizer)
        self._compiled = compiled
        self._optimizer = optimizer
        self._loss = loss
        self._weight = weight
        self._max_norm = check_max_norm(max_grad_norm)
        self._overlap = overlap
        self._on_nonfinite = on_nonfinite
        self._tables = StepTables(compiled.options)
        self._updates: Updates | None = None
        self._blocks: list[list[torch.Tensor]] = []
        self._schedule: Schedule | None = None
        self._is_running = False
        self._failed_at = 0
        self._boundary = Boundary(on_nonfinite)
        completion = Completion(self)
        compiled.before_reads(completion)
        completion.watch(compiled, optimizer)

    # -- what will run ----------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest call, or of `prepare`.

        Raises:
            ExecuteError: Before the first of them.
        """
        if self._schedule is None:
            raise ExecuteError(
                "no step is compiled yet.\n  A schedule needs the sizes of a batch.\n"
                "  Call the step, or prepare(batch), once."
            )
        return self._schedule

    @property
    def progress(self) -> Progress:
        """How many steps were taken and skipped, and the latest norm."""
        return self._boundary.progress

    def prepare(self, batch: Any) -> Schedule:
        """Makes the schedule of a batch like this one, without running or moving anything."""
        batches = micro_batches(batch)
        with self._compiled.exclusively(), torch.enable_grad():
            ready = self._ready(batches, [{} for _ in batches])
            self._schedule = self._tables.schedule([v.program for v in ready.variants], ready.mode)
        return self._schedule

    # -- steps --------------------------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> torch.Tensor:
        """Runs a step.

        Args:
            batch: A mapping of keyword arguments of the model, a tuple of positional ones, or the only one; or a
                list of such micro-batches, of any sizes.

        Returns:
            The loss, a tensor without dimensions on the compute device: the mean over micro-batches, by `weight`.

        Raises:
            ExecuteError: If gradients aren't finite and `on_nonfinite="raise"`, an operation fails, or an earlier
                failure left the model between two steps.
            TraceError: If the model can't be captured for this batch.
            ScheduleError: If the memory is too small for it.
        """
        return self._take(batch, None)

    def measure(self, batch: Any) -> Measured:
        """Runs a step like any other, and returns how long each operation took.

        The result goes into `schedule.simulate`, of this schedule or another one of the same program. On an
        accelerator each stream waits for the device after every operation, so this step takes a little longer.
        """
        seconds: dict[Position, float] = {}
        self._take(batch, seconds)
        return Measured.of(self.schedule, seconds)

    def _take(self, batch: Any, seconds: dict[Position, float] | None) -> torch.Tensor:
        self._check_whole()
        batches = micro_batches(batch)
        factors = shares(batches, self._weight)
        failed: list[dict[Variant, str]] = [{} for _ in batches]
        with self._compiled.exclusively(), torch.enable_grad():
            while True:
                ready = self._ready(batches, failed)
                try:
                    return self._run(batches, ready, factors, seconds)
                except GuardFailedError as failure:
                    at = self._failed_at
                    failed[at][ready.variants[at]] = str(failure)
                    self._compiled.learn(failure, ready.arguments[at], failed[at])

    def flush(self) -> None:
        """Takes the updates that are due, so that the parameters are those after the latest call."""
        if self._is_running or self._updates is None or not self._updates.is_under_way:
            return
        self._check_whole()
        self._is_running = True
        try:
            self._updates.finish()
        finally:
            self._is_running = False

    def _ready(self, batches: Sequence[MicroBatch], failed: Sequence[dict[Variant, str]]) -> _Ready:
        """Finds the captures of the micro-batches, making those that are missing."""
        arguments = [Arguments.of(batch.args, dict(batch.kwargs)) for batch in batches]
        variants: list[Variant] = []
        for given, unfit in zip(arguments, failed, strict=True):
            if self._compiled.known_variant(given, unfit) is None:
                self.flush()  # a capture may read the parameters
            variants.append(self._compiled.variant_for(given, unfit))
        return _Ready(arguments, variants, self._mode())

    def _mode(self) -> Mode:
        needs_norm = self._max_norm is not None or self._on_nonfinite is not None
        is_due = self._updates is not None and self._updates.is_under_way
        if self._overlap and needs_norm and not has_hooks(self._optimizer):
            return Mode("deferred" if is_due else "none", clip=True)
        self.flush()
        is_serial = not self._overlap or has_hooks(self._optimizer)
        return Mode("serial" if is_serial else "overlap", needs_norm)

    def _executor(self, ready: _Ready) -> StepExecutor:
        programs = [variant.program for variant in ready.variants]
        engine = self._compiled.engine
        executor = self._tables.executor(programs, ready.mode, engine)
        self._compiled.bind()
        engine.find_replaced()
        if ready.mode.updates == "deferred" and not _are_same(self._blocks_of(executor), self._blocks):
            self.flush()  # what is due belongs to other blocks
            executor = self._tables.executor(programs, self._mode(), engine)
        self._schedule = executor.schedule
        return executor

    def _blocks_of(self, executor: StepExecutor) -> list[list[torch.Tensor]]:
        return [[self._compiled.engine.tensors[key] for key in keys] for keys in executor.trained]

    def _prepare_updates(self, executor: StepExecutor) -> Updates:
        """Returns the updates of the executor's blocks."""
        blocks = self._blocks_of(executor)
        if self._updates is None or not _are_same(blocks, self._blocks):
            held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
            if not any(id(p) in held for block in blocks for p in block):
                raise OptimizerError(
                    "the optimizer holds none of the parameters that the model trains.\n"
                    "  A step updates what the optimizer holds.\n  Make it from compiled.parameters()."
                )
            self._blocks = blocks
            self._updates = Updates(
                self._optimizer,
                blocks,
                masters={},
                names={p: name for name, p in nn.Module.named_parameters(self._compiled)},
                max_norm=self._max_norm,
                threads=self._threads,
            )
        return self._updates

    @property
    def _threads(self) -> int:
        # On the CPU sums must be split as the caller's own are, to have the same bits.
        is_host = self._compiled.options.device.type == "cpu"
        return torch.get_num_threads() if is_host else update_threads()

    def _run(
        self,
        batches: Sequence[MicroBatch],
        ready: _Ready,
        factors: Sequence[float],
        seconds: dict[Position, float] | None,
    ) -> torch.Tensor:
        executor = self._executor(ready)
        updates = self._prepare_updates(executor)
        running = self._running(batches, ready, factors, executor, updates)
        engine = self._compiled.engine
        before = RngState.now(engine.device, [call for variant in ready.variants for call in variant.opaque])
        inputs = [
            v.traced.written_inputs.given(a.tensors) for v, a in zip(ready.variants, ready.arguments, strict=True)
        ]
        with engine.turn(), running.interrupts:
            self._is_running = True
            try:
                self._boundary.run(executor.begin(inputs, seconds=seconds), running, updates, before)
            finally:
                self._is_running = False
                self._failed_at = running.micro_batch
        return running.loss

    def _running(
        self,
        batches: Sequence[MicroBatch],
        ready: _Ready,
        factors: Sequence[float],
        executor: StepExecutor,
        updates: Updates,
    ) -> Running:
        tensors = self._compiled.engine.tensors
        parameters = {key: tensors[key] for keys in executor.trained for key in keys}
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                raise ExecuteError(
                    f"parameter `{key}` has a `.grad` already.\n"
                    "  A step takes the gradients of its own batch, all micro-batches included, and leaves none.\n"
                    "  Call optimizer.zero_grad(), or give the step what the other backward was of."
                )
        return Running(
            ready.mode,
            batches,
            ready.arguments,
            ready.variants,
            factors,
            self._loss,
            updates,
            parameters,
            Interrupts(),
            self._threads,
            looks_for_nonfinite=self._on_nonfinite is not None,
        )

    def _check_whole(self) -> None:
        if self._boundary.broken is not None:
            raise ExecuteError(self._boundary.broken)


def _are_same(left: Sequence[Sequence[torch.Tensor]], right: Sequence[Sequence[torch.Tensor]]) -> bool:
    return [[id(p) for p in block] for block in left] == [[id(p) for p in block] for block in right]
