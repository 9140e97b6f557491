"""Between ranks: the ticks of the ops that pass sums of gradients from one process to the next."""

from __future__ import annotations

from dataclasses import replace

from megatrain.scheduler.builder.order import Rows
from megatrain.scheduler.step_kind import StepKind


def between_ranks(rows: Rows, kind: StepKind) -> Rows:
    """The rows with an `R` for each block, and with a `P` where its gradients left, ahead of its `G`.

    A sum comes while the first micro-batch's backward is under way, and is added to its gradients.
    """
    ticks = rows.ticks
    order = sorted(ticks.offload, key=ticks.offload.__getitem__)
    if kind.receives:
        ticks = replace(ticks, receive=_receiving(order, ticks.backward))
    if not kind.sends:
        return replace(rows, ticks=ticks)
    send: dict[int, int] = {}
    offload: dict[int, int] = {}
    left = landed = -1
    for block in order:
        send[block] = left = max(left + 1, ticks.offload[block])
        offload[block] = landed = max(landed, left) + 1
    return replace(rows, ticks=replace(ticks, send=send, offload=offload), num_ticks=max(rows.num_ticks, landed + 1))


def _receiving(order: list[int], backward: dict[int, list[int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    at = -1
    for block in order:
        found[block] = at = max(at + 1, backward[block][0])
    return found
