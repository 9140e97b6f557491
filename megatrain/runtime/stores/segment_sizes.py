"""The sizes of the segments that torch's allocator gets before a schedule first runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatrain.passes.program import Program
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.lifetimes.peak import alive_at, find_peak
from megatrain.scheduler.schedule import Schedule

# Smaller tensors are in segments of 2 MiB of their own, whatever is free elsewhere.
LEAST_BYTES = 1 << 20
# A tensor of this size has a segment to itself, of a multiple of 2 MiB; smaller ones share 20 MiB.
_OWN_SEGMENT, _ROUNDING = 10 << 20, 2 << 20
_TENSOR_ROUNDING = 512
# Of the temporary tensors of ops elsewhere than at the peak, larger ones find memory: less is held there.
_SMALL = 32 << 20


def segment_sizes(schedule: Schedule, programs: Sequence[Program]) -> list[int]:
    """Bytes of each segment that the steps of a schedule need, largest first.

    They hold what is there at the peak, with the temporary tensors of the op there; and the small temporary tensors of
    any other op, so that these take no place of what is held.

    Args:
        schedule: The schedule.
        programs: One per micro-batch.
    """
    small: Counter[int] = Counter()
    for program in {id(each): each for each in programs}.values():
        for template in program.templates.values():
            for parts in template.cost.workspace_parts if template.cost is not None else ():
                small |= Counter(nbytes for nbytes in _large(parts) if nbytes < _SMALL)
    peak = find_peak(schedule)
    temporary = Counter[int]() if peak.is_after else Counter(_large(_workspace_parts(schedule, programs, peak.tick)))
    return fitting([*held_sizes(schedule, programs, peak.moment), *(temporary | small).elements()])


def held_sizes(schedule: Schedule, programs: Sequence[Program], moment: int) -> list[int]:
    """Bytes of each large tensor that a step makes and holds at a moment, besides slots; largest first.

    Args:
        schedule: The schedule.
        programs: One per micro-batch.
        moment: That of the peak.
    """
    found: list[int] = []
    for life in alive_at(Books(schedule), moment):
        kind, number, micro_batch = life.item
        if life.start is None:
            continue  # the caller's
        program = programs[micro_batch]
        if kind == "saved":
            cost = program.templates[program.blocks[number].template].cost
            found += () if cost is None else cost.saved_parts
        elif kind == "parameters" or (kind == "received" and schedule.kind.receives):
            states = (program.state[key] for key in program.blocks[number].binding)
            found += (state.spec.nbytes for state in states if state.requires_grad)
        else:
            found.append(life.nbytes)
    return sorted(_large(found), reverse=True)


def _workspace_parts(schedule: Schedule, programs: Sequence[Program], tick: int) -> Iterator[int]:
    """Bytes of each temporary tensor of the op of a tick."""
    op = schedule.ticks[tick].compute
    if op is None or op.what not in ("F", "B"):
        return
    program = programs[op.micro_batch or 0]
    cost = program.templates[program.blocks[op.block].template].cost
    if cost is None:
        return
    is_backward = op.what == "B"
    # A retained graph is held, and the workspace of a backward was measured with its recompute.
    held = cost.saved_parts if is_backward and op.block in schedule.saves else ()
    yield from (Counter(cost.workspace_parts[is_backward]) - Counter(held)).elements()


def fitting(sizes: Sequence[int]) -> list[int]:
    """Bytes of segments that tensors of these sizes fill with little loss, largest first.

    Alone, three tensors of 6 MiB leave 2 MiB of the 20 MiB of their segment, which fit no fourth. Two of them together
    are a segment of 12 MiB.

    >>> [nbytes >> 20 for nbytes in fitting([6 << 20] * 5)]
    [12, 12, 6]
    """
    found: list[int] = []
    for nbytes, count in Counter(-(-nbytes // _TENSOR_ROUNDING) * _TENSOR_ROUNDING for nbytes in sizes).items():
        together = _together(nbytes, count) if nbytes < _SMALL else 1
        found += [together * nbytes] * (count // together)
        found += [nbytes] * (count % together)
    return sorted(found, reverse=True)


def _together(nbytes: int, count: int) -> int:
    """How many of the tensors of a size share a segment, so that little of it is lost for each."""
    least = min(count, -(-_OWN_SEGMENT // nbytes))
    return min(range(least, min(count, least + 7) + 1), key=lambda number: -number * nbytes % _ROUNDING / number)


def _large(sizes: Sequence[int] | Iterator[int]) -> Iterator[int]:
    return (nbytes for nbytes in sizes if nbytes > LEAST_BYTES)
