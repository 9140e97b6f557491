"""Exchange: who else has gradients of a step's blocks, and parts of their updates; nobody, for a process alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megatrain.device.bus import Bus, GrowingArena
from megatrain.passes.program import Program
from megatrain.runtime.gradients import Landed
from megatrain.scheduler.instructions import Bytes
from megatrain.scheduler.schedule import Schedule

Word = dict[str, Any]
"""What a process tells others: numbers, texts, lists and dictionaries, by name."""


class Exchange:
    """What a training step asks of other processes that train the same model; this one has none.

    `megatrain.ranks.rank_exchange` has the one of several processes. There whatever waits for others may raise a
    `RanksError` that names one that failed, is elsewhere or differs; and `agree`, `check_room` and `refuse` an error of
    a model, an optimizer or a call that several processes can't have.

    Attributes:
        broken: Why no step can follow; None as long as one can.
    """

    is_alone = True
    rank = 0
    broken: str | None = None

    # -- gradients -------------------------------------------------------------------------------------------

    def scheduled(self, schedule: Schedule) -> Schedule:
        """A schedule with the ops that wait for others."""
        return schedule

    def landing(self, bus: Bus) -> GrowingArena:
        """The memory where this process's gradients wait for their updates."""
        return GrowingArena(bus)

    def land(self, block: int, where: Bytes | None, landed: Sequence[Landed]) -> Sequence[Landed] | None:
        """Takes a block's gradients of this process; see `Land`."""
        del block, where
        return landed

    def kept(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A whole gradient of this process's part, where others find it as long as its update is due."""
        del parameter
        return gradient

    def norms(self, own: Mapping[int, tuple[float, str]]) -> Sequence[Mapping[int, tuple[float, str]]]:
        """The norms of single gradients, and their dtypes, of all processes; those of this one are given."""
        return [own]

    # -- updates ---------------------------------------------------------------------------------------------

    def begin_updates(self) -> None:
        """The optimizers' step begins."""

    def updating(
        self, held: Collection[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor], *, takes_over: bool
    ) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor]]:
        """Updates parameters in the body.

        Args:
            held: Those of a block that optimizers hold.
            gradients: The whole gradients that there are.
            takes_over: Other processes' parts as well, unless they have begun.

        Yields:
            The gradients of the parameters that are to be updated here, and of no others.
        """
        del held, takes_over
        return nullcontext(gradients)

    def wait(self, held: Collection[torch.Tensor], go_on: Callable[[], object], *, gives_up: bool) -> bool:
        """Waits until all processes have updated their parts of some parameters.

        Args:
            go_on: Called now and then; raises an error to give the wait up.
            gives_up: Whether to return where an update has failed elsewhere, so that any process may make it.
        """
        del held, go_on, gives_up
        return True

    # -- a step ----------------------------------------------------------------------------------------------

    @contextmanager
    def taking(self, at: str = "a step") -> Generator[None]:
        """Takes a step, or makes another call of all processes; if it fails here, it fails on all of them."""
        del at
        yield

    def agree(
        self, programs: Sequence[Program], schedule: Schedule, facts: Mapping[str, object], word: Word
    ) -> list[Word]:
        """All processes take the same step next.

        Args:
            programs: What runs here, one per micro-batch, of the same blocks.
            facts: What must be the same on all.

        Returns:
            What all tell, by rank; none where there are no others.
        """
        del programs, schedule, facts, word
        return []

    def check_room(self, schedule: Schedule, room: Callable[[], tuple[Mapping[str, int], int]]) -> None:
        """Refuses a step before any process has allocated something for it, where the memory is too small for all.

        Args:
            room: Adds up the host memory that it takes: bytes by use, and how many of them this process has already.
        """

    def vote(self) -> None:
        """Waits until the forwards of all processes have succeeded; until then each may run its own again."""

    def may_repeat(self) -> bool:
        """Whether this process may run its part of the step again: no other has used a gradient of it."""
        return True

    def watching_loss(self) -> AbstractContextManager[object]:
        """Runs the code of a loss."""
        return nullcontext()

    def losses(self, losses: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The losses of the micro-batches of all processes, in the order of ranks."""
        return losses

    # -- between steps ---------------------------------------------------------------------------------------

    def tell(self, at: str, word: Word) -> list[Word]:
        """Tells all processes something, and hears what they tell; by itself there is what this one tells."""
        del at
        return [word]

    def check_written(self, at: str) -> None:
        """Refuses what user code has written on one process alone into state that all share."""

    def refuse(self, what: str, way_out: str) -> None:
        """Refuses something that only a process alone can do."""
