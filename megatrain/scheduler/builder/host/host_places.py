"""Host places: the bytes of the host where the gradients of each block land and wait for their update."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from megatrain.scheduler.lifetimes.lifetime import Lifetime
from megatrain.scheduler.table import Place


def place_gradients(lives: Iterable[Lifetime]) -> tuple[Place, ...]:
    """Gives gradients that land bytes of the host, so that those alive at the same tick don't overlap.

    Places are reused within a step where gradients wait for updates of that step: a `G` waits for each `U` of an
    earlier tick that releases some. First fit, in the order in which gradients arrive. Gradients of the previous step
    use the places of this step's gradients, and a `G` waits for their updates too.

    Args:
        lives: Of the gradients that land in this step.

    Returns:
        The places by block.
    """
    places: list[Place] = []
    alive: list[tuple[int, int, float]] = []  # first byte, byte after the last, and when it ends; by first byte
    for life in sorted(lives, key=_arrival):
        alive = [other for other in alive if other[2] >= _arrival(life)]
        start = 0
        for low, high, _ in alive:
            if start + life.nbytes <= low:
                break
            start = max(start, high)
        places.append(Place(life.item.number, start, life.nbytes))
        end = max((end.tick for end in life.ends), default=inf)
        alive = sorted([*alive, (start, start + life.nbytes, end)])
    return tuple(sorted(places))


def _arrival(life: Lifetime) -> int:
    assert life.start is not None, life.item
    return life.start.tick
