"""Updates: the ticks of the host's ops: squares of gradients, their norm, and the updates of the blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import networkx as nx

from megatrain.scheduler.builder.order import OpTicks, Written
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class HostTicks:
    """The ticks of the host's ops.

    Args:
        update: Of each `U`, by block.
        squares: Of each `S`, by block; none without `N`.
        norm: Of `N`; None if there is none.
    """

    update: Mapping[int, int]
    squares: Mapping[int, int]
    norm: int | None

    @property
    def num_ticks(self) -> int:
        """Rows that they take."""
        return 1 + max(*self.update.values(), -1, -1 if self.norm is None else self.norm)


# A forward is shorter than the backward, and so is the host's time for deferred updates. See decision 56.
DEFERRED_SHARE = Fraction(2, 5)


def deferred_updates(workload: Workload, kind: StepKind, device_updates: Collection[int] = ()) -> frozenset[int]:
    """The blocks whose update is deferred to the head of the next step, of those that the host updates.

    Of spread updates two fifths of the bytes are deferred, evenly among the blocks. The backward releases blocks in one
    order and the next forward needs them in the other: so each leaves the host time for some blocks of each region. The
    first block, whose gradients come last, is deferred: the end of a step doesn't wait for its update.
    """
    if kind.updates != "spread":
        return frozenset(workload.update_blocks() if kind.updates == "deferred" else ())
    deferred: set[int] = set()
    ahead = Fraction(0)  # bytes of deferred updates beyond their share
    for blocks in _sharing_blocks(workload):
        updates = [b for b in blocks if workload.blocks[b].update_bytes > 0 and b not in device_updates]
        nbytes = sum(workload.blocks[block].update_bytes for block in updates)
        is_deferred = ahead <= 0
        deferred.update(updates if is_deferred else ())
        ahead += nbytes * (int(is_deferred) - DEFERRED_SHARE)
    return frozenset(deferred)


def _sharing_blocks(workload: Workload) -> Sequence[Sequence[int]]:
    """All blocks, together where updates share their gradients, which wait for all of these; by the first of them."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(workload.blocks)))
    graph.add_edges_from((block, b) for block in workload.update_blocks() for b in workload.update_group(block))
    return sorted(map(sorted, nx.connected_components(graph)))


def head_updates(workload: Workload, deferred: Collection[int], loads: Iterable[int]) -> dict[int, int]:
    """Ticks of updates at the head of a step, each before the first `W` that reads the updated parameters.

    Args:
        workload: What runs.
        deferred: The blocks whose updates they are.
        loads: The blocks of the `W` ops, in their order.
    """
    owners: dict[int, list[int]] = {}
    for block in sorted(deferred):
        for member in workload.update_group(block):
            owners.setdefault(member, []).append(block)
    order = dict.fromkeys(owner for block in loads for owner in owners.get(block, ()))
    return {block: tick for tick, block in enumerate(order)}


def written(workload: Workload, head: Mapping[int, int]) -> dict[int, Written]:
    """When the last update at the head has written a block's weights."""
    found: dict[int, Written] = {}
    done = 0
    for block, begun in head.items():
        done += workload.blocks[block].update_bytes
        found.update(dict.fromkeys((block, *workload.blocks[block].shares), Written(begun, done)))
    return found


def place_host(workload: Workload, kind: StepKind, ticks: OpTicks, head: Mapping[int, int]) -> HostTicks:
    """Gives the ops of the host their ticks: updates in the order in which their gradients leave.

    Updates that overlap take the tick of the next `G`. In an earlier one they would release their gradients before
    it, which would have to wait for them (see the memory edges of the dependency graph). Squares release nothing: they
    follow their `G` at once, so that only those of the last block are left when all gradients are there.

    Args:
        workload: What runs.
        kind: As in `Schedule`.
        ticks: Of the other streams.
        head: The result of `head_updates`.
    """
    last = max(ticks.offload.values(), default=-1)
    free = max(head.values(), default=-1) + 1
    squares: dict[int, int] = {}
    for block, left in sorted(ticks.offload.items(), key=lambda leaving: leaving[1]) if kind.clip else ():
        squares[block] = free = max(free, left + 1)
        free += 1
    norm = max(last + 1, free) if kind.clip else None
    if kind.updates in ("none", "deferred"):
        return HostTicks(head, squares, norm)
    at_least = last if kind.updates == "serial" else -1
    at_least = at_least if norm is None else norm
    arrivals = sorted(ticks.offload.values())
    placed = dict(head)
    for ready, block in _by_readiness(workload, ticks):
        if block in head or block in ticks.update:
            continue
        following = bisect_right(arrivals, ready) + int(kind.updates == "spread")
        overlapped = arrivals[following] if following < len(arrivals) else max(ready, *arrivals[-1:]) + 1
        placed[block] = free = max(free, overlapped, at_least + 1)
        free += 1
    return HostTicks(placed, squares, max(free, last + 1) if kind.reports_norm else norm)


def _by_readiness(workload: Workload, ticks: OpTicks) -> Sequence[tuple[int, int]]:
    """Per update, the tick in which its last gradient leaves and the last op reads its parameters, and its block."""
    last: dict[int, int] = dict(ticks.offload)
    for runs in (ticks.forward, ticks.backward):
        for block, of_block in runs.items():
            last[block] = max(last.get(block, -1), *of_block)
    return sorted(
        (max(last[member] for member in workload.update_group(block)), block) for block in workload.update_blocks()
    )
