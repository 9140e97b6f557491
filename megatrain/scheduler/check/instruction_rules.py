"""The checker's rules of instructions: they are the table's ops, wait enough, and hold every byte as long as needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatrain.base.sizes import ALIGNMENT, PAGE
from megatrain.errors import ScheduleError
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.schedule_rules import check_waits
from megatrain.scheduler.instructions import Bytes, Half, Instruction, Instructions
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.workload import Workload


def check_instructions(instructions: Instructions, table: Table, workload: Workload) -> None:
    """Proves that instructions do what the table says, safely and in the memory that it states.

    Shares no decision with `emit`.
    """
    _check_order(instructions, table)
    waits = {i.position: i.waits for i in instructions.all}
    in_order = {position: waits[position] for position, _ in table.positions()}
    for instruction in instructions.all:
        _check_waits_are_earlier(instruction, in_order)
    case = check_waits(table, workload, in_order)
    _check_flags(case, instructions)
    _check_state(case, instructions)
    _check_landings(case, instructions)
    _check_parks(case, instructions)
    _check_evictions(case, instructions)
    _check_frees(case, instructions)
    _check_takes(case, instructions)
    totals = {"slot_bytes": table.arena_bytes, "landing_bytes": table.landing_bytes}
    for name, nbytes in totals.items():
        if getattr(instructions, name) != nbytes:
            raise ScheduleError(f"{name} of the instructions is {getattr(instructions, name)}, but is {nbytes}.")


def _fault(instruction: Instruction | str, what: str, rule: str) -> ScheduleError:
    where = instruction
    if isinstance(instruction, Instruction):
        where = f"{instruction.position.stream}:{instruction.op} at tick {instruction.position.tick}"
    return ScheduleError(f"{where} {what}.\n  {rule}\n  Use the result of schedule.instructions.")


def _expect(instruction: Instruction | str, name: str, found: Any, expected: Any, rule: str) -> None:
    if found != expected:
        raise _fault(instruction, f"has {name} {_shown(found)}, not {_shown(expected)}", rule)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "nothing" if type(value) in (list, tuple) else str(value)


def _check_order(instructions: Instructions, table: Table) -> None:
    rule = "Instructions are the ops of the table, in its order; in a call, the ops up to the last F come first."
    found = [(i.position, i.op) for i in instructions.all]
    if found != list(table.positions()):
        raise _fault("the instructions", "are not the ops of the table", rule)
    forwards = [p.tick for p, op in found if op.what == "F"]
    split = max(forwards) if forwards and not table.kind.is_training_step else -1
    expected = sum(p.tick <= split for p, _ in found)
    _expect("the part until the outputs", "ops", len(instructions.forward.instructions), expected, rule)


def _check_waits_are_earlier(instruction: Instruction, known: Mapping[Position, object]) -> None:
    rule = "An op waits for ops of earlier ticks and other streams."
    for wait in instruction.waits:
        is_other = wait.stream != instruction.position.stream and wait.tick < instruction.position.tick
        if wait not in known or not is_other:
            raise _fault(instruction, f"waits for {wait.stream} {wait.tick}", rule)


def _check_flags(case: Case, instructions: Instructions) -> None:
    rule = "`saves` says which graphs are retained; others are recomputed."
    is_train, turned = case.schedule.kind.mode == "train", set[int]()
    for instruction in instructions.all:
        op, number = instruction.op, instruction.micro_batch
        is_forward, is_saved = op.what == "F", op.block in case.saved
        has_backward = is_train and case.workload.blocks[op.block].has_backward
        _expect(instruction, "a retained graph", instruction.retains, is_forward and is_saved, rule)
        _expect(instruction, "a recompute", instruction.recomputes, is_forward and has_backward and not is_saved, rule)
        keeps = is_forward and op.block in case.keeping
        _expect(
            instruction, "results that are kept", instruction.keeps, keeps, "`results` says which blocks keep them."
        )
        persists = op.what == "W" and op.block in (*case.schedule.persistent, *case.schedule.device_updates)
        _expect(instruction, "weights that persist", instruction.persists, persists, "`persistent` says which do.")
        turns = op.what == "B" and number not in turned
        _expect(instruction, "a turn", instruction.turns, turns, "The caller's gradients arrive before the first B.")
        turned |= {number} if turns else set()


def _check_state(case: Case, instructions: Instructions) -> None:
    """Each W fills its slot, each F and B reads what the last W of its block filled, and the last reader leaves it."""
    rule = (
        "F and B read the bytes that the last W of their block in an earlier tick filled; the last reader releases "
        "them, unless they persist."
    )
    is_bound = case.schedule.kind.transfer == "bind"
    filled: dict[int, tuple[Position, Bytes]] = {}
    reader: dict[Position, tuple[Position, Bytes]] = {}
    pending: list[tuple[int, Position, Bytes]] = []
    by_tick: dict[int, list[Instruction]] = {}
    for instruction in instructions.all:
        by_tick.setdefault(instruction.position.tick, []).append(instruction)
    for tick in sorted(by_tick):
        for instruction in by_tick[tick]:
            op, expected = instruction.op, None
            if op.what == "W" and op.slot is not None and not is_bound:
                nbytes = case.held_bytes(op.block)
                expected = Bytes(case.schedule.slots[op.slot].offset, nbytes)
                pending.append((op.block, instruction.position, expected))
            elif instruction.position.stream == Stream.COMPUTE and op.block in filled and not is_bound:
                load, expected = filled[op.block]
                reader[load] = instruction.position, expected
            _expect(instruction, "state", instruction.state, expected, rule)
        filled.update({block: (load, where) for block, load, where in pending})
        pending.clear()
    left: dict[Position, set[Bytes]] = {}
    for load, (position, where) in reader.items():
        if case.op(load).block not in (*case.schedule.persistent, *case.schedule.device_updates):
            left.setdefault(position, set()).add(where)
    for instruction in instructions.all:
        _expect(instruction, "left bytes", sorted(instruction.leaves), sorted(left.get(instruction.position, ())), rule)


def _check_landings(case: Case, instructions: Instructions) -> None:
    rule = "G puts gradients in the place that the table states, or in the slab; if nothing moves, nowhere."
    places = {place.block: Bytes(place.offset, place.nbytes) for place in case.schedule.places}
    for instruction in instructions.all:
        expected, block = None, instruction.op.block
        if instruction.op.what == "G" and case.schedule.kind.transfer == "copy":
            expected = places.get(block) or Bytes(0, case.workload.blocks[block].landing_bytes)
        _expect(instruction, "a landing", instruction.landing, expected, rule)


def _check_parks(case: Case, instructions: Instructions) -> None:
    rule = "Every parked value has its own bytes in host memory, or in its buffer, and returns from these bytes."
    known: dict[int, Bytes] = {}
    for instruction in instructions.all:
        expected = case.parked.get(instruction.op.block, []) if instruction.op.what == "A" else []
        _expect(instruction, "values", [p.value for p in instruction.parked], list(expected), rule)
        for value, host in instruction.parked:
            _expect(instruction, f"value {value}", host, known.setdefault(value, host), rule)
            if host.offset % ALIGNMENT or host.nbytes < case.workload.values[value].nbytes:
                raise _fault(instruction, f"has no room for value {value} at {host}", rule)
    end = _end([place for block, members in case.parked.items() if block not in case.evicted
                for place in _of(known, members)], rule)  # fmt: skip
    _expect("the instructions", "parks of bytes", instructions.park_bytes, end, rule)
    for block in case.evicted:
        nbytes = _end(_of(known, case.parked[block]), rule)
        if nbytes > case.chunk_bytes(block):
            raise _fault("the instructions", f"park {nbytes} B of block {block} in a buffer that is smaller", rule)
    buffers = max((buffer.stop for buffer in case.buffers().values()), default=0)
    _expect("the instructions", "buffers of bytes", instructions.buffer_bytes, buffers, rule)
    stated = case.schedule.park_bytes
    _expect("the table", "parks of bytes", stated, end * len(case.micro_batches) + buffers, rule)


def _of(known: Mapping[int, Bytes], values: Sequence[int]) -> list[tuple[int, Bytes]]:
    return [(value, known[value]) for value in values if value in known]


def _end(places: Sequence[tuple[int, Bytes]], rule: str) -> int:
    """The end of places of values, none of which overlap."""
    end = 0
    for value, host in sorted(places, key=lambda item: item[1]):
        if host.offset < end:
            raise _fault("the instructions", f"park value {value} at {host}, which belongs to another value", rule)
        end = host.offset + host.nbytes
    return end


def _check_evictions(case: Case, instructions: Instructions) -> None:
    rule = "E, L and their A use the buffer that E and L name; each chunk has its own bytes in the file."
    buffers, slots, where = case.buffers(), dict[tuple[str, int, int], int](), dict[tuple[int, int], Bytes]()
    for position, op in case.ops:
        if position.stream == Stream.DISK and op.what in "EL" and op.slot is not None:
            for stream in (Stream.DISK, Stream.D2H) if op.what == "E" else (Stream.DISK, Stream.H2D):
                slots[op.what if stream == Stream.DISK else stream, op.block, op.micro_batch or 0] = op.slot
    for instruction in instructions.all:
        op, number = instruction.op, instruction.micro_batch
        is_disk = op.stream == Stream.DISK and op.what in "EL"
        slot = slots.get((op.what if is_disk else op.stream, op.block, number)) if is_disk or op.what == "A" else None
        expected = None if slot is None else Bytes(buffers[slot].start, case.chunk_bytes(op.block))
        _expect(instruction, "buffer", instruction.buffer, expected, rule)
        place = instruction.file if is_disk else None
        _expect(instruction, "bytes of a file", instruction.file, place, rule)
        if is_disk:
            known = where.setdefault((op.block, number), place) if place is not None else None
            if place is None or place != known or place.nbytes != case.chunk_bytes(op.block) or place.offset % PAGE:
                raise _fault(instruction, f"has bytes of a file {_shown(place)}", rule)
    end = 0
    for place in sorted(where.values()):
        if place.offset < end:
            raise _fault("the instructions", f"have two chunks at {place} of the file", rule)
        end = place.offset + place.nbytes


def _check_frees(case: Case, instructions: Instructions) -> None:
    """Every item is freed after its last use, and before anything takes device memory in a later tick."""
    rule = (
        "Memory last used by compute is freed after that op; memory last used by a transfer, before the next op of "
        "compute."
    )
    before: dict[Position, set[Item]] = {}
    after: dict[Position, set[Item]] = {}
    ends: tuple[set[Item], set[Item]] = (set(), set())
    split = _split(instructions)
    computes = [p for p, _ in case.ops if p.stream == Stream.COMPUTE]
    for item, uses in _uses(case):
        last = max(uses, key=lambda p: (p.tick, p.stream != Stream.COMPUTE))
        if last.stream == Stream.COMPUTE:
            after.setdefault(last, set()).add(item)
            continue
        half = 0 if last.tick <= split else 1
        following = bisect_right(computes, last.tick, key=lambda p: p.tick)
        if following == len(computes) or (half == 0 and computes[following].tick > split):
            ends[half].add(item)
            continue
        before.setdefault(computes[following], set()).add(item)
        for use in uses:
            case.require_before(use, computes[following], "takes memory that is used by", rule)
    for one in instructions.all:
        _expect_items(one, "frees before it", one.frees_before, before.get(one.position), rule)
        _expect_items(one, "frees", one.frees_after, after.get(one.position), rule)
    for half, expected in zip((instructions.forward, instructions.backward), ends, strict=True):
        _check_end(half, expected, rule)


def _check_takes(case: Case, instructions: Instructions) -> None:
    """Memory for what returns is taken in the order of compute, before its transfer starts."""
    rule = "Memory for what returns is taken after compute of an earlier tick."
    split = _split(instructions)
    expected: dict[Position, set[Item]] = {}
    starts: tuple[set[Item], set[Item]] = (set(), set())
    for position, op in case.ops:
        if position.stream != Stream.H2D or op.what != "A":
            continue
        items = {Item("returned", value, op.micro_batch or 0) for value in case.parked[op.block]}
        taker, half = case.taker_of(position), 0 if position.tick <= split else 1
        if taker is None or (half == 1 and taker.tick <= split):
            starts[half].update(items)
            continue
        expected.setdefault(taker, set()).update(items)
        case.require_before(taker, position, "fills memory that is taken after", rule)
    for one in instructions.all:
        _expect_items(one, "takes", one.takes, expected.get(one.position), rule)
    for half, items in zip((instructions.forward, instructions.backward), starts, strict=True):
        _expect_items("the start of a half", "takes", half.takes, items, rule)


def _split(instructions: Instructions) -> int:
    """The last tick until the outputs; -1 if there is none."""
    return instructions.forward.instructions[-1].position.tick if instructions.forward.instructions else -1


def _check_end(half: Half, expected: set[Item], rule: str) -> None:
    _expect_items("the end of a half", "frees", half.frees, expected, rule)


def _expect_items(
    instruction: Instruction | str, name: str, found: tuple[Item, ...], expected: set[Item] | None, rule: str
) -> None:
    texts = [f"{item.kind} {item.number}.{item.micro_batch}" for item in sorted(found)]
    _expect(instruction, name, texts, [f"{i.kind} {i.number}.{i.micro_batch}" for i in sorted(expected or ())], rule)


def _uses(case: Case) -> Iterator[tuple[Item, list[Position]]]:
    """All items that are freed within the step, each with the ops that use it."""
    kind, workload = case.schedule.kind, case.workload
    backwards = set() if kind.mode == "forward" else set(workload.backward_blocks())
    parked = {value: block for block, values in case.parked.items() for value in values}
    losses = _losses(case) if kind.outputs == "release" else {}
    for number in case.micro_batches:
        for index in filter(case.is_there, range(len(workload.values))):
            yield from _value_uses(case, index, number, parked.get(index), losses)
            producer = workload.values[index].producer
            if backwards and workload.has_value_gradient(index) and producer is not None:
                yield Item("gradient", index, number), [case.backward(producer, number)]
        for block in backwards & case.saved:
            yield Item("saved", block, number), [case.backward(block, number)]
    for block in backwards:
        if workload.blocks[block].gradient_bytes > 0:
            yield Item("parameters", block), case.gradient_users(block)


def _value_uses(
    case: Case, index: int, number: int, parked_by: int | None, losses: Mapping[int, Position]
) -> Iterator[tuple[Item, list[Position]]]:
    value, kind = case.workload.values[index], case.schedule.kind
    forward = [] if kind.mode == "backward" else [case.forward(block, number) for block in value.readers]
    backward: list[Position] = []
    if kind.mode != "forward":
        backward = [case.backward(block, number) for block in case.workload.backward_readers(index)]
        if value.producer in case.saved:
            backward.append(case.backward(value.producer, number))
    item = Item("value", index, number)
    if parked_by is not None:
        if kind.mode != "backward":
            yield Item("original", index, number), [*forward, *case.at(Stream.D2H, "A", parked_by, number)]
        yield Item("returned", index, number), backward
        return
    uses = [*forward, *backward]
    if value.is_output:
        if kind.outputs == "keep" or value.is_committed:
            return
        uses.append(losses[number])
    if not uses and value.producer is not None and kind.mode != "backward":
        uses = [case.forward(value.producer, number)]
    if uses:
        yield item, uses


def _losses(case: Case) -> dict[int, Position]:
    """The first B of each micro-batch, before which the caller has made a loss of the outputs; else its last F."""
    found: dict[int, Position] = {}
    for position, op in case.ops:
        known = found.get(op.micro_batch or 0)
        if op.what in ("F", "B") and (known is None or case.op(known).what == "F"):
            found[op.micro_batch or 0] = position
    return found
