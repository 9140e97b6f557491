"""step_bound(): seconds that a step takes under any choices for one budget of device memory.

All choices that fit the memory have a moment in common: the first backward of the block where the step turns. Then all
retained graphs, activations that aren't parked, and weights that stay are on the device together. Each second that
they save has its bytes there. So the bound solves a linear program: the least time of the longer stream, if parts of
blocks could be retained or stay. Further bounds are chains of ops that every plan has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.order import deferred_updates
from megatrain.scheduler.builder.search import result_bytes
from megatrain.scheduler.effects import Effects, turn_block
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.simulate import OpSeconds, link_limits, memory_limits


class StepBound(NamedTuple):
    """Seconds that no plan of a step is faster than.

    Attributes:
        seconds: The bound.
        reason: What takes so long, in words.
    """

    seconds: float
    reason: str

    def above(self, step_s: float) -> float:
        """By which part a step is longer than the bound."""
        return max(0.0, step_s / self.seconds - 1) if self.seconds > 0 else 0.0


def step_bound(step: Effects, memory: int | None, machine: Hardware) -> StepBound:
    """A lower bound of the seconds of a step: with any slots, retained graphs, parked activations, weights that stay.

    What is retained, parked and persistent in `step` doesn't count; blocks whose kernels are recorded stay so. Without
    `memory` there is any number of bytes.
    """
    assert step.kind.mode == "train", "other steps have no turn"
    if memory is None or turn_block(step.workload) is None:
        left = inf
    else:
        left = float(max(0, memory - bytes_at_turn(step)))
    parts = StepParts(step, machine, left)
    graphs, stays = tuple(parts.graphs()), tuple(parts.stays())
    found = [StepBound(*chain) for chain in parts.chains()]
    compute = [Tradeoff(s, "compute", ((each.compute, each.nbytes) for each in graphs)) for s in parts.compute_limits()]
    copies = [
        Tradeoff(
            start + to_device * parts.h2d_s(stays) + to_host * parts.d2h_s(stays) + of_host * parts.host_s(stays),
            reason,
            ((to_device * each.h2d + to_host * each.d2h + of_host * each.host, each.nbytes) for each in stays),
        )
        for start, to_device, to_host, of_host, reason in parts.copy_limits()
    ]
    found.append(StepBound(*least_seconds(compute, copies, left)))
    return max(found, key=lambda bound: bound.seconds)


class SavingUse(NamedTuple):
    """Device bytes at the turn, and the seconds of each stream that they save."""

    nbytes: int
    compute: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    host: float = 0.0


class StepParts:
    """Seconds of the parts of a step.

    Args:
        left: Device bytes that uses of memory may take: blocks whose optimizer state fits may be updated there.
    """

    def __init__(self, step: Effects, machine: Hardware, left: float = inf) -> None:
        self._step, self._machine = step, machine
        self._workload, self._kind = step.workload, step.kind
        self._seconds = OpSeconds(machine)
        everything = range(len(step.workload.blocks))
        recorded = step.recorded
        # As if the host made all updates: which are deferred depends on them.
        deferred = deferred_updates(step.workload, step.kind) if step.device_updates else step.deferred
        self._saved = Effects(step.workload, step.kind, everything, (), {}, everything, deferred, recorded)
        able = (b for b in everything if 0 < step.workload.blocks[b].optimizer_bytes <= left)
        self._there = frozenset(able if step.kind.may_update_there else ())
        self._turn, self._backward = turn_block(step.workload), step.workload.backward_blocks()
        self._numbers = range(step.kind.micro_batches)
        self._gradients = [b for b in step.workload.gradient_blocks() if b in self._backward and b not in self._there]

    def _op(self, stream: str, what: str, block: int, number: int = 0) -> float:
        return self._seconds.of(stream, self._saved.of(stream, what, block, number))

    def _weights(self, block: int) -> tuple[float, float]:
        """Seconds of a copy of all its weights, and of what isn't frozen."""
        if self._workload.blocks[block].state_bytes == 0:
            return 0.0, 0.0
        least = self._saved.of(Stream.H2D, "W", block)
        whole = replace(least, moves=self._step.copied(self._workload.blocks[block].state_bytes))
        return self._seconds.of(Stream.H2D, whole), self._seconds.of(Stream.H2D, least)

    def _forward(self, block: int) -> float:
        return len(self._numbers) * self._op(Stream.COMPUTE, "F", block)

    def _backward_s(self, block: int, *, is_saved: bool = True, has_results: bool = False) -> float:
        whole = partial(self._workload.blocks[block].whole_backward, is_saved, has_results=has_results)
        is_recorded = block in self._step.recorded
        return sum(self._seconds.of_kernels(whole(number), is_recorded) for number in self._numbers)

    def _least_compute(self) -> float:
        forward = sum(map(self._forward, range(len(self._workload.blocks))))
        return forward + sum(map(self._backward_s, self._backward))

    def graphs(self) -> Iterator[SavingUse]:
        """Retained graphs: seconds of compute that they save. That of the turn's block is mostly free.

        A part of them can be had without the graph where a block keeps its results, on the host if values can be
        parked.
        """
        for block in self._backward:
            nbytes = self._workload.blocks[block].saved_bytes
            count = len(self._numbers) - (block == self._turn)
            is_free = block == self._turn and block == len(self._workload.blocks) - 1
            least = with_results = self._backward_s(block, is_saved=False)
            if self._workload.blocks[block].kept is not None:
                of_results = result_bytes(self._workload, block) if self._kind.transfer == "bind" else 0
                with_results = self._backward_s(block, is_saved=False, has_results=True)
                yield SavingUse(0 if is_free else count * of_results, compute=least - with_results)
                nbytes = max(0, nbytes - of_results)
            yield SavingUse(0 if is_free else count * nbytes, compute=with_results - self._backward_s(block))

    def stays(self) -> Iterator[SavingUse]:
        """What stays on the device: seconds of copies that this saves, compared with all that may cross."""
        for block, work in enumerate(self._workload.blocks):
            whole, least = self._weights(block)
            is_read_again = block in self._backward and block != self._turn
            nbytes = 0 if block == self._turn else self._step.copied(work.state_bytes)
            if is_read_again or work.frozen_bytes:
                yield SavingUse(nbytes, h2d=whole * (1 + is_read_again) - (least if work.frozen_bytes else whole))
            if block in self._there:
                rest = {"d2h": self._op(Stream.D2H, "G", block), "host": self._op(Stream.HOST, "U", block)}
                yield SavingUse(work.optimizer_bytes, h2d=least, **rest)
        for index, value in enumerate(self._workload.values):
            readers = [b for b in self._workload.backward_readers(index) if b in self._backward]
            if not value.is_parkable or value.is_result or not readers or self._kind.transfer == "bind":
                continue
            nbytes = len(self._numbers) * value.nbytes
            rates = self._machine.h2d_bytes_per_s, self._machine.d2h_bytes_per_s
            at_turn = 0 if readers[-1] == self._turn else nbytes
            yield SavingUse(at_turn, h2d=nbytes / rates[0], d2h=nbytes / rates[1])

    def h2d_s(self, stays: Iterable[SavingUse] = ()) -> float:
        """Seconds of copies to the device: the least, and what the given uses of memory would save."""
        others = (block for block in range(len(self._workload.blocks)) if block not in self._there)
        return sum(self._weights(block)[1] for block in others) + sum(each.h2d for each in stays)

    def d2h_s(self, stays: Iterable[SavingUse] = ()) -> float:
        """Seconds of copies to the host: likewise."""
        return sum(self._op(Stream.D2H, "G", b) for b in self._gradients) + sum(each.d2h for each in stays)

    def _updates(self, *, deferred: bool) -> list[int]:
        """Blocks whose updates are there in all plans, and in this place: with some on the device, others defer."""
        updates = self._workload.update_blocks() if self._kind.updates != "none" and not self._there else ()
        return [block for block in updates if (block in self._saved.deferred) == deferred]

    def _update_s(self, blocks: Iterable[int]) -> float:
        return sum(self._op(Stream.HOST, "U", block) for block in blocks)

    def _disk_s(self, blocks: Iterable[int], ops: str = "RK") -> float:
        filed = [block for block in blocks if self._workload.blocks[block].moment_bytes]
        return sum(self._op(Stream.DISK, what, block) for block in filed for what in ops)

    def _squares_s(self) -> float:
        squares = self._gradients if self._kind.clip else ()
        has_norm = self._kind.clip or self._kind.reports_norm
        return sum(self._op(Stream.HOST, "S", b) for b in squares) + has_norm * self._op(Stream.HOST, "N", NO_BLOCK)

    def host_s(self, stays: Iterable[SavingUse] = ()) -> float:
        """Seconds of all ops of the host: the least, and what the given uses of memory would save."""
        updates = self._workload.update_blocks() if self._kind.updates != "none" else ()
        least = self._update_s(block for block in updates if block not in self._there)
        return least + self._squares_s() + sum(each.host for each in stays)

    def head_s(self) -> float:
        """Seconds before the first forward: the updates that its block waits for, and the copy of its weights."""
        owners = [owner for owner in self._saved.owners[0] if owner in self._saved.deferred and not self._there]
        return self._update_s(owners) + (0.0 if 0 in self._there else self._weights(0)[1])

    def tail_s(self) -> float:
        """Seconds after the last backward: its gradients leave, and what waits for them."""
        last = self._backward[0] if self._backward else None
        later = self._updates(deferred=False)
        if last is None or last not in self._gradients:
            return 0.0
        if not self._kind.clip and self._kind.updates != "serial":
            later = [owner for owner in later if last in self._workload.update_group(owner)]
        own = self._op(Stream.D2H, "G", last) + self._update_s(later)
        if self._kind.clip:
            own += self._op(Stream.HOST, "S", last)
        waits_for_norm = self._kind.clip or (self._kind.reports_norm and later)
        return own + (self._op(Stream.HOST, "N", NO_BLOCK) if waits_for_norm else 0.0)

    def compute_limits(self) -> Iterator[float]:
        """Seconds of compute if nothing is retained: after what must come before, or slowed down by other streams."""
        most = self._least_compute() + sum(each.compute for each in self.graphs())
        yield self.head_s() + most + self.tail_s()
        others = max(self.host_s(), *(a * self.h2d_s() + b * self.d2h_s() for a, b in link_limits(self._machine)))
        yield most + (1 - self._machine.compute_beside) * others

    def copy_limits(self) -> Iterator[tuple[float, float, float, float, str]]:
        """Limits of copies and of the host: seconds besides, what a second of each stream counts, and what is bound."""
        last = self._backward[0] if self._backward else None
        end = 0.0 if last is None else self._op(Stream.COMPUTE, "B", last, self._numbers[-1]) + self.tail_s()
        compute = self._least_compute()
        yield end, 1.0, 0.0, 0.0, "copies to the device"
        yield 0.0, 0.0, 1.0, 0.0, "copies to the host"
        yield 0.0, *memory_limits(self._machine), 1.0, "host memory, which updates and copies share"
        yield 0.0, 0.0, 0.0, 1.0, "updates on the host"
        slowed = 1 - self._machine.compute_beside
        for a, b in link_limits(self._machine):
            yield 0.0, a, b, 0.0, "copies both ways"
            yield compute, a * slowed, b * slowed, 0.0, "compute, slowed down by copies"

    def chains(self) -> Iterator[tuple[float, str]]:
        """Chains of ops that all plans have, and what each is called."""
        name, disk = "updates on the host", "the disk, which has optimizer state"
        yield self.host_s(), name
        yield self._disk_s(self._workload.update_blocks()) if self._kind.updates != "none" else 0.0, disk
        yield self._least_compute() + (1 - self._machine.compute_beside) * self.host_s(), "compute, beside updates"
        deferred, later = self._updates(deferred=True), self._updates(deferred=False)
        backward = sum(map(self._backward_s, self._backward))
        if deferred:
            copy = min(self._weights(block)[1] for block in deferred)
            yield self._update_s(deferred) + copy + backward + self.tail_s(), f"{name}, then the backward"
            # What the last two updates have made is written later.
            written = sorted((self._disk_s([block], "K") for block in deferred), reverse=True)
            moved = self._disk_s(deferred) - sum(written[:2])
            yield moved + copy + backward + self.tail_s(), f"{disk}, then the backward"
        if not self._gradients:
            return
        before = self._before_gradients()
        leaving = [self._op(Stream.D2H, "G", block) for block in self._gradients]
        last = self._update_s(later) if self._kind.updates == "serial" else 0.0
        yield before + sum(leaving) + last, "the forward, then gradients to the host"
        # A norm that is only reported sums what updates have read: without one it waits for nothing.
        waits = self._update_s(later) + (self._squares_s() if self._kind.clip or later else 0.0)
        yield before + min(leaving) + waits, f"the forward, then {name}"

    def _before_gradients(self) -> float:
        """Seconds before the first gradients leave: the forward, and the backwards down to their block."""
        order: Sequence[int] = [block for block in reversed(self._backward) if block >= self._gradients[-1]]
        forward = sum(map(self._forward, range(len(self._workload.blocks))))
        return self.head_s() + forward + sum(map(self._backward_s, order))


class Tradeoff:
    """Seconds that get less by uses of memory, each what it saves and its bytes; a part of a use saves its part."""

    def __init__(self, seconds: float, reason: str, uses: Iterable[tuple[float, int]]) -> None:
        useful = [use for use in uses if use[0] > 0]
        free = sum(saved for saved, nbytes in useful if nbytes == 0)
        uses = sorted((use for use in useful if use[1] > 0), key=lambda use: (-use[0] / use[1], use))
        self.reason = reason
        self.seconds = seconds - free
        self._saved = [0.0, *accumulate(saved for saved, _ in uses)]
        self._nbytes = [0, *accumulate(nbytes for _, nbytes in uses)]

    @property
    def least(self) -> float:
        """With all the memory that they can use."""
        return self.seconds - self._saved[-1]

    def nbytes(self, seconds: float) -> float:
        """The memory that brings them down to so many seconds."""
        wanted = self.seconds - seconds
        if wanted <= 0:
            return 0.0
        if wanted > self._saved[-1]:
            return inf
        above = max(1, bisect_right(self._saved, wanted))
        if above == len(self._saved):
            return float(self._nbytes[-1])
        part = (wanted - self._saved[above - 1]) / (self._saved[above] - self._saved[above - 1])
        return self._nbytes[above - 1] + part * (self._nbytes[above] - self._nbytes[above - 1])


# Each halves what is unknown: as many as digits of a float.
_HALVINGS = 60


def least_seconds(first: Sequence[Tradeoff], second: Sequence[Tradeoff], memory: float) -> tuple[float, str]:
    """The least seconds that all need, if uses of the first and of the second kind share the memory.

    Uses of one kind are the same for all tradeoffs of the kind, so what one of them needs serves the others. Never more
    than the true least.
    """
    both = [*first, *second]
    longest = max(both, key=lambda tradeoff: tradeoff.least)

    def fits(seconds: float) -> bool:
        return memory >= sum(max(each.nbytes(seconds) for each in kind) for kind in (first, second))

    if memory == inf or fits(longest.least):
        return longest.least, longest.reason
    low, high = longest.least, max(each.seconds for each in both)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    reasons = (max(kind, key=lambda each: each.nbytes(low)) for kind in (first, second))
    needing = [each.reason for each in reasons if each.nbytes(low) > 0]
    return low, f"{' and '.join(needing)}, in this memory"


def bytes_at_turn(step: Effects) -> int:
    """Device bytes that every plan has during the first backward where the step turns, whatever else it holds there.

    Those are the weights of the block, its workspace and gradients, and values that can't be parked. Of a value that
    only this block reads, that of one micro-batch counts.
    """
    workload, kind = step.workload, step.kind
    turn = turn_block(workload)
    assert turn is not None
    work = workload.blocks[turn]
    workspace = min(each.backward_workspace_bytes for each in (work, work.kept) if each is not None)
    found = step.copied(work.state_bytes) + work.gradient_bytes + workspace
    storages: dict[int, int] = {}
    for index, value in enumerate(workload.values):
        readers = workload.backward_readers(index)
        if value.on_host or value.is_result or (value.is_parkable and kind.transfer != "bind"):
            continue
        produced = value.producer is None or value.producer <= turn
        count = kind.micro_batches if readers and readers[0] < turn and produced else 1 if readers else 0
        storages[value.storage] = max(storages.get(value.storage, 0), count)
    return found + sum(count * workload.storages[storage] for storage, count in storages.items())
