"""RanksBand: the ops of a step of several ranks in time, and what holds the step up: which stream of which rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.timing.bands import GAPS, format_s
from megatrain.scheduler.timing.rank_waits import Place, RankWaits
from megatrain.scheduler.timing.shared import Timing

Index = tuple[int, int]
"""A rank, and the number of an op in its table."""
_MOST_SHARES = 4


@dataclass(frozen=True, slots=True)
class RanksBand:
    """The ops of a step of several ranks in time.

    Args:
        name: `"plan"` for modelled times, `"measured"` for those of a real run.
        origin: Where the times come from, in words.
        timelines: Of each rank every op, in table order, in seconds from the beginning of the step.
        follows: Per rank and op, the op whose end it had to wait for last; None where there is none.
        others: Of the ops that need something of other ranks, the op there that ends last.
        path: The ops that the step can't be shorter than: each follows the one before, up to the last of all ranks.
        shares: The fraction of the step that a rank's stream has on this path, and `GAPS` for the time between ops;
            largest first. They add up to 1.
        busy: Of each rank, the fraction of the step during which each stream works or stands still within an op.
        waits_s: Of each rank, the seconds for which the ops of each stream were held up by other ranks alone; of
            compute those for which it stood idle because of them, also where it waited for another stream that did.
    """

    name: str
    origin: str
    timelines: tuple[tuple[Timing, ...], ...]
    follows: tuple[tuple[Index | None, ...], ...]
    others: Mapping[Index, Index]
    path: tuple[Index, ...]
    shares: Mapping[tuple[int, str] | str, float]
    busy: tuple[Mapping[Stream, float], ...]
    waits_s: tuple[Mapping[Stream, float], ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last op of any rank ends."""
        return max((timing.end_s for timeline in self.timelines for timing in timeline), default=0.0)

    def words(self) -> tuple[str, ...]:
        """Says what holds the step up, and which rank's compute stands idle longest because of others."""
        if not self.shares:
            return (f"{self.name}: a step takes no time",)
        parts = [f"{_name(key)} {part:.0%}" for key, part in self.shares.items() if part >= 0.005]
        (bound, share), rest = next(iter(self.shares.items())), parts[1:_MOST_SHARES]
        left = 1 - sum(list(self.shares.values())[:_MOST_SHARES])
        rest += [f"others {left:.0%}"] if left >= 0.005 else []
        text = f"{self.name}: held up by {_name(bound)} {share:.0%} of the time"
        lines = [text + (f"; then {', '.join(rest)}" if rest else "")]
        streams = self._by_stream()
        if len(streams) < len(self.shares):
            each = ", ".join(f"{name} {part:.0%}" for name, part in streams.items() if part >= 0.005)
            lines[0] += f"; of all ranks together: {each}"
        idle = [its.get(Stream.COMPUTE, 0.0) for its in self.waits_s]
        rank = max(range(len(idle)), key=idle.__getitem__)
        part = idle[rank] / self.step_s
        if part < 0.005:
            lines.append(f"{self.name}: no rank's compute stands idle between its ops because of other ranks")
        else:
            seconds = f"{format_s(idle[rank])} or {part:.0%} of the step"
            lines.append(f"{self.name}: because of other ranks, compute of rank {rank} stands idle longest, {seconds}")
        return tuple(lines)

    def _by_stream(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, part in self.shares.items():
            name = key if isinstance(key, str) else key[1]
            found[name] = found.get(name, 0.0) + part
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def ranks_band(
    name: str,
    origin: str,
    books: Sequence[Books],
    waits: RankWaits,
    timelines: Sequence[Sequence[Timing]],
    stood_s: Mapping[Place, float] | None = None,
) -> RanksBand:
    """Finds who held up whom in a step.

    Args:
        name: As in `RanksBand`.
        origin: See there.
        books: Of each rank's table.
        waits: Of all of them.
        timelines: Of each rank every op, in table order.
        stood_s: As in `DevicesSimulation`; None where nobody knows, as in a measured step. An op that handles a sum
            piece by piece then counts as held up if the rank before was done with the sum later than all else was.
    """
    numbers = [{timing.position: index for index, timing in enumerate(timeline)} for timeline in timelines]
    ends = {(rank, t.position): t.end_s for rank, timeline in enumerate(timelines) for t in timeline}
    follows: list[list[Index | None]] = []
    others: dict[Index, Index] = {}
    waited: list[dict[Stream, float]] = []

    def number(place: Place) -> Index:
        return place[0], numbers[place[0]][place[1]]

    for rank, timeline in enumerate(timelines):
        latest: dict[Stream, Place] = {}
        follows.append([])
        waited.append({})
        for index, timing in enumerate(timeline):
            place, stream = (rank, timing.position), timing.position.stream
            # In table order, so that of equal ends the same one counts each time.
            befores = sorted(waits.ends[place], key=number)
            mine = [*([latest[stream]] if stream in latest else []), *(each for each in befores if each[0] == rank)]
            own = max(mine, key=ends.__getitem__, default=None)
            elsewhere = [before for before in befores if before[0] != rank]
            if stood_s is None and stream == Stream.PEERS:
                # A real update of a block concerns only the ranks that have parameters of it: a `V` waits for no other.
                elsewhere = [before for before in elsewhere if ends[before] <= timing.end_s]
            follow = waits.pieces.get(place)
            elsewhere += [] if follow is None else [follow]
            other = max(elsewhere, key=ends.__getitem__, default=None)
            ready_s = 0.0 if own is None else ends[own]
            held_s = 0.0
            if other is not None:
                others[rank, index] = number(other)
                held_s = max(0.0, min(ends[other], timing.end_s) - ready_s)
                if other == follow and stood_s is not None:
                    held_s = stood_s.get(place, 0.0)
            if held_s > 0:
                waited[-1][stream] = waited[-1].get(stream, 0.0) + held_s
            before = other if held_s > 0 else own
            follows[-1].append(None if before is None else number(before))
            latest[stream] = place
        waited[-1] |= _idle(rank, timelines, follows)
    path = _path(timelines, follows)
    step_s = max(ends.values(), default=0.0)
    busy = tuple(_busy(timeline, step_s) for timeline in timelines)
    fixed = tuple(map(tuple, follows))
    shares = _shares(timelines, path, step_s)
    return RanksBand(name, origin, tuple(map(tuple, timelines)), fixed, others, path, shares, busy, tuple(waited))


def _path(timelines: Sequence[Sequence[Timing]], follows: Sequence[Sequence[Index | None]]) -> tuple[Index, ...]:
    """From the op that ends last back to one that waits for nothing, the first first."""
    every = ((rank, index) for rank, timeline in enumerate(timelines) for index in range(len(timeline)))
    at: Index | None = max(every, key=lambda each: timelines[each[0]][each[1]].end_s, default=None)
    found: list[Index] = []
    while at is not None:
        found.append(at)
        at = follows[at[0]][at[1]]
    return tuple(reversed(found))


def _idle(
    rank: int, timelines: Sequence[Sequence[Timing]], follows: Sequence[Sequence[Index | None]]
) -> dict[Stream, float]:
    """The seconds of compute between two of its ops, where what came last before the second was another rank's."""
    idle_s, free_s = 0.0, 0.0
    for index, timing in enumerate(timelines[rank]):
        if timing.position.stream != Stream.COMPUTE:
            continue
        at: Index | None = (rank, index)
        while at is not None and at[0] == rank and timelines[rank][at[1]].end_s > free_s:
            at = follows[rank][at[1]]
        if at is not None and at[0] != rank:
            idle_s += max(0.0, timing.start_s - free_s)
        free_s = timing.end_s
    return {Stream.COMPUTE: idle_s} if idle_s > 0 else {}


def _shares(
    timelines: Sequence[Sequence[Timing]], path: Sequence[Index], step_s: float
) -> dict[tuple[int, str] | str, float]:
    seconds: dict[tuple[int, str] | str, float] = {}
    for key, own in _parts(timelines, path, step_s):
        seconds[key] = seconds.get(key, 0.0) + own
    return {key: own / step_s for key, own in sorted(seconds.items(), key=lambda item: -item[1]) if own > 0}


def _parts(
    timelines: Sequence[Sequence[Timing]], path: Sequence[Index], step_s: float
) -> Iterator[tuple[tuple[int, str] | str, float]]:
    """The seconds of the step from its end back to its beginning: whose each part is."""
    until = step_s
    for at, before in zip(reversed(path), [*reversed(path[:-1]), None], strict=True):
        timing = timelines[at[0]][at[1]]
        ready = 0.0 if before is None else min(until, timelines[before[0]][before[1]].end_s)
        begin = min(until, max(ready, timing.start_s))
        yield (at[0], str(timing.position.stream)), until - begin
        yield GAPS, begin - ready
        until = ready


def _busy(timeline: Sequence[Timing], step_s: float) -> dict[Stream, float]:
    works: dict[Stream, float] = {}
    for timing in timeline:
        works[timing.position.stream] = works.get(timing.position.stream, 0.0) + timing.end_s - timing.start_s
    return {stream: seconds / step_s if step_s > 0 else 0.0 for stream, seconds in works.items()}


def _name(key: tuple[int, str] | str) -> str:
    return key if isinstance(key, str) else f"{key[1]} of rank {key[0]}"
