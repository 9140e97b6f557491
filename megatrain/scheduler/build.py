"""schedule(): workload and options in, a table of ticks x streams out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.lifetimes import StepFacts, step_lifetimes
from megatrain.scheduler.memory import (
    accumulated_bytes,
    count_moved,
    host_bytes,
    live_bytes,
    workspace_bytes,
)
from megatrain.scheduler.op import Op, Stream
from megatrain.scheduler.order import Rows, assign_ticks
from megatrain.scheduler.parking import keep_all, parked_values
from megatrain.scheduler.place import Residency, compute_steps, place_slots, residencies
from megatrain.scheduler.table import MODES, TRANSFERS, Schedule, Slot, Tick
from megatrain.scheduler.workload import Workload

ACTIVATIONS = ("auto", "recompute", "keep", "offload")


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices that determine a schedule.

    Args:
        num_slots: Blocks whose weights may be on the device at the same time.
        keep: As in `Schedule`.
        saves: As in `Schedule`.
    """

    num_slots: int
    keep: int
    saves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A schedule whose ops have ticks but no rows yet: enough to know its memory.

    Args:
        plan: What it follows.
        rows: The ticks.
        live: Live bytes per tick.
        device_bytes: As in `Schedule`.
    """

    plan: Plan
    rows: Rows
    live: tuple[int, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where weights lie, which depends on the number of slots alone."""

    stays: tuple[Residency, ...]
    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]


class Builder:
    """Drafts schedules of one workload under different plans, and finishes one."""

    def __init__(self, workload: Workload, *, mode: str, transfer: str) -> None:
        self.workload = workload
        self.mode = mode
        self.transfer = transfer
        self.steps = compute_steps(workload, mode)
        self._accumulated = accumulated_bytes(workload)
        self._placed: dict[int, _Placed] = {}

    def draft(self, plan: Plan) -> Draft:
        """Gives the ops ticks and counts the memory."""
        placed = self._place(plan.num_slots)
        parked = self._parked(plan)
        rows = assign_ticks(self.workload, self.steps, placed.stays, parked, num_slots=plan.num_slots)
        facts = StepFacts(rows.ticks, frozenset(plan.saves), parked, self.mode)
        lives = step_lifetimes(self.workload, facts)
        arena = max((slot.offset + slot.nbytes for slot in placed.slots), default=0)
        live = live_bytes(self.workload, lives, rows.num_ticks, arena)
        return Draft(plan, rows, live, max([*live, *self._busy_bytes(rows, live, facts.saves)], default=0))

    def finish(self, draft: Draft) -> Schedule:
        """Makes the rows, and the figures of the header."""
        placed = self._place(draft.plan.num_slots)
        parked = self._parked(draft.plan)
        ticks = _table(draft.rows, placed)
        ops = [op for tick in ticks for _, op in tick.ops()]
        h2d, d2h = count_moved(self.workload, ops, parked, self.transfer)
        return Schedule(
            ticks=ticks,
            slots=placed.slots,
            keep=draft.plan.keep,
            saves=draft.plan.saves,
            mode=self.mode,
            transfer=self.transfer,
            live_bytes=draft.live,
            h2d_bytes=h2d,
            d2h_bytes=d2h,
            peak_bytes=max(draft.live, default=0),
            device_bytes=draft.device_bytes,
            host_bytes=host_bytes(self.workload, parked, self.mode, self.transfer),
            num_blocks=len(self.workload.blocks),
            workload=self.workload,
        )

    def _busy_bytes(self, rows: Rows, live: Sequence[int], saves: frozenset[int]) -> list[int]:
        work, extra = self.workload, self._accumulated
        return [
            live[tick] + workspace_bytes(work, what, block, saves, extra)
            for what, ticks in (("F", rows.ticks.forward), ("B", rows.ticks.backward))
            for block, tick in ticks.items()
        ]

    def _place(self, num_slots: int) -> _Placed:
        if num_slots not in self._placed:
            stays = residencies(self.workload, self.steps, num_slots=num_slots, transfer=self.transfer)
            self._placed[num_slots] = _Placed(stays, *place_slots(stays))
        return self._placed[num_slots]

    def _parked(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        return parked_values(
            self.workload, keep=plan.keep, saves=plan.saves, mode=self.mode, transfer=self.transfer
        )


def _table(rows: Rows, placed: _Placed) -> tuple[Tick, ...]:
    h2d: dict[int, Op] = {}
    compute: dict[int, Op] = {}
    d2h: dict[int, Op] = {}
    for stay, slot, tick in zip(placed.stays, placed.slot_of, rows.loads, strict=True):
        h2d[tick] = Op(Stream.H2D, "W", stay.block, slot=slot)
    for column, what, ticks in (
        (h2d, "A", rows.ticks.restore),
        (compute, "F", rows.ticks.forward),
        (compute, "B", rows.ticks.backward),
        (d2h, "A", rows.ticks.park),
        (d2h, "G", rows.ticks.offload),
    ):
        stream = Stream.H2D if column is h2d else Stream.COMPUTE if column is compute else Stream.D2H
        for block, tick in ticks.items():
            column[tick] = Op(stream, what, block)
    return tuple(Tick(h2d.get(t), compute.get(t), d2h.get(t)) for t in range(rows.num_ticks))


def schedule(
    workload: Workload,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | None = None,
    activations: str = "auto",
    transfer: str = "copy",
    mode: str = "train",
) -> Schedule:
    """Places one step of `workload` on the streams.

    Touches no tensor and no device. The order of compute is fixed first (forward in block order, backward
    reversed); transfers are placed as early as slots allow, so the result is deterministic.

    Args:
        workload: Blocks, values and their sizes.
        num_slots: Blocks whose weights may be on the device at the same time. 1 overlaps nothing. None means
            2, or 1 if only that fits `memory`.
        keep: The inputs of the last `keep` blocks, counted from the last block with a backward, stay on the
            device; older ones are parked on the host. None leaves it to `activations`.
        memory: Device bytes that the step may take, weights, activations, gradients and workspace included.
        activations: `"recompute"` retains the graph of no block but the last, and parks inputs only if
            they don't fit otherwise; `"keep"` retains all graphs; `"offload"` parks all it can; `"auto"`
            retains as many graphs as fit, counted from the last block, else recomputes and parks as few
            inputs as possible.
        transfer: `"copy"` the weights into slots, or `"bind"` them in place, where nothing moves.
        mode: `"train"`, `"forward"` for inference, or `"backward"` for the backward of a forward that ran
            earlier; `backward_schedule` makes the last to match a schedule.

    Returns:
        A schedule that passes `check_schedule`. Ticks count from 0; lifetimes include both ends.

    Raises:
        OptionError: If an option is unknown or a count isn't one.
        ScheduleError: If the workload is inconsistent, or `memory` too small; the message says how much is
            needed at least, and by which block.
    """
    from megatrain.scheduler.budget import choose_draft

    _check_options(activations, transfer, mode)
    _check_count("num_slots", num_slots, least=1)
    _check_count("keep", keep, least=0)
    _check_count("memory", memory, least=1)
    workload.check()
    builder = Builder(workload, mode=mode, transfer=transfer)
    draft = choose_draft(builder, num_slots=num_slots, keep=keep, memory=memory, activations=activations)
    return builder.finish(draft)


def backward_schedule(
    forward: Schedule, *, num_slots: int | None = None, memory: int | None = None
) -> Schedule:
    """The backward alone of a step whose forward ran as `forward` says and whose slots were since reused.

    Keeps and retains what `forward` does. No weights are on the device when it starts.

    Args:
        forward: A schedule of mode `"train"` that knows its workload.
        num_slots: As in `schedule`.
        memory: As in `schedule`.

    Raises:
        ScheduleError: If `forward` has no backward or no workload, or `memory` is too small.
    """
    from megatrain.scheduler.budget import first_fit

    if forward.mode != "train":
        raise ScheduleError(f"a schedule of mode `{forward.mode}` has no backward to split off; use `train`.")
    _check_count("num_slots", num_slots, least=1)
    _check_count("memory", memory, least=1)
    builder = Builder(forward.known_workload(), mode="backward", transfer=forward.transfer)
    counts = (2, 1) if num_slots is None else (num_slots,)
    plans = [Plan(count, forward.keep, forward.saves) for count in counts]
    return builder.finish(first_fit(builder, plans, memory))


def _check_options(activations: str, transfer: str, mode: str) -> None:
    for name, given, known in (
        ("activations", activations, ACTIVATIONS),
        ("transfer", transfer, TRANSFERS),
        ("mode", mode, MODES),
    ):
        if given not in known:
            listed = ", ".join(f'"{k}"' for k in known)
            raise OptionError(f"{name}={given!r} is unknown.\n  Known are {listed}.")


def _check_count(name: str, given: int | None, *, least: int) -> None:
    if given is not None and (isinstance(given, bool) or given < least):
        raise OptionError(f"{name}={given!r} must be an integer of at least {least}.")


def normal_keep(workload: Workload, keep: int | None, mode: str, transfer: str) -> int:
    """The `keep` that a schedule states: no larger than makes a difference, all where nothing parks."""
    if mode == "forward":
        return 0
    everything = keep_all(workload)
    return everything if keep is None or transfer == "bind" else min(keep, everything)
