"""The checker's rules of blocks that are dealt to several devices: what crosses between them, when, and in which order.

A table has the blocks of one device. Each table is checked alone: all devices run their compute in one order, that of
one process, in which all micro-batches run through a block before the next one. So an op between devices has a place
in this order, just before the compute that needs it or just after the compute that makes it. No two devices wait for
each other in a circle if each stream keeps to this order, and no op waits for an op between devices of a later place:
of all ops that aren't over, the first one in this order can go on.

What one device sends to another lies in a room for each micro-batch until it is taken. A message is sent after what its
receiver has taken before in this order; see `megatrain.ranks.legs`. So a full room is no other wait.

Of several hosts each deals the blocks to its devices, and sums of gradients go from host to host (`rank_rules`). These
ops have places in the same order: an `R` just before the second backward of its block, a `P` after the last one and
what goes to other devices behind it, and then the `G`. So a host waits for what others do up to the same block.

`check_devices` proves the same of all tables of a host together, and that the messages of all sides are the same ones;
`check_hosts` that no hosts wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position

_STEP = tuple[str, int, int]  # an F or B with its block and micro-batch


def check_crossings(case: Case) -> None:
    """Each value and gradient that crosses does so once for each micro-batch, when it is there and before its use."""
    rule = (
        "A value that crosses between devices has an X before its first F here, or after the F that makes it; its "
        "gradient a D after the last B here that adds to it, or before the first one."
    )
    is_dealt = case.schedule.kind.is_dealt
    for stream, what, blocks in _expected(case):
        for block in range(len(case.workload.blocks)):
            for number in case.micro_batches:
                if is_dealt and block in blocks:
                    case.once(stream, what, block, rule, number)
                else:
                    case.never(
                        stream, what, block, "has nothing to bring to another device, or from there", rule, number
                    )
    crossing = any(value.comes is not None or value.goes for value in case.workload.values)
    if crossing and not is_dealt:
        raise case.fault("values cross between devices, but there is one.", rule, 0, "State the devices.")
    if not is_dealt:
        return
    for number in case.micro_batches:
        for index in range(len(case.workload.values)):
            _check_forward(case, index, number, rule)
            if case.workload.has_value_gradient(index):
                _check_backward(case, index, number, rule)


def _expected(case: Case) -> Iterator[tuple[Stream, str, set[int]]]:
    """The blocks that have each kind of op between devices."""
    values = case.workload.values
    comes = [value.comes for value in values if value.comes is not None]
    goes = [crossing for value in values for crossing in value.goes]
    yield Stream.RECEIVE, "X", {crossing.forward for crossing in comes}
    yield Stream.SEND, "X", {crossing.forward for crossing in goes}
    yield Stream.RECEIVE, "D", {crossing.backward for crossing in goes if crossing.backward is not None}
    yield Stream.SEND, "D", {crossing.backward for crossing in comes if crossing.backward is not None}


def _check_forward(case: Case, index: int, number: int, rule: str) -> None:
    value = case.workload.values[index]
    made: Position | None = None
    if value.comes is not None:
        made = case.at(Stream.RECEIVE, "X", value.comes.forward, number)[0]
        for reader in value.readers:
            case.require_before(made, case.forward(reader, number), "reads a value that comes with", rule)
        for reader in case.workload.backward_readers(index):
            case.require_before(made, case.backward(reader, number), "reads a value that comes with", rule)
    elif value.producer is not None:
        made = case.forward(value.producer, number)
    for crossing in value.goes:
        going = case.at(Stream.SEND, "X", crossing.forward, number)[0]
        if made is not None:
            case.require_before(made, going, "hands on a value of", rule)


def _check_backward(case: Case, index: int, number: int, rule: str) -> None:
    value, readers = case.workload.values[index], case.workload.backward_readers(index)
    coming = None
    if value.returning is not None and value.returning.backward is not None:
        coming = case.at(Stream.RECEIVE, "D", value.returning.backward, number)[0]
        adding = [*readers, *([] if value.producer is None else [value.producer])]
        for block in adding:
            case.require_before(coming, case.backward(block, number), "adds to a sum that comes with", rule)
    if value.comes is not None and value.comes.backward is not None:
        going = case.at(Stream.SEND, "D", value.comes.backward, number)[0]
        for block in readers:
            case.require_before(case.backward(block, number), going, "hands on a sum to which adds", rule)
        if coming is not None:
            case.require_before(coming, going, "hands on a sum that comes with", rule)


def check_order_between_devices(case: Case) -> None:
    """All ops between devices and hosts have one order on all of them, once it is known that they are there."""
    if not case.schedule.kind.is_dealt:
        return
    rule = "Compute takes block after block, all micro-batches of each, on all devices in the order of one process."
    steps = {(op.what, op.block, op.micro_batch or 0): at for at, op in case.ops if op.stream == Stream.COMPUTE}
    order = list(_order(case))
    for (index, earlier), later in zip(enumerate(order), order[1:], strict=False):
        if steps[earlier] > steps[later]:
            what = f"{case.name(steps[later])} comes before {case.name(steps[earlier])}"
            raise case.fault(f"{what}, step {index} of one process.", rule, steps[later].tick, "Exchange the two.")
    rule = "Ops between devices keep to the order of compute, and nothing waits for a later one."
    found = _places(case, {step: 5 * number for number, step in enumerate(order)})
    for stream in (Stream.RECEIVE, Stream.SEND):
        own = [position for position in found if position.stream == stream]
        for earlier, later in pairwise(own):
            if found[later] < found[earlier]:
                raise case.fault(f"{case.name(later)} comes too late.", rule, later.tick, "Exchange the two.")
    _check_circles(case, found, rule)


def _places(case: Case, steps: dict[_STEP, int]) -> dict[Position, int]:
    """The places of all ops between devices and hosts among the steps of compute, which have theirs."""
    found: dict[Position, int] = {}
    for position, op in case.ops:
        run = op.block, op.micro_batch or 0
        if op.stream == Stream.COMPUTE:
            found[position] = steps[op.what, *run]
        elif op.what in ("X", "D"):
            step = steps["F" if op.what == "X" else "B", *run]
            found[position] = step - 1 if op.stream == Stream.RECEIVE else step + 1
        elif op.what == "R":
            found[position] = steps["B", op.block, 1] - 1
        elif op.what in ("P", "G") and case.schedule.kind.has_other_ranks:
            found[position] = steps["B", op.block, case.micro_batches[-1]] + (2 if op.what == "P" else 3)
    return found


def _order(case: Case) -> Iterator[_STEP]:
    """The compute of this device in the order of one process."""
    blocks, numbers = range(len(case.workload.blocks)), case.micro_batches
    backward = case.workload.backward_blocks()
    turns = case.schedule.kind.has_losses and backward[-1:] == tuple(blocks[-1:]) and len(numbers) > 1
    for block in blocks[:-1] if turns else blocks:
        yield from (("F", block, number) for number in numbers)
    if turns:
        yield from ((what, blocks[-1], number) for number in numbers for what in "FB")
    for block in reversed(backward[:-1] if turns else backward):
        yield from (("B", block, number) for number in numbers)


def _check_circles(case: Case, places: dict[Position, int], rule: str) -> None:
    later: dict[Stream, Position] = {}  # of each stream the first op with a later place
    for mine in sorted(places, key=places.__getitem__, reverse=True):
        for theirs in later.values():
            if theirs.stream != mine.stream and case.clocks.is_before(theirs, mine):
                what = f"{case.name(mine)} waits for {case.name(theirs)}"
                raise case.fault(f"{what}, which may wait for it on another device.", rule, mine.tick, "Move it.")
        later[mine.stream] = mine
