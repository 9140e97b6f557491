"""shared_timeline(): ops in time on a machine whose streams slow each other down."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position

# Ops that end at the same moment, up to rounding, end together.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Timing:
    """One op of a simulated step, in seconds from its start."""

    position: Position
    start_s: float
    end_s: float


class QueuedOp(NamedTuple):
    """An op in the queue of its stream.

    Attributes:
        tick: Its tick, by which other ops know it.
        seconds: How long it takes alone.
        waits: Streams, and ticks of ops in them, that must be done before. An op is done when a later one of its
            stream is.
    """

    tick: int
    seconds: float
    waits: Sequence[tuple[Stream, int]]


def speed(hardware: Hardware, stream: str, busy: Collection[str]) -> float:
    """The share of its own rate that a stream keeps while others work.

    Args:
        hardware: The machine.
        stream: Its name.
        busy: The names of all streams that work.
    """
    if stream == Stream.H2D:
        return hardware.h2d_beside if Stream.D2H in busy else 1.0
    if stream == Stream.D2H:
        return hardware.d2h_beside if Stream.H2D in busy else 1.0
    if stream == Stream.HOST:
        return hardware.host_beside if Stream.H2D in busy or Stream.D2H in busy else 1.0
    return hardware.compute_beside if stream == Stream.COMPUTE and len(busy) > 1 else 1.0


def shared_timeline(
    durations: Mapping[Position, float], waits: Mapping[Position, Collection[Position]], hardware: Hardware
) -> tuple[Timing, ...]:
    """Runs every op as soon as its stream is free and its dependencies are done, as fast as the others let it.

    Args:
        durations: Seconds of each op alone, in table order.
        waits: For each op, the ops of other streams that it waits for.
        hardware: The machine.
    """
    queues: dict[Stream, list[QueuedOp]] = {}
    for position, seconds in durations.items():
        before = [(other.stream, other.tick) for other in waits[position]]
        queues.setdefault(position.stream, []).append(QueuedOp(position.tick, seconds, before))
    times = run_queues(queues, hardware)
    done = {
        Position(op.tick, stream): time
        for stream, queue in queues.items()
        for op, time in zip(queue, times[stream], strict=True)
    }
    return tuple(Timing(position, *done[position]) for position in durations)


def run_queues(
    queues: Mapping[Stream, Sequence[QueuedOp]], hardware: Hardware
) -> dict[Stream, list[tuple[float, float]]]:
    """Runs the ops of each stream in their order; returns when each begins and ends.

    Args:
        queues: The ops of each stream.
        hardware: The machine, which says how streams slow each other down.
    """
    names, ops = list(queues), list(queues.values())
    place = {stream: number for number, stream in enumerate(names)}
    waits = [[[(place[stream], tick) for stream, tick in op.waits] for op in queue] for queue in ops]
    speeds: dict[int, list[float]] = {}
    latest = [-1] * len(names)  # the tick of the last op that is done
    times: list[list[tuple[float, float]]] = [[] for _ in names]
    begun, left = [0.0] * len(names), [0.0] * len(names)  # seconds that take place if nothing slows them down
    now, running = 0.0, list[int]()
    idle = [number for number, queue in enumerate(ops) if queue]
    while idle or running:
        for number in idle:
            op = len(times[number])
            if all([latest[other] >= tick for other, tick in waits[number][op]]):
                begun[number], left[number] = now, ops[number][op].seconds
                running.append(number)
        # An op that moves nothing doesn't slow others down.
        busy = sum([1 << number for number in running if left[number] > 0])
        if busy not in speeds:
            streams = [stream for number, stream in enumerate(names) if busy >> number & 1]
            speeds[busy] = [speed(hardware, stream, streams) for stream in names]
        share = speeds[busy]
        needed = [left[number] / share[number] for number in running]
        passed = min(needed)
        now += passed
        for number, seconds in zip(running, needed, strict=True):
            if seconds <= passed * _ROUNDING:
                latest[number] = ops[number][len(times[number])].tick
                times[number].append((begun[number], now))
                left[number] = -1.0
            else:
                left[number] -= passed * share[number]
        running = [number for number in running if left[number] >= 0]
        idle = [n for n, queue in enumerate(ops) if n not in running and len(times[n]) < len(queue)]
    return dict(zip(names, times, strict=True))


def link_bound(h2d_s: float, d2h_s: float, hardware: Hardware) -> float:
    """Seconds of copies that take so long alone: with as much at the same time as makes them end first.

    Each second with both under way does as much as the sum of the shares does alone.
    """
    return max(to_device * h2d_s + to_host * d2h_s for to_device, to_host in link_limits(hardware))


def link_limits(hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """What a second of copies to the device, and one to the host, count of the link's time: the larger sum holds."""
    shares = hardware.h2d_beside, hardware.d2h_beside
    gain = max(0.0, sum(shares) - 1)
    return (1 - gain / shares[0], 1.0), (1.0, 1 - gain / shares[1])
