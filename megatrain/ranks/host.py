"""Host: which ranks run on one host, and the memory that they share."""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.ranks.host_file import HostFile, can_tell_copies

NAME: str | None = None
"""What a test says for the host of this process: ranks that say the same count as on one host, others as apart."""
Exchange = Callable[[Any], list[Any]]


class Host:
    """The ranks of one host.

    Args:
        rank: This rank.
        processes: The process of each of them, by rank.
        file: The memory that they share.

    Attributes:
        ranks: Theirs, ascending.
        index: The place of this rank among them, from 0.
        size: How many they are, at least two.
        file: See above.
    """

    def __init__(self, rank: int, processes: dict[int, int], file: HostFile):
        self.ranks = sorted(processes)
        self.index, self.size = self.ranks.index(rank), len(processes)
        self.file = file
        self._ends = {r: end for r, process in processes.items() if r != rank and (end := _end_of(process)) is not None}
        self._close = weakref.finalize(self, _close, list(self._ends.values()))

    def ended(self) -> Sequence[int]:
        """The ranks of this host whose processes have ended."""
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, end in self._ends.items() if end in found]


def host_of(rank: int, exchange: Exchange) -> Host | None:
    """Finds the ranks of this host and opens memory for all of them; all ranks call it at the same time.

    Args:
        rank: This rank.
        exchange: Gives a value to all ranks; returns those of all, by rank.

    Returns:
        None if there are no others here, or memory can't be shared: then each has its own.
    """
    name = host_name()
    told = exchange([name, os.getpid(), can_tell_copies()])
    mates = {r: process for r, (other, process, _) in enumerate(told) if other == name}
    is_able = len(mates) > 1 and all(told[r][2] for r in mates)
    made = HostFile.made() if is_able and rank == min(mates) else None
    addresses = exchange(None if made is None else made.address)
    file = made
    if is_able and made is None:
        with suppress(OSError):  # no rank shares then: each finds that out below
            file = HostFile.opened(addresses[min(mates)])
    has_file = exchange(file is not None)
    return Host(rank, mates, file) if file is not None and all(has_file[r] for r in mates) else None


def host_name() -> str:
    """Equal for processes that can open each other's files, on one host."""
    if NAME is not None:
        return NAME
    parts = [socket.gethostname(), str(os.getuid()) if hasattr(os, "getuid") else ""]
    with suppress(OSError):  # another system than Linux, which has no such memory either
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts)


def _end_of(process: int) -> int | None:
    """A descriptor that can be read once a process has ended; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(process)
    return None


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)
