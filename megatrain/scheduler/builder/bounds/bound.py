"""step_bound(): seconds that a step takes under any choices for one budget of device memory."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bounds.bound_memory import Tradeoff, bytes_at_turn, least_seconds
from megatrain.scheduler.builder.bounds.step_parts import StepParts
from megatrain.scheduler.effects import Effects
from megatrain.scheduler.parking import turn_block


class StepBound(NamedTuple):
    """Seconds that no plan of a step is faster than.

    Attributes:
        seconds: The bound.
        reason: What takes so long, in words.
    """

    seconds: float
    reason: str

    def above(self, step_s: float) -> float:
        """By which part a step is longer than the bound."""
        return max(0.0, step_s / self.seconds - 1) if self.seconds > 0 else 0.0


def step_bound(step: Effects, memory: int | None, machine: Hardware) -> StepBound:
    """A lower bound of the seconds of a step: with any slots, retained graphs, parked activations, weights that stay.

    All choices that fit the memory have a moment in common: the first backward of the block where the step turns. Then
    all retained graphs, activations that aren't parked, and weights that stay are on the device together. Each second
    that they save has its bytes there. So the bound solves a linear program: the least time of the longer stream, if
    parts of blocks could be retained or stay. Further bounds are chains of ops that every plan has.

    Args:
        step: Its effects. What is retained, parked and persistent there doesn't count.
        memory: Bytes of the device; None is any number.
        machine: Whose rates count.
    """
    parts = StepParts(step, machine)
    assert step.kind.mode == "train", "other steps have no turn"
    if memory is None or turn_block(step.workload) is None:
        left = inf
    else:
        left = float(max(0, memory - bytes_at_turn(step)))
    graphs, stays = tuple(parts.graphs()), tuple(parts.stays())
    found = [StepBound(*chain) for chain in parts.chains()]
    compute = [Tradeoff(s, "compute", ((each.compute, each.nbytes) for each in graphs)) for s in parts.compute_limits()]
    copies = [
        Tradeoff(
            start + to_device * parts.h2d_s(stays) + to_host * parts.d2h_s(stays),
            reason,
            ((to_device * each.h2d + to_host * each.d2h, each.nbytes) for each in stays),
        )
        for start, to_device, to_host, reason in parts.copy_limits()
    ]
    found.append(StepBound(*least_seconds(compute, copies, left)))
    return max(found, key=lambda bound: bound.seconds)
