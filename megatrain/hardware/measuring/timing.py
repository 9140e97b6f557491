"""Timing: how long work takes on a device, in repetitions; two kinds of work at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

from megatrain.device import Device

_WARM_UP_S = 0.02


def seconds_of(device: Device, work: Callable[[], object], *, least_s: float, most: int = 200) -> float:
    """The median time of some work on the device, and of what its launch takes longer.

    Args:
        device: Where it runs.
        work: Issues it, to the current stream.
        least_s: Repeated for so long, three times at least.
        most: Times at most.
    """
    begin, is_warm = time.perf_counter(), False
    while not is_warm:
        work()
        device.settle()  # without that, a queue of so much work might take far longer
        is_warm = time.perf_counter() - begin >= min(_WARM_UP_S, least_s)
    found: list[float] = []
    while len(found) < 3 or (sum(found) < least_s and len(found) < most):
        before = device.moment()
        work()
        found.append(device.moment().seconds_since(before))
    return median(found)


class Beside:
    """Work of a thread, again and again, for as long as the body of a `with` runs.

    Args:
        work: Done again and again; each call waits for its end.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_over:
            self._work()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


def rates_together(ends: Sequence[Sequence[float]], nbytes: int) -> tuple[float, ...]:
    """Bytes per second of several queues while all of them worked.

    Args:
        ends: Of each queue, when it began, and when each of its copies ended.
        nbytes: Of each copy.
    """
    begin, end = max(times[0] for times in ends), min(times[-1] for times in ends)
    return tuple(nbytes * (_copies_until(times, end) - _copies_until(times, begin)) / (end - begin) for times in ends)


def _copies_until(times: Sequence[float], moment: float) -> float:
    """How many copies were done then; of one under way, the part."""
    done = max(number for number, time_s in enumerate(times) if time_s <= moment)
    if done == len(times) - 1:
        return float(done)
    return done + (moment - times[done]) / (times[done + 1] - times[done])
