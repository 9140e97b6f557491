"""check_schedule(): proves from the table alone that a step is safe for any timing.

The checker shares no decision with the builder: it derives for itself what must be on the device and when,
and asks of every pair of ops that need an order whether the streams and the waits enforce it
(happens-before).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import networkx as nx

from megatrain.base.counts import counted
from megatrain.errors import ScheduleError
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.host_rules import (
    check_device_updates,
    check_evictions,
    check_moments,
    check_norm,
    check_places,
    check_updates,
)
from megatrain.scheduler.check.memory_rules import (
    check_figures,
    check_live_bytes,
    check_persistent,
    check_releases_come_first,
    check_weights,
)
from megatrain.scheduler.dependency import dependency_graph, graph_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Op, Position, Table, columns
from megatrain.scheduler.workload import Workload


def check_schedule(schedule: Table, workload: Workload, graph: nx.DiGraph[Position] | None = None) -> None:
    """Proves that a schedule runs its workload safely and within the memory it states.

    The dependencies of `graph` are enforced at run time: by default those that `dependency_graph` derives, as the
    runtime does.
    """
    workload.check()
    columns(schedule.ticks)
    if schedule.num_blocks != len(workload.blocks):
        raise ScheduleError(
            f"the schedule has {counted(schedule.num_blocks, 'block')}, the workload {len(workload.blocks)}.\n"
            "  A schedule fits only the workload it was built for, or an equal one."
        )
    if len(schedule.live_bytes) != len(schedule.ticks):
        raise ScheduleError("every tick has one figure of live bytes.")
    _check_slots(schedule)
    plain = Case(schedule, workload, {position: () for position, _ in schedule.positions()})
    if workload.blocks and schedule.kind.micro_batches > max(1, len(plain.ops)):
        raise ScheduleError(
            f"{counted(schedule.kind.micro_batches, 'micro-batch')} can't run in {counted(len(plain.ops), 'op')}.\n"
            "  Each micro-batch has an F of every block."
        )
    # Deriving dependencies looks up blocks and slots, so these must be in range before.
    _check_ops_are_known(plain)
    check_waits(schedule, workload, graph_waits(dependency_graph(schedule, workload) if graph is None else graph))


def check_waits(schedule: Table, workload: Workload, waits: Mapping[Position, Sequence[Position]]) -> Case:
    """Proves the same of ops that wait for these, once it is known that blocks, slots and micro-batches exist."""
    case = Case(schedule, workload, waits)
    for rule in (*RULES, *further_rules.values()):
        rule(case)
    return case


def _check_slots(schedule: Table) -> None:
    """Slots stand in the order of their offsets; without copies they are empty."""
    offsets = [slot.offset for slot in schedule.slots]
    if offsets != sorted(set(offsets)):
        raise ScheduleError("slots are numbered by offset, and no two have the same.")
    if schedule.kind.transfer == "bind" and any(slot.nbytes for slot in schedule.slots):
        raise ScheduleError("slots have no bytes if weights are used in place.")


def _check_ops_are_known(case: Case) -> None:
    """Every op concerns a block of the model and a micro-batch of the step, and a slot that can hold its state."""
    rule = "Every op concerns one block of the model; W fills a slot that is large enough."
    numbers = "With several micro-batches F, B, A, E, L, X and D name one of them; other ops don't."
    for position, op in case.ops:
        if case.has_number(op.what) != (op.micro_batch is not None):
            raise case.fault(f"{case.name(position)} doesn't name its micro-batch.", numbers, position.tick, "Name it.")
        if op.micro_batch is not None and op.micro_batch not in case.micro_batches:
            raise case.fault(f"{case.name(position)} has no micro-batch.", numbers, position.tick, "Leave it out.")
        if op.block >= len(case.workload.blocks):
            raise case.fault(f"{case.name(position)} has no block.", rule, position.tick, "Leave it out.")
        if op.what == "W":
            _check_slot_fits(case, position, op, rule)


def _check_slot_fits(case: Case, position: Position, op: Op, rule: str) -> None:
    slots, nbytes = case.schedule.slots, case.held_bytes(op.block)
    assert op.slot is not None
    if nbytes == 0:
        raise case.fault(f"{case.name(position)} moves no state.", rule, position.tick, "Leave it out.")
    if op.slot >= len(slots):
        raise case.fault(f"{case.name(position)} has no slot.", rule, position.tick, "Add the slot.")
    if case.schedule.kind.transfer == "copy" and slots[op.slot].nbytes < nbytes:
        raise case.fault(
            f"{case.name(position)} needs {nbytes} B, but its slot has {slots[op.slot].nbytes} B.",
            rule,
            position.tick,
            "Use a larger slot.",
        )


def check_forward_order(case: Case) -> None:
    """A forward of every block and micro-batch, in the order of the blocks; none in a backward alone."""
    rule = "Every block has exactly one F, in the order of the blocks; a backward alone has none."
    blocks = range(len(case.workload.blocks))
    if case.schedule.kind.mode == "backward":
        for block in blocks:
            case.never(Stream.COMPUTE, "F", block, "has run already", rule)
        return
    for number in case.micro_batches:
        found = [case.once(Stream.COMPUTE, "F", block, rule, number) for block in blocks]
        for earlier, later in pairwise(found):
            case.require_before(earlier, later, "follows", rule)


def check_backward_order(case: Case) -> None:
    """A backward of every block that has one, after all forwards, and after all that hand it gradients."""
    rule = "Every block with a backward has one B: after all F, and after the B of all blocks that read its values."
    backwards = set() if case.schedule.kind.mode == "forward" else set(case.workload.backward_blocks())
    for block in range(len(case.workload.blocks)):
        for number in case.micro_batches:
            if block in backwards:
                case.once(Stream.COMPUTE, "B", block, rule, number)
            else:
                case.never(Stream.COMPUTE, "B", block, "has nothing to do", rule, number)
    if not backwards:
        return
    for number in case.micro_batches:
        if case.schedule.kind.mode == "train":
            first = min(case.backward(block, number) for block in backwards)
            case.require_before(case.forward(len(case.workload.blocks) - 1, number), first, "follows", rule)
        for index, value in enumerate(case.workload.values):
            if value.producer is not None and value.producer in backwards and case.workload.has_value_gradient(index):
                needs = case.backward(value.producer, number)
                for reader in case.workload.backward_readers(index):
                    case.require_before(case.backward(reader, number), needs, "needs a gradient of", rule)


def check_micro_batches(case: Case) -> None:
    """Of each block, micro-batches run in their order: sums of gradients and written buffers depend on it."""
    rule = "The micro-batches of a block run one after another, in the order of their numbers."
    for block in range(len(case.workload.blocks)):
        for what in "FB":
            found = [p for number in case.micro_batches for p in case.at(Stream.COMPUTE, what, block, number)]
            for earlier, later in pairwise(found):
                case.require_before(earlier, later, "follows", rule)


def check_saves(case: Case) -> None:
    """Graphs are retained only of blocks with a backward, and always of the one where a micro-batch turns."""
    saves, backwards = case.schedule.saves, case.workload.backward_blocks()
    rule = "Only graphs of blocks with a backward are retained; with one micro-batch, the last of these always is."
    expected_last = () if case.schedule.kind.mode == "forward" else backwards[-1:]
    is_last_right = case.schedule.kind.micro_batches > 1 or saves[-1:] == expected_last
    if list(saves) != sorted(set(saves)) or not is_last_right or not set(saves) <= set(backwards):
        raise case.fault(f"the graphs of blocks {list(saves)} can't be retained.", rule, 0, "Change `saves`.")


def check_results(case: Case) -> None:
    """Results are kept only of blocks that have some and recompute."""
    rule = "Blocks whose results are kept have such values, and a backward that recomputes."
    results = case.schedule.results
    owners = {value.producer for value in case.workload.values if value.is_result}
    recomputed = set(case.workload.backward_blocks()).difference(case.schedule.saves)
    is_right = case.schedule.kind.mode != "forward" and set(results) <= owners & recomputed
    if list(results) != sorted(set(results)) or (results and not is_right):
        raise case.fault(f"results of blocks {list(results)} can't be kept.", rule, 0, "Change `results`.")


def check_recorded(case: Case) -> None:
    """Recordings return nothing that a backward finds."""
    rule = "Blocks whose kernels are recorded retain no graph and keep no results: their backward recomputes."
    recorded, blocks = case.schedule.recorded, range(len(case.workload.blocks))
    others = {*case.schedule.saves, *case.schedule.results}
    if list(recorded) != sorted(set(recorded)) or not set(recorded) <= set(blocks) - others:
        raise case.fault(f"kernels of blocks {list(recorded)} can't be recorded.", rule, 0, "Change `recorded`.")


def check_parks(case: Case) -> None:
    """Every value that must be parked by `keep` and `saves` leaves after it is made and returns before its use."""
    rule = "A parked value leaves once, after its F, and returns once, before the first B that reads it."
    for position, op in case.ops:
        if op.what == "A" and op.block not in case.parked:
            raise case.fault(
                f"{case.name(position)} has nothing to move.",
                rule,
                position.tick,
                "Remove it, or lower `keep`.",
            )
    for block in case.parked:
        for number in case.micro_batches:
            _check_park(case, block, number, rule)


def _check_park(case: Case, block: int, number: int, rule: str) -> None:
    values = case.parked[block]
    restore = case.once(Stream.H2D, "A", block, rule, number)
    if case.schedule.kind.mode == "backward":
        case.never(Stream.D2H, "A", block, "has run already", rule)
    else:
        park = case.once(Stream.D2H, "A", block, rule, number)
        case.require_before(park, restore, "brings back a value that leaves with", rule)
        for index in values:
            producer = case.workload.values[index].producer
            assert producer is not None
            case.require_before(case.forward(producer, number), park, "moves a result of", rule)
    for index in values:
        for reader in case.workload.backward_readers(index):
            case.require_before(restore, case.backward(reader, number), "reads a value that returns with", rule)


def check_inputs(case: Case) -> None:
    """The values that an F or B reads were computed before."""
    rule = "An op uses only results that are certainly done when it starts."
    if case.schedule.kind.mode == "backward":
        return
    for number in case.micro_batches:
        for index, value in enumerate(case.workload.values):
            if value.producer is None:
                continue
            made = case.forward(value.producer, number)
            for reader in value.readers:
                case.require_before(made, case.forward(reader, number), "reads a result of", rule)
            if case.schedule.kind.mode == "train":
                for reader in case.workload.backward_readers(index):
                    case.require_before(made, case.backward(reader, number), "reads a result of", rule)


def check_gradients(case: Case) -> None:
    """The parameter gradients of every block leave exactly once, summed over the micro-batches."""
    rule = "Parameter gradients leave the device once, after the B of every micro-batch, because each adds to them."
    for block, work in enumerate(case.workload.blocks):
        has_own = work.gradient_bytes > 0 and work.has_backward and case.schedule.kind.mode != "forward"
        if has_own and block not in case.schedule.device_updates:
            offload = case.once(Stream.D2H, "G", block, rule)
            for backward in case.backwards(block):
                case.require_before(backward, offload, "moves gradients of", rule)
        else:
            case.never(Stream.D2H, "G", block, "has nothing to move", rule)


# Of kinds of ops that `megatrain.extending.register_op` adds, by stream and letter.
further_rules: dict[tuple[str, str], Callable[[Case], None]] = {}
# In this order, because a rule may rely on those before it.
RULES: tuple[Callable[[Case], None], ...] = (
    check_saves,
    check_results,
    check_recorded,
    check_forward_order,
    check_backward_order,
    check_micro_batches,
    check_inputs,
    check_parks,
    check_evictions,
    check_weights,
    check_device_updates,
    check_persistent,
    check_gradients,
    check_norm,
    check_updates,
    check_moments,
    check_places,
    check_releases_come_first,
    check_live_bytes,
    check_figures,
)
