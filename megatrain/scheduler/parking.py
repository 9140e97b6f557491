"""Which graphs are retained, which values leave the device between forward and backward, and which are never there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from megatrain.sizes import aligned

Parks = Mapping[int, Sequence[int]]
"""Values that leave the device between forward and backward, by the block of their `A`."""


def turn_block(workload: Workload) -> int | None:
    """The last block that has a backward: where the step turns around."""
    blocks = workload.backward_blocks()
    return blocks[-1] if blocks else None


def keep_all(workload: Workload) -> int:
    """The smallest `keep` under which nothing is parked."""
    turn = turn_block(workload)
    return 0 if turn is None else turn + 1


class Parking:
    """What leaves the device between forward and backward under choices of one workload.

    Args:
        workload: What runs.
        kind: The kind of the step.
    """

    def __init__(self, workload: Workload, kind: StepKind) -> None:
        turn = turn_block(workload)
        self._turn = -1 if turn is None else turn
        never = turn is None or kind.mode == "forward" or kind.transfer == "bind"
        self._values = [
            (index, value.producer, value.is_result, frozenset(readers), readers[-1])
            for index, value in enumerate(() if never else workload.values)
            if value.is_parkable and (readers := workload.backward_readers(index))
        ]

    def values(self, *, keep: int, saves: Collection[int], results: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
        """Values that are parked on the host, by the block whose `A` ops move them.

        That block is the last one whose backward reads the value, hence the first to need it back. A value stays
        on the device if that block is among the last `keep`, or if a retained graph holds it. Results are there only of
        blocks that keep theirs.
        """
        saved, last = frozenset(saves), self._turn - keep
        found: dict[int, list[int]] = {}
        for index, producer, is_result, readers, block in self._values:
            if block > last or producer in saved or (is_result and producer not in results):
                continue
            if saved.isdisjoint(readers):
                found.setdefault(block, []).append(index)
        return {block: tuple(found[block]) for block in sorted(found)}


def parked_values(
    workload: Workload, kind: StepKind, *, keep: int, saves: Collection[int], results: Collection[int] = ()
) -> dict[int, tuple[int, ...]]:
    """As `Parking.values`, for one choice."""
    return Parking(workload, kind).values(keep=keep, saves=saves, results=results)


def park_bytes(workload: Workload, kind: StepKind, parked: Mapping[int, Sequence[int]]) -> int:
    """Host bytes of all parked values of all micro-batches, each in bytes of its own."""
    return kind.micro_batches * sum(aligned(workload.values[v].nbytes) for values in parked.values() for v in values)


def host_value_bytes(workload: Workload, kind: StepKind) -> int:
    """Host bytes of all values that lie on the host, of all micro-batches, and of their gradients, all at once."""
    held = sum(workload.storages[storage] for storage in {value.storage for value in workload.values if value.on_host})
    if kind.mode != "forward":
        gradients = (i for i, value in enumerate(workload.values) if value.on_host and workload.has_value_gradient(i))
        held += sum(workload.values[index].nbytes for index in gradients)
    return kind.micro_batches * held
