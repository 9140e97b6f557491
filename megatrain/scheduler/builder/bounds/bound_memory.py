"""What memory a step has left where it turns, and the least seconds for which so much can be had."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from megatrain.scheduler.effects import Effects
from megatrain.scheduler.parking import turn_block


class Tradeoff:
    """Seconds that get less by uses of memory, where parts of a use count in proportion.

    Args:
        seconds: Without any.
        reason: What takes them, in words.
        uses: The seconds that each saves, and its bytes.
    """

    def __init__(self, seconds: float, reason: str, uses: Iterable[tuple[float, int]]) -> None:
        useful = [use for use in uses if use[0] > 0]
        free = sum(saved for saved, nbytes in useful if nbytes == 0)
        uses = sorted((use for use in useful if use[1] > 0), key=lambda use: (-use[0] / use[1], use))
        self.reason = reason
        self.seconds = seconds - free
        self._saved = [0.0, *accumulate(saved for saved, _ in uses)]
        self._nbytes = [0, *accumulate(nbytes for _, nbytes in uses)]

    @property
    def least(self) -> float:
        """With all the memory that they can use."""
        return self.seconds - self._saved[-1]

    def nbytes(self, seconds: float) -> float:
        """The memory that brings them down to so many seconds."""
        wanted = self.seconds - seconds
        if wanted <= 0:
            return 0.0
        if wanted > self._saved[-1]:
            return inf
        above = max(1, bisect_right(self._saved, wanted))
        if above == len(self._saved):
            return float(self._nbytes[-1])
        part = (wanted - self._saved[above - 1]) / (self._saved[above] - self._saved[above - 1])
        return self._nbytes[above - 1] + part * (self._nbytes[above] - self._nbytes[above - 1])


# Each halves what is unknown: as many as digits of a float.
_HALVINGS = 60


def least_seconds(first: Sequence[Tradeoff], second: Sequence[Tradeoff], memory: float) -> tuple[float, str]:
    """The least seconds that all need, if uses of the first and of the second kind share the memory.

    Uses of one kind are the same for all tradeoffs of the kind, so what one of them needs serves the others.

    Returns:
        The seconds, never more than the true least, and what takes them.
    """
    both = [*first, *second]
    longest = max(both, key=lambda tradeoff: tradeoff.least)

    def fits(seconds: float) -> bool:
        return memory >= sum(max(each.nbytes(seconds) for each in kind) for kind in (first, second))

    if memory == inf or fits(longest.least):
        return longest.least, longest.reason
    low, high = longest.least, max(each.seconds for each in both)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    reasons = (max(kind, key=lambda each: each.nbytes(low)) for kind in (first, second))
    needing = [each.reason for each in reasons if each.nbytes(low) > 0]
    return low, f"{' and '.join(needing)}, in this memory"


def bytes_at_turn(step: Effects) -> int:
    """Device bytes that every plan has during the first backward where the step turns, whatever else it holds there.

    Those are the weights of the block, its workspace and gradients, and values that can't be parked. Of a value that
    only this block reads, that of one micro-batch counts.
    """
    workload, kind = step.workload, step.kind
    turn = turn_block(workload)
    assert turn is not None
    work = workload.blocks[turn]
    workspace = min(each.backward_workspace_bytes for each in (work, work.kept) if each is not None)
    found = step.copied(work.state_bytes) + work.gradient_bytes + workspace
    storages: dict[int, int] = {}
    for index, value in enumerate(workload.values):
        readers = workload.backward_readers(index)
        if value.on_host or value.is_result or (value.is_parkable and kind.transfer != "bind"):
            continue
        produced = value.producer is None or value.producer <= turn
        count = kind.micro_batches if readers and readers[0] < turn and produced else 1 if readers else 0
        storages[value.storage] = max(storages.get(value.storage, 0), count)
    return found + sum(count * workload.storages[storage] for storage, count in storages.items())
