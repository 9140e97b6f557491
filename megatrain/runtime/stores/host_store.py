"""HostStore: the model's state on the host, in one arena or a few, each block's state contiguous."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch.autograd.graph import increment_version

from megatrain.base.host_limits import available_bytes
from megatrain.base.sizes import aligned, format_bytes
from megatrain.device.bus import PIECE_BYTES, Bus
from megatrain.device.host_arena import HostArena, together
from megatrain.device.unshared import check_unshared
from megatrain.errors import ExecuteError, PageLockWarning
from megatrain.files.weight_files import MappedFile
from megatrain.runtime.stores.residency import (
    OneCopy,
    Residency,
    Sent,
    StorePlace,
    copies_of,
    in_place,
    lend,
    residency_of,
    staying,
    take_in,
)
from megatrain.runtime.stores.weights import Weights, check_replaceable, replace_memory
from megatrain.tracer.block_image import BlockImage, is_alike
from megatrain.tracer.spec import TensorSpec


def check_movable(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], weights: Weights | None
) -> None:
    """Refuses tensors that can't be moved faithfully: no values, another spec, or memory shared by two keys."""
    for key, tensor in tensors.items():
        spec = specs[key]
        if tensor.is_meta and (weights is None or key not in weights):
            raise ExecuteError(f"`{key}` is on the meta device and has no values; load it before the first call.")
        check_replaceable(key, tensor)
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ExecuteError(f"`{key}` is {TensorSpec.of(tensor)}, but the model was compiled for {spec}.")
    check_unshared(tensors)


def lacks_room(moves: Sequence[tuple[torch.Tensor, TensorSpec]], alignment: int) -> ExecuteError | None:
    """Compares the memory that moving takes, beyond the tensors' present memory, with the host's.

    Each tensor is copied and then frees its own memory, so that the most that is needed at once is padding
    plus the largest tensor, unless several tensors share one storage: that is freed with the last of them.

    Returns:
        An error with the bytes that are missing; None if there is room.
    """
    left: dict[int, list[int]] = {}
    for tensor, _ in moves:
        storage = tensor.untyped_storage()
        nbytes, count = left.setdefault(storage.data_ptr(), [0 if tensor.is_meta else storage.nbytes(), 0])
        left[storage.data_ptr()] = [nbytes, count + 1]
    surplus = needed = total = 0
    for tensor, spec in moves:
        total += aligned(spec.nbytes, alignment)
        surplus += aligned(spec.nbytes, alignment)
        needed = max(needed, surplus)
        entry = left[tensor.untyped_storage().data_ptr()]
        entry[1] -= 1
        surplus -= entry[0] if entry[1] == 0 else 0
    available = available_bytes()
    if needed <= available:
        return None
    return ExecuteError(
        f"moving the model's state into the host store needs {format_bytes(needed)} more host memory, "
        f"{format_bytes(available)} are available.\n"
        f"  The store takes {format_bytes(total)}; the present memory of the state is freed tensor by tensor.\n"
        "  Free host memory, or use a machine with more."
    )


# A drive reads several pieces at a time faster than one after the other.
_READERS, _READ_BYTES = 8, 32 << 20

_WAYS_OUT = (
    "Each step reads from the disk what the system's cache doesn't hold of them, and copies pass through a ring. "
    "Leave the files as they are; more micro-batches share each read."
)

Writes = tuple[tuple[int, int], ...]
"""Of each of some tensors: which memory it has had, and torch's count of the writes into it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    layout: BlockImage
    runs: tuple[OneCopy, ...]
    bound: tuple[torch.Tensor, ...]
    sent: tuple[Sent, ...]


class HostStore:
    """Holds the state of a model; parameters and buffers become views of it and stay the same objects.

    State that several blocks use (tied) is stored with the first of them; the prefetch of the others takes one more
    copy. The arenas exist as long as any tensor views them, even longer than the store.

    Args:
        tensors: The state by key: the model's own parameters and buffers, on the CPU. Tensors that `images`
            do not name stay as they are; a later `extend` may take them.
        weights: Files that hold the values of these tensors; with them, tensors may be on meta.

    Attributes:
        num_moves: How often state that was here got other memory.

    Raises:
        ExecuteError: Before anything changes, if the host lacks the memory, or a tensor can't be moved faithfully.
        WeightsError: If a file of `weights` can't be read; values read before stay in the model.
    """

    def __init__(
        self,
        images: Sequence[BlockImage],
        tensors: Mapping[str, torch.Tensor],
        bus: Bus,
        weights: Weights | None = None,
    ) -> None:
        self._bus = bus
        self._tensors = dict(tensors)
        self._residencies: dict[str, Residency] = {}
        self._arenas: list[HostArena] = []
        # By the identity of their arenas.
        self._files: dict[int, MappedFile] = {}
        self._readers: ThreadPoolExecutor | None = None
        # By the identity of an image, which lives as long as what is placed: hashing one costs more than a small copy.
        self._placed: dict[int, _Placed] = {}
        self.num_moves = 0
        self.extend(images, weights=weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, and of the memory of others that is used in place, without files."""
        return sum(arena.nbytes for arena in self._arenas if id(arena) not in self._files)

    @property
    def in_files(self) -> frozenset[str]:
        """Keys of state that is used in its files."""
        return frozenset(key for key, residency in self._residencies.items() if id(residency.arena) in self._files)

    @property
    def note(self) -> str:
        """What is used in its files, in words; empty if that is nothing."""
        nbytes = sum(self._residencies[key].spec.nbytes for key in self.in_files)
        text = "the host has no room for all weights, so frozen ones stay in their files"
        return f"{text} ({format_bytes(nbytes)})" if nbytes else ""

    def check_files(self) -> None:
        """Refuses state in files that somebody has changed since.

        Raises:
            WeightsError: Naming the file.
        """
        for file in self._files.values():
            file.check()

    def extend(
        self,
        images: Sequence[BlockImage],
        tensors: Mapping[str, torch.Tensor] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Adds block images, and an arena for the keys that are new; state already here stays where it is.

        Args:
            images: Layouts; equal ones may be added again.
            tensors: More state by key, in addition to that given at construction.
        """
        self._tensors.update(tensors or {})
        fresh: dict[str, TensorSpec] = {}
        blocks: list[list[str]] = []
        for layout in images:
            num_known = len(fresh)
            for entry in layout.entries:
                residency = self._residencies.get(entry.owner)
                spec = entry.spec if entry.base is None else TensorSpec.of(self._tensors[entry.base])
                known = fresh.setdefault(entry.owner, spec) if residency is None else residency.spec
                assert is_alike(known, spec), f"{entry.owner} is {known} in one block and {spec} in another"
            blocks.append(list(islice(fresh, num_known, None)))
        if fresh:
            check_movable({key: self._tensors[key] for key in fresh}, fresh, weights)
            is_slow = self._bus.device.lock_bytes > 0
            for key in staying({key: self._tensors[key] for key in fresh}, fresh, is_slow=is_slow):
                self._stay(key, fresh.pop(key), weights)
            blocks = [[key for key in keys if key in fresh] for keys in blocks]
            alignment = max(layout.alignment for layout in images)  # so that neighbours in a block cross in one copy
            if weights is not None and (weights.stay or self._lacks_room(fresh, alignment)):
                blocks = self._leave(fresh, blocks, weights)
            if error := self._lacks_room(fresh, alignment):
                raise error
            self._move(fresh, blocks, alignment, weights)
        for layout in images:
            self._place(layout)

    def forget_resized(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Drops state that has another shape or dtype in `tensors`: a later `extend` takes the new tensor.

        Its old bytes stay allocated with their arena; images that contain it can't be prefetched any more.
        """
        now = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        gone = {
            k: residency
            for k, residency in self._residencies.items()
            if k in now and now[k] != (residency.shape, residency.view.dtype)
        }
        for key, residency in gone.items():
            del self._residencies[key]
            increment_version(residency.view)  # a backward that is still to come sees that its weights were changed
        self._placed = {
            number: placed
            for number, placed in self._placed.items()
            if not any(entry.owner in gone for entry in placed.layout.entries)
        }

    @property
    def residencies(self) -> Mapping[str, Residency]:
        """Where the state is, by key."""
        return self._residencies

    def move(self, places: Mapping[str, StorePlace], sent: Mapping[str, Sent]) -> None:
        """Gives state that is here other memory, which has the same values; `sent` has where copies come from."""
        for key, place in places.items():
            residency = self._residencies[key]
            replace_memory(key, residency.tensor, place.view)
            residency.places = [place]
            residency.use(place.arena, place.offset, place.view, sent.get(key))
        self._place_anew()

    def _place_anew(self) -> None:
        """Finds the copies of all blocks again, and lets go of arenas in which nothing is any more."""
        used = {id(each.arena) for residency in self._residencies.values() for each in (residency, *residency.places)}
        self._arenas = [arena for key, arena in {id(arena): arena for arena in self._arenas}.items() if key in used]
        for placed in self._placed.values():
            self._place(placed.layout)
        self.num_moves += 1

    def lock(self) -> None:
        """Page-locks what isn't yet, where transfers gain from that.

        Locking makes all pages resident: if done first, model and arena would both be fully resident. If it fails, the
        model is here and whole, and can be locked later.
        """
        self._bus.lock(self._arenas)

    def give_back(self, layout: BlockImage, keys: Collection[str]) -> None:
        """Gives the memory of some state of a block back to the system: its tensors have no values until it is written.

        Raises:
            ExecuteError: If the system doesn't lock what it did.
        """
        for arena, start, end in self._ranges(layout, keys):
            arena.give_back(start, end, self._bus.device)

    def lock_again(self, layout: BlockImage, keys: Collection[str]) -> None:
        """Page-locks what `give_back` has unlocked, as far as the system does: other copies wait for one another."""
        for arena, start, end in self._ranges(layout, keys):
            with suppress(ExecuteError):
                arena.lock_again(start, end, self._bus.device)

    def take(self, key: str, values: torch.Tensor) -> None:
        """Copies new values of a tensor from the device, as work of the current stream, not through a ring.

        Args:
            values: In the order of its memory, without dimensions.
        """
        residency = self._residencies[key]
        tensor, source = residency.tensor.data, values.view(torch.uint8)  # torch counts no write through `.data`
        out = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for start, end in pairwise([0, *residency.arena.cuts(out), source.numel()]):
            self._bus.device.copy(out[start:end], source[start:end])

    def _ranges(self, layout: BlockImage, keys: Collection[str]) -> list[tuple[HostArena, int, int]]:
        """The bytes of some state of a block, neighbours joined, so that pages which they share are whole."""
        found: list[tuple[HostArena, int, int]] = []
        for residency in (self._residencies[entry.owner] for entry in layout.entries if entry.key in keys):
            arena, start, end = residency.arena, residency.offset, residency.offset + residency.spec.nbytes
            last = found[-1] if found else (None, 0, 0)
            if last[0] is arena and last[2] <= start <= aligned(last[2], layout.alignment):
                found[-1] = arena, last[1], end
            else:
                found.append((arena, start, end))
        return found

    def _lacks_room(self, fresh: Mapping[str, TensorSpec], alignment: int) -> ExecuteError | None:
        return lacks_room([(self._tensors[key], spec) for key, spec in fresh.items()], alignment)

    def _leave(self, fresh: dict[str, TensorSpec], blocks: list[list[str]], weights: Weights) -> list[list[str]]:
        """Leaves frozen parameters in their files, and takes them from `fresh` and `blocks`."""
        files: dict[Path, MappedFile | None] = {}
        for key, stored in weights.staying({key: self._tensors[key] for key in fresh}).items():
            if stored.file not in files:
                files[stored.file] = MappedFile.of(stored)
            file = files[stored.file]
            if file is not None:
                spec = fresh.pop(key)
                place, given = lend(key, spec, file.arena, stored.start)
                replace_memory(key, self._tensors[key], given)
                self._residencies[key] = Residency(
                    key, spec, file.arena, stored.start, self._tensors[key], place.view, [place]
                )
        mapped = [file for file in files.values() if file is not None]
        self._arenas += [file.arena for file in mapped]
        self._files |= {id(file.arena): file for file in mapped}
        if mapped:
            warnings.warn(f"{self.note}.\n  {_WAYS_OUT}", PageLockWarning, stacklevel=2)
        return [[key for key in keys if key in fresh] for keys in blocks]

    def _move(
        self,
        fresh: Mapping[str, TensorSpec],
        blocks: Sequence[Sequence[str]],
        alignment: int,
        weights: Weights | None,
    ) -> None:
        """Copies or reads tensors into new arenas one by one; each frees its old memory before the next."""
        sizes = [sum(aligned(fresh[key].nbytes, alignment) for key in keys) for keys in blocks]
        groups = together(sizes, min(self._bus.device.lock_bytes, PIECE_BYTES))
        # The host may lack memory for the last of them; no tensor has moved then.
        arenas = [HostArena(sum(sizes[index] for index in group)) for group in groups]
        self._arenas += arenas
        with self._bus.locking() as begin:
            for group, arena in zip(groups, arenas, strict=True):
                begin(arena)
                offset = 0
                for key in (key for index in group for key in blocks[index]):
                    self._move_one(key, fresh[key], arena, offset, weights)
                    offset += aligned(fresh[key].nbytes, alignment)

    def _move_one(self, key: str, spec: TensorSpec, arena: HostArena, offset: int, weights: Weights | None) -> None:
        tensor = self._tensors[key]
        place, given = lend(key, spec, arena, offset)
        if weights is not None and key in weights:
            weights.read(key, place.view)
        else:
            place.view.copy_(tensor.detach())
        replace_memory(key, tensor, given)
        self._residencies[key] = Residency(key, spec, arena, offset, tensor, place.view, [place])

    def _stay(self, key: str, spec: TensorSpec, weights: Weights | None) -> None:
        tensor = self._tensors[key]
        if weights is not None and key in weights:
            weights.read(key, tensor.data)
        arena, view = in_place(tensor)
        self._arenas.append(arena)
        self._residencies[key] = Residency(key, spec, arena, 0, tensor, view, [])

    def _place(self, layout: BlockImage) -> None:
        residencies = [residency_of(entry, self._residencies) for entry in layout.entries]
        runs = tuple(copies_of(layout.entries, residencies, layout.alignment))
        sent = tuple(residency.sent for residency in residencies if residency.sent is not None)
        self._placed[id(layout)] = _Placed(layout, runs, tuple(residency.view for residency in residencies), sent)

    def prefetch(self, layout: BlockImage, out: torch.Tensor, *, without: frozenset[str] = frozenset()) -> None:
        """Copies a block's state into a slot, with one copy for adjacent tensors and one for each tied.

        What this rank's user has written, and other ranks don't see yet, is copied as well, from ordinary memory.

        Args:
            layout: An image known to this store.
            out: The slot, `uint8`, at least as large as the image.
            without: Keys of entries that are there.
        """
        placed = self._placed[id(layout)]
        runs: Sequence[OneCopy] = placed.runs
        own = any(sent.is_stale() for sent in placed.sent)
        if without or own:
            entries = [entry for entry in layout.entries if entry.key not in without]
            runs = list(
                copies_of(entries, [residency_of(e, self._residencies) for e in entries], layout.alignment, own=own)
            )
        for run in self._read_ahead(runs) if self._files else runs:
            self._bus.to_device(out[run.start : run.end], run.source, run.arena)

    def _read_ahead(self, runs: Sequence[OneCopy]) -> Iterator[OneCopy]:
        """Yields copies in their order, those of files once the system has the bytes; the next are read meanwhile."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, "megatrain-read")
        reads: list[list[Future[None]]] = []
        for run in runs:
            file = self._files.get(id(run.arena))
            pieces = () if file is None else run.source.split(_READ_BYTES)
            reads.append([self._readers.submit(file.fetch, piece) for piece in pieces if file is not None])
        for run, futures in zip(runs, reads, strict=True):
            for future in futures:
                future.result()
            yield run

    def stamp(self, layout: BlockImage, keys: Collection[str]) -> Writes | None:
        """What changes with each write into entries of an image that torch counts; None where it counts none."""
        residencies = [self._residencies[entry.owner] for entry in layout.entries if entry.key in keys]
        if any(residency.tensor.is_inference() for residency in residencies):
            return None
        return tuple((residency.memory, residency.tensor._version) for residency in residencies)

    def bytes_of(self, layout: BlockImage, keys: Collection[str]) -> list[torch.Tensor]:
        """The bytes of entries of an image, in the arena."""
        residencies = [residency_of(e, self._residencies) for e in layout.entries if e.key in keys and e.spec.nbytes]
        return [
            residency.arena.tensor[residency.offset : residency.offset + residency.spec.nbytes]
            for residency in residencies
        ]

    def has(self, key: str) -> bool:
        """Tells whether a tensor of the model is here."""
        return key in self._residencies

    def source(self, key: str) -> tuple[torch.Tensor, HostArena]:
        """Returns a tensor of the model as a view that needs no gradient, and the arena that it views."""
        return self._residencies[key].view, self._residencies[key].arena

    def bound(self, layout: BlockImage) -> list[torch.Tensor]:
        """Returns a block's state in place: views of the arena that need no gradient, in image order."""
        return list(self._placed[id(layout)].bound)

    def refresh(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Takes over new memory that the user gave to a tensor since the last call (`p.data = x`).

        Costs well below a microsecond per tensor when nothing changed, and about one per file that is used in place.

        Args:
            tensors: The state by key as it is now, where the objects themselves may have been replaced
                (`load_state_dict(assign=True)`); None if they are the same.

        Raises:
            WeightsError: As `check_files`.
        """
        self.check_files()
        for key, tensor in (tensors or {}).items():
            residency = self._residencies.get(key)
            self._tensors[key] = tensor
            if residency is not None and residency.tensor is not tensor:
                residency.replace(tensor)
        changed = [residency for residency in self._residencies.values() if residency.has_changed]
        if changed:
            check_unshared({key: residency.tensor for key, residency in self._residencies.items()})
            self._arenas += take_in(changed)
            self._place_anew()
            self.lock()
