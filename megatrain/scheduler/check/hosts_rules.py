"""check_hosts(): proves that hosts which each deal the blocks of a model to their devices don't wait in a circle.

Hosts need each other for sums of gradients alone. So of each host's step only the ops count that move these, and which
of them wait for which: `host_sums` finds that in the graph that `check_devices` has proven, and hosts tell it to each
other. A transfer between hosts is over when both ends are, so its ends are one op here: the `P` of a block and the `R`
of the next host, and the `G` of all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx

from megatrain.errors import ScheduleError
from megatrain.scheduler.check.devices_rules import Place
from megatrain.scheduler.table import Table

_Node = tuple[str, int]
"""`"P"`, `"R"` or `"G"`, and the block of the whole model."""
_ORDER = "Sums go from host to host by block, last one first, along the devices that have the same blocks."


@dataclass(frozen=True, slots=True)
class HostSums:
    """The ops of a host that move sums of gradients between hosts.

    Args:
        place: Where the host stands, as in `StepKind`.
        devices: Of each block that has such ops its device.
        waits: Per op those that it waits for; what follows from others is left out.
    """

    place: str
    devices: Mapping[int, int]
    waits: Mapping[_Node, tuple[_Node, ...]]

    def to_json(self) -> dict[str, Any]:
        """Numbers, texts, lists and dictionaries."""
        waits = [[[*op], [[*before] for before in befores]] for op, befores in self.waits.items()]
        return {"place": self.place, "devices": [[*pair] for pair in self.devices.items()], "waits": waits}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> HostSums:
        """The reverse."""
        waits = {(what, block): tuple((w, b) for w, b in befores) for (what, block), befores in told["waits"]}
        return HostSums(told["place"], {block: device for block, device in told["devices"]}, waits)


def host_sums(tables: Sequence[Table], graph: nx.DiGraph[Place | str]) -> HostSums:
    """Finds the ops of one host that other hosts wait for, or that wait for them.

    Args:
        tables: Of its devices.
        graph: What `check_devices` has proven of them.

    Raises:
        ScheduleError: If the devices of the host don't agree on where it stands.
    """
    places = {table.kind.ranks for table in tables}
    if len(places) != 1:
        raise ScheduleError(
            f"the devices of a host are those of the {' and of the '.join(sorted(places))} host.\n"
            "  Each host has one place in the order of sums.\n  State the same place for all of its devices."
        )
    between: dict[Place | str, _Node] = {}
    devices: dict[int, int] = {}
    for device, table in enumerate(tables):
        numbers = table.known_workload().numbers
        for position, op in table.positions():
            if op.what in ("P", "R", "G"):
                between[device, position] = op.what, numbers[op.block]
                devices[numbers[op.block]] = device
    return HostSums(places.pop(), devices, _contracted(graph, between))


def _contracted(graph: nx.DiGraph[Place | str], kept: Mapping[Place | str, _Node]) -> dict[_Node, tuple[_Node, ...]]:
    """Which of some ops wait for which, by whatever lies between them, transitively reduced."""
    order: list[Place | str] = list(nx.topological_sort(graph))
    found: list[_Node] = []
    own: dict[Place | str, int] = {}  # sets of ops of `found`, as bits
    before: list[int] = []
    waits: dict[_Node, tuple[_Node, ...]] = {}
    for node in order:
        bits = 0
        for other in graph.predecessors(node):
            bits |= own[other]
        if node in kept:
            left, direct = bits, list[_Node]()
            while left:  # the latest is implied by none of the others
                last = left.bit_length() - 1
                direct.append(found[last])
                left &= ~(before[last] | 1 << last)
            waits[kept[node]] = tuple(direct)
            before.append(bits)
            bits |= 1 << len(found)
            found.append(kept[node])
        own[node] = bits
    return waits


def check_hosts(hosts: Sequence[HostSums]) -> None:
    """Proves that the sums of all hosts meet, and that no hosts wait for each other in a circle.

    Args:
        hosts: In the order of their sums, at least two. The tables of each have passed `check_devices`.

    Raises:
        ScheduleError: Naming what doesn't fit.
    """
    places = [host.place for host in hosts]
    if places != ["first", *["middle"] * (len(hosts) - 2), "last"]:
        raise ScheduleError(
            f"the hosts stand as {', '.join(places)}.\n"
            "  Sums begin on the first host and end on the last one.\n  Give the hosts in their order."
        )
    for number, host in enumerate(hosts):
        _check_alike(number, host, hosts[0])
    graph: nx.DiGraph[tuple[_Node, int]] = nx.DiGraph()
    for number, host in enumerate(hosts):
        for op, befores in host.waits.items():
            graph.add_node(_joined(op, number))
            graph.add_edges_from((_joined(before, number), _joined(op, number)) for before in befores)
    for found in nx.strongly_connected_components(graph):
        node = next(iter(found))
        if len(found) > 1 or graph.has_edge(node, node):
            _refuse_circle([before for before, *_ in nx.find_cycle(graph.subgraph(found))])


def _check_alike(number: int, host: HostSums, first: HostSums) -> None:
    """Each block has the same device on all hosts, an R on all but the first, a P on all but the last, and a G."""
    blocks = set(first.devices)
    what = _difference(blocks, host.devices, first.devices, number)
    for letter, is_there in (("R", number > 0), ("P", host.place != "last"), ("G", True)):
        has = {block for op, block in host.waits if op == letter}
        wrong = has ^ (blocks if is_there else set())
        if what is None and wrong:
            block = min(wrong)
            found = "a further" if block in has else "no"
            what = f"host {number} has {found} {letter} of block {block}"
    if what is not None:
        raise ScheduleError(
            f"{what}.\n  {_ORDER} All hosts but the first have an R of each, all but the last a P, and all a G.\n"
            "  Deal the same blocks alike on all hosts."
        )


def _difference(blocks: set[int], mine: Mapping[int, int], first: Mapping[int, int], number: int) -> str | None:
    if set(mine) != blocks:
        return f"host {number} adds up gradients of the blocks {sorted(mine)}, host 0 of {sorted(blocks)}"
    block = next((block for block in sorted(blocks) if mine[block] != first[block]), None)
    if block is None:
        return None
    return f"block {block} is on device {mine[block]} of host {number}, but on device {first[block]} of host 0"


def _joined(op: _Node, host: int) -> tuple[_Node, int]:
    """An op with those that are over when it is: what a host sends with what the next one gets, and all totals."""
    what, block = op
    if what == "G":
        return op, 0
    return ("P", block), host - (what == "R")


def _refuse_circle(circle: Iterable[tuple[_Node, int]]) -> None:
    names = [
        f"the total of block {block}" if what == "G" else f"the sum of block {block} from host {host} to {host + 1}"
        for (what, block), host in circle
    ]
    steps = "".join(f"\n    {after} waits for {before}" for before, after in pairwise([*names, names[0]]))
    raise ScheduleError(
        f"hosts wait for each other in a circle:{steps}\n  {_ORDER}\n  Keep sums in the order of compute."
    )
