"""Device memory from torch's allocator: the segments of a step, and the meter that counts the bytes really held."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch

from megatrain.device import Device, is_on_host
from megatrain.passes.program import Program
from megatrain.scheduler.lifetimes import Books, alive_at, find_peak
from megatrain.scheduler.schedule import Schedule

# Smaller tensors are in segments of 2 MiB of their own, whatever is free elsewhere.
LEAST_BYTES = 1 << 20
# A tensor of this size has a segment to itself, of a multiple of 2 MiB; smaller ones share 20 MiB.
_OWN_SEGMENT, _ROUNDING = 10 << 20, 2 << 20
_TENSOR_ROUNDING = 512
# Of the temporary tensors of ops elsewhere than at the peak, larger ones find memory: less is held there.
_SMALL = 32 << 20


def segment_sizes(schedule: Schedule, programs: Sequence[Program]) -> list[int]:
    """Bytes of each segment that the steps of a schedule need, largest first.

    They hold what is there at the peak, with the temporary tensors of the op there; and the small temporary tensors of
    any other op, so that these take no place of what is held.
    """
    small: Counter[int] = Counter()
    for program in {id(each): each for each in programs}.values():
        for template in program.templates.values():
            for parts in template.cost.workspace_parts if template.cost is not None else ():
                small |= Counter(nbytes for nbytes in _large(parts) if nbytes < _SMALL)
    peak = find_peak(schedule)
    temporary = Counter[int]() if peak.is_after else Counter(_large(_workspace_parts(schedule, programs, peak.tick)))
    return fitting([*held_sizes(schedule, programs, peak.moment), *(temporary | small).elements()])


def held_sizes(schedule: Schedule, programs: Sequence[Program], moment: int) -> list[int]:
    """Bytes of each large tensor that a step makes and holds at a moment, besides slots; largest first.

    Args:
        programs: One per micro-batch.
        moment: That of the peak.
    """
    found: list[int] = []
    for life in alive_at(Books(schedule), moment):
        kind, number, micro_batch = life.item
        if life.start is None:
            continue  # the caller's
        program = programs[micro_batch]
        if kind == "saved":
            cost = program.templates[program.blocks[number].template].cost
            found += () if cost is None else cost.saved_parts
        elif kind == "parameters":
            states = (program.state[key] for key in program.blocks[number].binding)
            found += (state.spec.nbytes for state in states if state.requires_grad)
        else:
            found.append(life.nbytes)
    return sorted(_large(found), reverse=True)


def _workspace_parts(schedule: Schedule, programs: Sequence[Program], tick: int) -> Iterator[int]:
    """Bytes of each temporary tensor of the op of a tick."""
    op = schedule.ticks[tick].compute
    if op is None or op.what not in ("F", "B"):
        return
    program = programs[op.micro_batch or 0]
    cost = program.templates[program.blocks[op.block].template].cost
    if cost is None:
        return
    is_backward = op.what == "B"
    # A retained graph is held, and the workspace of a backward was measured with its recompute.
    held = cost.saved_parts if is_backward and op.block in schedule.saves else ()
    yield from (Counter(cost.workspace_parts[is_backward]) - Counter(held)).elements()


def fitting(sizes: Sequence[int]) -> list[int]:
    """Bytes of segments that tensors of these sizes fill with little loss, largest first.

    Alone, three tensors of 6 MiB leave 2 MiB of the 20 MiB of their segment, which fit no fourth. Two of them together
    are a segment of 12 MiB.

    >>> [nbytes >> 20 for nbytes in fitting([6 << 20] * 5)]
    [12, 12, 6]
    """
    found: list[int] = []
    for nbytes, count in Counter(-(-nbytes // _TENSOR_ROUNDING) * _TENSOR_ROUNDING for nbytes in sizes).items():
        together = _together(nbytes, count) if nbytes < _SMALL else 1
        found += [together * nbytes] * (count // together)
        found += [nbytes] * (count % together)
    return sorted(found, reverse=True)


def _together(nbytes: int, count: int) -> int:
    """How many of the tensors of a size share a segment, so that little of it is lost for each."""
    least = min(count, -(-_OWN_SEGMENT // nbytes))
    return min(range(least, min(count, least + 7) + 1), key=lambda number: -number * nbytes % _ROUNDING / number)


def _large(sizes: Sequence[int] | Iterator[int]) -> Iterator[int]:
    return (nbytes for nbytes in sizes if nbytes > LEAST_BYTES)


# Segments: torch's allocator gets memory for what a step holds, before temporary tensors leave it theirs.
#
# The allocator gives a tensor the smallest free memory into which it fits. Between two blocks that is memory of
# temporary tensors: a value of 12 MiB goes into 32 MiB that a product had, and stays there until its backward. What is
# left of them fits no other value, and no product. So up to half of what a step holds could be lost in holes.


class Segments:
    """The memory that torch's allocator was given for the steps of a model."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nbytes = 0
        self._num_emptied = 0

    def make(self, sizes: Sequence[int]) -> None:
        """Has the allocator take some segments at once, and keep them.

        Then each tensor of these sizes takes its own memory, the smallest into which it fits. Segments that were made
        for more than these stay instead, unless the allocator's cache was emptied since.
        """
        is_there = self._num_emptied == self._device.num_emptied
        if is_there and sum(sizes) <= self._nbytes:
            return
        taken: list[torch.Tensor] = []
        try:
            self._device.empty_cache()  # segments are cut from nothing that is there
            taken.extend(map(self._device.allocate, sizes))
        except BaseException as error:
            # Something else takes the device's memory. Some segments are better than none.
            if not self._device.ran_out(error):
                raise
        self._nbytes, self._num_emptied = sum(sizes), self._device.num_emptied


_Name = Hashable
"""The address of a storage; with a key, one that counts for this key alone."""
Storages = Mapping[_Name, int]
"""The bytes of some storages by their addresses."""


class Meter:
    """Counts the device bytes held: each distinct storage once, by its real size, however many tensors view it.

    Holds no tensor. The holder of a tensor under a key must release the key when it drops the tensor: a storage is
    identified by its address, which is unique only while the tensor exists. Thread-safe, also inside finalizers.

    Args:
        counts_host: Tensors of the CPU count too: the compute device is the host.
    """

    def __init__(self, *, counts_host: bool = True) -> None:
        self._counts_host = counts_host
        # Reentrant: a finalizer may release a key while this very thread is in here.
        self._lock = threading.RLock()
        self._held: dict[Hashable, Storages] = {}
        self._num_holders: dict[_Name, int] = {}
        self._nbytes: dict[_Name, int] = {}
        self._arena_bytes = 0
        self._current = 0
        self._peak = 0

    @property
    def current(self) -> int:
        """Bytes held now, the arena included."""
        return self._current

    @property
    def peak(self) -> int:
        """Most bytes held at once since the last `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Starts measuring the peak anew, from what is held now."""
        with self._lock:
            self._peak = self._current

    def set_arena(self, nbytes: int) -> None:
        """Counts an arena of `nbytes` in place of what was counted for it before."""
        with self._lock:
            self._current += nbytes - self._arena_bytes
            self._arena_bytes = nbytes
            self._peak = max(self._peak, self._current)

    def hold(self, key: Hashable, tensors: Iterable[torch.Tensor], *, is_private: bool = False) -> None:
        """Counts `tensors` as held under `key`, in place of what was held under it.

        Args:
            is_private: They may be freed before `key` is released (autograd frees what it saved one by one), so
                other tensors may use their addresses by then. Only storages that aren't counted yet count for this key.
        """
        self.hold_storages(key, self.storages_of(tensors), is_private=is_private)

    def hold_storages(self, key: Hashable, storages: Storages, *, is_private: bool = False) -> None:
        """As `hold`, of tensors whose storages are known."""
        with self._lock:
            known = self._num_holders
            found = (
                {name if name in known else (name, key): nbytes for name, nbytes in storages.items()}
                if is_private
                else storages
            )
            # First the new, then the old: what both have in common must not look free in between.
            for name, nbytes in found.items():
                number = known.get(name, 0)
                known[name] = number + 1
                if not number:
                    self._nbytes[name] = nbytes
                    self._current += nbytes
            self._peak = max(self._peak, self._current)
            before = self._held.pop(key, None)
            if found:
                self._held[key] = found
            if before is not None:
                self._let_go(before)

    def holds_any(self, storages: Iterable[_Name]) -> bool:
        """Tells whether some key holds one of the storages at these addresses."""
        return not self._num_holders.keys().isdisjoint(storages)

    def has(self, tensor: torch.Tensor) -> bool:
        """Tells whether some key holds the memory of `tensor`."""
        return self.holds_any(self.storages_of([tensor]))

    def release(self, key: Hashable) -> None:
        """Stops counting what is held under `key`; nothing may be."""
        with self._lock:
            if (before := self._held.pop(key, None)) is not None:
                self._let_go(before)

    def clear(self) -> None:
        """Stops counting everything but the arena."""
        with self._lock:
            for key in list(self._held):
                self.release(key)

    def storages_of(self, tensors: Iterable[torch.Tensor]) -> Storages:
        """The storages, with bytes, of those tensors that count; of a sparse one those of its parts."""
        found: dict[_Name, int] = {}
        for tensor in tensors:
            if tensor.layout == torch.sparse_coo:
                found |= self.storages_of([tensor._indices(), tensor._values()])
            elif self._counts_host or not is_on_host(tensor):
                storage = tensor.untyped_storage()
                if nbytes := storage.nbytes():
                    found[storage.data_ptr()] = nbytes
        return found

    def _let_go(self, storages: Iterable[_Name]) -> None:
        known = self._num_holders
        for name in storages:
            number = known[name] - 1
            if number:
                known[name] = number
            else:
                del known[name]
                self._current -= self._nbytes.pop(name)
