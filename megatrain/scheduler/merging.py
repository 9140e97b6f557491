"""merge(): one workload for the micro-batches of a step, which may be different captures of one model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from megatrain.counts import counted
from megatrain.errors import MicroBatchError, ScheduleError
from megatrain.hardware.work import most
from megatrain.scheduler.workload import BlockWork, KeptWork, ValueWork, Workload

# What a batch may change of a block, besides its name.
_BLOCK_SIZES = ("saved_bytes", "forward_workspace_bytes", "backward_workspace_bytes")
_BLOCK_WORKS = ("forward", "backward")
_BLOCK_KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Merged:
    """One workload for several.

    Args:
        workload: As large as each of them, with the values of all.
        places: Per workload, and per value of `workload`: its index in that workload; None where that one lacks it.
    """

    workload: Workload
    places: tuple[tuple[int | None, ...], ...]


def merge(workloads: Sequence[Workload]) -> Merged:
    """Merges the workloads of micro-batches that are different captures: each size is the largest of them.

    A table for the result serves each of them: memory only grows with sizes, and a value that a micro-batch lacks (a
    mask, where it has no padding) is one of no bytes. Their blocks must have the same structure; that these hold the
    same *parameters*, only programs can tell. Names are those of the first that has the block or the value.

    Args:
        workloads: Of the micro-batches, at least one, in any order.

    Raises:
        ScheduleError: At the first difference in structure of the blocks.

    >>> layer = BlockWork("layer", 1024, 1024, 8, 0, 0, True)
    >>> other = BlockWork("layer", 1024, 1024, 4, 16, 0, True)
    >>> merge([Workload((layer,), (), ()), Workload((other,), (), ())]).workload.blocks[0].saved_bytes
    8
    """
    if not workloads:
        raise ScheduleError("an empty list of workloads can't be merged.\n  A step has at least one micro-batch.")
    refuse(_differences(workloads[0], other) for other in workloads)
    storages = _Storages(workloads[0])
    places = [storages.places_of(each) for each in workloads]
    values = storages.values
    return Merged(
        Workload(
            blocks=tuple(map(_largest, zip(*(w.blocks for w in workloads), strict=True))),
            values=tuple(values),
            storages=tuple(storages.nbytes),
            loss_bytes=max(w.loss_bytes for w in workloads),
            last_reads_values=any(w.last_reads_values for w in workloads),
        ),
        tuple(tuple(own.get(index) for index in range(len(values))) for own in places),
    )


def refuse(differences: Iterable[Iterator[str]]) -> None:
    """Refuses micro-batches that differ from the first in more than sizes and values.

    Args:
        differences: Of each micro-batch, in words.

    Raises:
        MicroBatchError: At the first difference.
    """
    for number, found in enumerate(differences):
        for difference in found:
            raise MicroBatchError(
                f"micro-batch {number} differs from micro-batch 0: {difference}.\n"
                "  All micro-batches of a step use the weights of a block while they are on the device, and hand on "
                "their buffers.\n"
                "  Use micro-batches for which the model runs the same layers in the same order, or separate steps."
            )


class _Storages:
    """The storages of several workloads, and their values. Storages whose values are made and read alike are one."""

    def __init__(self, first: Workload) -> None:
        self.values = list(first.values)
        self.nbytes = list(first.storages)
        self._alike: dict[object, list[tuple[int, list[int]]]] = defaultdict(list)
        for storage, indices in enumerate(_values_of_storages(first)):
            self._alike[_kind(first, indices)].append((storage, indices))

    def places_of(self, workload: Workload) -> dict[int, int]:
        """Makes room for a workload; returns the index of each of its values, by the index here."""
        free = {kind: deque(known) for kind, known in self._alike.items()}
        own: dict[int, int] = {}
        for nbytes, indices in zip(workload.storages, _values_of_storages(workload), strict=True):
            kind = _kind(workload, indices)
            storage, places = free[kind].popleft() if free.get(kind) else self._new(workload, indices)
            self.nbytes[storage] = max(self.nbytes[storage], nbytes)
            for place, index in zip(places, indices, strict=True):
                known = self.values[place]
                self.values[place] = replace(known, nbytes=max(known.nbytes, workload.values[index].nbytes))
                own[place] = index
        return own

    def _new(self, workload: Workload, indices: Sequence[int]) -> tuple[int, list[int]]:
        storage, places = len(self.nbytes), [len(self.values) + number for number in range(len(indices))]
        self.nbytes.append(0)
        self.values += [replace(workload.values[index], storage=storage) for index in indices]
        self._alike[_kind(workload, indices)].append((storage, places))
        return storage, places


def _values_of_storages(workload: Workload) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in workload.storages]
    for index, value in enumerate(workload.values):
        found[value.storage].append(index)
    return found


# What values may differ in and yet be one.
_VALUE_SIZES = ("name", "nbytes", "storage")


def _kind(workload: Workload, indices: Sequence[int]) -> tuple[tuple[object, ...], ...]:
    """Who makes and reads the values of a storage, and how: what storages must have in common to be one."""
    names = [field.name for field in fields(ValueWork) if field.name not in _VALUE_SIZES]
    return tuple(tuple(getattr(workload.values[index], name) for name in names) for index in indices)


def _largest(same: Sequence[BlockWork]) -> BlockWork:
    sizes = {name: max(getattr(work, name) for work in same) for name in _BLOCK_SIZES}
    works = {name: most([getattr(work, name) for work in same]) for name in _BLOCK_WORKS}
    return replace(same[0], **sizes, **works, kept=_most_kept(same))


def _most_kept(same: Sequence[BlockWork]) -> KeptWork | None:
    """The largest of them where results are kept; a micro-batch that has none runs as it does otherwise."""
    if all(work.kept is None for work in same):
        return None
    each = [
        work.kept or KeptWork(work.forward_workspace_bytes, work.backward_workspace_bytes, work.forward)
        for work in same
    ]
    return KeptWork(
        max(kept.forward_workspace_bytes for kept in each),
        max(kept.backward_workspace_bytes for kept in each),
        most([kept.repeated for kept in each]),
    )


def _differences(first: Workload, other: Workload) -> Iterator[str]:
    """Says in what the blocks of another workload differ."""
    if len(first.blocks) != len(other.blocks):
        yield f"it has {counted(len(other.blocks), 'block')}, not {len(first.blocks)}"
    for index, (here, there) in enumerate(zip(first.blocks, other.blocks, strict=False)):
        for part in fields(here):
            expected, found = getattr(here, part.name), getattr(there, part.name)
            if part.name not in ("name", *_BLOCK_SIZES, *_BLOCK_WORKS, _BLOCK_KEPT) and found != expected:
                yield f"of block {index} ({here.name}), {part.name} is {found}, not {expected}"
