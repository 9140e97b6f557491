"""TrainStep: forward, backward, clipping and update of one batch, as one schedule."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch

from megatrain.base.checks import FLAG, PATH, checked, count, number, one_of, optional
from megatrain.base.checks.several_optimizers import OPTIMIZERS, Optimizers, optimizers_of
from megatrain.base.progress import ProgressLine
from megatrain.base.sizes import MEMORY, SIZE
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.loss_bytes import Loss
from megatrain.planning.options import given_bytes
from megatrain.planning.planned_step import PLAN, AnyPlan, SavedPlan, timed_choices
from megatrain.ranks.rank_exchange import RankExchange
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.streams.events import RunClock, Stopwatch
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Measured, TimedRun
from megatrain.training import saved_step as checkpoint
from megatrain.training.batch import Weight, check_reduce, micro_batches
from megatrain.training.compiled.module import COMPILED, CompiledModule
from megatrain.training.completion import Completion, Looked
from megatrain.training.saved_schedulers import SCHEDULERS, Schedulers
from megatrain.training.setup import Setting, Setup, check_held
from megatrain.training.step_run import Progress, StepRules, StepRun


class TrainStep:
    """Trains a compiled model, a batch at a time.

        step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)
        for batch in batches:
            loss = step(batch)

    A call does the work of the loop `zero_grad`, forward, `backward`, `clip_grad_norm_`, `optimizer.step`, with the
    same numbers, as one schedule: each block's weights cross to the device at most twice for any number of
    micro-batches (gradient accumulation), and updates run on the host at the same time as the device's work.

    Without clipping, a block is updated as soon as its gradients have left the device; on an accelerator two of five
    updates are left to the next call (`spread`). With `max_grad_norm` or `on_nonfinite` all are, for they need all
    gradients. What is left is due when the call returns; each update runs before its block's weights are copied, or all
    at once by `flush` or the first operation on a parameter whose update is due. With `overlap=False` all updates come
    after all gradients, within the call. All ways give the same bits. Hooks on parameters run once a step, with whole
    gradients. A call that fails before its first update leaves no trace; a later failure is completed, and noted.

    Args:
        compiled: From `megatrain.compile`.
        optimizer: Of torch, or a subclass, over the model's parameters, or a list (Muon, then AdamW for the rest). One
            that isn't `megatrain.optim.per_parameter` takes its step at once, after all gradients. LR schedulers and
            changes of `param_groups` between calls work as usual.
        loss: `loss(result, batch)` computes the scalar to differentiate; None takes the result's `loss`, or itself.
        reads: What `loss` reads of a result: `"all"`, or its own `"loss"` alone; other outputs aren't computed then.
        weight: `weight(batch)` is how much a micro-batch counts in the mean, say its targets; None counts all alike.
        reduce: `"mean"` of the micro-batches' losses, or their `"sum"`, of losses divided by a common count already.
        max_grad_norm: Largest norm of all gradients, as in `clip_grad_norm_(model.parameters())`; None doesn't clip.
        report_norm: Whether `progress.grad_norm` has the norm without clipping, too; updates don't wait for it.
        overlap: Whether updates may run at the same time as the device's work.
        spread: Whether updates without a norm may be left to the next call; None is True but on the CPU.
        on_nonfinite: If a gradient has an infinite or undefined element, `"raise"` an error, or `"skip"` the update.
        plan: A plan, whose choices each step takes exactly; a step of another model, shape or kind is refused.
        offload: A folder on a fast disk: a file there has the optimizer's state (8 bytes a parameter of AdamW, 2.2 of
            AdamW8bit) between updates, and memory that of two blocks. Another has parked activations within a step, as
            far as the host's memory is short. The bits are the same. Both go with the process.
            With `host_memory` the state of as many blocks as have room stays in memory.
        host_memory: Memory of the host that a step may take, bytes or `"96GiB"`; None is what is free.

    Raises:
        OptimizerError: If one needs a closure, two hold the same parameter, or none holds one of the model's; with
            `offload`, if an optimizer is neither AdamW (of fp32 parameters with `fused=True`) nor AdamW8bit.
        OptionError: If an option has a wrong value; an `ExecuteError` if a hook is on a node that accumulates.

    Attributes:
        user: After `load`, the values that were given to `save`.
    """

    @checked(
        compiled=COMPILED,
        optimizer=OPTIMIZERS,
        reads=one_of("all", "loss"),
        reduce=one_of("mean", "sum"),
        max_grad_norm=optional(number(above=0)),
        spread=optional(FLAG),
        on_nonfinite=optional(one_of("raise", "skip")),
        plan=optional(PLAN),
        offload=optional(PATH),
        host_memory=optional(MEMORY),
    )
    def __init__(
        self,
        compiled: CompiledModule,
        optimizer: Optimizers,
        *,
        loss: Loss | None = None,
        reads: str = "all",
        weight: Weight | None = None,
        reduce: str = "mean",
        max_grad_norm: float | None = None,
        report_norm: bool = False,
        overlap: bool = True,
        spread: bool | None = None,
        on_nonfinite: str | None = None,
        plan: AnyPlan | None = None,
        offload: str | os.PathLike[str] | None = None,
        host_memory: int | str | None = None,
    ):
        check_reduce(reduce, weight)
        compiled.megatrain.complete_updates()  # of other steps: the trials below look at the optimizers' state
        self._optimizers = optimizers_of(optimizer)
        self._compiled = compiled.megatrain
        check_held(self._optimizers, [list(self._compiled.model.parameters())])
        ranks, own = self._compiled.ranks, (self._compiled, self._optimizers)
        self._exchange = Exchange() if ranks is None else RankExchange(ranks, *own)
        self._setup = Setup(
            self._compiled,
            self._optimizers,
            loss=loss,
            reads=reads,
            max_norm=max_grad_norm,
            needs_norm=max_grad_norm is not None or on_nonfinite is not None,
            reports_norm=report_norm,
            overlap=overlap,
            spread=spread,
            plan=plan,
            exchange=self._exchange,
            offload=None if offload is None else Path(offload),
            host_memory=given_bytes(host_memory, "host_memory"),
        )
        self.user: Mapping[str, Any] = {}
        self._completion = Completion(self._complete, self._setup.changing)
        facts = {"max_grad_norm": max_grad_norm, "report_norm": report_norm, "on_nonfinite": on_nonfinite}
        facts |= {"reduce": reduce, "weight": "none" if weight is None else "given", "overlap": overlap, "reads": reads}
        budget = self._compiled.budget if plan is None else None
        rules = StepRules(loss, weight, reduce == "sum", on_nonfinite, budget, facts)
        self._run = StepRun(self._compiled, self._setup, self._completion, self._exchange, rules)
        self._compiled.before_reads(self._completion)
        self._completion.attach(self._optimizers)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest call, or of `prepare`; before the first of them an `ExecuteError`."""
        return _known(self._run.setting).schedule

    @property
    def plan(self) -> SavedPlan:
        """The choices of the latest call, as for `schedule`: to write with `to_json`, or to give to another step."""
        options = self._compiled.options
        parts = self.program.name, options.precision, self.schedule, options.device_memory, options.hardware
        return timed_choices(*parts)

    @property
    def program(self) -> Program:
        """The blocks that the schedule runs, as for `schedule`; of several captures those of the first micro-batch."""
        return _known(self._run.setting).programs[0]

    @property
    def progress(self) -> Progress:
        """The numbers of steps taken and skipped, and the latest norm."""
        return self._run.progress

    @property
    def host_plan(self) -> HostPlan:
        """The host memory that steps like the latest, or like the prepared one, take; as for `schedule`."""
        with self._completion.suspended():  # nobody looks at values
            return self._setup.host_plan(_known(self._run.setting))

    def prepare(self, batch: Any) -> Schedule:
        """Makes the schedule of a batch like this one, without running or allocating anything."""
        self._run.prepare(micro_batches(batch))
        return self.schedule

    def __call__(self, batch: Any) -> torch.Tensor:
        """Runs a step.

        Args:
            batch: Keyword arguments as a mapping, positional ones as a tuple, or the only one; or a list of these.

        Returns:
            The loss, a tensor without dimensions on the compute device: over micro-batches the mean, or the sum.

        Raises:
            ExecuteError: If gradients aren't finite and `on_nonfinite="raise"`, an operation fails, or an earlier
                failure left the model in the middle of a step; or if other processes would know nothing of the step.
            TraceError: If the model can't be captured for this batch.
            ScheduleError: If the memory is too small for it.
        """
        return self._run.take(batch, None)

    def measure(self, batch: Any) -> Measured:
        """Runs a step whose streams wait after each operation; returns the times, which `schedule.simulate` takes.

        The first step isn't typical where blocks are persistent: it brings what then stays.
        """
        self._exchange.refuse("step.measure", "Use step.time, which holds no stream up.")
        self._run.take(batch, watch := Stopwatch(self._compiled.options.device))
        return Measured(self.schedule, watch.seconds)

    def time(self, batch: Any) -> TimedRun:
        """Runs a step as a call does; returns when each operation began and ended, which `megatrain.report` draws.

        All ranks of a process group time the same step, each its own operations.
        """
        with self._exchange.taking():
            clock = RunClock(self._compiled.options.device)
        self._run.take(batch, clock)
        return TimedRun.of(self.schedule, clock.spans())

    @checked(num_steps=count(1, 1 << 40), tokens_per_step=count(1, 1 << 40))
    def progress_line(self, num_steps: int, tokens_per_step: int) -> ProgressLine:
        """A line on the terminal for your loop: steps, tokens per second, loss and memory; none in a file or a pipe.

        Args:
            num_steps: Steps of the whole training, those before a resume included.
            tokens_per_step: Tokens of a step, padding included.

        Raises:
            OptionError: If one of them isn't a whole number from 1 to 2**40.
        """
        return ProgressLine(num_steps, tokens_per_step, lambda: self.progress.count, lambda: self._compiled.peak_bytes)

    def flush(self) -> None:
        """Has parameters and moments as the latest step left them: runs due updates, copies what the device updated.

        Raises:
            ExecuteError: If the host has no room for what the device updated; the device still has it then.
        """
        self._flush(None)

    def _flush(self, looked: Looked) -> None:
        if self._run.running is not None or self._setup.is_behind:
            with self._compiled.exclusively("flush()", in_child=True), self._completion.suspended():
                self._setup.look(looked)

    def _complete(self, looked: Looked) -> None:
        """Like `flush`, for a use of marked objects. Nothing is due within a step; hooks must not look then."""
        running = self._run.running  # another thread may end it meanwhile
        if running is not None:
            running.check_no_hook()
            self._completion.unmark()
            try:
                running.look(looked)
            finally:
                self._completion.mark()
        elif not self._setup.is_completing:
            self._flush(looked)

    @checked(folder=PATH, scheduler=optional(SCHEDULERS), shard_bytes=SIZE)
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        scheduler: Schedulers | None = None,
        user: Mapping[str, Any] | None = None,
        shard_bytes: int | str = "5GB",
        more: Callable[[Path], object] | None = None,
        weights: bool = True,
    ) -> None:
        """Writes everything that the next step depends on; see docs/checkpoints.md for the files.

        The weights are safetensors files under the model's own names, with the configuration for `from_pretrained`.
        Nothing is copied in memory; what the device updates comes from there, piece by piece. At each moment `folder`
        is a complete checkpoint: the previous or the new one.

        Args:
            folder: The folder to write; an existing checkpoint is replaced.
            scheduler: An LR scheduler, or any object with a `state_dict` and `load_state_dict`; or a list of several.
            user: Your own values, in `user` after `load`: numbers, texts, tensors, and dicts and lists of these.
            shard_bytes: Largest size of a file, in bytes or as `"5GB"`.
            more: Adds files of its own to the folder, such as `tokenizer.save_pretrained`.
            weights: False leaves out the weights and the configuration: you store them, and set them before `load`.

        Raises:
            CheckpointError: If something can't be stored, or the disk lacks room or fails; nothing is lost then.
            ExecuteError: If a failure left the model in the middle of a step, or a step is running (in a hook, say).
        """
        with self._compiled.exclusively("save()", in_child=True), torch.device("cpu"):
            self._run.check_whole()
            with self._exchange.taking("save()"), self._completion.suspended():
                self._setup.complete()
            values = self.user if user is None else user
            options: dict[str, Any] = {"shard_bytes": shard_bytes, "more": more, "weights": weights, "user": values}
            options |= {"device_tensors": self._setup.device_tensors, "unmarked": self._completion.suspended}
            parts = self._exchange, self._compiled, self._optimizers, self.progress
            with self._completion.saving():
                checkpoint.save(folder, *parts, scheduler=scheduler, **options)

    @classmethod
    @checked(folder=PATH, scheduler=optional(SCHEDULERS), compiled=COMPILED, optimizer=OPTIMIZERS)
    def load(
        cls,
        folder: str | os.PathLike[str],
        compiled: CompiledModule,
        optimizer: Optimizers,
        *,
        scheduler: Schedulers | None = None,
        **options: Any,
    ) -> TrainStep:
        """Reads a checkpoint and returns a step that continues as if it had never stopped, bit for bit.

        Memory, blocks, transfer, activations, `overlap` and `spread` may change. Things that a checkpoint doesn't store
        must be as they were: the model's code, `options`, and the batches to come; see docs/checkpoints.md.

        Args:
            folder: Written by `save`.
            compiled: The model built as it was, with any weights; or on meta, compiled with `weights=folder` and for
                example arguments.
            optimizer: Of the same class, with the same parameters in the same groups; or as many, in the same order.
            scheduler: As given to `save`, if it was; several in the same order.
            options: Of `TrainStep`.

        Raises:
            OptionError: If an argument has a wrong value.
            CheckpointError: If it is damaged or doesn't fit; a damaged tensor is found when it is read.
        """
        step = cls(compiled, optimizer, **options)
        with compiled.megatrain.exclusively("load()"), torch.device("cpu"):
            restored = checkpoint.restore(folder, compiled.megatrain, step._optimizers, scheduler, step._setup.moments)
        step._run.progress, step.user = restored
        return step

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # at the end even `sys` may be gone
        if hasattr(self, "_completion") and not _is_over():
            try:
                self.flush()  # a function that trains and returns leaves the model trained
            except ExecuteError:
                if not self._setup.is_behind:
                    raise
                # Each use has its block from the device.
                self._compiled.heirs.append(self._setup)
                self._completion.heir = WeakMethod(self._setup.look)
            self._completion.detach()

    def __repr__(self) -> str:
        return f"<TrainStep: after step {self.progress.count}, model {self._compiled}>"


def _known(setting: Setting | None) -> Setting:
    """Returns the setting of a step; if there is none yet, raises an `ExecuteError`."""
    if setting is None:
        raise ExecuteError(_NO_STEP)
    return setting


_NO_STEP = "no step is compiled yet.\n  A step needs the sizes of a batch.\n  Call the step, or prepare(batch), once."
