"""Setup: finds everything that a step runs: captures, places of updates, the schedule, the receiver of gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from megatrain.base.checks.several_optimizers import check_apart, parameters_of
from megatrain.base.host_limits import update_threads
from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import (
    disable_current_modes,
    function_modes,
    pop_function_mode,
    preserve_dispatch_keys,
    send_to_meta_kernels,
)
from megatrain.errors import ExecuteError, OptimizerError, OptionError
from megatrain.files.scratch_file import ScratchFile, large_enough
from megatrain.optim.fast.on_device import why_not
from megatrain.optim.moments import Moments, moment_layout
from megatrain.optim.per_parameter import check_steps
from megatrain.optim.proxy import Optimizer
from megatrain.optim.trained_model import TrainedModel
from megatrain.optim.updates import Updates
from megatrain.passes.program import Program, trained_holders
from megatrain.planning.from_files import warn_if_needless
from megatrain.planning.host_plan import HostPlan, host_plan
from megatrain.planning.host_room import ALL
from megatrain.planning.loss_bytes import Cut, Loss, measure_loss
from megatrain.planning.plan_step import IN_FILES, WAITS_FOR_ALL
from megatrain.planning.planned_step import AnyPlan
from megatrain.planning.step_programs import StepPrograms
from megatrain.runtime.engine import ordinary_tensors
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.executor import Executor
from megatrain.scheduler.builder.moments import buffer_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.traced import TracedModule
from megatrain.training.batch import MicroBatch, untrained
from megatrain.training.compiled.inside import Compiled, Variant
from megatrain.training.completion import Looked
from megatrain.training.device_updates import DeviceUpdates
from megatrain.training.step_tables import StepTables
from megatrain.training.update_times import Times, UpdateTimes


def check_held(optimizers: Sequence[Optimizer], blocks: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuses optimizers without any of the parameters.

    Args:
        optimizers: Of a step.
        blocks: The parameters that are updated with each block.

    Raises:
        OptimizerError: If there is none.
    """
    held = set(map(id, parameters_of(*optimizers)))
    if not any(id(p) in held for block in blocks for p in block):
        subject = "the optimizer holds" if len(optimizers) == 1 else "the optimizers hold"
        raise OptimizerError(
            f"{subject} none of the parameters that the model trains.\n"
            "  A step updates only parameters of the optimizer.\n  Make the optimizer from compiled.parameters()."
        )


def check_no_gradients(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters that have a gradient already.

    Args:
        tensors: By name.

    Raises:
        ExecuteError: If there are some.
    """
    for key, tensor in tensors.items():
        if tensor.grad is not None and isinstance(tensor, nn.Parameter):
            raise ExecuteError(
                f"parameter `{key}` has a `.grad` already.\n"
                "  A step uses the gradients of its own batch only, with all micro-batches, and leaves none.\n"
                "  Call optimizer.zero_grad(), or pass the data of the other backward to the step, as a micro-batch."
            )


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that one attempt at a step runs.

    Args:
        batches: The micro-batches.
        own: Their arguments, flattened.
        arguments: The same after the cast to the compute dtype.
        variants: Their captures.
        traced: What the step runs of each capture.
        captures: The programs of these, one of which is run.
        programs: The ones that are run.
        kind: The kind of the step.
        schedule: Of the whole step.
        cuts: Bring the tensors that each capture returns to the lengths of its micro-batch.
    """

    batches: Sequence[MicroBatch]
    own: Sequence[Arguments]
    arguments: Sequence[Arguments]
    variants: Sequence[Variant]
    traced: Sequence[TracedModule]
    captures: Sequence[StepPrograms]
    programs: Sequence[Program]
    kind: StepKind
    schedule: Schedule
    cuts: Sequence[Cut]

    def without_tensors(self) -> Setting:
        """Returns what tells of the step and holds none of the caller's batch."""
        return replace(self, batches=(), own=(), arguments=(), cuts=())


class Setup:
    """Finds settings, and keeps schedules and updates from step to step.

    Args:
        compiled: The model.
        optimizers: The user's, in the order of their steps.
        max_norm: Largest norm of all gradients, or None.
        overlap: Whether updates may run at the same time as the device's work.
        spread: Whether some of them may run in the next step; None: unless the device is the CPU.
        needs_norm: Whether updates wait for a norm.
        reports_norm: Whether a norm is wanted for which they needn't wait.
        loss: The caller's, or None if the model's result is the loss.
        reads: What the loss reads, as in `TrainStep`.
        plan: The choices that all steps take, or None.
        exchange: Who else takes the steps.
        offload: Where a file has the optimizers' state between updates, or None.
        host_memory: What a step may take of the host, or None for what is free, and all state in the file.

    Raises:
        OptimizerError: If an optimizer's `step` needs a closure, or two hold the same parameter; or if the state of one
            can't be in a file.
        OptionError: If the file can't be made.

    Attributes:
        optimizers: The user's.
        tables: The schedules of steps.
        updates: Take the gradients of the blocks; None before the first step.
        there: Updates blocks on the device; None before the first step that has some.
        moments: The optimizers' state in a file; None if it stays in memory.
        activations: The file of parked values that the latest step's schedule moves on to one; None before such a step.
        is_completing: Whether due updates are running.
    """

    def __init__(
        self,
        compiled: Compiled,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None,
        overlap: bool,
        spread: bool | None,
        needs_norm: bool,
        reports_norm: bool = False,
        loss: Loss | None = None,
        reads: str = "all",
        plan: AnyPlan | None = None,
        exchange: Exchange | None = None,
        offload: Path | None = None,
        host_memory: int | None = None,
    ):
        for optimizer in optimizers:
            check_steps(optimizer)
        self._compiled = compiled
        self.optimizers = optimizers
        self._check_apart()
        self._max_norm = max_norm
        self._exchange = exchange = Exchange() if exchange is None else exchange
        self._times = UpdateTimes(
            compiled.model,
            optimizers,
            overlap=overlap,
            spread=not compiled.options.device.is_host if spread is None else spread,
            needs_norm=needs_norm,
            reports_norm=reports_norm,
            is_fixed=plan is not None or not exchange.is_alone,
        )
        self._loss, self._is_own_loss = loss, loss is None or reads == "loss"
        self.moments, self._folder = None if offload is None else self._in_file(offload), offload
        self.activations: ScratchFile | None = None
        self._host_memory, self._has_warned = host_memory, False
        limits, least = compiled.options, ALL if host_memory is None and plan is None else 0
        if self.moments is not None:
            limits = replace(limits, filed=self.moments.layout.sizes, least_filed_bytes=least)
        self.tables = StepTables(limits, compiled.budget, plan, exchange)
        self._blocks: list[list[torch.Tensor]] = []
        self._shapes: dict[str, torch.Size] = {}
        self.updates: Updates | None = None
        self.there: DeviceUpdates | None = None
        self._asked: tuple[object, str] = None, ""
        self.is_completing = False

    def _in_file(self, folder: Path) -> Moments:
        """Makes the file of the optimizers' state."""
        if not self._exchange.is_alone:
            raise OptionError(
                "offload= with a process_group is impossible.\n"
                "  Ranks share one copy of the optimizer's state, in memory that all of them see.\n"
                "  Leave offload out, or train in one process."
            )
        model = self._trained_model()
        return Moments(moment_layout(model), model.tensors, self.optimizers, folder)

    def _trained_model(self) -> TrainedModel:
        return TrainedModel.of(self._compiled.model, self._compiled.options.master_kind, self.optimizers)

    @property
    def threads(self) -> int:
        """How many threads the work of the host takes."""
        # On the CPU sums must be split as the caller's own are, to have the same bits.
        device = self._compiled.options.device
        return torch.get_num_threads() if device.is_host else update_threads(device.launching_threads)

    @property
    def is_due(self) -> bool:
        """Whether updates of an earlier step are still due."""
        return self.updates is not None and self.updates.is_under_way

    @property
    def is_behind(self) -> bool:
        """Whether the host has old values of something: an update is due, or the device has made it."""
        is_ahead = self.there is not None and self.there.is_ahead
        return self.is_due or is_ahead or (self.moments is not None and self.moments.is_behind)

    def write_changed(self, *, noting: BaseException | None = None) -> None:
        """Has the file of the optimizers' state hold all that updates have changed.

        Args:
            noting: An error under way, which gets a note if that fails; the next look or step tries it again.

        Raises:
            ExecuteError: If it fails, and no error is under way.
        """
        if self.moments is None:
            return
        try:
            self.moments.write_changed()
        except ExecuteError as error:
            if noting is None:
                raise
            noting.add_note(f"  Nor is all of the optimizer's state in its file: {error}")

    def complete(self) -> None:
        """Runs the due updates."""
        if self.updates is not None and self.updates.is_under_way:
            turn = self._compiled.engine.turn.run("an update", in_child=True)
            with Interrupts(), without_modes(), turn:
                self.is_completing = True
                try:
                    self.updates.finish()
                    self.write_changed()
                finally:
                    self.is_completing = False

    def look(self, looked: Looked = None) -> None:
        """Runs the due updates, and copies what the device has updated, because somebody looks at what they change.

        Raises:
            ExecuteError: If the host has no room for the blocks of these tensors, or of all for None.
        """
        self._times.note_look()
        self.catch_up(looked)

    def catch_up(self, looked: Looked = None) -> None:
        """Has values on the host, as `look`."""
        self.complete()
        self.write_changed()
        if self.there is not None:
            with Interrupts(), without_modes(), self._compiled.engine.turn.run("an update", in_child=True):
                self.is_completing = True
                try:
                    self.there.give_back(looked)
                finally:
                    self.is_completing = False

    def changing(self) -> Iterable[torch.Tensor]:
        """The tensors of the host that due updates will change, or that have other values on the device."""
        if self.updates is not None:
            yield from self.updates.changing()
        if self.there is not None:
            yield from self.there.changing()
        if self.moments is not None:
            yield from self.moments.changing()

    def device_tensors(self) -> Mapping[int, torch.Tensor]:
        """What the device has in place of the host's tensors; see `DeviceUpdates`."""
        return {} if self.there is None else self.there.device_tensors()

    def setting(self, batches: Sequence[MicroBatch], failed: Sequence[dict[Variant, str]]) -> Setting:
        """Finds everything that a step runs; captures new calls.

        Args:
            batches: The micro-batches.
            failed: For each micro-batch, the captures that failed in the middle of this step, with the failures.

        Raises:
            TraceError: If a call can't be captured.
            ScheduleError: If the memory is too small, or the micro-batches can't share blocks.
            OptimizerError: If two optimizers hold the same parameter.
        """
        self._check_apart()  # groups may have been added
        plain = [untrained(self._compiled.model, batch) for batch in batches]
        # A capture may read the parameters.
        find = partial(self._compiled.variant_for, before_capture=self.catch_up)
        found = [find(given, unfit) for given, unfit in zip(plain, failed, strict=True)]
        variants, arguments = [variant for variant, _, _ in found], [given for _, given, _ in found]
        own = [padded.arguments for _, _, padded in found]
        # Of the model's own loss nothing else is computed.
        cuts: list[Cut] = [list if self._is_own_loss else padded.cut for _, _, padded in found]
        kind = self._kind(variants)
        pairs = [variant.for_step(is_own_loss=self._is_own_loss) for variant in variants]
        traced, captures = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

        def loss_bytes(capture: StepPrograms) -> int:
            if self._loss is None:
                return 0  # it is in the program
            at = captures.index(capture)
            given = capture.at(0), traced[at], own[at].tensors, batches[at].given, cuts[at]
            return measure_loss(*given, self._loss, self._compiled.options.device)

        programs, schedule = self.tables.schedule(captures, kind, loss_bytes)
        return Setting(batches, own, arguments, variants, traced, captures, programs, schedule.kind, schedule, cuts)

    def _kind(self, variants: Sequence[Variant]) -> StepKind:
        runs_in_backward = any(variant.runs_in_backward for variant in variants)
        times = self._times.choose(self._compiled.parameters, runs_in_backward=runs_in_backward)
        self.tables.updates_there = not self.why_not_there(times)
        if times.updates not in ("deferred", "spread"):
            self.complete()
        return self.tables.kind(len(variants), times.updates, clip=times.clip, reports_norm=times.reports_norm)

    def why_not_there(self, times: Times) -> str:
        """Says why no block may be updated on the device, whatever memory it has; empty if some may."""
        if times.updates == "serial" or times.shows_gradients:
            return WAITS_FOR_ALL
        if self.tables.has_file:
            return IN_FILES
        if self._times.is_looked_at:
            return "somebody looks at parameters or at the optimizer's state after each step"
        if not self._exchange.is_alone:
            return "other processes share the parameters"
        if why := why_not(self.optimizers, (), device=self._compiled.options.device):
            return why
        # To find the model's parameters takes longer than to look at the groups.
        asked = id(self._blocks), *(len(group["params"]) for each in self.optimizers for group in each.param_groups)
        if self._asked[0] != asked:
            self._asked = asked, why_not(self.optimizers, self._compiled.masters)
        return self._asked[1]

    def host_plan(self, setting: Setting) -> HostPlan:
        """Adds up the host memory that steps like this one take, without allocating it.

        Raises:
            OptimizerError: If the size of the optimizer's state can't be found out.
        """
        options, maps, moments = self._compiled.options, self._compiled.engine.maps, self.moments
        # Before the first step nothing that is in the files of a checkpoint has been written.
        in_maps = maps.nbytes if maps is not None and self.updates is None else 0
        return host_plan(
            _distinct(setting.programs),
            setting.schedule,
            self._trained_model(),
            on_host=options.device.is_host,
            in_files=() if options.weights is None else self._compiled.engine.in_files,
            vacated_bytes=in_maps if self.there is None else self.there.vacated_bytes,
            moments=None if moments is None else moments.layout,
            mapped=() if moments is None else moments.mapped,
            held_bytes=self._compiled.masters.held_bytes + (0 if moments is None else moments.held_bytes),
        )

    def executor(self, setting: Setting) -> Executor | None:
        """Returns the executor of a setting, with `updates` of its blocks.

        Returns:
            None if another setting is to be found, once due updates are complete: those are of other blocks, or the
            host lacks memory, for blocks that the device could update or gradients that wait for the next step.

        Raises:
            OptimizerError: If no optimizer holds any of the parameters.
            ExecuteError: If a parameter has a gradient already, or no values, or the host lacks the memory; the last
                before anything is allocated.
        """
        if not self.tables.has_executor(setting.captures, setting.kind) and not self._has_room(setting):
            return None
        engine = self._compiled.engine
        executor = self.tables.executor(setting.captures, setting.kind, engine)
        self._compiled.bind()
        engine.find_replaced()
        self._check_shapes({key: engine.tensors[key].shape for keys in executor.trained for key in keys})
        blocks = [[engine.tensors[key] for key in keys] for keys in executor.trained]
        if self.updates is None or not _are_same(blocks, self._blocks):
            if self.is_due:
                return None
            trained = [[engine.tensors[key] for key in trained_holders(each)] for each in _distinct(setting.programs)]
            check_held(self.optimizers, trained)
            self._blocks = blocks
            self.updates = Updates(
                self.optimizers,
                blocks,
                masters=self._compiled.masters,
                names={p: name for name, p in self._compiled.model.named_parameters()},
                max_norm=self._max_norm,
                threads=self.threads,
                # On the CPU, where the loop's own norm is taken by torch, the bits are torch's.
                norm_threads=None if engine.device.is_host else self.threads,
                exchange=self._exchange,
                moments=self.moments,
            )
        if self.is_behind:
            self._times.note_due()
        if self.there is None and setting.schedule.device_updates:
            self.there = DeviceUpdates(engine, self.optimizers, self._compiled.masters)
        if self.there is not None:
            self.there.keep(executor.places_there)
        if self.is_due and self.updates.due != list(setting.schedule.deferred):
            self.complete()  # what other schedules defer, or a step that failed has left
        self._begin_files(setting.schedule)
        self.updates.sums_squares = setting.kind.reports_norm
        check_no_gradients(engine.tensors)
        return executor

    def _has_room(self, setting: Setting) -> bool:
        """Whether the host has the memory; False if another setting takes less of it.

        Raises:
            ExecuteError: If none does.
        """
        plan = self.host_plan(setting)
        missing = max(plan.missing_bytes(limit) for limit in {None, self._host_memory})  # free memory, or what is given
        if missing and not self.tables.is_planned and self._exchange.is_alone:
            is_other = self._times.look_no_more() or self.tables.take_less(setting.schedule, missing)
            if is_other or (setting.kind.updates == "spread" and self._times.spread_no_more()):
                return False
        engine, has_files = self._compiled.engine, self._compiled.options.weights is not None
        if has_files and plan.missing_bytes() and engine.leave_in_files():
            plan = self.host_plan(setting)
        plan.check(self._host_memory if plan.missing_bytes() == 0 else None)
        if self.moments is not None and not self._has_warned:
            self._has_warned = warn_if_needless(plan, self.moments.layout.nbytes, self._host_memory)
        return True

    def _begin_files(self, table: Schedule) -> None:
        """Makes the file of a step that has activations in one, and the buffers for optimizer state that is in one."""
        if self._folder is not None and table.evicted:
            file, self.activations = self.activations, None  # if there is no room for another, there is none
            self.activations = large_enough(file, self._folder, table.evicted_bytes)
        if self.moments is not None:
            buffer_of = {op.block: op.slot for op in table.ops if op.what == "R" and op.slot is not None}
            self.moments.begin(self._blocks, buffer_bytes(table), buffer_of)

    def _check_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        for key, shape in shapes.items():
            before = self._shapes.setdefault(key, shape)
            if before != shape:
                raise OptimizerError(
                    f"parameter `{key}` has the shape {list(shape)} now; it had {list(before)} when the steps began.\n"
                    "  The optimizer holds the old parameter, or moments of its old shape.\n"
                    "  Make a new optimizer of compiled.parameters(), and a new TrainStep with it."
                )

    def _check_apart(self) -> None:
        check_apart(self.optimizers, nn.Module.named_parameters(self._compiled.model))


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors, function modes and another default device (one of these).

    A dropped step is completed when Python collects it, perhaps while another model is made on meta, or in the middle
    of a fake tensor's kernel.
    """
    with ordinary_tensors(), ExitStack() as function_modes_left, disable_current_modes(), preserve_dispatch_keys():
        for _ in function_modes():
            function_modes_left.enter_context(pop_function_mode())
        send_to_meta_kernels(False)
        yield


def _distinct(programs: Sequence[Program]) -> list[Program]:
    return list({id(program): program for program in programs}.values())


def _are_same(left: Sequence[Sequence[torch.Tensor]], right: Sequence[Sequence[torch.Tensor]]) -> bool:
    return [[id(p) for p in block] for block in left] == [[id(p) for p in block] for block in right]
