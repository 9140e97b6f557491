"""Host places: the bytes of the host where the gradients of each block land and wait for their update."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Place
from megatrain.scheduler.waiting import last_updates
from megatrain.scheduler.workload import Workload


def place_gradients(
    workload: Workload, kind: StepKind, offload: Mapping[int, int], update: Mapping[int, int]
) -> tuple[Place, ...]:
    """Gives each block's gradients bytes of the host, so that those alive at the same tick don't overlap.

    Places are reused within a step where gradients wait for updates of that step: a `G` waits for each `U` of an
    earlier tick that releases some. First fit, in the order in which gradients arrive.

    Args:
        workload: What runs.
        kind: As in `Table`.
        offload: Tick of each `G`, by block.
        update: Tick of each `U`, by block.

    Returns:
        The places by block; none for a step whose gradients go to the caller at once, or stay where they are made.
    """
    if not kind.holds_gradients or kind.transfer == "bind":
        return ()
    is_of_this_step = kind.updates in ("overlap", "serial")
    last = last_updates(workload, update) if is_of_this_step else {}
    places: list[Place] = []
    alive: list[tuple[int, int, float]] = []  # first byte, byte after the last, and when it ends; by first byte
    for block in sorted(offload, key=offload.__getitem__):
        nbytes = workload.blocks[block].landing_bytes
        alive = [life for life in alive if life[2] >= offload[block]]
        start = 0
        for low, high, _ in alive:
            if start + nbytes <= low:
                break
            start = max(start, high)
        places.append(Place(block, start, nbytes))
        alive = sorted([*alive, (start, start + nbytes, last.get(block, inf))])
    return tuple(sorted(places))
