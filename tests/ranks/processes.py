"""Processes of one process group, which run functions of tests side by side; Gloo on the loopback interface."""

from __future__ import annotations

import importlib
import io
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.captures import lowered_once, rehearsed_once
from tests.simulated_device.loading import load, unavailable

WAIT_S = 100.0
SHARED = "memfd:megatrain-store"
TESTS = ("tests.ranks.sides",)  # which import what most processes of tests need


class Processes:
    """Some processes of one group. A function that they run gets the group's ranks from `torch.distributed`.

    Args:
        size: How many.
        simulated: Each has the simulated device.
    """

    def __init__(self, size: int, *, simulated: bool = False):
        # A server that has imported everything once, and forks: a process is there in no time. A first capture imports
        # `torch._dynamo`, which takes longer than most tests.
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "megatrain", *TESTS])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.size = size
        self.inboxes = [context.SimpleQueue() for _ in range(size)]
        self.outboxes = [context.Queue() for _ in range(size)]
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            queues = self.inboxes[rank], self.outboxes[rank]
            arguments = (rank, size, self.store.port, *queues, simulated)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, of: Sequence[int] | None = None) -> list[Any]:
        """Runs a function of a module on all ranks; returns the results, or the errors that were raised, by rank.

        Args:
            function: Gets its rank, then these arguments.
            arguments: What can be pickled.
            of: Whose results; None waits for all.
        """
        self.begin(function, *arguments)
        return [self.result(rank) for rank in (range(self.size) if of is None else of)]

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Has all ranks run a function, and doesn't wait."""
        # pytest imports a test's module by a name that processes don't know.
        module = f"tests.{function.__module__.removeprefix('tests.')}"
        for inbox in self.inboxes:
            inbox.put((module, function.__qualname__, arguments))

    def result(self, rank: int) -> Any:
        """The result of a rank."""
        try:
            return torch.load(io.BytesIO(self.outboxes[rank].get(timeout=WAIT_S)), weights_only=False)
        except Empty:
            raise AssertionError(f"rank {rank} has no result after {WAIT_S:.0f} s") from None

    def close(self) -> None:
        """Ends all of them."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, inbox: Any, outbox: Any, simulated: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if simulated:
        load()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with lowered_once(), rehearsed_once():  # tests have few models
        while True:
            try:
                module, name, arguments = inbox.get()
                found = getattr(importlib.import_module(module), name)(rank, *arguments)
            except BaseException as error:
                found = error
            content = io.BytesIO()
            torch.save(found, content)
            outbox.put(content.getvalue())


def processes_fixture(size: int, scope: Any = "module", *, simulated: bool = False) -> Any:
    """A fixture: so many processes, which end with its scope.

    Args:
        size: How many.
        scope: Of the fixture, as pytest's.
        simulated: Each has the simulated device; where there is none, tests are skipped.
    """

    @pytest.fixture(scope=scope)
    def processes() -> Iterator[Processes]:
        reason = unavailable() if simulated else None
        if reason is not None:
            pytest.skip(reason)
        made = Processes(size, simulated=simulated)
        yield made
        made.close()

    return processes


def refused(work: Callable[[], object]) -> str:
    """What was raised, or nothing."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
