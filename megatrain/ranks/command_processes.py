"""CommandProcesses: the processes that run one command together, if torchrun has started more than one."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from megatrain.counts import counted
from megatrain.device import Device, find, num_accelerators, take_accelerator, usable
from megatrain.errors import MegatrainError, OptionError, RanksError
from megatrain.ranks.launched import launched_group
from megatrain.ranks.meeting import words_of

_T = TypeVar("_T")
_HEARD_S = 10.0
"""How long a process waits for the first one's error before it prints its own."""
_SAID_S = 2.0
"""torchrun ends all processes when one has ended: the first one has so long to print its error."""
_WRONG, _INTERRUPTED = 2, 130
"""Exit statuses of the command; see `megatrain.cli.main`."""


class CommandProcesses:
    """The processes of a command that trains: the ranks of a process group, or one process alone.

    Until the model is compiled they meet by collectives of the group; from then on training steps find what fails.

    Args:
        group: The process group; None for a process alone.

    Attributes:
        rank: Of this process, from 0.
        size: How many processes there are.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    @staticmethod
    @contextmanager
    def joined() -> Generator[CommandProcesses]:
        """Joins the processes that torchrun has started, for the time of the body.

        The first one prints, and says what all of them would say. The others print nothing but errors of their own.
        """
        with launched_group() as group, ExitStack() as silent:
            found = CommandProcesses(group)
            if not found.is_first:
                silent.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            try:
                yield found
            except MegatrainError as error:
                if found._is_said_by_first(str(error)):
                    _end_behind_first()
                raise
            except KeyboardInterrupt:
                if found.is_first:
                    raise
                raise SystemExit(_INTERRUPTED) from None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints, and writes files."""
        return self.rank == 0

    @property
    def place(self) -> str:
        """Where this process stands among all, by a name of `StepKind`."""
        if self.size == 1:
            return "alone"
        return "first" if self.is_first else "last" if self.rank == self.size - 1 else "middle"

    def device(self, given: str | None) -> Device:
        """Returns the device of a name; each of several processes takes the accelerator of its number on its host.

        Raises:
            OptionError: If the name is that of a single card, or there are fewer cards than processes.
        """
        if self.size == 1 or find(given).is_host:
            return usable(given)
        if given is not None and ":" in given:
            raise OptionError(
                f"--device {given} is one device, and there are {self.size} processes.\n"
                "  Each process takes the device that has its number on its host (LOCAL_RANK).\n"
                f"  Give --device {given.partition(':')[0]}, or leave --device out."
            )
        index, count = dist.get_node_local_rank(), num_accelerators()
        if index >= count:
            raise OptionError(
                f"process {index} of this host has no device of its own: there {'is' if count == 1 else 'are'} "
                f"{count}, and they count from 0.\n"
                "  Each process computes on another device, whose memory it plans.\n"
                f"  Start {count} on this host (--nproc-per-node={count}); or give --device cpu."
            )
        take_accelerator(index)
        return usable(given)

    def together(self, code: Callable[[], _T]) -> _T:
        """Runs code in all processes, and returns when all of them have run it.

        Raises:
            RanksError: If it failed in another process.
        """
        if self.size == 1:
            return code()
        try:
            found, error, said = code(), None, None
        except Exception as raised:  # raised below, when the others know of it
            found, error, said = None, raised, f"{type(raised).__name__}: {raised}"
        told = self._gathered(said)
        if told[0] is not None and not self.is_first and said in (None, told[0]):
            _end_behind_first()
        if error is not None:
            raise error
        failed = next((rank for rank, words in enumerate(told) if words is not None), None)
        if failed is not None:
            raise RanksError(
                f"rank {failed} failed: {told[failed].partition(chr(10))[0]}\n"
                "  All processes read the same files and train together.\n"
                "  Look at what that process has printed."
            )
        return found  # pyright: ignore[reportReturnType]  # code has returned it

    def of_first(self, code: Callable[[], _T]) -> _T:
        """Runs code in the first process; returns what it returned, in all of them.

        Args:
            code: Its result can be pickled.
        """
        found = self.together(lambda: code() if self.is_first else None)
        return found if self.size == 1 else self._gathered(found)[0]  # pyright: ignore[reportReturnType]

    def compare(self, facts: Mapping[str, object]) -> None:
        """Looks whether plain values are the same in all processes.

        Args:
            facts: By their names in words.

        Raises:
            RanksError: With the first difference; the same in all of them.
        """
        told = [dict(facts)] if self.size == 1 else self._gathered(dict(facts))
        for rank, theirs in enumerate(told):
            for name, first in told[0].items():
                if theirs[name] != first:
                    raise RanksError(
                        f"the ranks differ: {name} is {first} on rank 0, but {theirs[name]} on rank {rank}.\n"
                        "  All processes read the same model and the same data, and divide the micro-batches.\n"
                        "  Give all hosts the same files, and the same versions of the libraries."
                    )

    def here(self) -> int:
        """How many of the processes run on this host."""
        name = socket.gethostname()
        return 1 if self.size == 1 else self._gathered(name).count(name)

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank.

        Raises:
            RanksError: If one of them is gone.
        """
        told: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(told, value, self._group)
        except RuntimeError as error:
            raise RanksError(
                f"another one of the {counted(self.size, 'process')} has ended: {words_of(error)}\n"
                "  A training goes on with all of its processes.\n"
                "  Look at what torchrun says of it. The same command begins again, from the newest checkpoint."
            ) from error
        return told

    def _is_said_by_first(self, said: str) -> bool:
        """Whether the first process ends by the same error, so that it alone has to print it."""
        if self.size == 1:
            return False
        try:
            store = self._group.get_group_store()
            if self.is_first:
                store.set("megatrain/command/error", said)
                return False
            store.wait(["megatrain/command/error"], timedelta(seconds=_HEARD_S))
            return store.get("megatrain/command/error").decode() == said
        except RuntimeError:  # it has none, or is gone with the store
            return False


ALONE = CommandProcesses()


def _end_behind_first() -> NoReturn:
    """Ends a process whose error the first one prints."""
    time.sleep(_SAID_S)
    raise SystemExit(_WRONG)
