"""Crossing effects: what the ops do that bring values and their gradients from one device to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.scheduler.items import Effect, Item
from megatrain.scheduler.workload import Workload


class Crossings:
    """The values that cross between devices, by the block here whose op moves them.

    Args:
        workload: The blocks of one device.

    Attributes:
        come: Per block the values that come before its forward.
        go: Per block those that go after its forward.
        gradients_come: Per block those whose gradients come before its backward.
        gradients_go: Per block those whose gradients go after its backward.
        is_any: Whether any value crosses.
    """

    def __init__(self, workload: Workload) -> None:
        self.come, self.go, self.gradients_come, self.gradients_go = (
            [list[int]() for _ in workload.blocks] for _ in range(4)
        )
        for index, value in enumerate(workload.values):
            if value.comes is not None:
                self.come[value.comes.forward].append(index)
                if value.comes.backward is not None:
                    self.gradients_go[value.comes.backward].append(index)
            for block in dict.fromkeys(crossing.forward for crossing in value.goes):
                self.go[block].append(index)
            if value.returning is not None and value.returning.backward is not None:
                self.gradients_come[value.returning.backward].append(index)
        self.is_any = any(map(any, (self.come, self.go, self.gradients_come, self.gradients_go)))

    def touched(self, block: int) -> tuple[int, ...]:
        """The values that some `X` of a block moves."""
        return tuple(dict.fromkeys((*self.come[block], *self.go[block])))


def _nbytes(step: Any, values: list[int], times: Callable[[int], int] = lambda _: 1) -> int:
    return sum(step.workload.values[index].nbytes * times(index) for index in values)


def come(step: Any, block: int, micro_batch: int) -> Effect:
    """X from other devices."""
    found = step.crossings.come[block]
    makes = tuple(step.value(index, micro_batch, is_forward=True) for index in found)
    return Effect(makes=makes, moves=_nbytes(step, found))


def go(step: Any, block: int, micro_batch: int) -> Effect:
    """X to other devices; one value may go to several."""
    found = step.crossings.go[block]
    reads = tuple(step.value(index, micro_batch, is_forward=True) for index in found)

    def times(index: int) -> int:
        return sum(crossing.forward == block for crossing in step.workload.values[index].goes)

    return Effect(reads, moves=_nbytes(step, found, times))


def gradients_come(step: Any, block: int, micro_batch: int) -> Effect:
    """D from other devices: sums, to which blocks here add."""
    found = step.crossings.gradients_come[block]
    return Effect(makes=tuple(Item("gradient", index, micro_batch) for index in found), moves=_nbytes(step, found))


def gradients_go(step: Any, block: int, micro_batch: int) -> Effect:
    """D to other devices."""
    found = step.crossings.gradients_go[block]
    return Effect(tuple(Item("gradient", index, micro_batch) for index in found), moves=_nbytes(step, found))
