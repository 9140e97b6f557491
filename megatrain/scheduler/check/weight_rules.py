"""The checker's rules of weights: F and B find theirs in a slot, and what stays across steps is never overwritten."""

from __future__ import annotations

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position


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
        if op.slot is None:
            continue
        if position not in readers:
            raise case.fault(f"{case.name(position)} is read by nothing.", rule, position.tick, "Remove it.")
        nbytes = 0 if case.schedule.kind.transfer == "bind" else case.workload.blocks[op.block].state_bytes
        start = case.schedule.slots[op.slot].offset
        overwritten = [p for p, (a, b) in lying.items() if a < start + nbytes and start < b]
        for load in overwritten:
            # Every later write to these bytes follows this W in its stream.
            del lying[load]
            for reader in readers[load]:
                case.require_before(reader, position, f"overwrites {case.name(load)}, read by", rule)
        lying[position] = (start, start + nbytes)


def check_persistent(case: Case) -> None:
    """Nothing else is ever copied to where the frozen weights of a block stay across steps."""
    rule = "A persistent block has frozen weights, one W a step, and bytes of the arena that no other W writes."
    blocks, schedule = case.schedule.persistent, case.schedule
    is_known = list(blocks) == sorted(set(blocks)) and all(0 <= b < len(case.workload.blocks) for b in blocks)
    has_kind = schedule.kind.is_training_step and schedule.kind.transfer == "copy"
    if blocks and not (is_known and has_kind and all(case.workload.blocks[b].frozen_bytes > 0 for b in blocks)):
        raise case.fault(f"blocks {list(blocks)} can't be persistent.", rule, 0, "Change `persistent`.")
    for block in blocks:
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
    return work.state_bytes - (work.frozen_bytes if block in case.schedule.persistent else 0)


def _written(case: Case, load: Position) -> tuple[int, int]:
    """The bytes of the arena that a W fills."""
    op = case.op(load)
    assert op.slot is not None
    start = case.schedule.slots[op.slot].offset
    return start, start + case.workload.blocks[op.block].state_bytes
