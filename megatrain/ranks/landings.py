"""Landings: the gradients of each rank in memory that all ranks of a host see, and the sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatrain.base.sizes import aligned
from megatrain.device.bus import Bus, GrowingArena
from megatrain.device.host_arena import HostArena
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.ranks.processes import Ranks
from megatrain.ranks.shared_memory import PAGE
from megatrain.runtime.gradients import Landed, block_layouts
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.block_image import Entry, stored_stride, views
from megatrain.tracer.spec import TensorSpec

_AREA_BYTES = 1 << 42
"""Bytes from the landings of one rank to the next: what nobody touches takes no memory."""
_PIECE = 1 << 18  # elements: few enough for the caches, enough for threads
_LANDED, _PLACE, _SUMMED, _PRESENT = range(4)
GoOn = Callable[[], object]


class Landings(GrowingArena):
    """Where the gradients of a rank land, step by step, and where those of the others are.

    Args:
        ranks: All of them.
        bus: Brings gradients to the host.
    """

    def __init__(self, ranks: Ranks, bus: Bus) -> None:
        super().__init__(bus)
        self._ranks = ranks
        self._first_area = 1 + ranks.num_areas * ranks.size
        ranks.num_areas += 1
        self._maps: dict[int, HostArena] = {}
        self._boards: dict[tuple[tuple[str, ...], ...], torch.Tensor] = {}
        self.least = 0

    # -- memory ----------------------------------------------------------------------------------------------

    def ensure(self, nbytes: int) -> HostArena:
        """See `GrowingArena`. Memory that grows keeps what is there."""
        nbytes = max(nbytes, self.least)
        if nbytes > self.memory.nbytes:
            self.memory = self._mapped(self._ranks.rank, nbytes)
            self.bus.lock([self.memory])
        return self.memory

    def _mapped(self, rank: int, nbytes: int) -> HostArena:
        start = (self._first_area + rank) * _AREA_BYTES
        return HostArena.over(self._ranks.memory.landing(start, max(nbytes, 1)))

    def _bytes_of(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of a rank's landings."""
        known = self.memory if rank == self._ranks.rank else self._maps.get(rank)
        if known is None or known.nbytes < start + nbytes:
            known = self._maps[rank] = self._mapped(rank, start + nbytes)
        return known.tensor[start : start + nbytes]

    def offset_of(self, gradient: torch.Tensor) -> int:
        """Where a gradient is in the landings of this rank; -1 if it isn't there."""
        start = gradient.data_ptr() - self.memory.tensor.data_ptr() if self.memory.nbytes else -1
        return start if start < self.memory.nbytes else -1

    def gradient_at(self, rank: int, offset: int, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter in the landings of a rank, laid out like the parameter."""
        held = self._bytes_of(rank, offset, parameter.nbytes).view(parameter.dtype)
        return held.as_strided(parameter.shape, parameter.stride())

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, program: Program, *, lands: bool) -> None:
        """A step of some blocks begins, on all ranks.

        Args:
            program: Has the blocks.
            lands: Whether the schedule has a place for each block; otherwise each has one here.
        """
        self._program = program
        self._layouts = block_layouts(program)
        key = tuple(tuple(entry.key for entry in layout.entries) for layout in self._layouts)
        if key not in self._boards:
            most = max((len(keys) for keys in key), default=0)
            start = self._ranks.size * PAGE + self._ranks.board_bytes
            self._boards[key] = self._ranks.memory.words(start, self._ranks.size, len(key), _PRESENT + most)
            self._ranks.board_bytes += aligned(self._boards[key].nbytes, PAGE)
        self._board = self._boards[key]
        self._offsets: list[int] = []
        self.least = 0
        for layout in self._layouts if not lands else ():
            self._offsets.append(self.least)
            self.least += aligned(layout.nbytes, PAGE)

    def land(self, block: int, where: Bytes | None, landed: Sequence[Landed]) -> None:
        """Shows all ranks the gradients of a block of this one.

        Raises:
            ExecuteError: If one is sparse, or of another dtype than its parameter.
        """
        offset = self._offsets[block] if where is None else where.offset
        layout, board = self._layouts[block], self._board[self._ranks.rank, block]
        found = dict(zip(self._program.blocks[block].binding, landed, strict=True))
        places = views(layout, self.memory.tensor[offset : offset + layout.nbytes])
        for number, (entry, place) in enumerate(zip(layout.entries, places, strict=True)):
            gradient = found[entry.key].gradient
            if gradient is not None:
                _check(entry.key, gradient, entry.spec)
                if gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
            board[_PRESENT + number] = gradient is not None
        board[_PLACE] = offset
        self._say(block, _LANDED)

    def wait_for(self, block: int, *, summed: bool, go_on: GoOn) -> None:
        """Returns once all ranks have landed a block's gradients, or summed them."""
        words = self._board[:, block, _SUMMED if summed else _LANDED]
        self._ranks.wait_until(lambda: int(words.min()) >= self._ranks.count, go_on)

    def totals(self, block: int, is_mine: Callable[[str], bool]) -> list[Landed]:
        """Adds the gradients of all ranks, in their order, once they have landed.

        Args:
            block: The block.
            is_mine: Whether this rank takes the total of a state's gradient, which replaces its own: no other reads it.

        Returns:
            The totals of the block's state, in its order; none of what isn't this rank's.
        """
        layout, found = self._layouts[block], dict[str, torch.Tensor]()
        board = self._board[:, block]
        for number, entry in enumerate(layout.entries):
            there = [rank for rank in range(self._ranks.size) if board[rank, _PRESENT + number]]
            if not there or not is_mine(entry.key):
                continue
            terms = [self._flat(entry, rank, block) for rank in there]
            out = self._flat(entry, self._ranks.rank, block)
            _add(out, terms)
            found[entry.key] = out.as_strided(entry.spec.shape, stored_stride(entry.spec))
        self._say(block, _SUMMED)
        return [Landed(found.get(key)) for key in self._program.blocks[block].binding]

    def _flat(self, entry: Entry, rank: int, block: int) -> torch.Tensor:
        """The elements of a gradient of a rank, in the order of their memory."""
        start = int(self._board[rank, block, _PLACE]) + entry.offset
        return self._bytes_of(rank, start, entry.spec.nbytes).view(entry.spec.dtype)

    def _say(self, block: int, what: int) -> None:
        with self._ranks.memory.locked():  # which also orders what was written before for other processors
            self._board[self._ranks.rank, block, what] = self._ranks.count


def blocks_text(program: Program) -> Mapping[str, str]:
    """What each block trains, in words."""
    found: dict[str, str] = {}
    for block, layout in zip(program.blocks, block_layouts(program), strict=True):
        if layout.nbytes:
            entries = (f"{entry.key} {TensorSpec(entry.spec.shape, entry.spec.dtype)}" for entry in layout.entries)
            found[f"what block {block.index} trains"] = ", ".join(entries)
    return found


def _add(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Adds dense terms of one size in their order; `out` may be one of them."""
    for start in range(0, out.numel(), _PIECE):
        total, *others = (term[start : start + _PIECE] for term in terms)
        for other in others:
            total = total + other
        if (place := out[start : start + _PIECE]).data_ptr() != total.data_ptr():
            place.copy_(total)


def _check(key: str, gradient: torch.Tensor, spec: TensorSpec) -> None:
    if gradient.layout != torch.strided or gradient.dtype != spec.dtype:
        raise ExecuteError(
            f"the gradient of `{key}` is {gradient.dtype}, {gradient.layout}.\n"
            f"  Ranks add dense gradients of their parameter's dtype, {spec.dtype}.\n"
            "  Build an embedding with sparse=False, or train it in one process."
        )
