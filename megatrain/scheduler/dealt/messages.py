"""Messages: what goes at once from one device to another, where blocks are dealt, as either side states it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.workload import Workload
from megatrain.sizes import aligned


class Message(NamedTuple):
    """What goes from one device to another at once, as either side states it.

    Attributes:
        what: `"X"` for values, `"D"` for gradients.
        sender: The block of the whole model after which it goes.
        receiver: The block of the whole model before which it comes.
        sizes: Bytes of its tensors, ascending.
    """

    what: str
    sender: int
    receiver: int
    sizes: tuple[int, ...]


Route = tuple[int, int, int]
"""The way of the messages of a micro-batch: from a device to another one. It has one room."""
Sides = Mapping[Route, Sequence[tuple[Position, Message]]]


def sent_by(device: int, table: Table) -> Sides:
    """The messages that a device sends, by route, in their order."""
    return _messages(device, table, Stream.SEND)


def received_by(device: int, table: Table) -> Sides:
    """Those that it receives."""
    return _messages(device, table, Stream.RECEIVE)


def mail_bytes(device: int, table: Table) -> int:
    """Bytes of the rooms for what a device sends: of each way one for each micro-batch, as large as its messages."""
    most: dict[Route, int] = {}
    for route, sent in sent_by(device, table).items():
        most[route] = max(sum(aligned(nbytes) for nbytes in message.sizes) for _, message in sent)
    return sum(most.values())


def _messages(device: int, table: Table, stream: Stream) -> dict[Route, list[tuple[Position, Message]]]:
    workload = table.known_workload()
    found: dict[Route, list[tuple[Position, Message]]] = {}
    by_op: dict[tuple[str, int], dict[int, list[tuple[int, int]]]] = {}
    for what in "XD":
        for block in range(len(workload.blocks)):
            by_op[what, block] = _of_op(workload, stream, what, block)
    for position, op in table.positions():
        if position.stream != stream or op.what not in ("X", "D"):
            continue
        own = workload.numbers[op.block]
        for other, moved in by_op[op.what, op.block].items():
            theirs = {there for there, _ in moved}
            sizes = tuple(sorted(nbytes for _, nbytes in moved))
            for there in sorted(theirs):
                route = (device, other) if stream == Stream.SEND else (other, device)
                blocks = (own, there) if stream == Stream.SEND else (there, own)
                message = Message(op.what, *blocks, sizes)
                found.setdefault((*route, op.micro_batch or 0), []).append((position, message))
    return found


def _of_op(workload: Workload, stream: Stream, what: str, block: int) -> dict[int, list[tuple[int, int]]]:
    """By the other device: the block there and the bytes of each value that an op moves."""
    found: dict[int, list[tuple[int, int]]] = {}
    for value in workload.values:
        comes = [] if value.comes is None else [value.comes]
        crossings = comes if (stream == Stream.RECEIVE) == (what == "X") else value.goes
        for crossing in crossings:
            here, there = crossing.forward, crossing.forward_there
            if what == "D":
                here, there = crossing.backward, crossing.backward_there
            if here == block and there is not None:
                found.setdefault(crossing.device, []).append((there, value.nbytes))
    return found
