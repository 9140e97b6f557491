"""Band: the ops of a step in time, modelled or measured, and the streams that it is bound by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.scheduler.dependency import derive_waits
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.simulate import Timing
from megatrain.scheduler.table import Position, Table

GAPS = "the time between ops"
"""What takes time on the path of a measured step besides ops: threads that wake up, Python, launches."""


class Bottleneck(NamedTuple):
    """What bounds a step if whatever bounds it now took no time."""

    name: str
    step_s: float


@dataclass(frozen=True, slots=True)
class Band:
    """The ops of a step in time.

    Args:
        name: `"plan"` for modelled times, `"measured"` for those of a real run.
        origin: Where the times come from, in words.
        timeline: Every op, in table order.
        follows: Per op, the index of the op whose end it had to wait for last; None where there is none.
        path: Indices of the ops that the step can't be shorter than: each follows the one before, up to the last.
        shares: The fraction of the step that each stream has on this path, and `GAPS`, which only a measured step has;
            largest first. They add up to 1.
        busy: The fraction of the step during which each stream works.
        then: The next bottleneck; None where nothing would be left.
    """

    name: str
    origin: str
    timeline: tuple[Timing, ...]
    follows: tuple[int | None, ...]
    path: tuple[int, ...]
    shares: Mapping[str, float]
    busy: Mapping[str, float]
    then: Bottleneck | None

    @property
    def step_s(self) -> float:
        """Seconds until the last op ends."""
        return _end(self.timeline)

    def words(self) -> str:
        """Says what bounds the step, and what would bound it next."""
        if not self.shares:
            return f"{self.name}: a step takes no time"
        (bound, share), *others = self.shares.items()
        rest = ", ".join(f"{name} {other:.0%}" for name, other in others if other >= 0.005)
        text = f"{self.name}: {format_s(self.step_s)} a step, bound by {bound} {share:.0%} of the time"
        text += f" ({rest})" if rest else ""
        if self.then is None:
            return f"{text}; nothing else bounds it"
        without = bound if bound == GAPS else f"the time of {bound}"
        return (
            f"{text}; the next bottleneck is {self.then.name}: without {without} a step would take "
            f"{format_s(self.then.step_s)}"
        )


def format_s(seconds: float) -> str:
    """Returns a duration for people, with three digits.

    >>> format_s(12.345), format_s(0.0012345), format_s(2e-6), format_s(0)
    ('12.3 s', '1.23 ms', '2.00 us', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        number = seconds / size
        if number >= 0.9995 or (unit == "ns" and seconds > 0):
            return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f} {unit}"
    return "0 s"


def band_of(name: str, origin: str, schedule: Table, timeline: Sequence[Timing]) -> Band:
    """A step in time, of a simulation or of a run."""
    order = _Order.of(schedule)
    follows, ready = order.follows(timeline)
    path, step_s = _path(timeline, follows), _end(timeline)
    shares = _shares(timeline, path, ready)
    works = dict.fromkeys(streams(), 0.0)
    for timing in timeline:
        works[timing.position.stream] += timing.end_s - timing.start_s
    busy: dict[str, float] = {stream: seconds / step_s for stream, seconds in works.items() if seconds > 0}
    then = _next(order, timeline, ready, next(iter(shares))) if shares else None
    return Band(name, origin, tuple(timeline), tuple(follows), tuple(path), shares, busy, then)


class _Order(NamedTuple):
    """Who waits for whom: per op the ones that must be over, that of its own stream first."""

    positions: list[Position]
    before: list[list[int]]

    @staticmethod
    def of(schedule: Table) -> _Order:
        waits = derive_waits(schedule)
        indices = {position: index for index, (position, _) in enumerate(schedule.positions())}
        latest: dict[Stream, int] = {}
        before: list[list[int]] = []
        for position, index in indices.items():
            own = [latest[position.stream]] if position.stream in latest else []
            before.append([*own, *(indices[wait] for wait in waits[position])])
            latest[position.stream] = index
        return _Order(list(indices), before)

    def replayed(self, durations: Sequence[float]) -> list[Timing]:
        """The step with these seconds for its ops."""
        found: list[Timing] = []
        for position, before, seconds in zip(self.positions, self.before, durations, strict=True):
            start = max((found[index].end_s for index in before), default=0.0)
            found.append(Timing(position, start, start + seconds))
        return found

    def follows(self, timeline: Sequence[Timing]) -> tuple[list[int | None], list[float]]:
        """Per op the last of those that it waits for, and when that one ends; of equals the one of its own stream."""
        last = [max(before, key=lambda index: timeline[index].end_s, default=None) for before in self.before]
        return last, [0.0 if index is None else timeline[index].end_s for index in last]


def _next(order: _Order, timeline: Sequence[Timing], ready: Sequence[float], bound: str) -> Bottleneck | None:
    """The step if what bounds it took no time, and all else as long as it did."""
    if bound == GAPS:
        durations = [max(0.0, timing.end_s - timing.start_s) for timing in timeline]
    else:
        spans = zip(timeline, ready, strict=True)
        durations = [0.0 if t.position.stream == bound else max(0.0, t.end_s - begin) for t, begin in spans]
    replayed = order.replayed(durations)
    shares = _shares(replayed, _path(replayed, order.follows(replayed)[0]), [timing.start_s for timing in replayed])
    return Bottleneck(next(iter(shares)), _end(replayed)) if shares else None


def _path(timeline: Sequence[Timing], follows: Sequence[int | None]) -> list[int]:
    """From the op that ends last back to one that waits for nothing, the first first."""
    index = max(range(len(timeline)), key=lambda i: timeline[i].end_s, default=None)
    found: list[int] = []
    while index is not None:
        found.append(index)
        index = follows[index]
    return found[::-1]


def _shares(timeline: Sequence[Timing], path: Iterable[int], ready: Sequence[float]) -> dict[str, float]:
    seconds: dict[str, float] = {**dict.fromkeys(streams(), 0.0), GAPS: 0.0}
    for index in path:
        timing, begin = timeline[index], ready[index]
        gap = min(max(0.0, timing.start_s - begin), max(0.0, timing.end_s - begin))
        seconds[GAPS] += gap
        seconds[timing.position.stream] += max(0.0, timing.end_s - begin - gap)
    step_s = _end(timeline)
    return {name: own / step_s for name, own in sorted(seconds.items(), key=lambda item: -item[1]) if own > 0}


def _end(timeline: Sequence[Timing]) -> float:
    return max((timing.end_s for timing in timeline), default=0.0)
