"""SharedStore: a model's state, its masters and the optimizers' moments in memory that the ranks of a host share."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatrain.device import is_on_host
from megatrain.device.host_arena import HostArena
from megatrain.device.host_pages import HostPages
from megatrain.ranks.shared_memory import Region, SharedMemory, SharedPlace
from megatrain.runtime.stores.residency import Sent

STATE, LOW = "state", "low"
# The latest update that was claimed, by which rank, and the latest that is over; the step of the latest whole gradient,
# the rank that has it, and where.
_CLAIMED, _BY, _DONE, _STEP, _AT, _OFFSET = range(6)
_WORDS = 6
_FAILED = -1


class Name(NamedTuple):
    """The name of a tensor.

    Attributes:
        kind: `STATE`, `LOW` (of a master), or the number of an optimizer.
        key: The parameter or buffer, by its key in the model.
        what: What the optimizer calls it; empty for others.
    """

    kind: str
    key: str
    what: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A tensor that ranks share, as two tensors over the same bytes.

    Attributes:
        private: What the user's code gets: it sees what any rank writes with `shared`. What this rank writes here stays
            its own, and hides what others write, until it is dropped.
        shared: What updates write.
        arena: The memory of `private`.
        start: The first byte there.
    """

    private: torch.Tensor
    shared: torch.Tensor
    arena: HostArena
    start: int
    region: Region

    @property
    def is_written(self) -> bool:
        """Whether this rank has written into `private`."""
        return self.region.is_written(self.start, self.private.nbytes)

    @property
    def has_changed(self) -> bool:
        """Whether this rank has written other values into `private` than are there; what is the same is dropped."""
        if not self.is_written:
            return False
        mine, all_see = (self._bytes(pages) for pages in (self.region.private, self.region.shared))
        if torch.equal(mine, all_see):
            self.drop()
            return False
        return True

    def _bytes(self, pages: HostPages) -> torch.Tensor:
        return torch.frombuffer(pages, dtype=torch.uint8, count=self.private.nbytes, offset=self.start)

    def take_in(self) -> None:
        """Gives all ranks what this rank has written into `private`."""
        if self.is_written:
            self.shared.copy_(self.private.detach())
            self.drop()

    def drop(self) -> None:
        """Drops what this rank has written into `private`."""
        self.region.drop(self.start, self.private.nbytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is `private`, or a tensor over the same bytes."""
        return _place(tensor) == _place(self.private)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this one's shape, dtype and layout."""
        return _place(tensor)[1:] == _place(self.private)[1:]


class SharedStore:
    """Tensors by name, and for each parameter which rank updates it, and how often it was updated.

    Every tensor begins a page of its own, so that writes into its neighbours concern nobody.

    Args:
        memory: Of the ranks that share it.
        rank: This one.
        size: How many there are.

    Attributes:
        memory: See above.
        rank: See above.
        owners: The rank that updates each parameter.
        shares: The bytes of the parameters that each rank updates.
        twins: The tensors that this rank knows.
        number: How many updates of all parameters have begun. Ranks begin each at their own time, all the same ones.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int):
        self.memory, self.rank = memory, rank
        self.owners: dict[str, int] = {}
        self.shares = [0] * size
        self.twins: dict[Name, Twin] = {}
        self.number = 0
        self._words: dict[str, torch.Tensor] = {}
        self._arenas: dict[int, HostArena] = {}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The kind of the names of an optimizer's moments; ranks ask for the same optimizers in the same order."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return str(number)
        self._optimizers.append(weakref.ref(optimizer))
        return str(len(self._optimizers) - 1)

    # -- tensors -------------------------------------------------------------------------------------------

    def place(self, tensors: Mapping[Name, torch.Tensor], parameters: Collection[str] = ()) -> None:
        """Copies tensors to memory that all ranks share, and tells them.

        Args:
            tensors: Dense ones, by their names; each replaces one of this name.
            parameters: Keys of parameters that will be updated.
        """
        with self.memory.locked():
            items: list[Any] = []
            for name, tensor in tensors.items():
                # A tensor without elements has a page, too: moments of a parameter without any are told as all are.
                offset, start = self.memory.take(max(tensor.nbytes, tensor.itemsize))
                nbytes = self.memory.region_bytes(offset)
                dtype = str(tensor.dtype).removeprefix("torch.")
                items.append([*name, offset, nbytes, start, dtype, list(tensor.shape), list(tensor.stride())])
                twin = self._made(offset, nbytes, start, dtype, tensor.shape, tensor.stride())
                twin.shared.copy_(tensor.detach())
                self.twins[name] = twin
            words: list[int] = []
            if parameters:
                offset, start = self.memory.take(_WORDS * 8 * len(parameters))
                words = [offset, self.memory.region_bytes(offset), start]
                self._take_words(words, parameters)
            self.memory.post({"by": self.rank, "items": items, "words": words, "keys": list(parameters)})

    def hear(self) -> list[Name]:
        """Learns which tensors other ranks have placed; returns their names."""
        found: list[Name] = []
        with self.memory.locked():
            for news in self.memory.news():
                if news["by"] == self.rank:
                    continue
                for kind, key, what, *place in news["items"]:
                    found.append(Name(kind, key, what))
                    self.twins[found[-1]] = self._made(*place)
                if news["keys"]:
                    self._take_words(news["words"], news["keys"])
        return found

    def sent(self, twins: Mapping[str, Twin]) -> dict[str, Sent]:
        """Maps tensors once more, so that they can be copied to a device from memory that can be page-locked.

        To page-lock the private mapping would give this process a copy of each page.
        """
        spans: dict[int, tuple[int, int]] = {}
        for twin in twins.values():
            start, end = spans.get(twin.region.offset, (twin.start, 0))
            spans[twin.region.offset] = min(start, twin.start), max(end, twin.start + twin.private.nbytes)
        arenas = {
            offset: HostArena.over(self.memory.mapped(offset + start, end - start))
            for offset, (start, end) in spans.items()
        }
        return {
            key: Sent(arenas[at := twin.region.offset], twin.start - spans[at][0], lambda twin=twin: twin.is_written)
            for key, twin in twins.items()
        }

    def _made(
        self, offset: int, nbytes: int, start: int, dtype: str, shape: Iterable[int], stride: Iterable[int]
    ) -> Twin:
        region, kind = self.memory.region(offset, nbytes), getattr(torch, dtype)
        arena = self._arenas.setdefault(offset, HostArena.over(region.private))
        shape, stride = tuple(shape), tuple(stride)
        end = start + kind.itemsize * max(1, torch.Size(shape).numel())

        def over(bytes_: torch.Tensor) -> torch.Tensor:
            return bytes_.view(kind).as_strided(shape, stride)

        shared = torch.frombuffer(memoryview(region.shared)[start:end], dtype=torch.uint8)
        return Twin(over(arena.part(start, end)), over(shared), arena, start, region)

    def _take_words(self, place: list[int], keys: Iterable[str]) -> None:
        offset, nbytes, start = place
        pages = self.memory.region(offset, nbytes).shared
        for index, key in enumerate(keys):
            at = start + index * _WORDS * 8
            self._words[key] = torch.frombuffer(memoryview(pages)[at : at + _WORDS * 8], dtype=torch.int64)

    # -- who updates what ------------------------------------------------------------------------------------

    def counts_updates(self, key: str) -> bool:
        """Whether the store counts the updates of a parameter."""
        return key in self._words

    def claim(self, keys: Iterable[str]) -> list[str]:
        """Claims parameters for the present update; returns those that no rank has claimed or updated."""
        found: list[str] = []
        with self.memory.locked():
            for key in keys:
                claimed, by, done = self._words[key][:3].tolist()
                if done < self.number and (claimed < self.number or by == _FAILED):
                    self._words[key][_CLAIMED], self._words[key][_BY] = self.number, self.rank
                    found.append(key)
        return found

    def finish(self, keys: Iterable[str]) -> None:
        """Tells all ranks that parameters claimed by this rank are updated."""
        with self.memory.locked():
            for key in keys:
                self._words[key][_DONE] = self.number

    def give_back(self, keys: Iterable[str]) -> None:
        """Tells all ranks that the update of parameters claimed by this rank has failed, and left no trace."""
        with self.memory.locked():
            for key in keys:
                self._words[key][_BY] = _FAILED

    def left(self, keys: Iterable[str]) -> dict[str, bool]:
        """Which parameters aren't updated yet, and whether the rank that claimed each has failed to."""
        with self.memory.locked():
            found = {key: self._words[key][:3].tolist() for key in keys}
        return {
            key: claimed == self.number and by == _FAILED
            for key, (claimed, by, done) in found.items()
            if done < self.number
        }

    def show(self, key: str, step: int, owned: SharedPlace) -> None:
        """Tells all ranks where the whole gradient of a parameter is."""
        with self.memory.locked():
            self._words[key][_STEP:] = torch.tensor([step, *owned])

    def shown(self, key: str, step: int) -> SharedPlace | None:
        """Where the whole gradient of a parameter is; None if no rank has one of this step."""
        with self.memory.locked():
            of_step, rank, offset = self._words[key][_STEP:].tolist()
        return SharedPlace(rank, offset) if of_step == step else None


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_plain = tensor.layout == torch.strided and is_on_host(tensor)
    return (tensor.data_ptr() if is_plain else 0, tensor.dtype, tuple(tensor.shape), tensor.stride() if is_plain else 0)
