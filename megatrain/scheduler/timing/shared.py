"""shared_timeline(): ops in time on a machine whose streams slow each other down."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Running:
    """An op under way.

    Args:
        position: The op.
        start_s: When it began.
        left_s: Seconds that it still takes if nothing slows it down.
    """

    position: Position
    start_s: float
    left_s: float


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
    queues: dict[Stream, list[Position]] = {}
    for position in reversed(list(durations)):
        queues.setdefault(position.stream, []).append(position)
    speeds: dict[tuple[Stream, frozenset[str]], float] = {}
    running: dict[Stream, _Running] = {}
    done: dict[Position, Timing] = {}
    now = 0.0
    while len(done) < len(durations):
        for stream, queue in queues.items():
            if stream not in running and queue and all(before in done for before in waits[queue[-1]]):
                position = queue.pop()
                running[stream] = _Running(position, now, durations[position])
        # An op that moves nothing doesn't slow others down.
        busy = frozenset(stream for stream, op in running.items() if op.left_s > 0)
        for stream in running:
            if (stream, busy) not in speeds:
                speeds[stream, busy] = speed(hardware, stream, busy)
        passed = min(op.left_s / speeds[stream, busy] for stream, op in running.items())
        now += passed
        for stream, op in list(running.items()):
            if op.left_s / speeds[stream, busy] <= passed * _ROUNDING:
                done[op.position] = Timing(op.position, op.start_s, now)
                del running[stream]
            else:
                op.left_s -= passed * speeds[stream, busy]
    return tuple(done[position] for position in durations)


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
