"""On-demand weights: the cache of weights that calls without a schedule copy to the device as they need them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatrain.base.counts import counted
from megatrain.base.sizes import aligned, format_bytes
from megatrain.base.torch_private import StorageWeakRef, storage_use_count
from megatrain.device import Device, is_on_host
from megatrain.errors import ExecuteError
from megatrain.runtime.engine import Engine
from megatrain.runtime.streams.stream_set import Event
from megatrain.tracer.block_image import stored_stride
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import storage_key


@dataclass(frozen=True, slots=True)
class WalkFigures:
    """What a walk did.

    Args:
        num_prefetches: Copies of state to the device.
        budget_bytes: The bound of device memory; None if the state is used in place.
        peak_bytes: Most bytes of the device that state, results and caches held.
    """

    what: str
    num_prefetches: int = 0
    h2d_bytes: int = 0
    budget_bytes: int | None = None
    peak_bytes: int = 0

    def __str__(self) -> str:
        if self.budget_bytes is None:
            return f"walk of {self.what}: the state is used in place"
        prefetches = counted(self.num_prefetches, "prefetch")
        return f"walk of {self.what}: {prefetches}, h2d {self.h2d_bytes} B, peak {self.peak_bytes} B"


class _Known(NamedTuple):
    storage: StorageWeakRef
    nbytes: int
    key: str | None


class HeldBytes:
    """Counts each storage of the device that a call took or returned, once, for as long as it exists.

    Sizes are rounded up as the device's allocator does. Nobody says when a tensor of the model's own code ends, so
    storages are referred to weakly, and looked at when the sum matters.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        self._counts_host = device.is_host
        self._alignment = device.alignment
        self._known: dict[int, _Known] = {}

    def look_at(self, tensor: torch.Tensor) -> str | None:
        """Counts the memory of a tensor, if it isn't known; returns the key of the state that it is, if it is one's."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None:
            return known.key
        if not tensor.is_meta and is_on_host(tensor) == self._counts_host:
            self._note(storage, aligned(storage.nbytes(), self._alignment), None)
        return None

    def leave_out(self, tensor: torch.Tensor, key: str) -> None:
        """Has the memory of a tensor not count, for as long as it exists: it is that of some state."""
        self._note(tensor.untyped_storage(), 0, key)

    def prune(self) -> None:
        """Stops counting storages that are gone."""
        gone = [number for number, known in self._known.items() if known.storage.expired()]
        for number in gone:
            self.nbytes -= self._known.pop(number).nbytes

    def _note(self, storage: torch.UntypedStorage, nbytes: int, key: str | None) -> None:
        # The weak reference keeps the address of the storage from being used again.
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), nbytes, key)
        self.nbytes += nbytes


@dataclass(slots=True, eq=False)
class CachedWeight:
    """A copy of a parameter or buffer in device memory of its own.

    Args:
        arrived: Settled when its values are there.
        is_waited_for: Compute waits for `arrived` already.
        latest: The number of the call that read it last; 0 before the first.
        is_compared: Its memory may be written without its version counting that, so its values tell.
    """

    key: str
    tensor: torch.Tensor
    arrived: Event
    is_waited_for: bool = False
    latest: int = 0
    is_compared: bool = False
    _alone: tuple[int, int] = (0, 0)
    _version: int = 0

    @staticmethod
    def of(entry: StateEntry, device: torch.device) -> tuple[CachedWeight, torch.Tensor]:
        """Takes memory; also returns the tensor for the transfer, whose writes the copy doesn't count as the model's.

        The copy of a trained parameter requires a gradient, as kernels look at that: they round differently.
        """
        spec = entry.spec
        memory = torch.empty_strided(spec.shape, stored_stride(spec), dtype=spec.dtype, device=device)
        copy = memory.data.requires_grad_(entry.requires_grad)
        return CachedWeight(entry.key, copy, Event(f"W {entry.key}")), memory

    @property
    def is_written(self) -> bool:
        """Whether the model has written into it since `note`."""
        return self.tensor._version != self._version

    def note(self) -> None:
        """Notes that only the walk has it, as it is now."""
        self._alone = self._holders()
        self.note_version()

    def note_version(self) -> None:
        """Notes that the writes so far are known."""
        self._version = self.tensor._version

    @property
    def is_alone(self) -> bool:
        """Whether only the walk has it. A view that the model still has keeps the memory, and may be written into."""
        return self._holders() == self._alone

    def _holders(self) -> tuple[int, int]:
        return storage_use_count(self.tensor.untyped_storage()._cdata), sys.getrefcount(self.tensor)


AHEAD = 16
"""The most tensors that are brought before they are read."""
AHEAD_PART = 8
"""They take at most this part of the budget, and the next one whatever it takes."""


@dataclass(slots=True)
class Learned:
    """What earlier walks of a model have shown; a wrong guess costs time, and nothing else.

    Attributes:
        successors: The state that was read after each.
        growth: The most bytes that one call added.
    """

    successors: dict[str, str] = field(default_factory=dict[str, str])
    growth: int = 0


class WeightCache:
    """Brings state to the device when a call is about to read it, and some before that; makes room within the budget.

    State that was read once goes at once: nothing tells yet how much the model's results will take. State that comes
    again stays as long as there is room. Models read their state in the same order over and over, so the tensor that
    was read last is the one that will not be read for longest: it goes first.

    Args:
        engine: Holds the state on the host, in a step of its streams.
        learned: Read and extended.
    """

    def __init__(
        self, what: str, engine: Engine, entries: Mapping[str, StateEntry], budget_bytes: int, learned: Learned
    ) -> None:
        self._figures = WalkFigures(what, budget_bytes=budget_bytes)
        self._engine = engine
        self._entries = entries
        self._budget = budget_bytes
        self._sizes = {key: aligned(entry.spec.nbytes, engine.device.alignment) for key, entry in entries.items()}
        self._learned = learned
        self._held = HeldBytes(engine.device)
        self._others = engine.meter.current  # of calls whose backward is still to come
        self._here: dict[str, CachedWeight] = {}
        self._cached_bytes = 0
        self._clock = 0
        self._reads: Counter[str] = Counter()
        self._latest_key: str | None = None
        self._copies = self._copied_bytes = self._peak = 0

    @property
    def figures(self) -> WalkFigures:
        """What was moved and held so far."""
        return WalkFigures(self._figures.what, self._copies, self._copied_bytes, self._budget, self._peak)

    @property
    def _total(self) -> int:
        return self._others + self._held.nbytes + self._cached_bytes

    @property
    def _room(self) -> int:
        """The bound for state that isn't needed at once: caches grow, so a call may add more than any before."""
        return self._budget - 2 * self._learned.growth

    def get(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """Returns state on the device, for one call; an ExecuteError if there is no room for it."""
        self._clock += 1
        for key in keys:
            if self._latest_key not in (None, key):
                self._learned.successors[self._latest_key] = key
            self._latest_key = key
            if key not in self._here:
                self._bring(key, keys)
        for key in keys:
            cached = self._here[key]
            self._wait(cached)
            cached.latest = self._clock
            self._reads[key] += 1
        if len(self._here) < len(self._learned.successors):  # else all that is known is here
            self._look_ahead(keys)
        return [self._here[key].tensor for key in keys]

    def after(self, keys: Sequence[str], tensors: Iterable[torch.Tensor], written: Collection[int] = ()) -> None:
        """Counts what a call took and returned, keeps what it wrote, and makes room.

        Args:
            tensors: Its other arguments, which may be views of state, and its results.
            written: Memory that it wrote, where versions don't tell.

        Raises:
            ExecuteError: If it wrote into a trained parameter, or holds more than the budget.
        """
        before, touched = self._held.nbytes, dict.fromkeys(keys)
        for tensor in tensors:
            key = self._held.look_at(tensor)
            if key is not None:
                touched[key] = None
        growth = self._held.nbytes - before
        for key in touched:
            cached = self._here.get(key)
            if cached is not None:
                self._keep_written(cached, is_known=storage_key(cached.tensor) in written)
                if self._reads[key] == 1 and cached.is_alone:
                    self._give_back(cached)
        if growth:
            self._learned.growth = max(self._learned.growth, growth)
            # The next call may add as much again. What comes ahead keeps to the lower bound, so as not to go unread.
            self._make_room(0, (), self._room, only_read=True)
            self._make_room(0, (), self._budget - self._learned.growth)
            if self._total > self._budget:
                raise self._lack("what the model has computed", 0)
            self._measure()

    def compare_values(self, keys: Iterable[str]) -> None:
        """Has state compared with the host's values when a call touched it: its version counts not all writes."""
        for key in keys:
            self._here[key].is_compared = True

    def end(self, *, has_failed: bool = False) -> None:
        """Gives everything back; what the model wrote is kept."""
        for cached in list(self._here.values()):
            if has_failed:  # the streams have stopped, and the device has done what it was given
                cached.is_waited_for = True
            self._give_back(cached)

    # -- one tensor ------------------------------------------------------------------------------------------

    def _bring(self, key: str, pinned: Collection[str]) -> None:
        nbytes = self._sizes[key]
        if not self._make_room(nbytes, pinned, self._room):
            self._held.prune()
            if self._total + nbytes > self._budget:
                raise self._lack(f"`{key}`", nbytes)
        self._fetch(key)

    def _fetch(self, key: str) -> None:
        engine, streams, entry = self._engine, self._engine.streams, self._entries[key]
        assert engine.store is not None
        bus, (source, arena) = engine.bus, engine.store.source(key)
        taken, box = Event(f"take {key}"), list[tuple[CachedWeight, torch.Tensor]]()

        def copy() -> None:
            bus.to_device(box.pop()[1], source, arena)

        # Memory is taken in the order of compute: work that it gets there may have used the same bytes until now.
        place = engine.device.torch_device
        streams.submit("compute", taken.label, lambda: box.append(CachedWeight.of(entry, place)), (), taken)
        cached = self._here[key] = box[0][0]
        self._cached_bytes += self._sizes[key]
        self._held.leave_out(cached.tensor, key)
        self._copies += 1
        self._copied_bytes += entry.spec.nbytes
        streams.submit("h2d", cached.arrived.label, copy, (taken,), cached.arrived)
        self._measure()

    def _wait(self, cached: CachedWeight) -> None:
        if not cached.is_waited_for:
            label = f"read {cached.key}"
            self._engine.streams.submit("compute", label, lambda: None, (cached.arrived,), Event(label))
            cached.is_waited_for = True
            cached.note()

    def _give_back(self, cached: CachedWeight) -> None:
        self._wait(cached)  # its memory must not be used again before the copy is done
        self._keep_written(cached)
        del self._here[cached.key]
        self._cached_bytes -= self._sizes[cached.key]

    def _keep_written(self, cached: CachedWeight, *, is_known: bool = False) -> None:
        if cached.latest and (is_known or cached.is_written or self._differs(cached)):
            entry = self._entries[cached.key]
            cached.note_version()
            if not entry.is_writable:
                raise ExecuteError(
                    f"the model writes into its parameter `{entry.key}`.\n"
                    "  Only buffers and untrained parameters can be written by a forward.\n"
                    "  Update trained parameters outside the forward."
                )
            self._engine.buffers.download([(self._engine.tensors[entry.key], cached.tensor)])

    def _differs(self, cached: CachedWeight) -> bool:
        """Whether somebody has written into it past its version, where that is possible."""
        if not cached.is_compared:
            return False
        device, kept = self._engine.device, self._engine.tensors[cached.key]
        pair = (t.detach().contiguous().flatten().view(torch.uint8) for t in (device.to_host(cached.tensor), kept))
        return not torch.equal(*pair)

    # -- room ------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, pinned: Collection[str], limit: int, *, only_read: bool = False) -> bool:
        """Gives state back until so many bytes more are within `limit`; tells whether they are."""
        if self._total + nbytes > limit:
            self._held.prune()
        while self._total + nbytes > limit:
            victim = self._victim(pinned, only_read=only_read)
            if victim is None:
                return False
            self._give_back(victim)
        return True

    def _victim(self, pinned: Collection[str], *, only_read: bool) -> CachedWeight | None:
        """The state that will not be read for longest: what was read last, then what was brought ahead last."""
        present = [cached for cached in self._here.values() if cached.key not in pinned]
        read = [cached for cached in present if cached.latest and cached.is_alone]
        if read:
            return max(read, key=lambda cached: cached.latest)
        ahead = [cached for cached in present if not cached.latest]
        return ahead[-1] if ahead and not only_read else None

    def _look_ahead(self, pinned: Sequence[str]) -> None:
        ahead = 0
        passed, key = set(pinned), pinned[-1]
        for _ in range(AHEAD):
            following = self._learned.successors.get(key)
            if following is None or following in passed or following not in self._entries:
                return
            key = following
            passed.add(key)
            nbytes = self._sizes[key]
            if key not in self._here:
                if ahead and ahead + nbytes > self._budget // AHEAD_PART:
                    return
                if not self._make_room(nbytes, passed, self._room, only_read=True):
                    return
                self._fetch(key)
            if not self._here[key].latest:
                ahead += nbytes

    def _measure(self) -> None:
        if self._total > self._peak:
            self._held.prune()
            self._peak = max(self._peak, self._total)

    def _lack(self, what: str, nbytes: int) -> ExecuteError:
        self._held.prune()
        need = f", and {what} takes {format_bytes(nbytes)} more" if nbytes else ""
        others = f"{format_bytes(self._others)} by earlier calls{need}"
        return ExecuteError(
            f"{self._figures.what} needs more device memory than the budget of {format_bytes(self._budget)}, "
            f"for {what}.\n"
            f"  {format_bytes(self._held.nbytes)} are held by inputs, results and caches, "
            f"{format_bytes(self._cached_bytes)} by weights in use, {others}.\n"
            "  Give a larger memory=, a smaller batch, fewer tokens, or a cache that stays on the host."
        )
