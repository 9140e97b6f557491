"""What one of several ranks draws in a training step: a part of the numbers that one process would draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatrain.device import Device
from megatrain.runtime.drawing.draws import Draws, cannot_draw_ahead
from megatrain.runtime.drawing.micro_batch_generators import BlockGenerators, MicroBatchGenerators
from megatrain.runtime.rng import OwnGenerators, RngState, kept_generators


@runtime_checkable
class RankDraws(Protocol):
    """The part of a step's random numbers that is one rank's."""

    def generators(self, device: Device) -> Sequence[MicroBatchGenerators]:
        """What each of its micro-batches draws from, as in a process that has all micro-batches and all blocks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchDraws:
    """Those of a rank that has micro-batches of its own, and all blocks.

    Args:
        begins_at: Where this rank's first forward begins.
        ends: Where each of its forwards ends.
        first: How many micro-batches earlier ranks have.
        leaves_at: Where the step leaves this rank's global generators: on rank 0 at the end of the last forward of all
            ranks, on others where they are.
    """

    begins_at: RngState
    ends: Sequence[RngState]
    first: int
    leaves_at: RngState

    def generators(self, device: Device) -> Sequence[MicroBatchGenerators]:
        """See `RankDraws`."""
        found: list[MicroBatchGenerators] = []
        begins = [self.begins_at, *self.ends]
        for number, end in enumerate(self.ends):
            # The first of all draws from the global generators, as it does in a process alone.
            forward = None if self.first + number == 0 else OwnGenerators(begins[number], device)
            found.append(MicroBatchGenerators(forward, device, ends_at=end, leaves_at=self.leaves_at))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class BlockDraws:
    """Those of a rank that has some of the blocks, and all micro-batches of its host.

    Args:
        blocks: Of each micro-batch: where each block of this rank begins and ends, by its number here.
        leaves_at: See `MicroBatchDraws`.
    """

    blocks: Sequence[Mapping[int, tuple[RngState, RngState]]]
    leaves_at: RngState

    def generators(self, device: Device) -> Sequence[MicroBatchGenerators]:
        """See `RankDraws`."""
        found: list[MicroBatchGenerators] = []
        for each in self.blocks:
            blocks = {block: BlockGenerators(*states, device) for block, states in each.items()}
            found.append(MicroBatchGenerators(quiet_on=device, leaves_at=self.leaves_at, blocks=blocks))
        return found


def drawn_ends(draws: Sequence[Draws | None], begins_at: RngState, device: Device) -> list[Sequence[RngState]]:
    """Draws what some forwards draw, one after the other.

    Args:
        draws: Of each forward.
        begins_at: Where the first begins.
        device: Compute device.

    Returns:
        Of each forward, where the generators are at the end of each of its blocks.

    Raises:
        DrawsError: If a forward can't be drawn ahead.
    """
    found: list[Sequence[RngState]] = []
    with kept_generators(device):
        begins_at.restore(device)
        for each in draws:
            if each is None:
                raise cannot_draw_ahead()
            found.append(each.ends(device))
    return found
