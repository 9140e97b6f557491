"""Gradients that wait on the host: from the op that brings them to the update that needs them last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


def last_updates(workload: Workload, update: Mapping[int, int]) -> dict[int, int]:
    """Per block with gradients, the tick of the last `U` that needs them; those that none needs are left out.

    A block that shares parameters with others has gradients in several updates, of which the last releases them.

    Args:
        workload: What runs.
        update: Tick of each `U`, by block.
    """
    blocks = frozenset(workload.gradient_blocks())
    found: dict[int, int] = {}
    for block, tick in update.items():
        for member in blocks.intersection(workload.update_group(block)):
            found[member] = max(found.get(member, -1), tick)
    return found


def waiting_bytes(
    workload: Workload, kind: StepKind, offload: Mapping[int, int], update: Mapping[int, int], num_ticks: int
) -> int:
    """The most bytes of block gradients on the host at any tick, from their `G` to their last `U`, both inclusive.

    That bounds what waits at run time, because a `G` waits for every `U` of an earlier tick that releases some (the
    "memory" edges of the dependency graph). Gradients that no `U` of this step needs wait until it ends, or for the
    next step. 0 for a step with neither updates nor a norm: its gradients are the caller's at once. 0
    also where weights are copied: gradients have places then.

    Args:
        workload: What runs.
        kind: As in `Schedule`.
        offload: Tick of each `G`, by block.
        update: Tick of each `U`, by block.
        num_ticks: Rows of the table.
    """
    if not kind.holds_gradients or kind.transfer == "copy":
        return 0
    change = [0] * (num_ticks + 1)
    for block, stay in _stays(
        offload, last_updates(workload, update), num_ticks, is_deferred=kind.updates == "deferred"
    ):
        if stay:
            change[stay.start] += workload.blocks[block].gradient_bytes
            change[stay.stop] -= workload.blocks[block].gradient_bytes
    return max(accumulate(change), default=0)


def _stays(
    offload: Mapping[int, int], last: Mapping[int, int], num_ticks: int, *, is_deferred: bool
) -> Iterator[tuple[int, range]]:
    for block, tick in offload.items():
        is_used = block in last and not is_deferred
        yield block, range(tick, last[block] + 1 if is_used else num_ticks)
    if is_deferred:
        yield from ((block, range(tick + 1)) for block, tick in last.items())
