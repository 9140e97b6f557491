"""SIGINT at random moments of steps, flushes, reads, saves and loads."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.children import Trial, in_children
from tests.faults.tally import Tally
from tests.faults.world import CASES, Undisturbed, World

KINDS = ("step", "step", "step", "save", "load", "flush", "read")
PER_WORLD = 60


@contextmanager
def ctrl_c() -> Generator[None]:
    """Makes SIGINT raise KeyboardInterrupt, also where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Finalizers:
    """Counts the interrupts that Python lost because they came in a `__del__`: nobody else hears of those."""

    def __init__(self) -> None:
        self.lost = 0

    def __enter__(self) -> Finalizers:
        self._before, sys.unraisablehook = sys.unraisablehook, self._note
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._before

    def _note(self, found: Any) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            self.lost += 1
        else:
            self._before(found)


class Timer:
    """Interrupts this process some time after `start`, unless `stop` comes first."""

    def __init__(self) -> None:
        self._is_armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, *_: Any) -> None:
        if self._is_armed:
            self._is_armed = False
            signal.raise_signal(signal.SIGINT)

    def start(self, seconds: float) -> None:
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds))

    def stop(self) -> bool:
        """Returns whether it rang."""
        rang, self._is_armed = not self._is_armed, False
        signal.setitimer(signal.ITIMER_REAL, 0)
        return rang


def interrupts(tally: Tally, folder: Path, *, seed: int, first: int, count: int) -> None:
    """Tries `count` interrupts, in runs of `PER_WORLD`."""
    sizes = [min(PER_WORLD, count - done) for done in range(0, count, PER_WORLD)]
    with ctrl_c():
        in_children(
            [(seed, first + number, size) for number, size in enumerate(sizes)],
            lambda: lambda item: one_run(folder, *item),
            tally,
            named=lambda item: Trial("interrupts of a run", None, _repeat(*item)),
            folder=folder.with_name("logs"),
        )


def _repeat(seed: int, number: int, size: int) -> str:
    return f"--only interrupts --seed {seed} --first {number} --count {size}"


def one_run(folder: Path, seed: int, number: int, size: int) -> list[Trial]:
    """One run with `size` interrupts, of which none comes too late, until something is wrong."""
    dice, timer, trials = random.Random(f"interrupts {seed} {number}"), Timer(), list[Trial]()
    name = sorted(CASES)[number % len(CASES)]
    world = World(name, Undisturbed(CASES[name]), folder)
    usual: dict[str, list[float]] = {}
    while len(trials) < size:
        kind = dice.choice(KINDS)
        act, times = world.ready(kind), usual.setdefault(kind, [])
        limit = 1.1 * median(times) if len(times) > 1 else 60.0
        with Finalizers() as finalizers:
            rang, has_come, took = one_interrupt(timer, act, dice.uniform(0, limit))
        if not has_come:
            times.append(took)
        complaint = world.complaint(kind)
        if rang and not has_come and not finalizers.lost:
            complaint = complaint or "the interrupt was lost"
        if rang or complaint is not None:
            what = f"interrupt in a {'finalizer' if finalizers.lost else kind}"
            trials.append(Trial(what, complaint, f"{_repeat(seed, number, size)}, in `{name}`"))
        if complaint is not None:
            return trials
    return [*trials, Trial("end of an interrupted run", world.end_differs(), _repeat(seed, number, size))]


def one_interrupt(timer: Timer, act: Callable[[], object], after_s: float) -> tuple[bool, bool, float]:
    """Returns whether there was an interrupt while `act` ran, whether it came out, and how long `act` took."""
    began = time.perf_counter()
    try:
        timer.start(after_s)
        act()
        return timer.stop(), False, time.perf_counter() - began
    except KeyboardInterrupt:
        return True, True, time.perf_counter() - began
