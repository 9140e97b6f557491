"""The checker's rules of the host: every parameter is updated once, from whole gradients, and not while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from megatrain.scheduler.check.case import Case
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.table import Position


def check_norm(case: Case) -> None:
    """The norm is taken once, over all gradients, after the previous step's updates have used its old value."""
    rule = (
        "A clipped step has one S for each G, after it, and one N, after all S and after updates of the previous step; "
        "steps without a norm have neither."
    )
    blocks = range(len(case.workload.blocks))
    _check_norms_there(case)
    if case.schedule.kind.reports_norm:
        _check_reported_norm(case)
        return
    if not case.schedule.kind.clip:
        for block in (NO_BLOCK, *blocks):
            case.never(Stream.HOST, "N" if block == NO_BLOCK else "S", block, "is read by nothing", rule)
        return
    norm = case.once(Stream.HOST, "N", NO_BLOCK, rule)
    for block in blocks:
        offloads = case.at(Stream.D2H, "G", block)
        if not offloads:
            case.never(Stream.HOST, "S", block, "has no gradients", rule)
            continue
        squares = case.once(Stream.HOST, "S", block, rule)
        for offload in offloads:
            case.require_before(offload, squares, "sums squares of gradients that leave with", rule)
        case.require_before(squares, norm, "takes the norm from what is summed by", rule)
        if case.schedule.kind.updates == "deferred":
            for update in case.at(Stream.HOST, "U", block):
                case.require_before(update, norm, "replaces the norm that is read by", rule)


def _check_norms_there(case: Case) -> None:
    """The device takes norms of whole gradients that stay there, once, before the norm of all."""
    rule = (
        "In a step with a norm each block that the device updates has one S of d2h, between its B and N; no other has."
    )
    has_norm = case.schedule.kind.clip or case.schedule.kind.reports_norm
    for block in range(len(case.workload.blocks)):
        if not has_norm or block not in case.schedule.device_updates:
            case.never(Stream.D2H, "S", block, "takes norms of nothing", rule)
            continue
        taken = case.once(Stream.D2H, "S", block, rule)
        for backward in case.backwards(block):
            case.require_before(backward, taken, "takes the norm of gradients of", rule)
        case.require_before(taken, case.once(Stream.HOST, "N", NO_BLOCK, rule), "needs the norms of", rule)


def _check_reported_norm(case: Case) -> None:
    rule = "A step that reports its norm has one N, after all U, which have summed the squares; and no S."
    norm = case.once(Stream.HOST, "N", NO_BLOCK, rule)
    for block in range(len(case.workload.blocks)):
        case.never(Stream.HOST, "S", block, "sums what is summed with an update", rule)
        for update in case.at(Stream.HOST, "U", block):
            case.require_before(update, norm, "takes the norm from what is summed by", rule)


def check_places(case: Case) -> None:
    """Gradients that wait on the host have bytes of their own as long as they wait."""
    rule = (
        "Waiting gradients have one place per block, in the order of blocks; no G writes there before the last U has "
        "read them."
    )
    schedule = case.schedule
    found = {place.block: range(place.offset, place.offset + place.nbytes) for place in schedule.places}
    has_places = schedule.kind.holds_gradients and schedule.kind.transfer == "copy"
    expected = [b for b in range(len(case.workload.blocks)) if has_places and case.at(Stream.D2H, "G", b)]
    if [place.block for place in schedule.places] != expected:
        raise case.fault(
            f"places are stated for blocks {list(found)}, but gradients of blocks {expected} wait.",
            rule,
            0,
            "State one place for each of these.",
        )
    for block, place in found.items():
        if place.start < 0 or len(place) != case.workload.blocks[block].landing_bytes:
            raise case.fault(
                f"the place of block {block} has {len(place)} B, but its gradients land in "
                f"{case.workload.blocks[block].landing_bytes} B.",
                rule,
                case.at(Stream.D2H, "G", block)[0].tick,
                "State a place of that size.",
            )
    _check_places_are_free(case, found, rule)


def _check_places_are_free(case: Case, places: Mapping[int, range], rule: str) -> None:
    readers: dict[int, list[Position]] = {block: [] for block in places}
    is_deferred = {block: any(map(case.is_deferred, case.updates_of(block))) for block in places}
    for position, op in case.ops:
        if op.what == "U" and position.stream == Stream.HOST:
            for member in {op.block, *case.workload.blocks[op.block].shares} & set(readers):
                readers[member].append(position)
    # The waiting gradients by place, and the ops that consume them; those of the previous step are in the same places.
    waiting = {block: (places[block], found) for block, found in readers.items() if is_deferred[block] and found}
    for position, op in case.ops:
        if op.what != "G" or op.block not in places:
            continue
        mine = places[op.block]
        for other, (place, consumers) in list(waiting.items()):
            if not (place.start < mine.stop and mine.start < place.stop):
                continue
            del waiting[other]
            if not consumers:
                raise case.fault(
                    f"{case.name(position)} overwrites gradients of block {other}, which wait until the step is over.",
                    rule,
                    position.tick,
                    "Give it a place of its own.",
                )
            for consumer in consumers:
                case.require_before(consumer, position, f"overwrites gradients of block {other}, read by", rule)
        waiting[op.block] = mine, [] if is_deferred[op.block] else readers[op.block]


def check_device_updates(case: Case) -> None:
    """The device updates a block once, after every micro-batch has added to the gradients and nothing reads weights."""
    rule = (
        "A block that the device updates has state for that, one W, and one U on compute, after its F and B, and N if "
        "the step is clipped; other blocks have no such U."
    )
    blocks, kind = case.schedule.device_updates, case.schedule.kind
    is_known = list(blocks) == sorted(set(blocks)) and all(0 <= b < len(case.workload.blocks) for b in blocks)
    is_able = kind.transfer == "copy" and kind.updates in ("overlap", "spread", "deferred")
    if blocks and not (
        is_known
        and is_able
        and not set(blocks) & set(case.schedule.persistent)
        and all(case.workload.blocks[b].optimizer_bytes > 0 for b in blocks)
    ):
        raise case.fault(f"the device can't update blocks {list(blocks)}.", rule, 0, "Change `device_updates`.")
    for block in range(len(case.workload.blocks)):
        if block not in blocks:
            case.never(Stream.COMPUTE, "U", block, "is an update of the host", rule)
            continue
        update = case.once(Stream.COMPUTE, "U", block, rule)
        for reader in [*case.backwards(block), *(case.forward(block, number) for number in case.micro_batches)]:
            case.require_before(reader, update, "writes what is read by", rule)
        for norm in case.at(Stream.HOST, "N", NO_BLOCK) if kind.clip else ():
            case.require_before(norm, update, "is scaled by", rule)


def check_updates(case: Case) -> None:
    """Each block with parameters of its own to update has one U, where `updates` says."""
    rule = "A step with updates has one U for each block that updates parameters; other steps have none."
    for block, work in enumerate(case.workload.blocks):
        if work.update_bytes == 0 or case.schedule.kind.updates == "none" or block in case.schedule.device_updates:
            case.never(Stream.HOST, "U", block, "has nothing to update", rule)
            continue
        members = (block, *work.shares)
        update = case.once(Stream.HOST, "U", block, rule)
        if case.is_deferred(block):
            _check_alike(case, update, members)
            _check_update_of_before(case, update, members)
        else:
            _check_update_of_this(case, update, members)


def _check_alike(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """All updates that use the gradients of a block are deferred, or none: the gradients wait for all of them."""
    rule = "Updates that use gradients of one block are all deferred, or none is."
    for other in sorted({b for member in members for b in case.updates_of(member)}):
        if not case.is_deferred(other):
            found = case.once(Stream.HOST, "U", other, rule)
            what = f"{case.name(update)} uses gradients of the previous step, {case.name(found)} those of this step."
            raise case.fault(what, rule, update.tick, "Move one of them.")


def _check_update_of_before(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """It is over when this step first reads the parameters, and when its gradients replace the ones that it reads."""
    rule = "A deferred U is done before its parameters are read, and before new gradients arrive."
    for reader in case.weight_readers(members):
        case.require_before(update, reader, "reads what is written by", rule)
    for member in members:
        for offload in case.at(Stream.D2H, "G", member):
            case.require_before(update, offload, "replaces gradients that are read by", rule)


def _check_update_of_this(case: Case, update: Position, members: tuple[int, ...]) -> None:
    """It has whole gradients, from all blocks that share the parameters, and nobody reads what it writes."""
    rule = (
        "U follows the G of all blocks that share its parameters, N if the step is clipped, and every op that reads "
        "them."
    )
    for member in members:
        for offload in case.at(Stream.D2H, "G", member):
            case.require_before(offload, update, "reads what leaves with", rule)
    for norm in case.at(Stream.HOST, "N", NO_BLOCK) if case.schedule.kind.clip else ():
        case.require_before(norm, update, "is scaled by", rule)
    for reader in case.weight_readers(members):
        case.require_before(reader, update, "writes what is read by", rule)
    if case.schedule.kind.updates == "serial":
        # Streams keep their order, so the last one to leave stands for all.
        last = max(p for p, op in case.ops if op.what == "G")
        case.require_before(last, update, "follows all gradients, the last of which leaves with", rule)


def check_moments(case: Case) -> None:
    """Optimizer state that a file has is read before its update, written after it, and then its buffer is free."""
    rule = (
        "A block whose optimizer state is in a file has one R before the U of the host, and one K after it; other "
        "blocks have neither. A buffer is filled again when what it held is written."
    )
    held: dict[int, int] = {}
    for block, work in enumerate(case.workload.blocks):
        updates = case.at(Stream.HOST, "U", block)
        if work.moment_bytes == 0 or not updates:
            for what in "RK":
                case.never(Stream.DISK, what, block, "moves no optimizer state", rule)
            continue
        read, written = (case.once(Stream.DISK, what, block, rule) for what in "RK")
        case.require_before(read, updates[0], "changes what is read by", rule)
        case.require_before(updates[0], written, "writes what is changed by", rule)
    for position, op in case.ops:
        if position.stream == Stream.DISK and op.what == "R" and op.slot is not None:
            if op.slot in held:
                (written,) = case.at(Stream.DISK, "K", held[op.slot])
                case.require_before(written, position, "fills a buffer that is written by", rule)
            held[op.slot] = op.block


def check_evictions(case: Case) -> None:
    """Parked values that a file has leave and return through it, and no buffer is filled while a chunk is in it."""
    rule = (
        "In a training step a block whose parked values are in a file has one E, after their A to the host, and one L, "
        "after the E and before their A to the device, for each micro-batch; other blocks have neither. A buffer is "
        "filled again when what it held has left."
    )
    fills: dict[int, list[tuple[Position, Position]]] = {}
    for block in sorted(case.evicted):
        is_able = case.schedule.kind.is_training_step and block in case.parked
        for number in () if is_able else case.micro_batches:
            for what in "EL":
                case.never(Stream.DISK, what, block, "moves no parked values", rule, number)
        for number in case.micro_batches if is_able else ():
            written, read = (case.once(Stream.DISK, what, block, rule, number) for what in "EL")
            (leaves,), (returns,) = (case.at(stream, "A", block, number) for stream in (Stream.D2H, Stream.H2D))
            case.require_before(leaves, written, "writes what leaves with", rule)
            case.require_before(written, read, "reads what is written by", rule)
            case.require_before(read, returns, "returns what is read by", rule)
            for disk, pair in ((written, (leaves, written)), (read, (read, returns))):
                slot = case.op(disk).slot
                assert slot is not None
                fills.setdefault(slot, []).append(pair)
    for chunks in fills.values():
        for (_, left), (filled, _) in pairwise(sorted(chunks)):
            case.require_before(left, filled, "fills a buffer that is emptied by", rule)
