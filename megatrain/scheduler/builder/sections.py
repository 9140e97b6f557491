"""Sections: the block whose deferred update and copy of weights follow each other section by section."""

from __future__ import annotations

from megatrain.counts import counted
from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.host.host_ticks import deferred_updates
from megatrain.scheduler.builder.stays import giants
from megatrain.scheduler.items import NO_BLOCK, Sections
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload

# Copying a section takes a millisecond or more on any link, far longer than Python takes for one more op. Four of them
# hide three quarters of the shorter of update and copy; more would hide little more, and each costs the host an op.
LEAST_BYTES, ENOUGH = 32 << 20, 4


def first_deferred(workload: Workload, kind: StepKind) -> int:
    """The first block whose update is deferred and whose weights move; `NO_BLOCK` if there is none."""
    deferred = deferred_updates(workload, kind) if kind.transfer == "copy" else ()
    return min(deferred, default=NO_BLOCK)


def worthwhile_sections(workload: Workload, kind: StepKind) -> int:
    """Into how many sections to divide the first block that is updated; 1 if it had better be left whole.

    Its deferred update is the first work of the host in a step, and the copy of its weights follows before anything
    computes. Of a block like the others that is no time to speak of; of an embedding it is.
    """
    block = first_deferred(workload, kind)
    if block not in giants(workload) or workload.blocks[block].is_mostly_frozen:
        return 1
    return max(1, min(ENOUGH, workload.blocks[block].state_bytes // LEAST_BYTES))


def sections_of(workload: Workload, kind: StepKind, count: int) -> Sections | None:
    """The block that is divided into so many sections; None if that is one.

    Raises:
        ScheduleError: If no update is deferred, or most weights of the first block that is updated are frozen.
    """
    if count == 1:
        return None
    if kind.is_shared:
        raise ScheduleError(
            f"a step can't have {counted(count, 'section')}: several ranks share the store.\n"
            "  They divide the updates of a block by parameters.\n"
            "  Leave `sections` out."
        )
    block = first_deferred(workload, kind)
    if block == NO_BLOCK or workload.blocks[block].is_mostly_frozen:
        why = "no update is deferred" if block == NO_BLOCK else f"most weights of block {block} are frozen"
        raise ScheduleError(
            f"a step can't have {counted(count, 'section')}: {why}.\n"
            "  Sections are of the first block that is updated, where its update is deferred and its weights move.\n"
            "  Leave `sections` out."
        )
    return Sections(block, count)
