"""schedule(): workload and options in, a table of ticks x streams out."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.checks import Rule, checked, count, one_of, optional
from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.budget import choose_draft, first_fit
from megatrain.scheduler.draft import Builder, Plan
from megatrain.scheduler.table import MODES, OUTPUTS, TRANSFERS, UPDATES, Schedule
from megatrain.scheduler.workload import Workload

ACTIVATIONS = ("auto", "recompute", "keep", "offload")
# A table has some rows for each micro-batch and block, and takes the longer to check the more it has: this many take
# minutes, and no more slots are of use than a model has blocks.
MOST = 10_000
STEP: Mapping[str, Rule] = {
    "num_slots": optional(count(1, MOST)),
    "keep": optional(count()),
    "activations": one_of(*ACTIVATIONS),
    "transfer": one_of(*TRANSFERS),
    "mode": one_of(*MODES),
    "micro_batches": count(1, MOST),
    "updates": one_of(*UPDATES),
    "outputs": one_of(*OUTPUTS),
}
"""What the options of a step may be, one by one."""


@checked(**STEP, memory=optional(count(1)))
def schedule(
    workload: Workload,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | None = None,
    activations: str = "auto",
    transfer: str = "copy",
    mode: str = "train",
    micro_batches: int = 1,
    updates: str = "none",
    clip: bool = False,
    outputs: str = "keep",
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
        micro_batches: How many batches of the workload's size one step takes. All of them run through a block
            before the next one, so weights cross as often as with one; the gradients of a block are summed on
            the device and leave once.
        updates: When the host updates the parameters of a block. `"none"`: the step doesn't; `"overlap"`: when
            its gradients have left; `"serial"`: when all gradients have left; `"deferred"`: at the head of the
            next step, so this table begins with the updates of the step before, each ahead of the weights.
        clip: The host takes the norm of all gradients once they have left. Updates of this step wait for it.
        outputs: `"keep"` the model's outputs on the device until the step ends, or `"release"` them once the
            backward of their micro-batch begins, when the caller has made a loss of them.

    Returns:
        A schedule that passes `check_schedule`. Ticks count from 0; lifetimes include both ends.

    Raises:
        OptionError: If an option is unknown, a count isn't one, or options exclude each other.
        ScheduleError: If the workload is inconsistent, or `memory` too small; the message says how much is
            needed at least, and by which block.

    >>> from megatrain.scheduler.workload import BlockWork
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True, 10**6)
    >>> print(*schedule(Workload((layer, layer, layer), (), ()), num_slots=1).ops)
    W0@0 F0 W1@0 F1 W2@0 F2 B2 W1@0 G2 B1 W0@0 G1 B0 G0
    """
    _check_whole_step(mode, micro_batches, updates, clip, outputs)
    workload.check()
    builder = Builder(
        workload, mode=mode, transfer=transfer, micro_batches=micro_batches, updates=updates, clip=clip, outputs=outputs
    )
    draft = choose_draft(builder, num_slots=num_slots, keep=keep, memory=memory, activations=activations)
    return builder.finish(draft)


@checked(num_slots=STEP["num_slots"], memory=optional(count(1)))
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
    if forward.mode != "train":
        raise ScheduleError(f"a schedule of mode `{forward.mode}` has no backward to split off; use `train`.")
    if forward.micro_batches > 1 or forward.updates != "none" or forward.clip or forward.outputs != "keep":
        raise ScheduleError(
            "a schedule of a whole step, with micro-batches, updates, a norm or released outputs, can't be split.\n"
            "  Only one micro-batch whose outputs are kept, without ops of the host, has a backward of its own."
        )
    builder = Builder(forward.known_workload(), mode="backward", transfer=forward.transfer)
    counts = (2, 1) if num_slots is None else (num_slots,)
    plans = [Plan(count, forward.keep, forward.saves) for count in counts]
    return builder.finish(first_fit(builder, plans, memory))


def _check_whole_step(mode: str, micro_batches: int, updates: str, clip: bool, outputs: str) -> None:
    if mode != "train" and (micro_batches > 1 or updates != "none" or clip or outputs != "keep"):
        raise OptionError(
            f'mode="{mode}" with micro-batches, updates, a norm or released outputs makes no sense.\n'
            '  They belong to a whole step: use mode="train".'
        )
