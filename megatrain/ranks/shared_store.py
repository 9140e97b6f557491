"""SharedStore: a model's state, its masters and the optimizers' moments in memory that the ranks of a host share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatrain.device import is_on_host
from megatrain.device.host_arena import HostArena
from megatrain.errors import OptimizerError
from megatrain.ranks.shared_memory import Region, SharedMemory
from megatrain.runtime.stores.residency import Sent
from megatrain.tracer.packing import is_wrapper

Optimizer = torch.optim.Optimizer

STATE, LOW, GRADIENT = "state", "low", "gradient"
# The latest update that was claimed, by which rank, and the latest that is over; the step of the latest whole gradient,
# and where it is.
_CLAIMED, _BY, _DONE, _STEP, _OFFSET = range(5)
_WORDS = 5
_UPDATES = 1 << 39
"""Where these are in the memory of landings."""
_FAILED = -1


class Name(NamedTuple):
    """The name of a tensor.

    Attributes:
        kind: `STATE`, `LOW` (of a master), `GRADIENT` (a whole one that isn't where gradients land), or the number of
            an optimizer.
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
        region: Where the bytes are.
        start: The first of them there.
    """

    private: torch.Tensor
    shared: torch.Tensor
    region: Region
    start: int

    @property
    def is_written(self) -> bool:
        """Whether this rank has written into `private`."""
        return self.region.is_written(self.start, self.private.nbytes)

    @property
    def has_changed(self) -> bool:
        """Whether this rank has written other values into `private` than are there; what is the same is dropped."""
        if not self.is_written:
            return False
        part: Any = {"dtype": torch.uint8, "count": self.private.nbytes, "offset": self.start}
        is_same = torch.equal(*(torch.frombuffer(pages, **part) for pages in (self.region.private, self.region.shared)))
        if is_same:
            self.drop()
        return not is_same

    def take_in(self) -> None:
        """Gives all ranks what this rank has written into `private`."""
        if self.is_written:
            self.shared.copy_(self.private.detach())
            self.drop()

    def drop(self) -> None:
        """Drops what this rank has written into `private`."""
        self.region.drop(self.start, self.private.nbytes)

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
        owners: The rank that updates each parameter.
        twins: The tensors that this rank knows.
        number: How many updates of all parameters have begun. Ranks begin each at their own time, all the same ones.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int):
        self.memory, self.rank = memory, rank
        self.owners: dict[str, int] = {}
        self._shares = [0] * size  # bytes of the parameters that each rank updates
        self.twins: dict[Name, Twin] = {}
        self.number = 0
        self._words: dict[str, torch.Tensor] = {}  # a row for each parameter that has a rank
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def kind_of(self, optimizer: Optimizer) -> str:
        """The kind of the names of an optimizer's moments; ranks ask for the same optimizers in the same order."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return str(number)
        self._optimizers.append(weakref.ref(optimizer))
        return str(len(self._optimizers) - 1)

    # -- tensors -------------------------------------------------------------------------------------------

    def place(self, tensors: Mapping[Name, torch.Tensor]) -> None:
        """Copies tensors to memory that all ranks share, and tells them.

        Args:
            tensors: Dense ones, by their names; each takes the place of one of this name, if that fits.
        """
        with self.memory.locked():
            for name, tensor in tensors.items():
                twin = self.twins.get(name)
                if twin is None or not twin.fits(tensor):
                    # One without elements has a page, too: moments of a parameter without any are told as all are.
                    region, start = self.memory.take(max(tensor.nbytes, tensor.itemsize))
                    dtype, nbytes = str(tensor.dtype).removeprefix("torch."), len(region.shared)
                    place = (region.offset, nbytes, start, dtype, tuple(tensor.shape), tensor.stride())
                    self.memory.post([*name, *place])
                    twin = self.twins[name] = self._made(*place)
                if twin.shared.data_ptr() != tensor.data_ptr():
                    twin.shared.copy_(tensor.detach())

    def hear(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Learns which tensors ranks have placed, and gives moments among them to this rank's optimizers.

        Args:
            parameters: By key.
        """
        with self.memory.locked():
            for kind, key, what, *place in self.memory.news():
                self.twins[Name(kind, key, what)] = self._made(*place)
                optimizer = self._optimizers[int(kind)]() if kind.isdigit() else None
                if optimizer is not None and key in parameters:
                    optimizer.state[parameters[key]][what] = self.twins[Name(kind, key, what)].private

    def place_moments(self, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        """Has an optimizer's state of some parameters, by key, where all ranks see it, and gives it this rank's view.

        Raises:
            OptimizerError: If a part of it can't be shared.
        """
        moments = self.moments(optimizer, parameters)
        self.place({name: value for name, value in moments.items() if not self.holds(name, value)})
        for name in moments:
            optimizer.state[parameters[name.key]][name.what] = self.twins[name].private

    def moments(self, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """An optimizer's state of some parameters, by key.

        Raises:
            OptimizerError: If a part of it can't be shared.
        """
        found: dict[Name, torch.Tensor] = {}
        for key, parameter in parameters.items():
            for what, value in optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor) and not is_wrapper(value) and value.layout == torch.strided
                if not (is_tensor and is_on_host(value) and isinstance(what, str)):
                    raise OptimizerError(
                        f"the state `{what}` of `{key}` in {type(optimizer).__name__} is no plain tensor on the host.\n"
                        "  Ranks of one host share the optimizer's state, and each updates a part of the parameters.\n"
                        "  Leave such state out, or compile without process_group, into DistributedDataParallel."
                    )
                found[Name(self.kind_of(optimizer), key, what)] = value
        return found

    def holds(self, name: Name, tensor: torch.Tensor) -> bool:
        """Whether a tensor is this rank's view of one that ranks share."""
        twin = self.twins.get(name)
        return twin is not None and _place(tensor) == _place(twin.private)

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
        shape, stride = tuple(shape), tuple(stride)
        end = start + kind.itemsize * max(1, torch.Size(shape).numel())

        def over(bytes_: torch.Tensor) -> torch.Tensor:
            return bytes_.view(kind).as_strided(shape, stride)

        shared = torch.frombuffer(memoryview(region.shared)[start:end], dtype=torch.uint8)
        return Twin(over(region.arena.part(start, end)), over(shared), region, start)

    # -- who updates what ------------------------------------------------------------------------------------

    def deal(self, blocks: Iterable[Mapping[str, int]]) -> None:
        """Gives each parameter that has no rank yet to one.

        Args:
            blocks: Bytes of the parameters whose gradients are whole with each block, by key. The largest of a block is
                dealt first, each to the rank that has the least so far: what ranks have differs by no more than the
                largest.
        """
        for sizes in blocks:
            for key in sorted((key for key in sizes if key not in self.owners), key=lambda key: -sizes[key]):
                self.owners[key] = rank = min(range(len(self._shares)), key=self._shares.__getitem__)
                self._shares[rank] += sizes[key]
        if len(self._words) < len(self.owners):
            rows = self.memory.words(_UPDATES, len(self.owners), _WORDS)
            self._words = dict(zip(self.owners, rows, strict=True))

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

    def end(self, keys: Iterable[str], *, has_failed: bool) -> None:
        """Tells all ranks that parameters claimed by this rank are updated, or that this failed and left no trace."""
        what, told = (_BY, _FAILED) if has_failed else (_DONE, self.number)
        with self.memory.locked():
            for key in keys:
                self._words[key][what] = told

    def left(self, keys: Iterable[str]) -> dict[str, bool]:
        """Which parameters aren't updated yet, and whether the rank that claimed each has failed to."""
        with self.memory.locked():
            found = {key: self._words[key][:3].tolist() for key in keys}
        return {
            key: claimed == self.number and by == _FAILED
            for key, (claimed, by, done) in found.items()
            if done < self.number
        }

    def show(self, key: str, step: int, offset: int) -> None:
        """Tells all ranks where the rank of a parameter has its whole gradient: in its landings, or -1 for here."""
        with self.memory.locked():
            self._words[key][_STEP:] = torch.tensor([step, offset])

    def shown(self, key: str, step: int) -> int | None:
        """The same; None if there is none of this step."""
        with self.memory.locked():
            of_step, offset = self._words[key][_STEP:].tolist()
        return offset if of_step == step else None


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_plain = tensor.layout == torch.strided and is_on_host(tensor)
    return (tensor.data_ptr() if is_plain else 0, tensor.dtype, tuple(tensor.shape), tensor.stride() if is_plain else 0)
