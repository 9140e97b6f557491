"""Runs cases in processes of their own: one that crashes or hangs costs its row, not the table."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.simulated_device import load
from tests.simulated_device.lstm_cell import lstm_cell
from tests.zoo.run import Row

TIME_LIMIT = 120.0


def rows(names: list[tuple[str, str]], jobs: int, device: str = "cpu", kernels: str | None = None) -> Iterator[Row]:
    """Yields a row for each `(case, family)` on a device, in the order in which they end; None is default kernels."""
    queue = list(reversed(names))
    workers: list[Worker] = []
    while queue or workers:
        while queue and len(workers) < jobs:
            workers.append(Worker(device, kernels))
        for worker in workers:
            if worker.at is None and queue:
                worker.give(*queue.pop())
        idle = [w for w in workers if w.at is None]
        for worker in idle:  # nothing is left for it
            worker.end()
        workers = [w for w in workers if w not in idle]
        ready = wait([w.pipe for w in workers], timeout=1.0)
        for worker in list(workers):
            row = worker.answer() if worker.pipe in ready else worker.check_time()
            if row is None:
                continue
            yield row
            if worker.is_lost:
                workers.remove(worker)


class Worker:
    """One process, which runs one case at a time."""

    def __init__(self, device: str, kernels: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device, kernels), daemon=True)
        self.process.start()
        theirs.close()
        self.at: tuple[str, str] | None = None
        self.since = 0.0
        self.is_lost = False

    def give(self, case: str, family: str) -> None:
        """Starts a case."""
        self.at, self.since = (case, family), time.monotonic()
        self.pipe.send(case)

    def answer(self) -> Row | None:
        """The row of the case that runs; an error if the process died on it."""
        assert self.at is not None
        try:
            row = Row(**self.pipe.recv())
        except EOFError:
            self.process.join()
            return self._lost(f"the process died with exit code {self.process.exitcode}")
        self.at = None
        # Whatever runs on the accelerator in this process from now on fails alike.
        self.is_lost = "AcceleratorError" in row.detail
        return row

    def check_time(self) -> Row | None:
        """An error if the case has run for too long, else None."""
        if time.monotonic() - self.since < TIME_LIMIT:
            return None
        self.process.kill()
        return self._lost(f"no result after {TIME_LIMIT:.0f} s")

    def end(self) -> None:
        """Lets the process go."""
        self.pipe.close()
        self.process.join()

    def _lost(self, why: str) -> Row:
        assert self.at is not None
        self.is_lost = True
        return Row(*self.at, "error", why, seconds=round(time.monotonic() - self.since, 1))


def _serve(pipe: Connection[Any, Any], device: str, kernels: str | None) -> None:
    from dataclasses import asdict

    from tests.zoo.collect import cases
    from tests.zoo.run import run

    if device == "sim":  # its streams work as late as the waits allow
        load().order("late")
    # What models and fake tensors have to say about themselves isn't part of the table.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known = cases()
    with lstm_cell() if device == "sim" else nullcontext():
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                return
            pipe.send(asdict(run(known[name], device, kernels)))
