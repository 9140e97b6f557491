"""Between ranks: the ticks of the ops that pass sums of gradients from one process to the next."""

from __future__ import annotations

from dataclasses import replace

from megatrain.scheduler.builder.order import Rows, Run
from megatrain.scheduler.step_kind import StepKind


def between_ranks(rows: Rows, kind: StepKind) -> Rows:
    """The rows with an `R` ahead of each block's backward, and with a `P` where its gradients left, ahead of its `G`.

    A sum comes while the block before is under way: so it is there in time, and takes the device's memory for one
    block more.
    """
    ticks = rows.ticks
    order = sorted(ticks.offload, key=ticks.offload.__getitem__)
    firsts = [min(tick for (block, _), tick in ticks.backward.items() if block == run[0]) for run in order]
    if kind.receives:
        ticks = replace(ticks, receive=_receiving(order, firsts))
    if not kind.sends:
        return replace(rows, ticks=ticks)
    send: dict[Run, int] = {}
    offload: dict[Run, int] = {}
    left = landed = -1
    for run in order:
        send[run] = left = max(left + 1, ticks.offload[run])
        offload[run] = landed = max(landed, left) + 1
    return replace(rows, ticks=replace(ticks, send=send, offload=offload), num_ticks=max(rows.num_ticks, landed + 1))


def _receiving(order: list[Run], firsts: list[int]) -> dict[Run, int]:
    found: dict[Run, int] = {}
    at = -1
    for index, run in enumerate(order):
        found[run] = at = max(at + 1, firsts[index - 1] if index else firsts[0] - 1)
    return found
