"""DemoProcesses: the processes that run a demo together, if torchrun has started more than one."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatrain.device import take_accelerator
from megatrain.errors import OptionError
from megatrain.ranks.launched import launched_group

_T = TypeVar("_T")


class DemoProcesses:
    """The processes of a demo: the ranks of a process group, or one process alone.

    Args:
        group: The process group; None for a process alone.

    Attributes:
        group: See above.
    """

    def __init__(self, group: Any = None):
        self.group = group
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())

    @staticmethod
    @contextmanager
    def joined() -> Generator[DemoProcesses]:
        """Joins the processes that torchrun has started, for the time of the body; each takes a device of its own."""
        with launched_group("gloo") as group:
            if group is not None:
                take_accelerator(dist.get_node_local_rank())
            yield DemoProcesses(group)

    def __str__(self) -> str:
        return (
            ""
            if self.group is None
            else f"ranks   {self._size} processes, each takes a part of a step's micro-batches\n"
        )

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints."""
        return self._rank == 0

    @property
    def is_again(self) -> bool:
        """Whether torchrun has started the processes anew, because one of them ended."""
        # torchrun says it nowhere else.
        return self.group is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # noqa: TID251

    def check(self, micro_batches: int) -> None:
        """Refuses a demo whose steps have too few micro-batches.

        Raises:
            OptionError: If there are fewer than processes.
        """
        if micro_batches < self._size:
            raise OptionError(
                f"--micro-batches {micro_batches} is less than the {self._size} processes.\n"
                "  Each process takes at least one micro-batch of each step.\n"
                f"  Give --micro-batches {self._size}, or start fewer processes."
            )

    def part(self, micro_batches: Sequence[_T]) -> list[_T]:
        """This process's micro-batches of a step: those of all processes one after the other are the step's."""
        edges = [len(micro_batches) * rank // self._size for rank in (self._rank, self._rank + 1)]
        return list(micro_batches[slice(*edges)])

    def agreed(self, number: float) -> float:
        """The first process's number: clocks of several differ, and all of them must end with the same step."""
        if self.group is None:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)

    def wait(self) -> None:
        """Waits until all processes are here."""
        if self.group is not None:
            dist.barrier()

    def end_one(self) -> None:
        """Ends the last process at once, as if the system had killed it."""
        if self._rank == self._size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
