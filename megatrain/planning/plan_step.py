"""plan_step(): the schedule of a step within limits, with pieces and blocks as large as fit.

`megatrain.plan` and `TrainStep` both plan here; so does a step whose plan was given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from megatrain.base.progress import stage
from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError, ScheduleError, TooSmallError
from megatrain.hardware.hardware import Hardware, of_weights
from megatrain.hardware.machine import usual_machine
from megatrain.passes.measured_runs import recordable_blocks
from megatrain.passes.program import Program
from megatrain.planning.kernel_choice import AS_ASKED, as_compared, given_kernels, with_kernels
from megatrain.planning.options import Limits
from megatrain.planning.planned_step import SavedPlan
from megatrain.planning.step_programs import StepPrograms
from megatrain.runtime.exchange import Exchange
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.build import SMALLER_BLOCKS, NotShorterError, build
from megatrain.scheduler.builder.evictions import with_evictions
from megatrain.scheduler.builder.moments import with_state_in_file
from megatrain.scheduler.explain import workload_lines
from megatrain.scheduler.from_program import filed_state, step_workload, updated_bytes
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload

# Fractions of the largest block's state. The last is of single calls: nothing is smaller, but activations may be more.
_SHIFTS = (1, 3, 63)
# Above the bound of all plans of the same blocks: nearer ones gain nothing by smaller blocks.
_FAR = 0.15
# With blocks that the device updates, of which the bound takes any part, and which cost it nothing.
_FAR_THERE = 0.3
# Why the host makes all updates of a serial step.
WAITS_FOR_ALL = "updates wait for all gradients: overlap=False, or code of yours that may look at them"
# Likewise, of steps with `offload`.
IN_FILES = "the optimizer's state is in a file between updates, which only the host reads"
# The last resort of "auto" and "recompute" is to do the same as "offload".
_LEAST = {"auto": "offload", "recompute": "offload"}


def updates_allowed(*, overlap: bool, waits: bool, clip: bool, spread: bool) -> tuple[str, ...]:
    """When the updates of a step may run, the fastest way first; later ways need less memory of the host.

    Args:
        overlap: Whether they may run at the same time as the device's work.
        waits: Whether the user's code may look at all gradients before the first: an optimizer's, or a hook.
        clip: Whether they wait for a norm.
        spread: Whether some of them may run in the next step.
    """
    if not overlap or waits:
        return ("serial",)
    if clip:
        return ("deferred",)
    return ("spread", "overlap") if spread else ("overlap",)


@dataclass(frozen=True, slots=True, eq=False)
class StepChoices:
    """What was chosen for a step.

    Args:
        captures: One per micro-batch, or more: a step of some of them runs by this schedule, too.
        programs: Of each capture at this level. The schedule serves them in any order.
        too_small: Why it doesn't fit; None if it does.
        why_kernels: Why its kernels are recorded, or aren't; empty where nothing was to be chosen.
    """

    captures: Sequence[StepPrograms]
    level: int
    programs: Sequence[Program]
    schedule: Schedule
    too_small: str | None = None
    why_kernels: str = ""

    def programs_of(self, captures: Sequence[StepPrograms]) -> Sequence[Program]:
        """Returns the programs of these captures, in their order."""
        known = dict(zip(map(id, self.captures), self.programs, strict=True))
        return [known[id(capture)] for capture in captures]

    def with_less_parked(self, nbytes: int) -> StepChoices:
        """The same, with so many bytes less of the host that activations take, if a file has as many more of them."""
        table = with_evictions(self.schedule, max(0, self.schedule.park_bytes - nbytes))
        if table is self.schedule:
            return self
        schedule = schedule_of(table)
        schedule.check()
        return replace(self, schedule=schedule)

    @property
    def input_bytes(self) -> int:
        """Of the capture with the most."""
        return max(each.input_bytes for each in self.captures)

    def serves(self, captures: Sequence[StepPrograms]) -> bool:
        """Whether it was made for these captures, and maybe others."""
        return set(map(id, captures)) <= set(map(id, self.captures))


class StepPlans:
    """Plans steps, and keeps the choices used last.

    Args:
        given: A plan whose choices all steps take, or None.
        exchange: Who else takes the steps; None for a process alone.
    """

    def __init__(self, most: int, given: SavedPlan | None = None, exchange: Exchange | None = None) -> None:
        self._most, self._given = most, given
        self._exchange = Exchange() if exchange is None else exchange
        self._known: OrderedDict[tuple[Hashable, ...], StepChoices] = OrderedDict()

    def plan(
        self,
        captures: Sequence[StepPrograms],
        kind: StepKind,
        limits: Limits,
        loss_bytes: Callable[[], int],
        *,
        or_least: bool = False,
    ) -> StepChoices:
        """Plans a step, unless its choices are known; with `or_least`, the least memory counts where no step fits.

        What measures the loss isn't called again for the same captures.

        Raises:
            ScheduleError: If the step doesn't fit, isn't the one of the given plan, or can't be planned.
        """
        key = frozenset(map(id, captures)), *self._asked(kind, limits)
        if key not in self._known:
            alike = (known for (others, *_), known in self._known.items() if others == key[0])
            other = next(alike, None)
            nbytes = loss_bytes() if other is None else other.schedule.known_workload().loss_bytes
            if self._given is not None:
                _check_kind(self._given, kind)
                given = self._exchange.scheduled(self._given.schedule)
                found = _given_choices(given, captures, limits, nbytes)
            else:
                with nullcontext() if or_least else stage("planning"):
                    found = self._planned(captures, kind, limits, nbytes, or_least=or_least)
            if not or_least:
                self._keep_rewritten(found, key)
            self._known[key] = found
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def known(
        self, captures: Sequence[StepPrograms], kind: StepKind, limits: Limits, largest: int
    ) -> StepChoices | None:
        """The latest choices for these captures, and maybe others of at most so many input bytes; None if unknown."""
        asked = self._asked(kind, limits)
        for key, found in reversed(self._known.items()):
            if key[1:] == asked and found.serves(captures) and found.input_bytes <= largest:
                self._known.move_to_end(key)
                return found
        return None

    def _asked(self, kind: StepKind, limits: Limits) -> tuple[Hashable, ...]:
        machine = None if limits.device_memory is None else limits.hardware
        bounds = limits.device_memory, limits.activations, machine, limits.master_kind, limits.most_result_bytes
        return (
            kind,
            *bounds,
            limits.kernels,
            limits.updates_there,
            limits.least_spared_bytes,
            limits.most_park_bytes,
            tuple(limits.filed.items()),
            limits.least_filed_bytes,
        )

    def _planned(
        self, captures: Sequence[StepPrograms], kind: StepKind, limits: Limits, loss_bytes: int, *, or_least: bool
    ) -> StepChoices:
        if limits.least_filed_bytes > 0 or limits.most_park_bytes is not None:
            # The disk's ops come last, and change no others: so the search is that of a step without a file.
            others = replace(limits, filed={}, least_filed_bytes=0, most_park_bytes=None, updates_there=False)
            found = self.plan(captures, kind, others, lambda: loss_bytes, or_least=or_least)
            return replace(found, schedule=_with_files(found, limits))
        if limits.hardware is not None:
            limits = replace(limits, hardware=of_weights(limits.hardware, captures[0].at(0).weights_bytes))
        if limits.kernels != "auto":
            found = plan_step(captures, kind, limits, loss_bytes, self._exchange, or_least=or_least)
            return replace(found, why_kernels=AS_ASKED.get(limits.kernels, ""))
        # Kernels that are launched one by one take no more memory: what fits, in which pieces, is decided with these.
        found = self.plan(captures, kind, limits.launching_each, lambda: loss_bytes, or_least=or_least)
        if found.too_small is not None:
            return found

        def plan(others: Limits) -> Schedule:
            return self._exchange.scheduled(scheduled(found.programs, kind, others, loss_bytes))

        table, why = with_kernels(found.schedule, found.programs, limits, plan)
        if table is not found.schedule:
            table.check()
        return replace(found, schedule=table, why_kernels=why)

    def _keep_rewritten(self, found: StepChoices, key: tuple[Hashable, ...]) -> None:
        """Has later steps begin at this level, and forgets the step of another budget, which may have been lower."""
        for capture in found.captures:
            capture.least = found.level
        for other, known in [*self._known.items()]:
            if other[:2] == key[:2] and known.level < found.level:
                del self._known[other]


def plan_step(
    captures: Sequence[StepPrograms],
    kind: StepKind,
    limits: Limits,
    loss_bytes: int = 0,
    exchange: Exchange | None = None,
    *,
    or_least: bool = False,
) -> StepChoices:
    """Plans a step with kernels that are known, with as little rewritten as fits.

    The caller's loss takes `loss_bytes` besides the model's results and their gradients. All of an `exchange` have the
    same blocks, so none are cut smaller. With `or_least`, the least memory counts where no step fits.

    Raises:
        TooSmallError: If none fits: of the programs that need the least. It names smaller blocks if they help.
        ScheduleError: If the micro-batches can't share blocks.
        ExecuteError: If there is nothing to train.
    """
    tries = _Tries(captures, kind, limits, loss_bytes, Exchange() if exchange is None else exchange)
    try:
        found = tries.chosen()
    except TooSmallError as error:
        if not or_least:
            raise with_true_hint(error, captures[0].at(0), tries.with_blocks) from None
        found = tries.least(str(error))
    if kind.is_training_step and not any(op.what in "GU" for op in found.schedule.ops):
        raise ExecuteError(
            "no parameter of the model gets a gradient.\n  A step trains parameters that require grad and that "
            "the outputs depend on.\n  Unfreeze some, or call the model without a TrainStep."
        )
    found.schedule.check()
    return found


def scheduled(
    programs: Sequence[Program],
    kind: StepKind,
    limits: Limits,
    loss_bytes: int = 0,
    *,
    num_slots: int | None = None,
    known_s: float = inf,
) -> Schedule:
    """Schedules a step of these programs within limits; the schedule isn't checked yet.

    Raises:
        NotShorterError: If no plan that fits is shorter than `known_s`.
        ScheduleError: If the memory is too small, or the micro-batches can't share blocks.
    """
    records = limits.kernels == "graphs"
    with limits.memory_for(programs, records=records) as memory:
        there = limits.updates_there and kind.may_update_there
        options: Any = {"masters": limits.master_kind, "updates_there": there}
        return build(
            step_workload(programs, loss_bytes=loss_bytes, **options),
            kind,
            num_slots=num_slots,
            memory=memory,
            activations=limits.activations,
            hardware=limits.hardware,
            usual=of_weights(usual_machine(limits.device), programs[0].weights_bytes),
            # Kernels other than eager's return no results that could be kept.
            most_result_bytes=limits.most_result_bytes if limits.kernels == "eager" else 0,
            least_spared_bytes=limits.least_spared_bytes,
            known_s=known_s,
            recorded=recordable_blocks(programs)[0] if records else (),
        )


def _with_files(found: StepChoices, limits: Limits) -> Schedule:
    """The schedule of a plan with as much optimizer state, and as many activations, in files as limits ask for."""
    program = found.programs[0]
    machine = of_weights(limits.hardware or usual_machine(limits.device), program.weights_bytes)
    nbytes = updated_bytes(program, limits.filed)
    state = with_state_in_file(found.schedule, nbytes, limits.least_filed_bytes, machine)
    table = schedule_of(with_evictions(state, limits.most_park_bytes))
    table.check()
    return table


class _Tries:
    """Plans of a step at the levels of its captures, each made once."""

    def __init__(
        self,
        captures: Sequence[StepPrograms],
        kind: StepKind,
        limits: Limits,
        loss_bytes: int,
        exchange: Exchange,
    ) -> None:
        self._captures, self._kind, self._limits = captures, kind, limits
        self._loss_bytes, self._exchange = loss_bytes, exchange
        self._known: dict[tuple[int, ...], Schedule | None] = {}
        self._errors: list[TooSmallError] = []  # why levels don't fit
        self._start = max(each.least for each in captures)
        self._width = captures[0].width  # so many levels have blocks of one size
        last = max(each.last for each in captures)
        self._end = 1 + last if exchange.is_alone else (self._start // self._width + 1) * self._width

    def chosen(self) -> StepChoices:
        """The plan with as little rewritten as its step needs to fit.

        Blocks get smaller where nothing fits otherwise. On a known machine they also get smaller where a step takes
        15 % longer than its bound, as with a single slot for weights, in which copies wait for compute, and gets
        shorter so.
        """
        found = self._first(self._start)
        if found is None:
            # If the smallest blocks don't fit, others won't.
            others = range(self._start + self._width, self._end, self._width)
            if not others or self._at(self._end - 1) is None:
                raise min(self._errors, key=lambda error: error.least_bytes)
            found = next(each for each in map(self._first_of_last, others) if each is not None)
        machine, memory = self._limits.hardware, self._limits.device_memory
        return found if machine is None or memory is None else self._faster(found, machine, memory)

    def least(self, why: str) -> StepChoices:
        """The step that takes the least memory, of micro-batches of one capture."""
        first = self._captures[0]
        activations = _LEAST.get(self._limits.activations, self._limits.activations)
        limits = replace(self._limits, device_memory=None, activations=activations)
        programs = [[program] * len(self._captures) for program in first.extremes]
        tables = [(each, self._plan(each, limits, num_slots=1)) for each in programs]
        chosen, table = min(tables, key=lambda pair: pair[1].device_bytes)
        return StepChoices(tuple(self._captures), first.last, chosen, table, why)

    def with_blocks(self, block_bytes: int) -> Schedule:
        """The plan with blocks of so many bytes."""
        programs = {key: each.with_blocks(block_bytes) for key, each in {id(c): c for c in self._captures}.items()}
        return self._plan([programs[id(each)] for each in self._captures], self._limits)

    def _plan(self, programs: Sequence[Program], limits: Limits, **options: Any) -> Schedule:
        return self._exchange.scheduled(scheduled(programs, self._kind, limits, self._loss_bytes, **options))

    def _first(self, level: int, known_s: float = inf) -> StepChoices | None:
        """The first that fits, of this level and those after it with blocks of its size.

        Raises:
            NotShorterError: If no plan of the first that fits is shorter than `known_s`.
        """
        levels = range(level, (level // self._width + 1) * self._width)
        return next((found for each in levels if (found := self._at(each, known_s)) is not None), None)

    def _first_of_last(self, level: int) -> StepChoices | None:
        """The first that fits with blocks of its size, if the smallest pieces do."""
        last = level - level % self._width + self._width - 1
        return None if self._at(last) is None else self._first(level)

    def _at(self, level: int, known_s: float = inf) -> StepChoices | None:
        """The plan of a level; None if it doesn't fit."""
        programs = [each.at(level) for each in self._captures]
        key = tuple(map(id, programs))
        if key not in self._known:
            try:
                self._known[key] = self._plan(programs, self._limits, known_s=known_s)
            except TooSmallError as error:
                self._known[key] = None
                self._errors.append(error)
            except ScheduleError:
                if level < self._width:
                    raise
                self._known[key] = None  # two parts of a block may have to stay in one
        found = self._known[key]
        return None if found is None else StepChoices(tuple(self._captures), level, programs, found)

    def _faster(self, found: StepChoices, machine: Hardware, memory: int) -> StepChoices:
        """Smaller blocks, in the same or smaller pieces, where that makes a step shorter."""
        schedule = found.schedule
        bound, shortest_s = step_bound(schedule.effects(), memory, machine), schedule.simulate(machine).step_s
        far = _FAR_THERE if schedule.device_updates else _FAR
        if bound.above(shortest_s) < far:
            return found
        for level in range(found.level + self._width, self._end, self._width):
            try:
                smaller = self._first(level, shortest_s)
            except NotShorterError:
                continue
            if smaller is not None and (step_s := smaller.schedule.simulate(machine).step_s) < shortest_s:
                found, shortest_s = smaller, step_s
        return found


def with_true_hint(error: TooSmallError, program: Program, plan: Callable[[int], object]) -> TooSmallError:
    """Returns the error with what a smaller `block_bytes` does: it fits, it needs less, or it isn't named.

    Not every tensor can be cut: the weight of one linear layer can't, nor stacked experts that an adapter is added to.
    `plan` plans blocks of so many bytes, or raises.
    """
    if SMALLER_BLOCKS not in error.helps:
        return error
    largest = max(map(program.state_bytes, program.blocks), default=0)
    least = error.least_bytes
    for size in sorted({max(1, largest >> shift) for shift in _SHIFTS}, reverse=True):
        try:
            plan(size)
        except TooSmallError as finer:
            least = min(least, finer.least_bytes)
        except ScheduleError:
            continue  # two parts of a block may have to stay in one
        else:
            return error
    smaller = [] if least == error.least_bytes else [f"{SMALLER_BLOCKS} ({least} B are needed then)"]
    helps = [each for hint in error.helps for each in (smaller if hint == SMALLER_BLOCKS else [hint])]
    return TooSmallError(error.text, error.least_bytes, helps)


def _check_kind(plan: SavedPlan, kind: StepKind) -> None:
    """Refuses a plan of another kind of step.

    Raises:
        ScheduleError: If training has no such step.
    """
    planned = plan.schedule.kind
    if kind == planned:
        return
    pairs = [(part.name, getattr(planned, part.name), getattr(kind, part.name)) for part in fields(StepKind)]
    raise _refused([f"{name}: {here} -> {there}" for name, here, there in pairs if here != there])


def _given_choices(
    schedule: Schedule, captures: Sequence[StepPrograms], limits: Limits, loss_bytes: int
) -> StepChoices:
    """The choices of a plan with this schedule for captures whose step was planned.

    Raises:
        ScheduleError: If the step isn't the one that was planned, or there is less memory, with the difference.
    """
    planned, budget = schedule.known_workload(), limits.device_memory
    if budget is not None and schedule.device_bytes > budget:
        sizes = f"{format_bytes(schedule.device_bytes)} -> {format_bytes(budget)}"
        raise _refused([f"memory of the device: {sizes}"])
    others: list[Workload] = []
    for level, programs in _levels(captures, planned):
        there = any(block.optimizer_bytes for block in planned.blocks)
        filed = filed_state(programs[0], planned, limits.filed)
        options: Any = {"masters": limits.master_kind, "updates_there": there, "filed": filed}
        found = step_workload(programs, loss_bytes=loss_bytes, **options)
        if as_compared(found, limits) == as_compared(planned, limits):
            schedule, differences = given_kernels(schedule, programs, limits)
            if differences:
                raise _refused(differences)
            with limits.memory_for(programs, records=bool(schedule.recorded)) as left:
                if left is not None and schedule.device_bytes > left:
                    sizes = f"{format_bytes(schedule.device_bytes)} -> {format_bytes(left)}"
                    raise _refused([f"memory of the device, without that of recorded kernels: {sizes}"])
            if schedule.device_updates and not limits.updates_there:
                raise _refused(["updates on the device: here the host makes all of them"])
            if schedule.results and limits.kernels in ("graphs", "inductor"):
                raise _refused(["results of attention that are kept: compiled and recorded kernels return none"])
            schedule.check()
            return StepChoices(tuple(captures), level, programs, schedule)
        others.append(found)
    nearest = min(others, key=lambda other: len(other.blocks) != len(planned.blocks))
    raise _refused(workload_lines(planned, nearest))


def _levels(captures: Sequence[StepPrograms], planned: Workload) -> Iterator[tuple[int, Sequence[Program]]]:
    """The levels whose blocks may be those of the plan; pieces change no state."""
    wanted = sum(block.state_bytes > 0 for block in planned.blocks)
    for level in range(max(each.least for each in captures), 1 + max(each.last for each in captures)):
        plain = captures[0].at(level - level % captures[0].width)
        if level < captures[0].width or sum(map(bool, map(plain.state_bytes, plain.blocks))) == wanted:
            yield level, [each.at(level) for each in captures]


def _refused(differences: Sequence[str]) -> ScheduleError:
    listed = "\n".join(f"    {difference}" for difference in differences)
    return ScheduleError(
        f"the plan that was given isn't one of this step: {differences[0]}.\n"
        f"  A step takes exactly its plan's choices. As planned -> here:\n{listed}\n"
        "  Plan this step, with megatrain.plan and the same model, shapes, device and options, or leave out plan=."
    )
