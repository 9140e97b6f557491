"""build(): a workload, the kind of step and options in, a table of ticks x streams out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatrain.checks import Rule, count, one_of, optional
from megatrain.errors import ScheduleError
from megatrain.garbage import paused_collection
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.budget import choose_plan, first_fit
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import KIND_RULES, StepKind
from megatrain.scheduler.workload import Workload

ACTIVATIONS = ("auto", "recompute", "keep", "offload")
# No more slots are of use than a model has blocks.
MOST_SLOTS = 10_000
STEP: Mapping[str, Rule] = {
    "num_slots": optional(count(1, MOST_SLOTS)),
    "keep": optional(count()),
    "activations": one_of(*ACTIVATIONS),
    **KIND_RULES,
}
"""What the options of a step may be, one by one."""


@paused_collection()
def build(
    workload: Workload,
    kind: StepKind,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | None = None,
    activations: str = "auto",
    hardware: Hardware | None = None,
    usual: Hardware | None = None,
    most_result_bytes: int | None = None,
) -> Schedule:
    """Places one step of `workload` on the streams.

    Touches no tensor and no device. The order of compute is fixed first (forward in block order, backward
    reversed); transfers are placed as early as slots allow, so the result is deterministic.

    Args:
        workload: Blocks, values and their sizes.
        kind: The kind of the step.
        num_slots: As in `megatrain.schedule`, like those below.
        keep: See there.
        memory: Device bytes; see there.
        activations: See there.
        hardware: See there.
        usual: Whose rates weigh compute against copies without `hardware`; None is an RTX 4090.
        most_result_bytes: Bytes of the results that may be kept or parked; None is any number.

    Returns:
        A schedule that passes `check_schedule`. Ticks count from 0; lifetimes include both ends.

    Raises:
        ScheduleError: If the workload is inconsistent, or `memory` too small; the message says how much is
            needed at least, and by which block.

    >>> from megatrain.scheduler.workload import BlockWork
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True)
    >>> print(*build(Workload((layer, layer, layer), (), ()), StepKind(), num_slots=1).ops)
    W0@0 F0 W1@0 F1 W2@0 F2 B2 W1@0 G2 B1 W0@0 G1 B0 G0
    """
    workload.check()
    builder = Builder(workload, kind)
    plan = choose_plan(
        builder,
        num_slots=num_slots,
        keep=keep,
        memory=memory,
        activations=activations,
        hardware=hardware,
        usual=usual,
        most_result_bytes=most_result_bytes,
    )
    return schedule_of(builder.table(plan))


@paused_collection()
def backward_schedule(forward: Schedule, *, num_slots: int | None = None, memory: int | None = None) -> Schedule:
    """The backward alone of a step whose forward ran as `forward` says and whose slots were since reused.

    Keeps and retains what `forward` does. No weights are on the device when it starts.

    Args:
        forward: A schedule of mode `"train"` that knows its workload.
        num_slots: As in `schedule`.
        memory: As in `schedule`.

    Raises:
        ScheduleError: If `forward` has no backward or no workload, or `memory` is too small.
    """
    if forward.kind.mode != "train":
        raise ScheduleError(f"a schedule of mode `{forward.kind.mode}` has no backward to split off; use `train`.")
    if forward.kind.is_training_step:
        raise ScheduleError(
            "a schedule of a training step, with micro-batches, updates, a norm or released outputs, can't be split.\n"
            "  Only one micro-batch whose outputs are kept, without ops of the host, has a backward of its own."
        )
    builder = Builder(forward.known_workload(), replace(forward.kind, mode="backward"))
    counts = (2, 1) if num_slots is None else (num_slots,)
    plans = [Choices(count, forward.keep, forward.saves, results=forward.results) for count in counts]
    return schedule_of(builder.table(first_fit(builder, plans, memory)))
