"""simulate_devices(): a step of several ranks on paper, whose devices share the memory of their host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, log2
from typing import NamedTuple

from megatrain.checks import Rule, checked
from megatrain.counts import counted
from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.items import Effect, Stream
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.timing.costs import OpSeconds
from megatrain.scheduler.timing.dealt_waits import waits_of
from megatrain.scheduler.timing.rank_waits import Place, RankWaits, books_of_ranks
from megatrain.scheduler.timing.shared import Timing
from megatrain.sizes import SUM_PIECE_BYTES

_ROUNDING = 1 + 1e-12
TO_DEVICE, TO_HOST = (Stream.H2D, Stream.RECEIVE), (Stream.D2H, Stream.SEND)
"""Streams whose copies share a direction of a rank's link."""
_TABLES = Rule(
    "the tables of ranks, first to last, or those of all devices to which blocks are dealt, host by host",
    "{name}=[plan.schedule for plan in plans]",
    lambda value: None if _stand_in_order(value) else "doesn't have the first rank first and the last one last",
)


class Hosts(NamedTuple):
    """The hosts of ranks, each of which has as many, the first ones on the first host.

    Attributes:
        number: How many there are.
        network_bytes_per_s: What goes from one to another in a second, each way.
    """

    number: int = 1
    network_bytes_per_s: float = inf

    def of(self, size: int) -> list[int]:
        """The number of each rank's host, of so many ranks."""
        return [rank * self.number // size for rank in range(size)]


ONE_HOST = Hosts()


@dataclass(frozen=True, slots=True)
class DevicesSimulation:
    """A simulated step of several ranks.

    Args:
        step_s: Seconds until the last op of any rank ends.
        busy: Fraction of the step during which each stream works, of the rank for which it is most.
        host_bytes: What copies and updates read and write in the memory of a host, of the one for which it is most.
        host_s: How long that takes alone.
        timelines: Of each rank every op, in table order, in seconds from the beginning of the step.
        stood_s: For how many seconds of its time an op stood still, until a piece of the rank before had come; only of
            ops that did.
    """

    step_s: float
    busy: Mapping[str, float]
    host_bytes: int
    host_s: float
    timelines: tuple[tuple[Timing, ...], ...] = field(repr=False)
    stood_s: Mapping[Place, float] = field(repr=False)


@dataclass(slots=True, eq=False)
class _Op:
    """An op of a rank: seconds that it takes alone, and what of the host's memory it uses meanwhile.

    The last `piece_s` seconds are those of a piece of a sum, which follows the last piece of the rank before; None if
    there is none, or if it is under way.
    """

    place: Place
    seconds: float
    host_bytes: int
    piece_s: float | None = None
    left_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.left_s = self.seconds - (self.piece_s or 0.0)

    @property
    def demand(self) -> float:
        """Bytes per second at full speed."""
        return self.host_bytes / self.seconds if self.seconds > 0 else 0.0


@checked(tables=_TABLES)
def simulate_devices(tables: Sequence[Table], hardware: Hardware, hosts: Hosts = ONE_HOST) -> DevicesSimulation:
    """Runs every op of all ranks as soon as its stream is free and its dependencies are done, those on other ranks too.

    Each rank has a device and a link of its own; where blocks are dealt to devices, values cross between them through
    the host's memory. All of a host share its memory: where copies and updates together
    ask for more than `hardware.host_bytes_per_s`, all of them slow down alike. A total that another rank has made goes
    to each other host once, and is copied within it. Ranks that share a store divide the updates of a block evenly; any
    other rank makes all. Where blocks are dealt, each device of a host has its part of the network.

    Args:
        tables: One for each rank, at least two.
        hardware: Of one device with its link, and of a host.
        hosts: Where the ranks are.

    Raises:
        OptionError: If the tables are those of another number of hosts that deal the blocks.
        ScheduleError: If a table doesn't know its workload.
    """
    ops: dict[Place, _Op] = {}
    _check_hosts(tables, hosts)
    books, numbers = books_of_ranks(tables), hosts.of(len(tables))
    for rank, (table, its) in enumerate(zip(tables, books, strict=True)):
        sides = _Sides.of(rank, numbers, table.kind.devices)
        seconds = partial(_op, rank, sides, table, OpSeconds(hardware), hardware, hosts)
        ops |= {(rank, position): seconds(position, effect) for position, effect in its.ops}
    starts, ends, stood_s = _course(ops, waits_of(books, numbers), hardware, numbers)
    step_s = max(ends.values(), default=0.0)
    totals: dict[tuple[int, str], float] = {}
    for (rank, position), op in ops.items():
        totals[rank, position.stream] = totals.get((rank, position.stream), 0.0) + op.seconds
    busy: dict[str, float] = {}
    for (_, stream), total in totals.items():
        busy[stream] = max(busy.get(stream, 0.0), total / step_s if step_s else 0.0)
    used = [0] * hosts.number
    for (rank, _), op in ops.items():
        used[numbers[rank]] += op.host_bytes
    host_bytes = max(used)
    host_s = host_bytes / hardware.host_bytes_per_s
    timelines: list[list[Timing]] = [[] for _ in tables]
    for place in ops:
        timelines[place[0]].append(Timing(place[1], starts[place], ends[place]))
    return DevicesSimulation(step_s, busy, host_bytes, host_s, tuple(map(tuple, timelines)), stood_s)


class _Sides(NamedTuple):
    """A rank among its hosts: how many ranks its own has, and which of its neighbours are on another."""

    num_mates: int
    is_before_away: bool
    is_after_away: bool

    @staticmethod
    def of(rank: int, numbers: Sequence[int], away: int) -> _Sides:
        """Args: the rank, the number of each rank's host, and how many ranks further its neighbours are."""
        here = numbers[rank]
        after = numbers[rank + away] if rank + away < len(numbers) else here
        return _Sides(numbers.count(here), rank >= away and numbers[rank - away] != here, after != here)


def _op(
    rank: int,
    sides: _Sides,
    table: Table,
    costs: OpSeconds,
    hardware: Hardware,
    hosts: Hosts,
    position: Position,
    effect: Effect,
) -> _Op:
    """The seconds of an op alone, and the bytes that it reads and writes on the host."""
    op = table.ticks[position.tick][position.stream]
    moves, added_s, piece_s = effect.moves, 0.0, None
    network = hosts.network_bytes_per_s / table.kind.devices
    is_adding = table.kind.adding_op == op.what and op.what in ("P", "G")
    if is_adding or op.what == "R":
        # The sum of the rank before comes to the device as well, or only.
        piece = min(moves, SUM_PIECE_BYTES)
        piece_s = piece / hardware.h2d_bytes_per_s + is_adding * piece / hardware.d2h_bytes_per_s
        added_s = is_adding * moves / hardware.h2d_bytes_per_s
    if op.what == "P" and sides.is_after_away:
        added_s += moves / network
    elif op.what == "G" and table.kind.ranks == "last":
        added_s += ceil(log2(hosts.number)) * moves / network  # a broadcast, along a tree
    if op.what == "U":
        moves = -(-moves // (sides.num_mates if table.kind.is_shared else 1))
        seconds = hardware.launch_s + hardware.op_s + moves / hardware.host_bytes_per_s
    elif op.what == "G" and table.kind.sends:
        # From the room where the last rank left it, to where it waits for its update, if that isn't the room.
        moves = 2 * table.known_workload().blocks[op.block].gradient_bytes * (not table.kind.keeps_totals)
        seconds = hardware.launch_s + moves / hardware.host_bytes_per_s
    elif op.what in "RPXD":
        rate = hardware.h2d_bytes_per_s if position.stream == Stream.RECEIVE else hardware.d2h_bytes_per_s
        seconds = hardware.launch_s + moves / rate
    else:
        seconds = costs.of(position.stream, effect)
    # The last rank also copies a total from the room to where it waits.
    is_copied = op.what == "G" and table.kind.ranks == "last" and not table.kind.keeps_totals
    is_of_host = position.stream not in (Stream.COMPUTE, Stream.GATHER)
    times = (3 if is_copied else 1) + is_adding
    # The network reads and writes the host's memory as well.
    times += (op.what == "P" and sides.is_after_away) + (piece_s is not None and sides.is_before_away)
    return _Op((rank, position), seconds + added_s, times * moves if is_of_host else 0, piece_s)


class _Course(NamedTuple):
    """When each op began and ended, and how long it stood still meanwhile."""

    starts: dict[Place, float]
    ends: dict[Place, float]
    stood_s: dict[Place, float]


def _course(ops: Mapping[Place, _Op], waits: RankWaits, hardware: Hardware, hosts: Sequence[int]) -> _Course:
    """Runs all ops."""
    queues: dict[tuple[int, str], list[Place]] = {}
    for place in reversed(list(ops)):
        queues.setdefault((place[0], place[1].stream), []).append(place)
    running: dict[tuple[int, str], _Op] = {}
    starts, ends, stood_s = course = _Course({}, {}, {})
    now = 0.0
    while len(ends) < len(ops):
        for key, queue in queues.items():
            if key not in running and queue and all(before in ends for before in waits.ends[queue[-1]]):
                running[key] = ops[queue.pop()]
                starts[running[key].place] = now
        standing = _standing(running, waits, ends)
        speeds = _speeds(running, hardware, hosts)
        going = {key: op for key, op in running.items() if op.left_s > 0 or op.piece_s is None}
        assert going, "ranks wait for each other in a circle"
        passed = min(op.left_s / speeds[key] for key, op in going.items())
        now += passed
        for place in standing if passed > 0 else ():
            stood_s[place] = stood_s.get(place, 0.0) + passed
        for key, op in going.items():
            if op.left_s / speeds[key] > passed * _ROUNDING:
                op.left_s -= passed * speeds[key]
            elif op.piece_s is not None:
                op.left_s = 0.0
            else:
                ends[op.place] = now
                del running[key]
    return course


def _standing(running: Mapping[tuple[int, str], _Op], waits: RankWaits, ends: Mapping[Place, float]) -> list[Place]:
    """Begins the last piece of ops whose rank before is done with the sum; returns those that stand still."""
    found: list[Place] = []
    for op in running.values():
        if op.left_s == 0 and op.piece_s is not None:
            if waits.pieces[op.place] in ends:
                op.left_s, op.piece_s = op.piece_s, None
            else:
                found.append(op.place)
    return found


def _speeds(
    running: Mapping[tuple[int, str], _Op], hardware: Hardware, hosts: Sequence[int]
) -> dict[tuple[int, str], float]:
    """The share of its own rate that each op keeps: of its rank's link, and of its host's memory."""
    moving = {key for key, op in running.items() if op.left_s > 0}
    speeds: dict[tuple[int, str], float] = {}
    for rank, stream in running:
        mine, others = (TO_DEVICE, TO_HOST) if stream in TO_DEVICE else (TO_HOST, TO_DEVICE)
        if stream not in mine:
            speeds[rank, stream] = 1.0
            continue
        beside = hardware.h2d_beside if stream in TO_DEVICE else hardware.d2h_beside
        is_both = any((rank, other) in moving for other in others)
        speeds[rank, stream] = (beside if is_both else 1.0) / max(1, sum((rank, each) in moving for each in mine))
    if hardware.host_bytes_per_s == inf:
        return speeds
    asked = dict.fromkeys(hosts, 0.0)
    for key in moving:
        asked[hosts[key[0]]] += running[key].demand * speeds[key]
    shares = {host: min(1.0, hardware.host_bytes_per_s / each) if each > 0 else 1.0 for host, each in asked.items()}
    return {key: speed * (shares[hosts[key[0]]] if running[key].host_bytes else 1.0) for key, speed in speeds.items()}


def _stand_in_order(tables: object) -> bool:
    if not isinstance(tables, Sequence) or len(tables) < 2 or not all(isinstance(t, Table) for t in tables):
        return False
    found: Sequence[Table] = tables  # pyright: ignore[reportUnknownVariableType]
    devices = found[0].kind.devices
    number = len(found) // devices
    names = ["first", *["middle"] * (number - 2), "last"] if number > 1 else ["alone"]
    of_all = [name for name in names for _ in range(devices)]
    return [table.kind.ranks for table in found] == of_all and all(t.kind.devices == devices for t in found)


def _check_hosts(tables: Sequence[Table], hosts: Hosts) -> None:
    devices = tables[0].kind.devices
    if devices > 1 and len(tables) != devices * hosts.number:
        raise OptionError(
            f"{counted(len(tables), 'table')} of {devices} devices each can't be on {counted(hosts.number, 'host')}.\n"
            "  Each host deals the blocks to its devices.\n  Give hosts their number."
        )
