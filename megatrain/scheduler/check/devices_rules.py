"""check_devices(): proves of the tables of all devices to which blocks are dealt that together they are one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from megatrain.counts import counted
from megatrain.errors import ScheduleError
from megatrain.scheduler.dealt.messages import Message, Route, received_by, sent_by
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.table import Position, Table

Place = tuple[int, Position]
"""A device, and an op of its table."""
_NORM = "the norm"  # one meeting of all devices


def check_devices(
    tables: Sequence[Table], graphs: Sequence[nx.DiGraph[Position]] | None = None
) -> nx.DiGraph[Place | str]:
    """Proves that every block is on one device, each message meets its partner, and no devices wait in a circle.

    Args:
        tables: Of the devices, in their order. Each has passed its own check.
        graphs: The dependencies that are enforced on each; by default those that follow from its table.

    Returns:
        The dependencies of all, with those between devices.

    Raises:
        ScheduleError: Naming what doesn't fit.
    """
    _check_blocks(tables)
    graph: nx.DiGraph[Place | str] = nx.DiGraph()
    graphs = [dependency_graph(table) for table in tables] if graphs is None else graphs
    for device, (table, own) in enumerate(zip(tables, graphs, strict=True)):
        norms = {position for position, op in table.positions() if op.what == "N"}
        graph.add_nodes_from(_node(device, position, norms) for position in own.nodes)
        graph.add_edges_from((_node(device, a, norms), _node(device, b, norms)) for a, b in own.edges)
    sent: dict[Route, Sequence[tuple[Position, Message]]] = {}
    received: dict[Route, Sequence[tuple[Position, Message]]] = {}
    for device, table in enumerate(tables):
        sent |= sent_by(device, table)
        received |= received_by(device, table)
    for route in {**sent, **received}:
        sender, receiver, _ = route
        ours, theirs = sent.get(route, ()), received.get(route, ())
        _check_partners(route, [message for _, message in ours], [message for _, message in theirs])
        for (goes, _), (comes, _) in zip(ours, theirs, strict=True):
            graph.add_edge((sender, goes), (receiver, comes))
        for (before, _), (goes, _) in zip(theirs, ours[1:], strict=False):
            graph.add_edge((receiver, before), (sender, goes))  # the room is free then
    for found in nx.strongly_connected_components(graph):
        if len(found) > 1:
            _refuse_circle(tables, graph, found)
    return graph


def _node(device: int, position: Position, norms: set[Position]) -> Place | str:
    return _NORM if position in norms else (device, position)


def _check_blocks(tables: Sequence[Table]) -> None:
    owned = [number for table in tables for number in table.known_workload().numbers]
    if sorted(owned) != list(range(len(owned))):
        twice = sorted({number for number in owned if owned.count(number) > 1})
        what = f"blocks {twice} are on several devices" if twice else f"the blocks of all devices are {sorted(owned)}"
        raise ScheduleError(f"{what}.\n  Each block of the model is on one device.\n  Deal it to one of them.")
    kinds = [table.kind for table in tables]
    if {kind.devices for kind in kinds} != {len(tables)} or len({kind.micro_batches for kind in kinds}) > 1:
        raise ScheduleError(
            f"{counted(len(tables), 'table')} can't be one step.\n"
            "  All devices run all micro-batches, and each table says how many devices there are.\n"
            "  Give the table of each device."
        )
    if sum(kind.has_losses for kind in kinds) != 1:
        raise ScheduleError(
            f"{sum(kind.has_losses for kind in kinds)} devices have the losses.\n"
            "  One device has the model's outputs, and makes the losses.\n  State elsewhere on all others."
        )


def _check_partners(route: Route, ours: Sequence[Message], theirs: Sequence[Message]) -> None:
    if ours == theirs:
        return
    number = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if number is None:
        number = min(len(ours), len(theirs))
    one, other = ([str(tuple(m)) for m in side[number : number + 1]] for side in (ours, theirs))
    raise ScheduleError(
        f"message {number} of micro-batch {route[2]} from device {route[0]} to device {route[1]} is "
        f"{''.join(one) or 'nothing'} for the sender, but {''.join(other) or 'nothing'} for the receiver.\n"
        "  Both sides have the same messages in the same order.\n"
        "  Deal one program to all devices, and make the table of each from its part."
    )


def _refuse_circle(tables: Sequence[Table], graph: nx.DiGraph[Place | str], found: set[Place | str]) -> None:
    circle = nx.find_cycle(graph.subgraph(found))
    names = [_name(tables, node) for node, *_ in circle]
    steps = "".join(f"\n    {after} waits for {before}" for before, after in pairwise([*names, names[0]]))
    raise ScheduleError(
        f"devices wait for each other in a circle, which has {counted(len(names), 'op')}.\n"
        f"  Each of these ops waits for the one before:{steps}\n"
        "  Keep ops between devices in the order of compute."
    )


def _name(tables: Sequence[Table], node: Place | str) -> str:
    if isinstance(node, str):
        return node
    device, position = node
    return f"{tables[device].ticks[position.tick][position.stream]} of device {device} ({position.stream})"
