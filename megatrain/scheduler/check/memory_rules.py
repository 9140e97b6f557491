"""The checker's rules of memory: the figures that a table states, and proof that no timing exceeds them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megatrain.base.sizes import aligned
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import BlockWork, KeptWork


def check_weights(case: Case) -> None:
    """Every F and B finds its weights in a slot, and no W touches them before it is done."""
    rule = "F and B read what the last W of their block copied; no W writes there before they are done."
    latest: dict[int, Position] = {}
    readers: dict[Position, list[Position]] = {}
    for tick, row in enumerate(case.schedule.ticks):
        if row.compute is not None and case.workload.blocks[row.compute.block].state_bytes > 0:
            position = Position(tick, Stream.COMPUTE)
            if row.compute.block not in latest:
                raise case.fault(
                    f"{case.name(position)} needs W{row.compute.block}, which isn't at an earlier tick.",
                    rule,
                    tick,
                    f"Prefetch W{row.compute.block} at tick {tick - 1} or earlier.",
                )
            load = latest[row.compute.block]
            case.require_before(load, position, "reads weights that are copied by", rule)
            readers.setdefault(load, []).append(position)
        for stream, op in row.items():
            if op.what == "W":
                latest[op.block] = Position(tick, stream)
    _check_overwrites(case, readers, rule)


def _check_overwrites(case: Case, readers: dict[Position, list[Position]], rule: str) -> None:
    lying: dict[Position, tuple[int, int]] = {}
    for position, op in case.ops:
        if op.what != "W" or op.slot is None:
            continue
        if position not in readers:
            raise case.fault(f"{case.name(position)} is read by nothing.", rule, position.tick, "Remove it.")
        nbytes = 0 if case.schedule.kind.transfer == "bind" else case.held_bytes(op.block)
        start = case.schedule.slots[op.slot].offset
        overwritten = [p for p, (a, b) in lying.items() if a < start + nbytes and start < b]
        for load in overwritten:
            # Every later write to these bytes follows this W in its stream.
            del lying[load]
            for reader in readers[load]:
                case.require_before(reader, position, f"overwrites {case.name(load)}, read by", rule)
        lying[position] = (start, start + nbytes)


def check_persistent(case: Case) -> None:
    """Nothing else is ever copied to where weights of a block stay across steps, frozen or updated there."""
    rule = (
        "A block whose weights stay has frozen ones, or is updated on the device; it has one W a step, and bytes of "
        "the arena that no other W writes."
    )
    blocks, schedule = case.schedule.persistent, case.schedule
    is_known = list(blocks) == sorted(set(blocks)) and all(0 <= b < len(case.workload.blocks) for b in blocks)
    has_kind = schedule.kind.is_training_step and schedule.kind.transfer == "copy"
    if blocks and not (is_known and has_kind and all(case.workload.blocks[b].frozen_bytes > 0 for b in blocks)):
        raise case.fault(f"blocks {list(blocks)} can't be persistent.", rule, 0, "Change `persistent`.")
    for block in (*blocks, *schedule.device_updates):
        load = case.once(Stream.H2D, "W", block, rule)
        start, stop = _written(case, load)
        for position, op in case.ops:
            if op.what == "W" and position != load:
                low, high = _written(case, position)
                if low < stop and start < high:
                    raise case.fault(
                        f"{case.name(position)} overwrites the weights of block {block}.",
                        rule,
                        position.tick,
                        "Use another slot.",
                    )


def loaded_bytes(case: Case, block: int) -> int:
    """Bytes that a W of a block copies: what isn't there since an earlier step."""
    work = case.workload.blocks[block]
    if block in case.schedule.device_updates:
        return 0
    return work.state_bytes - (work.frozen_bytes if block in case.schedule.persistent else 0)


def _written(case: Case, load: Position) -> tuple[int, int]:
    """The bytes of the arena that a W fills."""
    op = case.op(load)
    assert op.slot is not None
    start = case.schedule.slots[op.slot].offset
    return start, start + case.held_bytes(op.block)


def recount_host(case: Case) -> int:
    """Bytes of parked values, and where gradients land and have places."""
    if case.schedule.kind.transfer == "bind":
        return 0
    sizes = (case.workload.blocks[op.block].landing_bytes for _, op in case.ops if op.what == "G")
    slab = max([0, *sizes]) if not case.schedule.kind.holds_gradients else 0
    places = max((place.offset + place.nbytes for place in case.schedule.places), default=0)
    kept = [
        case.workload.values[v] for block, values in case.parked.items() for v in values if block not in case.evicted
    ]
    parks = len(case.micro_batches) * sum(aligned(value.nbytes) for value in kept)
    return slab + places + parks + max((buffer.stop for buffer in case.buffers().values()), default=0)


def recount_host_values(case: Case) -> int:
    """Values that are tensors of the CPU, with their gradients: each memory once for each micro-batch."""
    memories: dict[int, int] = {}
    gradients = 0
    for index, value in enumerate(case.workload.values):
        if value.on_host:
            memories[value.storage] = case.workload.storages[value.storage]
            has_one = case.schedule.kind.mode != "forward" and case.workload.has_value_gradient(index)
            gradients += value.nbytes if has_one else 0
    return len(case.micro_batches) * (sum(memories.values()) + gradients)


def recount_waiting(case: Case) -> int:
    """The most bytes of gradients on the host without places: gradients that no update has consumed yet.

    A step begins with all gradients that its deferred updates consume.
    """
    if not case.schedule.kind.holds_gradients or case.schedule.kind.transfer == "copy":
        return 0
    consumed = consumed_bytes(case)
    head = next(
        (tick for tick, row in enumerate(case.schedule.ticks) if row.d2h is not None and row.d2h.what == "G"), 0
    )
    of_before = {"deferred": len(case.schedule.ticks), "spread": head}.get(case.schedule.kind.updates, 0)
    most = waiting = sum(nbytes for tick, nbytes in consumed.items() if tick < of_before)
    for tick, row in enumerate(case.schedule.ticks):
        if row.d2h is not None and row.d2h.what == "G":
            waiting += case.workload.blocks[row.d2h.block].gradient_bytes
        most = max(most, waiting)
        waiting -= consumed.get(tick, 0)
    return most


def consumed_bytes(case: Case) -> dict[int, int]:
    """Bytes of gradients that the host needs no more after a tick: its `U` is the last to read those of some block."""
    updates = [(p.tick, op.block) for p, op in case.ops if op.what == "U" and p.stream == Stream.HOST]
    found: dict[int, int] = {}
    seen: set[int] = set()
    for tick, block in reversed(updates):
        for member in {block, *case.workload.blocks[block].shares} - seen:
            seen.add(member)
            work = case.workload.blocks[member]
            if work.has_backward and work.gradient_bytes > 0:
                found[tick] = found.get(tick, 0) + work.gradient_bytes
    return found


# The checker's own accounting of the device's memory, which shares nothing with that of the builder.
#
# Spans are of moments, two for each tick: while its op of compute runs, and when that op is over.


def counted_moments(case: Case) -> list[int]:
    """Bytes that live at each moment."""
    num_moments = _num_moments(case)
    change = [0] * (num_moments + 1)
    arena = max((slot.offset + slot.nbytes for slot in case.schedule.slots), default=0)
    spans = list(_gradient_spans(case))
    on_host = {value.storage for value in case.workload.values if value.on_host}
    for number in case.micro_batches:
        spans += _other_spans(case, number)
        storages: dict[int, set[range]] = {}
        for storage, span in _storage_spans(case, number):
            storages.setdefault(storage, set()).add(span)
        for storage, uses in storages.items():
            # Aliases overlap: of their common bytes, those that an earlier alias covers are left out.
            covered = -1
            for use in sorted(uses, key=lambda r: (r.start, r.stop)):
                rest = range(max(use.start, covered + 1), use.stop)
                spans.append((0 if storage in on_host else case.workload.storages[storage], rest))
                covered = max(covered, use.stop - 1)
    for nbytes, span in spans:
        if len(span) > 0:
            change[span.start] += nbytes
            change[span.stop] -= nbytes
    total, live = arena, list[int]()
    for delta in change[:num_moments]:
        total += delta
        live.append(total)
    return live


def _num_moments(case: Case) -> int:
    return 2 * len(case.schedule.ticks)


def _while(position: Position) -> int:
    """The moment of an op: of compute while it runs; what a transfer uses is there until compute waits for it."""
    return 2 * position.tick + (position.stream != Stream.COMPUTE)


def _taken(case: Case, transfer: Position) -> int:
    """The moment in which memory is taken that a transfer fills: when its taker is over, or the start of the step."""
    taker = case.taker_of(transfer)
    return 0 if taker is None else 2 * taker.tick + 1


def _uses(case: Case, index: int, number: int) -> tuple[list[int], list[int]]:
    """Moments of the forwards and of the backwards that need a value on the device, its production included."""
    value, mode = case.workload.values[index], case.schedule.kind.mode
    forward = list[int]()
    backward = list[int]()
    if mode != "backward":
        makers = () if value.producer is None else (value.producer,)
        forward = [_while(case.forward(b, number)) for b in (*makers, *value.readers)]
    if mode != "forward":
        backward = [_while(case.backward(b, number)) for b in case.workload.backward_readers(index)]
        if value.producer is not None and value.producer in case.saved:
            backward.append(_while(case.backward(value.producer, number)))
    return forward, backward


def _storage_spans(case: Case, number: int) -> Iterator[tuple[int, range]]:
    """When the storage of each value of a micro-batch is held, before parking."""
    parked = {v: block for block, values in case.parked.items() for v in values}
    handed_in = _turn(case, number)
    for index, value in enumerate(case.workload.values):
        if not case.is_there(index):
            continue
        forward, backward = _uses(case, index, number)
        begins_before = case.schedule.kind.mode == "backward" or value.is_there
        start = 0 if begins_before else min(forward)
        stays = value.is_output and (case.schedule.kind.outputs == "keep" or value.is_committed)
        if stays or (value.is_there and not value.readers and not value.is_output):
            is_unused = case.schedule.kind.mode == "backward" and not value.is_output
            yield value.storage, range(start, start if is_unused else _num_moments(case))
        elif index in parked:
            if forward:
                leaves = _while(case.at(Stream.D2H, "A", parked[index], number)[0])
                yield value.storage, range(start, max(*forward, leaves) + 1)
        elif forward or backward or value.is_output:
            last_use = handed_in if value.is_output else start
            yield value.storage, range(start, max([*forward, *backward, last_use]) + 1)


def _turn(case: Case, number: int) -> int:
    """The moment of the first backward of a micro-batch, or of its last forward where there is none."""
    backwards = () if case.schedule.kind.mode == "forward" else case.workload.backward_blocks()
    if backwards:
        return min(_while(case.backward(block, number)) for block in backwards)
    forwards = range(0 if case.schedule.kind.mode == "backward" else len(case.workload.blocks))
    return max((_while(case.forward(block, number)) for block in forwards), default=0)


def _other_spans(case: Case, number: int) -> Iterator[tuple[int, range]]:
    """Bytes and moments of what a micro-batch has besides the storages of its values.

    That is returned values, gradients of values, and retained graphs.
    """
    for block, values in case.parked.items():
        taken = _taken(case, case.at(Stream.H2D, "A", block, number)[0])
        for index in values:
            _, backward = _uses(case, index, number)
            yield case.workload.values[index].nbytes, range(taken, max(backward) + 1)
    if case.schedule.kind.mode == "forward" or not case.workload.backward_blocks():
        return
    turn = _turn(case, number)
    for index, value in enumerate(case.workload.values):
        if case.workload.has_value_gradient(index):
            readers = [_while(case.backward(b, number)) for b in case.workload.backward_readers(index)]
            last = _num_moments(case) - 1
            end = last if value.producer is None else _while(case.backward(value.producer, number))
            # The caller passes the gradient of an output: when the backward starts, or before a backward alone.
            handed_in = 0 if case.schedule.kind.mode == "backward" else turn
            nbytes = 0 if value.on_host else value.nbytes
            yield nbytes, range(handed_in if value.is_output else min(readers), end + 1)
    for block in case.schedule.saves:
        start = 0 if case.schedule.kind.mode == "backward" else _while(case.forward(block, number))
        yield case.workload.blocks[block].saved_bytes, range(start, _while(case.backward(block, number)) + 1)


def _gradient_spans(case: Case) -> Iterator[tuple[int, range]]:
    """Gradients of parameters: from the first B of a block, to which the others add, until nothing needs them."""
    if case.schedule.kind.mode == "forward":
        return
    for block in case.workload.backward_blocks():
        work = case.workload.blocks[block]
        if work.gradient_bytes > 0:
            last = max(map(_while, case.gradient_users(block)))
            yield work.gradient_bytes, range(_while(min(case.backwards(block))), last + 1)


def needed_moments(case: Case) -> Iterator[int]:
    """The same with the workspace of ops, while they run."""
    added = _summands(case)
    seen: set[int] = set()
    moments = iter(counted_moments(case))
    for row in case.schedule.ticks:
        workspace = 0
        if row.compute is not None and row.compute.what == "F":
            workspace = _measured(case, row.compute.block).forward_workspace_bytes
        elif row.compute is not None and row.compute.what == "U":
            workspace = case.workload.blocks[row.compute.block].update_workspace_bytes
        elif row.compute is not None:
            block = row.compute.block
            work = case.workload.blocks[block]
            held = work.saved_bytes if block in case.saved else 0
            workspace = max(_measured(case, block).backward_workspace_bytes - held, 0)
            workspace += added.get((block, row.compute.micro_batch or 0), 0)
            # The gradients of each backward except the first exist in addition to the sum.
            is_first = block not in seen
            workspace += 0 if is_first else work.gradient_bytes
            workspace = max(workspace, _with_loss(case, block, row.compute.micro_batch or 0, is_first=is_first))
            seen.add(block)
        yield next(moments) + workspace
        yield next(moments)  # the op is over


def _measured(case: Case, block: int) -> BlockWork | KeptWork:
    """Where the workspace of a block is stated: other bytes count as such where results are kept."""
    work = case.workload.blocks[block]
    return work.kept if work.kept is not None and block in case.keeping else work


def _with_loss(case: Case, block: int, number: int, *, is_first: bool) -> int:
    """Bytes of the loss before the first backward of a micro-batch, less the gradients that this one begins."""
    kind, moment = case.schedule.kind, _while(case.backward(block, number))
    if kind.mode != "train" or kind.outputs == "keep" or moment != _turn(case, number):
        return 0
    begun = case.workload.blocks[block].gradient_bytes if is_first else 0
    for index, value in enumerate(case.workload.values):
        if case.workload.has_value_gradient(index) and not (value.is_output or value.on_host):
            readers = [_while(case.backward(b, number)) for b in case.workload.backward_readers(index)]
            begun += value.nbytes if readers and min(readers) == moment else 0
    return max(0, case.workload.loss_bytes - begun)


def _summands(case: Case) -> dict[tuple[int, int], int]:
    """Per block and micro-batch, the bytes of gradients of values that its B adds to others."""
    added: dict[tuple[int, int], int] = {}
    gradients = range(0 if case.schedule.kind.mode == "forward" else len(case.workload.values))
    for index, number in product(filter(case.workload.has_value_gradient, gradients), case.micro_batches):
        # The first gradient of a value is the sum itself: the caller's gradient, if there is one.
        value = case.workload.values[index]
        if value.on_host:
            continue
        readers = sorted(case.workload.backward_readers(index), key=lambda b: case.backward(b, number).tick)
        for block in readers if value.is_output else readers[1:]:
            added[block, number] = added.get((block, number), 0) + value.nbytes
    return added


def check_releases_come_first(case: Case) -> None:
    """Every op that allocates certainly runs after the ops of earlier ticks that release memory."""
    rule = "Live bytes omit memory that earlier ticks released, so an op that allocates must wait for its release."
    last: dict[Stream, Position] = {}
    consumed = consumed_bytes(case)
    for tick, row in enumerate(case.schedule.ticks):
        for stream, op in row.items():
            for other in (Stream.D2H,) if stream == Stream.COMPUTE else _RELEASING.get((stream, op.what), ()):
                if other in last:
                    case.require_before(last[other], Position(tick, stream), "takes memory released by", rule)
        for stream in row:
            if stream != Stream.HOST or tick in consumed:
                last[stream] = Position(tick, stream)


# Ops that take memory, and the streams that release some of it.
_RELEASING: dict[tuple[Stream, str], tuple[Stream, ...]] = {
    (Stream.H2D, "A"): (Stream.COMPUTE,),
    (Stream.D2H, "G"): (Stream.HOST,),
}


def check_live_bytes(case: Case) -> None:
    """The live bytes of every tick are those of the weights, values, gradients and graphs alive in it."""
    rule = "Live bytes of a tick: slots, and all items made by then and not released before."
    moments = counted_moments(case)
    live = map(max, moments[::2], moments[1::2])
    for tick, (stated, counted) in enumerate(zip(case.schedule.live_bytes, live, strict=True)):
        if stated != counted:
            raise case.fault(
                f"tick {tick} states {stated} live bytes, but {counted} are.", rule, tick, f"State {counted}."
            )


def check_figures(case: Case) -> None:
    """The figures of the header are the sums and maxima of the table."""
    schedule = case.schedule
    h2d, d2h = _recount_moved(case)
    counted = {
        "h2d_bytes": h2d,
        "d2h_bytes": d2h,
        "peak_bytes": max(schedule.live_bytes, default=0),
        "device_bytes": max(needed_moments(case), default=0),
        "host_bytes": recount_host(case) + recount_waiting(case) + recount_host_values(case),
    }
    for name, figure in counted.items():
        if getattr(schedule, name) != figure:
            raise case.fault(
                f"{name} is stated as {getattr(schedule, name)}, but is {figure}.",
                "The figures of the header follow from the table.",
                0,
                f"State {figure}.",
            )


def _recount_moved(case: Case) -> tuple[int, int]:
    moved = {Stream.H2D: 0, Stream.D2H: 0}
    if case.schedule.kind.transfer == "copy":
        for position, op in case.ops:
            if op.what == "A":
                moved[position.stream] += sum(case.workload.values[v].nbytes for v in case.parked[op.block])
            elif op.what in ("W", "G"):
                is_load = op.what == "W"
                nbytes = loaded_bytes(case, op.block) if is_load else case.workload.blocks[op.block].gradient_bytes
                moved[position.stream] += nbytes
    return moved[Stream.H2D], moved[Stream.D2H]
